"""When nodes should move, and how much work where: on simulated ranks whose seconds follow from their work."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.imbalance import ImbalanceWatch, RankLoad, RebalanceRules, flows, levelled
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
    assert level.predicted[0] == pytest.approx(level.predicted[2], rel=1e-6)
    assert levelled([slow, full, RankLoad(seconds=0.25, sizes=free.sizes, most_growth=1.0)], _RULES).given[2] == 0


def test_proportions_come_from_the_work_model() -> None:
    # rank 1 is busy with edges, rank 0 with nodes: the same seconds, other prices
    work = LinearWork((LinearCost(inner=1e-6, edges=1e-9), LinearCost(inner=1e-9, edges=1e-7)))
    loads = loads_of([1e6, 1e6], [0.5, 2])
    level = levelled(loads, RebalanceRules(work=work))
    assert level.node_work == pytest.approx((1000, 0.01))
    assert level.given[0] > 0 and max(level.predicted) == pytest.approx(min(level.predicted))
    doubled = levelled(loads, RebalanceRules(work=LinearWork(tuple(cost.times(7) for cost in work.seconds_of))))
    assert doubled.given == pytest.approx(level.given)


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


@given(given_work=st.lists(st.integers(-100, 100), min_size=2, max_size=6), seed=st.integers(0, 100))
def test_flows_give_what_goes_and_bring_what_comes(given_work: list[int], seed: int) -> None:
    surplus = sum(given_work)
    work = [float(w) for w in given_work]
    work[0] -= surplus
    affinity = np.random.default_rng(seed).random((len(work), len(work))).tolist()
    found = flows(work, affinity)
    for rank, amount in enumerate(work):
        goes, comes = math.fsum(found[rank].values()), math.fsum(each.get(rank, 0.0) for each in found)
        assert goes == pytest.approx(max(amount, 0), abs=1e-6) and comes == pytest.approx(max(-amount, 0), abs=1e-6)


def simulate(
    speed_of: Callable[[int, int], float],
    *,
    num_ranks: int = 2,
    epochs: int = 120,
    noise: float = 0.0,
    move_seconds: float = 2.0,
    moves: float = 1.0,
    fixed_seconds: float = 0.0,
) -> tuple[list[int], list[float]]:
    """Epochs after which nodes moved, and the slowest rank's seconds in each; ``moves`` of what was asked is moved."""
    rng, watch = np.random.default_rng(0), ImbalanceWatch(_RULES)
    nodes, window, moved, makespans = [1e6] * num_ranks, list[list[float]](), list[int](), list[float]()
    for epoch in range(1, epochs + 1):
        speeds = [speed_of(epoch, rank) for rank in range(num_ranks)]
        seconds = [n / 1e6 / s + fixed_seconds for n, s in zip(nodes, speeds, strict=True)]
        makespans.append(max(seconds))
        window.append([s * (1 + noise * rng.standard_normal()) for s in seconds])
        last = window[-_RULES.window :]
        if len(last) < _RULES.least_epochs:
            continue
        medians = [statistics.median(each[rank] for each in last) for rank in range(num_ranks)]
        loads = [RankLoad(seconds=s, sizes=part(n)) for s, n in zip(medians, nodes, strict=True)]
        level = watch.look(loads, num_epochs=1, epochs_left=epochs - epoch)
        if level is not None:
            nodes = nodes_after(nodes, [moves * work for work in level.given])
            watch.moved(level, move_seconds)
            moved.append(epoch)
            window.clear()
    return moved, makespans


def test_a_rank_slowed_threefold_in_mid_run() -> None:
    moved, makespans = simulate(lambda epoch, rank: 1 / 3 if rank == 1 and epoch > 40 else 1.0)
    assert len(moved) == 1 and 40 < moved[0] <= 50
    assert makespans[moved[0]] == pytest.approx(1.5, rel=0.01), "two million nodes at 1 + 1/3"
    moved, makespans = simulate(lambda epoch, rank: 1 / 3 if rank == 1 and epoch > 40 else 1.0, noise=0.05)
    assert makespans[-1] < 1.1 * 1.5 and len(moved) <= 2


def test_it_comes_back_when_the_rank_is_fast_again() -> None:
    moved, makespans = simulate(lambda epoch, rank: 1 / 3 if rank == 1 and 20 < epoch <= 60 else 1.0)
    assert len(moved) == 2 and makespans[-1] == pytest.approx(1.0, rel=0.01)


def test_noise_and_hiccups_move_nothing() -> None:
    assert simulate(lambda epoch, rank: 1.0, noise=0.08, num_ranks=4)[0] == []
    assert simulate(lambda epoch, rank: 0.2 if rank == 1 and epoch % 5 < 2 else 1.0)[0] == []


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
    assert watch.shortfall == (level.gain, 0.0)
    watch.look(even, num_epochs=1, epochs_left=400)
    assert watch.shortfall is None


def test_what_is_not_worth_it_is_left() -> None:
    slow = lambda epoch, rank: 1 / 3 if rank == 1 and epoch > 110 else 1.0  # noqa: E731
    assert simulate(slow, move_seconds=5.0)[0] == [], "ten epochs are too few to earn a move"
    watch = ImbalanceWatch(RebalanceRules(least_gain_seconds=1e4))
    assert all(watch.look(loads_of([1e6, 1e6], [1, 1 / 3]), num_epochs=1, epochs_left=500) is None for _ in range(200))


def test_moves_that_bring_nothing_become_rare() -> None:
    # what makes the rank slow is not its nodes
    often, _ = simulate(lambda epoch, rank: 0.3 if rank == 1 else 1.0, moves=0.0, epochs=250)
    gaps = np.diff(often)
    assert len(often) < 10 and (gaps[1:] >= gaps[:-1]).all() and gaps[-1] > 4 * gaps[0]
    assert len(simulate(lambda epoch, rank: 0.3 if rank == 1 else 1.0, epochs=400)[0]) == 1


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


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"least_imbalance": 0.0}, "least_imbalance is 0.0"),
        ({"window": 0}, "window is 0"),
        ({"least_gain_seconds": -1.0}, "least_gain_seconds is -1.0"),
        ({"node_work": math.nan}, "node_work is nan"),
    ],
)
def test_rules_out_of_range(values: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RebalanceRules(**values)  # type: ignore[arg-type]
