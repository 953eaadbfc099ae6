"""When nodes should move, and how much work where: on simulated ranks whose seconds follow from their work."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.imbalance import RankLoad, RebalanceRules, flows, levelled
from nugnn.planning.imbalance_watch import ImbalanceWatch, Shortfall
from nugnn.planning.moved_parts import best_fraction, sizes_after
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.work_model import LinearCost, LinearWork

_RULES = RebalanceRules(least_gain_seconds=0.0)
_DEGREE = 20


def part(nodes: float) -> PartSizes:
    return PartSizes(inner=round(nodes), edges=_DEGREE * round(nodes))


def loads_of(nodes: Sequence[float], speeds: Sequence[float], **more: float) -> list[RankLoad]:
    """Seconds of parts of ``nodes`` on ranks that do a million nodes in ``1 / speed`` seconds."""
    return [RankLoad(seconds=n / 1e6 / speed, sizes=part(n), **more) for n, speed in zip(nodes, speeds, strict=True)]


def nodes_after(nodes: Sequence[float], given: Sequence[float]) -> list[float]:
    return [n - work / (_RULES.node_work + _DEGREE) for n, work in zip(nodes, given, strict=True)]


speeds = st.lists(st.floats(0.05, 20.0), min_size=2, max_size=8)


@given(speeds)
def test_all_end_together_and_nothing_is_lost(speeds: list[float]) -> None:
    nodes = [1e6] * len(speeds)
    level = levelled(loads_of(nodes, speeds), _RULES)
    ideal = sum(nodes) / 1e6 / sum(speeds)
    least_kept = max(1 / speed for speed in speeds) * 0.02
    assert max(level.predicted) <= max(ideal, least_kept) * 1.05
    assert math.fsum(level.given) == pytest.approx(0, abs=1e-3 * sum(nodes))
    after = nodes_after(nodes, level.given)
    assert min(after) > 0
    for n, speed, predicted in zip(after, speeds, level.predicted, strict=True):
        assert n / 1e6 / speed == pytest.approx(predicted, rel=1e-6)


def test_a_part_grows_as_far_as_it_may() -> None:
    slow, full, free = loads_of([1e6] * 3, [1, 4, 4])
    full = RankLoad(seconds=full.seconds, sizes=full.sizes, most_growth=1.25)
    level = levelled([slow, full, free], _RULES)
    nodes = nodes_after([1e6] * 3, level.given)
    assert nodes[1] == pytest.approx(1.25e6, rel=1e-6)
    assert level.predicted[0] == pytest.approx(level.predicted[2], rel=1e-6) and level.predicted[1] < level.predicted[0]
    assert level.gain == pytest.approx(1 - level.predicted[0])
    assert levelled([slow, full, RankLoad(seconds=0.25, sizes=free.sizes, most_growth=1.0)], _RULES).given[2] == 0


def test_limits_are_of_a_parts_own_work() -> None:
    """Whose nodes have more in-edges than those of others, or fewer."""
    sizes = [PartSizes(inner=1_000_000, edges=5_000_000), PartSizes(inner=1_000_000, edges=40_000_000)]
    of_whole = [_RULES.node_work * size.inner + size.edges for size in sizes]
    for slow, fast in ((0, 1), (1, 0)):
        ranks = [RankLoad(seconds=1e6 if rank == slow else 1.0, sizes=sizes[rank]) for rank in (0, 1)]
        level = levelled(ranks, _RULES)
        assert level.given[slow] == pytest.approx(0.98 * of_whole[slow], rel=1e-6), "a rank without work shows no more"
        ranks[fast] = replace(ranks[fast], most_growth=1.25)
        growth = min(0.25 * of_whole[fast], 0.98 * of_whole[slow])
        assert levelled(ranks, _RULES).given[fast] == pytest.approx(-growth, rel=1e-6)


def test_proportions_come_from_the_work_model() -> None:
    # rank 1 is busy with edges, rank 0 with nodes: the same seconds, other prices
    work = LinearWork((LinearCost(inner=1e-6, edges=1e-9), LinearCost(inner=1e-9, edges=1e-7)))
    loads = loads_of([1e6, 1e6], [0.5, 2])
    level = levelled(loads, RebalanceRules(work=work))
    assert level.node_work == pytest.approx((1000, 0.01))
    assert level.given[0] > 0 and max(level.predicted) == pytest.approx(min(level.predicted))
    doubled = levelled(loads, RebalanceRules(work=LinearWork(tuple(cost.times(7) for cost in work.seconds_of))))
    assert doubled.given == pytest.approx(level.given)


class _Measured:
    """Seconds of rank 0 fall with nodes, as noise has it; those of rank 1 have nothing to do with in-edges."""

    def seconds(self, rank: int, sizes: PartSizes) -> float:
        return 1e-6 * sizes.inner if rank else 1e-7 * sizes.edges - 1e-9 * sizes.inner


def test_nodes_cost_nothing_where_more_of_them_take_less_and_what_rules_say_where_edges_cost_nothing() -> None:
    level = levelled(loads_of([1e6, 1e6], [0.5, 2]), replace(_RULES, work=_Measured()))
    assert level.node_work == (0.0, _RULES.node_work) and level.given[0] > 0 > level.given[1]


@given(halo=st.floats(0.01, 0.6))
def test_what_rows_that_travel_take_does_not_leave_with_nodes(halo: float) -> None:
    """Ranks whose seconds are exactly those of the model end together when the rows that travel stay."""
    rows = 200_000
    costs = LinearCost(inner=1e-6, edges=1e-8, halo=halo * 1e-5), LinearCost(inner=2e-6, edges=3e-8, halo=1e-7)
    work = LinearWork(costs)
    sizes = [PartSizes(inner=n, edges=_DEGREE * n, halo=rows) for n in (1_500_000, 500_000)]
    loads = [RankLoad(seconds=7 * work.seconds(rank, size), sizes=size) for rank, size in enumerate(sizes)]
    level = levelled(loads, RebalanceRules(work=work))
    after = [
        PartSizes(inner=n, edges=_DEGREE * n, halo=rows)
        for n in (
            round(size.inner - given / (_DEGREE + of_node))
            for size, given, of_node in zip(sizes, level.given, level.node_work, strict=True)
        )
    ]
    assert sum(size.inner for size in after) == pytest.approx(2_000_000, abs=2)
    ends = [7 * work.seconds(rank, size) for rank, size in enumerate(after)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-4) and ends == pytest.approx(level.predicted, rel=1e-4)


@given(work=st.lists(st.integers(-100, 100), min_size=2, max_size=6), seed=st.integers(0, 100))
def test_flows_give_what_goes_and_bring_what_comes_scaled_to_it(work: list[int], seed: int) -> None:
    ranks, affinity = range(len(work)), np.random.default_rng(seed).random((len(work), len(work))).tolist()
    found = flows(work, affinity)
    going, coming = [max(w, 0) for w in work], [max(-w, 0) for w in work]
    if not any(coming):
        assert not any(found)
        return
    coming = [w * sum(going) / sum(coming) for w in coming]
    goes = [math.fsum(found[p].values()) for p in ranks]
    comes = [math.fsum(each.get(q, 0.0) for each in found) for q in ranks]
    assert goes == pytest.approx(going, abs=1e-6) and comes == pytest.approx(coming, abs=1e-6)
    for p, q in product(ranks, ranks):  # no pair could have more without less for one that is nearer
        to_nearer = math.fsum(w for other, w in found[p].items() if affinity[p][other] >= affinity[p][q])
        from_nearer = math.fsum(found[other].get(q, 0.0) for other in ranks if affinity[other][q] >= affinity[p][q])
        assert to_nearer > going[p] - 1e-6 or from_nearer > coming[q] - 1e-6


class Run(NamedTuple):
    """Epochs after which nodes moved, and moved back; seconds of each epoch; nodes at the end."""

    moved: list[int]
    returned: list[int]
    epochs: list[float]
    nodes: list[float]


def simulate(
    speed_of: Callable[[int, int], float],
    *,
    num_ranks: int = 2,
    epochs: int = 120,
    moves: float = 1.0,
    move_seconds: float = 1.0,
    noise: float = 0.0,
    fixed_seconds: float = 0.0,
    exchange_seconds: Callable[[Sequence[float]], float] = lambda nodes: 0.0,
    rules: RebalanceRules = _RULES,
    seed: int = 0,
) -> Run:
    """``moves`` of what was asked is moved; exchanges take what they do by the nodes of each rank."""
    rng, watch = np.random.default_rng(seed), ImbalanceWatch(rules)
    nodes, computed, passed = [1e6] * num_ranks, list[list[float]](), list[float]()
    before, run, looked_at = nodes, Run([], [], [], nodes), 0
    for epoch in range(1, epochs + 1):
        speeds = [speed_of(epoch, rank) for rank in range(num_ranks)]
        seconds = [n / 1e6 / s + fixed_seconds for n, s in zip(nodes, speeds, strict=True)]
        seconds = [s * (1 + noise * rng.standard_normal()) for s in seconds]
        run.epochs.append(max(seconds) + exchange_seconds(nodes))
        computed, passed = [*computed, seconds][-rules.window :], [*passed, run.epochs[-1]][-rules.window :]
        if len(passed) < rules.window:
            continue
        medians = [statistics.median(each[rank] for each in computed) for rank in range(num_ranks)]
        loads = [RankLoad(seconds=s, sizes=part(n), passed=tuple(passed)) for s, n in zip(medians, nodes, strict=True)]
        level = watch.look(loads, num_epochs=epoch - looked_at, epochs_left=epochs - epoch, can_return=True)
        looked_at = epoch
        if level is not None:
            (run.returned if level.is_return else run.moved).append(epoch)
            nodes, before = before if level.is_return else nodes_after(nodes, [moves * w for w in level.given]), nodes
            watch.moved(level, move_seconds)
            computed, passed = [], []
    return run._replace(nodes=nodes)


def test_a_rank_slowed_threefold_in_mid_run() -> None:
    slow = lambda epoch, rank: 1 / 3 if rank == 1 and epoch > 40 else 1.0  # noqa: E731
    run = simulate(slow)
    assert len(run.moved) == 1 and 40 < run.moved[0] <= 50
    assert run.epochs[run.moved[0]] == pytest.approx(1.5, rel=0.01), "two million nodes at 1 + 1/3"
    run = simulate(slow, noise=0.05)
    assert statistics.median(run.epochs[-9:]) < 1.1 * 1.5 and len(run.moved) <= 2


def test_it_comes_back_when_the_rank_is_fast_again() -> None:
    run = simulate(lambda epoch, rank: 1 / 3 if rank == 1 and 20 < epoch <= 60 else 1.0)
    assert len(run.moved) == 2 and run.epochs[-1] == pytest.approx(1.0, rel=0.01) and not run.returned


def test_noise_and_hiccups_move_nothing() -> None:
    assert simulate(lambda epoch, rank: 1.0, noise=0.08, num_ranks=4).moved == []
    assert simulate(lambda epoch, rank: 0.2 if rank == 1 and epoch % 5 < 2 else 1.0).moved == []


def test_one_look_alone_moves_nothing_and_a_broken_promise_is_told() -> None:
    even, uneven = loads_of([1e6, 1e6], [1, 1]), loads_of([1e6, 1e6], [1, 1 / 3])
    watch = ImbalanceWatch(_RULES)
    for loads in (uneven, even) * 20:
        assert watch.look(loads, num_epochs=50, epochs_left=500) is None
    assert watch.look(uneven, num_epochs=50, epochs_left=500) is None
    level = watch.look(uneven, num_epochs=50, epochs_left=500)
    assert level is not None and watch.shortfall is None
    watch.moved(level, 1.0)
    watch.look(uneven, num_epochs=1, epochs_left=400)
    assert watch.shortfall == Shortfall(promised=level.gain, brought=0.0, longer=0.0)
    watch.look(even, num_epochs=1, epochs_left=400)
    assert watch.shortfall is None


def test_what_is_not_worth_it_is_left() -> None:
    slow = lambda epoch, rank: 1 / 3 if rank == 1 and epoch > 110 else 1.0  # noqa: E731
    assert simulate(slow, move_seconds=5.0).moved == [], "ten epochs are too few to earn a move"
    watch = ImbalanceWatch(RebalanceRules(least_gain_seconds=1e4))
    assert all(watch.look(loads_of([1e6, 1e6], [1, 1 / 3]), num_epochs=1, epochs_left=500) is None for _ in range(200))


def test_moves_that_bring_nothing_become_rare() -> None:
    # what makes the rank slow is not its nodes
    often = simulate(lambda epoch, rank: 0.3 if rank == 1 else 1.0, moves=0.0, epochs=250).moved
    gaps = np.diff(often)
    assert len(often) < 12 and (gaps[1:] >= gaps[:-1]).all() and gaps[-1] > 4 * gaps[0]
    assert len(simulate(lambda epoch, rank: 0.3 if rank == 1 else 1.0, epochs=400).moved) == 1


def test_a_dear_move_waits_longer() -> None:
    watch = ImbalanceWatch(_RULES)
    loads = loads_of([1e6, 1e6], [1, 1 / 3])
    level = levelled(loads, _RULES)
    watch.moved(level, 30.0)
    assert watch.look(loads, num_epochs=1, epochs_left=10_000, slow_start=15.0) is None
    assert watch.cost_seconds(1.0, 10**9) == 45
    assert ImbalanceWatch(_RULES).cost_seconds(1.0, 10**8) == pytest.approx(4 + 6)
    looks = 1
    while watch.look(loads, num_epochs=1, epochs_left=10_000, slow_start=15.0) is None:  # which counts once
        looks += 1
    assert looks + 1 >= 2 * 45 / level.gain, "twice, since the last one kept no promise"


# -- exchanges ---------------------------------------------------------------------------------------------------------


def dear(nodes: Sequence[float]) -> float:
    """Of exchanges, which take the longer the more of the graph leaves where it was at first."""
    return 4e-6 * abs(nodes[0] - 1e6)


def _uneven(epoch: int, rank: int) -> float:
    return 0.5 if rank else 1.0


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_move_that_makes_exchanges_dear_is_taken_back_and_tried_rarely(noise: float) -> None:
    run = simulate(_uneven, epochs=1000, exchange_seconds=dear, noise=noise)
    assert run.nodes == [1e6, 1e6] and len(run.returned) == len(run.moved) <= 4
    assert run.returned[0] - run.moved[0] == _RULES.window, "one window of epochs tells"
    gaps = np.diff(run.moved)
    assert gaps[0] > 4 * run.moved[0] and (gaps[1:] > 2 * gaps[:-1]).all()
    steady, away = 2.0, 4e-6 * 1e6 / 3
    assert statistics.median(run.epochs[: run.moved[0]]) == pytest.approx(steady, rel=0.05)
    # of each attempt: the epochs of a window, longer by what exchanges take and shorter by what computing saves
    lost = len(run.moved) * _RULES.window * (away - 2 / 3)
    assert sum(run.epochs) == pytest.approx(1000 * steady + lost, abs=0.1 + 4 * noise * steady * 1000**0.5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
def test_a_good_move_is_not_taken_back(noise: float, seed: int) -> None:
    """Also where exchanges take back a part of what computing saves."""
    for seconds in (0.0, 0.3):
        slow = simulate(
            lambda epoch, rank: 0.3 if rank == 1 else 1.0,
            epochs=200, noise=noise, seed=seed, exchange_seconds=lambda nodes, s=seconds: s * abs(nodes[0] - 1e6) / 1e6,
        )  # fmt: skip
        assert slow.moved and not slow.returned


def test_a_return_has_to_be_worth_it_and_possible() -> None:
    before, after = (1.0, 1.1, 0.9, 1.0, 1.2), (2.0, 2.1, 1.9, 2.0, 2.2)
    uneven, even = loads_of([1e6, 1e6], [1, 1 / 3]), loads_of([1.5e6, 0.5e6], [1, 1 / 3])

    def after_a_move(**how: int) -> tuple[ImbalanceWatch, bool]:
        watch = ImbalanceWatch(_RULES)
        assert watch.look(uneven, num_epochs=50, epochs_left=500) is None
        level = watch.look([replace(load, passed=before) for load in uneven], num_epochs=50, epochs_left=500)
        assert level is not None and not level.is_return
        watch.moved(level, 10.0)
        way = watch.look([replace(load, passed=after) for load in even], num_epochs=5, **({"epochs_left": 500} | how))
        assert way is None or (way.is_return and way.predicted == level.seconds and not any(way.given))
        return watch, way is not None

    assert after_a_move(can_return=True)[1]
    for how in ({}, {"can_return": True, "epochs_left": 19}):  # 19 epochs shorter by 1 s, and twice 10 s
        watch, returns = after_a_move(**how)
        assert not returns and watch.shortfall is not None and watch.shortfall.longer == pytest.approx(1.0)


def test_slowest_ranks_epochs_count() -> None:
    """Those of the rank on which most passes, whatever the others measured."""
    watch, loads = ImbalanceWatch(_RULES), loads_of([1e6, 1e6], [1, 1 / 3])
    short, long = (0.1,) * 5, (3.0, 3.1, 2.9, 3.0, 3.1)
    seen = [replace(loads[0], passed=short), replace(loads[1], passed=long)]
    assert watch.look(seen, num_epochs=50, epochs_left=500) is None
    level = watch.look(seen, num_epochs=50, epochs_left=500)
    assert level is not None
    watch.moved(level, 1.0)
    now = [replace(load, passed=(2.0,) * 5) for load in loads_of([1.5e6, 0.5e6], [1, 1 / 3])]
    assert watch.look(now, num_epochs=5, epochs_left=400, can_return=True) is None and watch.shortfall is None


# -- the model of whole epochs -----------------------------------------------------------------------------------------

_SIZES = [
    PartSizes(inner=1_900_000, edges=_DEGREE * 1_900_000, halo=90_000, sent=100_000),
    PartSizes(inner=100_000, edges=_DEGREE * 100_000, halo=100_000, sent=90_000),
]
_COSTS = (LinearCost(inner=1e-6, edges=1e-8), LinearCost(inner=2e-6, edges=2e-8))
_COMPUTING = LinearWork(_COSTS)


def _with_exchanges(seconds_per_row: float) -> LinearWork:
    return LinearWork(tuple(replace(cost, halo=seconds_per_row, sent=seconds_per_row) for cost in _COSTS))


def _measured(slower: float = 1.0) -> list[RankLoad]:
    return [RankLoad(seconds=slower * _COMPUTING.seconds(r, size), sizes=size) for r, size in enumerate(_SIZES)]


@given(fraction=st.floats(0.0, 1.0))
def test_parts_after_a_move_hold_the_graph(fraction: float) -> None:
    loads = _measured()
    level = levelled(loads, RebalanceRules(work=_COMPUTING)).scaled(fraction)
    after = sizes_after(loads, level)
    assert sum(size.inner for size in after) == pytest.approx(2_000_000, abs=2)
    assert sum(size.edges for size in after) == pytest.approx(2_000_000 * _DEGREE, abs=2)
    for rank, (load, size) in enumerate(zip(loads, after, strict=True)):
        assert _COMPUTING.seconds(rank, size) == pytest.approx(level.predicted[rank], rel=1e-4)
        assert size.halo <= 2_000_000 - size.inner
        assert size.sent >= load.sizes.sent * 0.99, "nearer to halves, more of the graph is beside the other part"
        if not fraction:
            assert size == load.sizes


@given(slower=st.floats(0.5, 3.0), row=st.floats(0.0, 1e-4))
def test_no_move_is_made_that_lengthens_the_epoch(slower: float, row: float) -> None:
    loads, whole = _measured(slower), _with_exchanges(row)
    level = levelled(loads, RebalanceRules(work=_COMPUTING))
    best, saved = best_fraction(level, loads, _COMPUTING, whole)

    def epoch(sizes: Sequence[PartSizes]) -> float:
        of_exchanges = [whole.seconds(r, size) - _COMPUTING.seconds(r, size) for r, size in enumerate(sizes)]
        return max(slower * _COMPUTING.seconds(r, size) + of_exchanges[r] for r, size in enumerate(sizes))

    assert saved == pytest.approx(epoch(_SIZES) - epoch(sizes_after(loads, best)), abs=1e-9)
    assert saved >= epoch(_SIZES) - epoch(sizes_after(loads, level)) - 1e-9
    watch, made = ImbalanceWatch(RebalanceRules(work=_COMPUTING, whole=whole, least_gain_seconds=0.0)), None
    for _ in range(100):
        made = made or watch.look(loads, num_epochs=10, epochs_left=10_000)
    assert (made is not None) == (saved >= 0.1 * max(level.seconds))
    assert made is None or made == best


def test_dear_exchanges_keep_a_plan_and_cheap_ones_change_nothing() -> None:
    loads = _measured()
    level = levelled(loads, RebalanceRules(work=_COMPUTING))
    best, saved = best_fraction(level, loads, _COMPUTING, _COMPUTING)
    assert best.given == level.given and saved == pytest.approx(level.gain, rel=1e-4)
    assert best_fraction(level, loads, _COMPUTING, _with_exchanges(3e-5))[1] < 0
    some, saved = best_fraction(level, loads, _COMPUTING, _with_exchanges(1e-6))
    assert saved > 0 and some.given[0] <= level.given[0]


@given(speeds)
def test_ranks_that_are_left_out_neither_give_nor_take(speeds: list[float]) -> None:
    nodes = [1e6] * len(speeds)
    loads = [*loads_of(nodes, speeds), RankLoad(seconds=1e-4, sizes=PartSizes(inner=1, edges=_DEGREE))]
    rest, left_out = levelled(loads[:-1], _RULES), frozenset({len(speeds)})
    level = levelled(loads, replace(_RULES, left_out=left_out))
    assert level.given[-1] == 0 and level.predicted[-1] == 1e-4
    assert level.given[:-1] == pytest.approx(rest.given, rel=1e-6, abs=1e-3 * len(speeds) * 1e6)
    assert levelled(loads, _RULES).given[-1] < 0, "which a rank of one node that is idle does else"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"least_imbalance": 0.0}, "least_imbalance is 0.0"),
        ({"window": 0}, "window is 0"),
        ({"least_gain_seconds": -1.0}, "least_gain_seconds is -1.0"),
        ({"node_work": math.nan}, "node_work is nan"),
        ({"whole": LinearWork((LinearCost(),))}, "whole is given and work is not"),
    ],
)
def test_rules_out_of_range(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RebalanceRules(**values)  # type: ignore[arg-type]
