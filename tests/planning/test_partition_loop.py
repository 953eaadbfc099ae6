"""The loop is never worse than what it starts from, keeps memories, and says what its parts really hold."""

from __future__ import annotations

import dataclasses
import importlib.util
import math

import numpy as np
import pytest
import torch

from nugnn.partition import coarse
from nugnn.partition.assign import partition_nodes
from nugnn.partition.metis import symmetric_graph
from nugnn.planning import single_moves
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.partition_loop import partition_to_fit
from nugnn.planning.partition_rounds import FittedParts
from nugnn.planning.partition_search import LoopMethod, PartitionSearch
from nugnn.planning.search_aims import EqualEnds, FasterStep
from nugnn.planning.share_curves import scaled_sizes
from nugnn.planning.shares import plan_shares
from nugnn.planning.work_model import LinearCost, LinearWork, WorkModel, count_sizes

COST = LinearCost(fixed=1e-3, inner=2e-6, edges=5e-7, halo=1e-6, sent=5e-7, train=1e-7)
NO_LIMIT = math.inf
needs_kaminpar = pytest.mark.skipif(importlib.util.find_spec("kaminpar") is None, reason="needs kaminpar")


def grid(side: int):
    """A square mesh, both directions of each edge."""
    ids = np.arange(side * side).reshape(side, side)
    one = np.concatenate([ids[:, :-1].ravel(), ids[:-1].ravel()])
    two = np.concatenate([ids[:, 1:].ravel(), ids[1:].ravel()])
    return side * side, np.concatenate([one, two]), np.concatenate([two, one])


def uneven_graph(num_nodes: int, num_edges: int, seed: int):
    """Directed, with hubs, parallel edges, self-loops and isolated nodes."""
    rng = np.random.default_rng(seed)
    near = rng.integers(0, num_nodes, num_edges)
    far = np.where(
        rng.random(num_edges) < 0.7, near + rng.integers(-9, 10, num_edges), rng.integers(0, num_nodes, num_edges)
    )
    hubs = (rng.random(num_edges) ** 3 * num_nodes).astype(np.int64)
    src = np.where(rng.random(num_edges) < 0.3, hubs, far).clip(0, num_nodes - 1)
    keep = near % 13 != 0
    return num_nodes, src[keep], near[keep]


def devices(*factors: float, cost: LinearCost = COST) -> LinearWork:
    return LinearWork(tuple(cost.times(factor) for factor in factors))


def makespan(work: WorkModel, src, dst, part, num_parts: int, train=()) -> float:
    sizes = count_sizes(src, dst, part, num_parts, train)
    return max(work.seconds(p, size) for p, size in enumerate(sizes))


def check(fitted: FittedParts, work: WorkModel, graph, limits, train=()) -> None:
    """What the result says of its parts is so, and no round is better."""
    num_nodes, src, dst = graph
    part = fitted.assignment.part
    assert part.shape == (num_nodes,) and part.dtype == torch.int32
    assert fitted.sizes == count_sizes(src, dst, part, len(limits), train)
    assert fitted.seconds == tuple(work.seconds(p, size) for p, size in enumerate(fitted.sizes))
    assert fitted.best.bytes == tuple(work.bytes(p, size) for p, size in enumerate(fitted.sizes))
    assert all(held <= limit for held, limit in zip(fitted.best.bytes, limits, strict=True))
    assert fitted.assignment.node_counts == tuple(size.inner for size in fitted.sizes)
    assert min(fitted.assignment.node_counts) >= 1
    assert fitted.best is fitted.rounds[fitted.best_round]
    assert fitted.best.rank == min(one.rank for one in fitted.rounds)


@pytest.mark.parametrize("seed", range(8))
def test_no_one_shot_split_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = num_nodes, src, dst = uneven_graph(int(rng.integers(60, 700)), int(rng.integers(200, 5000)), seed)
    num_parts = int(rng.integers(2, 6))
    train = rng.permutation(num_nodes)[: num_nodes // 5]
    work = LinearWork(
        tuple(
            LinearCost(**{f.name: getattr(COST, f.name) * 10 ** rng.uniform(-1, 1) for f in dataclasses.fields(COST)})
            for _ in range(num_parts)
        )
    )
    other = {"mine": (1 + rng.random(num_parts)).tolist()}
    limits = [NO_LIMIT] * num_parts
    fitted = partition_to_fit(num_nodes, src, dst, work, limits, train_nodes=train, rounds=2, seed=seed, also=other)
    check(fitted, work, graph, limits, train)
    whole = PartSizes(num_nodes, len(src), 0, 0, len(train))
    relaxed = plan_shares(work, whole, limits)
    assert fitted.relaxed == relaxed
    for shares in (relaxed.shares, [1.0] * num_parts, other["mine"]):
        one_shot = partition_nodes(num_nodes, src, dst, shares, seed=seed)
        assert fitted.makespan <= makespan(work, src, dst, one_shot.part, num_parts, train)
    names = [one.name for one in fitted.rounds]
    assert names[:4] == ["work", "nodes", "even", "mine"]
    assert all(fitted.makespan <= one.makespan for one in fitted.rounds)


def test_moves_and_corrections_bring_something() -> None:
    """On a graph with a large halo, which no node weight knows of."""
    num_nodes, src, dst = uneven_graph(2000, 24_000, seed=1)
    work = devices(1, 2, 4)
    limits = [NO_LIMIT] * 3
    fitted = partition_to_fit(num_nodes, src, dst, work, limits)
    without = partition_to_fit(num_nodes, src, dst, work, limits, moves=False)
    assert {one.name for one in without.rounds} == {"work", "nodes", "even", "targets"}
    assert without.makespan < 0.99 * without.rounds[0].makespan
    assert fitted.makespan < 0.97 * fitted.rounds[0].makespan
    assert fitted.best.idle_share < 0.04
    nothing = partition_to_fit(num_nodes, src, dst, work, limits, rounds=0, moves=False)
    assert [one.name for one in nothing.rounds] == ["work", "nodes", "even"]


def test_a_moment_s_plan_cuts_once_and_corrects() -> None:
    graph, work = uneven_graph(400, 4000, 1), devices(1.0, 3.0)
    fitted = partition_to_fit(*graph, work, [NO_LIMIT] * 2, rounds=2, moves=False, only_work=True)
    check(fitted, work, graph, [NO_LIMIT] * 2)
    assert [each.name for each in fitted.rounds] == ["work", "targets", "targets"][: len(fitted.rounds)]
    assert fitted.makespan <= fitted.rounds[0].makespan and len(fitted.rounds) > 1


def phases(sizes) -> float:
    """Of a step in which all devices meet after a phase of nodes and after one of edges, which they do unlike fast."""
    of_nodes = max(rate * size.inner for rate, size in zip((1e-6, 2e-6, 2e-6), sizes, strict=False))
    return of_nodes + max(rate * size.edges for rate, size in zip((1e-7, 6e-7, 6e-7), sizes, strict=False))


def alone(*devices: int) -> LinearWork:
    """What each of the devices of `phases` takes that never waits."""
    costs = LinearCost(inner=1e-6, edges=1e-7), *[LinearCost(inner=2e-6, edges=6e-7)] * 2
    return LinearWork(tuple(costs[device] for device in devices))


def test_where_a_step_decides_targets_aim_at_it() -> None:
    """Nodes would have 1/3 on the slower device, edges 1/7; all together, each for itself, end at some share between.
    The step is fastest where one of the phases ends at the same time on both.
    """
    graph = num_nodes, src, _ = grid(40)
    fitted = partition_to_fit(*graph, alone(0, 1), [NO_LIMIT] * 2, aim=FasterStep(phases))
    assert not any(one.name == "moves" for one in fitted.rounds)
    assert fitted.makespan == phases(fitted.sizes) == min(one.makespan for one in fitted.rounds)
    by_slowest = partition_to_fit(*graph, alone(0, 1), [NO_LIMIT] * 2, moves=False)
    assert fitted.makespan <= phases(by_slowest.sizes)
    whole = PartSizes(num_nodes, len(src), 0, 0, 0)
    shares = np.linspace(0.01, 0.99, 197)
    least = min(phases([scaled_sizes(whole, float(s), num_nodes) for s in (1 - share, share)]) for share in shares)
    assert fitted.makespan < 1.02 * least


def test_devices_of_a_group_get_targets_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, ...]] = []

    def partition(self, name, shares, *how):
        asked.append(tuple(shares) if name == "targets" else ())
        return before(self, name, shares, *how)

    before = PartitionSearch.partition
    monkeypatch.setattr(PartitionSearch, "partition", partition)
    graph, limits = grid(40), [NO_LIMIT] * 3
    start = {"mine": (0.9, 0.05, 0.05)}
    partition_to_fit(*graph, alone(0, 1, 2), limits, aim=FasterStep(phases, (0, 1, 1)), also=start, rounds=2)
    targets = [shares for shares in asked if shares]
    assert targets
    for shares in targets:  # as far as parts of one cut, with targets of their own, differ
        assert shares[1] == pytest.approx(shares[2], rel=0.1)


def test_targets_of_a_faster_step_keep_memories() -> None:
    graph, rows = grid(40), 500
    held = (LinearCost(), LinearCost(inner=1.0))
    work = LinearWork(alone(0, 1).seconds_of, held)

    def prefers_the_second(sizes) -> float:
        return float(sizes[0].inner)

    fitted = partition_to_fit(*graph, work, [NO_LIMIT, rows], aim=FasterStep(prefers_the_second))
    assert fitted.sizes[1].inner <= rows
    assert fitted.sizes[1].inner > 0.9 * rows


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize(("count", "room"), [(2, 1.05), (4, 1.1)])
def test_where_a_step_decides_nodes_leave_parts_that_lack_memory(count: int, room: float, is_quick: bool) -> None:
    """No cut of METIS holds these, by a row or two."""
    graph = grid(40)
    rows, held = LinearCost(inner=1e-6), LinearCost(inner=1.0, halo=1.0)
    work, limits = LinearWork((rows,) * count, (held,) * count), [room * 1600 / count] * count
    how = {"only_work": True, "rounds": 0} if is_quick else {}

    def step(sizes) -> float:
        return 1e-6 * max(size.inner for size in sizes)

    fitted = partition_to_fit(*graph, work, limits, aim=FasterStep(step, [0] * count), **how)
    check(fitted, work, graph, limits)


@pytest.mark.parametrize("seed", range(6))
def test_where_a_step_decides_no_one_shot_split_is_better_either(seed: int) -> None:
    """By a step of phases that devices do unlike fast, after each of which all wait for the slowest."""
    rng = np.random.default_rng(seed)
    graph = num_nodes, src, dst = uneven_graph(int(rng.integers(60, 700)), int(rng.integers(200, 5000)), seed)
    num_parts = int(rng.integers(2, 6))
    phases_of = [devices(*(10 ** rng.uniform(-0.5, 0.5, num_parts))).seconds_of for _ in range(3)]

    def step(sizes) -> float:
        return sum(max(cost.of(size) for cost, size in zip(costs, sizes, strict=True)) for costs in phases_of)

    work = devices(*(sum(costs[part].inner / COST.inner for costs in phases_of) for part in range(num_parts)))
    limits = [NO_LIMIT] * num_parts
    fitted = partition_to_fit(*graph, work, limits, rounds=2, seed=seed, aim=FasterStep(step))
    check(fitted, work, graph, limits)
    assert fitted.makespan == step(fitted.sizes)
    relaxed = plan_shares(work, PartSizes(num_nodes, len(src), 0, 0, 0), limits)
    for shares in (relaxed.shares, [1.0] * num_parts):
        one_shot = partition_nodes(num_nodes, src, dst, shares, seed=seed)
        assert fitted.makespan <= step(count_sizes(src, dst, one_shot.part, num_parts, ()))


def test_devices_that_hardly_wait_end_a_search_for_equal_ends_and_not_one_for_a_faster_step() -> None:
    graph, work = grid(30), devices(1, 2, 3, cost=LinearCost(inner=2e-6, edges=5e-7))
    limits = [NO_LIMIT] * 3
    equal_ends = partition_to_fit(*graph, work, limits, moves=False)
    assert equal_ends.best.idle_share < 0.02 and [one.name for one in equal_ends.rounds] == ["work", "nodes", "even"]
    closer = partition_to_fit(*graph, work, limits, moves=False, aim=EqualEnds(0.001))
    assert "targets" in [one.name for one in closer.rounds]

    def slowest(sizes) -> float:
        return max(work.seconds(part, size) for part, size in enumerate(sizes))

    step = partition_to_fit(*graph, work, limits, aim=FasterStep(slowest))
    assert "targets" in [one.name for one in step.rounds]
    assert step.makespan < 0.999 * equal_ends.makespan


def test_one_cut_of_a_search_for_a_faster_step_lies_far_from_the_others() -> None:
    class Leap(FasterStep):
        def far_targets(self, first, devices) -> tuple[float, ...]:
            assert first.round.name == "work"
            return (0.1, 0.9)

    def prefers_the_second(sizes) -> float:
        """By steps of some per cent the first part only grows."""
        return 2.0 + abs(sizes[0].inner - 1200.0) if sizes[0].inner > 400 else 1.0

    graph, limits = grid(40), [NO_LIMIT] * 2
    fitted = partition_to_fit(*graph, alone(0, 1), limits, aim=Leap(prefers_the_second))
    far = [number for number, one in enumerate(fitted.rounds) if one.shares == pytest.approx((0.1, 0.9))]
    assert len(far) == 1 and fitted.best_round == far[0]
    without = partition_to_fit(*graph, alone(0, 1), limits, aim=FasterStep(prefers_the_second))
    assert without.sizes[0].inner > 400 and [one.shares for one in without.rounds[: far[0]]] == [
        one.shares for one in fitted.rounds[: far[0]]
    ]
    at_once = partition_to_fit(*graph, alone(0, 1), limits, aim=Leap(prefers_the_second), rounds=0)
    assert not any(one.name == "targets" for one in at_once.rounds)


@pytest.mark.parametrize("has_step", [False, True])
def test_what_balance_leaves_lacking_is_relieved_in_the_end(has_step: bool) -> None:
    """Nodes that must not make a slow device slower stay where they do not fit, until memory is all that counts."""
    graph = uneven_graph(300, 2400, 1)
    held = LinearCost(inner=1.0, halo=0.5)
    work, limits = LinearWork(devices(1, 3, 9).seconds_of, (held,) * 3), [120.0, 168.0, 192.0]

    def step(sizes) -> float:
        return max(work.seconds(part, size) for part, size in enumerate(sizes))

    how = {"aim": FasterStep(step)} if has_step else {}
    fitted = partition_to_fit(*graph, work, limits, rounds=0, seed=1, **how)
    check(fitted, work, graph, limits)
    assert [one.name for one in fitted.rounds[3:]] == ["moves", "relief"]
    assert fitted.rounds[3].lacking_bytes > 0 and fitted.best.name == "relief"
    with pytest.raises(DoesNotFitError):
        partition_to_fit(*graph, work, limits, rounds=0, seed=1, moves=False, **how)


def test_relief_moves_nodes_out_of_parts_that_lack_memory_and_no_more_than_needed() -> None:
    num_nodes, src, dst = grid(30)
    held = LinearCost(inner=1.0)
    work, limits = LinearWork(devices(1, 1, 1).seconds_of, (held,) * 3), (250.0, NO_LIMIT, 320.0)
    part = partition_nodes(num_nodes, src, dst, [1.0, 1.0, 1.0]).part.numpy().astype(np.int64)
    before, sizes = part.copy(), count_sizes(src, dst, part, 3)
    assert sizes[0].inner > 280 and sizes[2].inner <= 320
    moves = single_moves.SingleMoves(src, dst, np.zeros(0, np.int64), np.bincount(dst), work, limits)
    moves.relieve(part, sizes)
    after = count_sizes(src, dst, part, 3)
    assert after[0].inner == 250 and after[2].inner <= 320
    assert set(before[part != before].tolist()) == {0}
    now = part.copy()
    moves.relieve(now, after)  # nothing is lacking: nothing moves, however long a part takes
    assert np.array_equal(now, part) and after[1].inner > 1.2 * after[0].inner


def test_equal_devices_get_about_equal_parts() -> None:
    graph = num_nodes, src, dst = grid(40)
    fitted = partition_to_fit(num_nodes, src, dst, devices(1, 1, 1, 1), [NO_LIMIT] * 4)
    check(fitted, devices(1, 1, 1, 1), graph, [NO_LIMIT] * 4)
    assert max(fitted.assignment.node_counts) <= 1.05 * min(fitted.assignment.node_counts)
    assert fitted.best.idle_share <= 0.02


def test_work_follows_speed_where_the_cut_is_small() -> None:
    num_nodes, src, dst = grid(60)
    cost = LinearCost(inner=2e-6, edges=5e-7, halo=1e-7)
    fitted = partition_to_fit(num_nodes, src, dst, devices(1, 10, cost=cost), [NO_LIMIT] * 2)
    fast, slow = (cost.inner * s.inner + cost.edges * s.edges for s in fitted.sizes)
    assert fast / slow == pytest.approx(10, rel=0.05)


def test_devices_in_another_order_get_as_good_a_split() -> None:
    num_nodes, src, dst = uneven_graph(1500, 12_000, seed=3)
    limits = [NO_LIMIT] * 3
    forth = partition_to_fit(num_nodes, src, dst, devices(1, 2, 5), limits)
    back = partition_to_fit(num_nodes, src, dst, devices(5, 2, 1), limits)
    assert back.makespan == pytest.approx(forth.makespan, rel=0.05)
    assert back.sizes[0].edges == pytest.approx(forth.sizes[2].edges, rel=0.15)


@pytest.mark.parametrize("method", ["metis", "clusters"])
def test_equal_arguments_give_equal_parts(method: LoopMethod) -> None:
    num_nodes, src, dst = uneven_graph(800, 8000, seed=5)
    work, limits = devices(1, 3, 3), [NO_LIMIT] * 3
    known = symmetric_graph(num_nodes, src, dst, None)
    one, two = (
        partition_to_fit(num_nodes, src, dst, work, limits, method=method, seed=7, rounds=2, symmetric=graph)
        for graph in (None, known)
    )
    assert torch.equal(one.assignment.part, two.assignment.part)
    assert [dataclasses.replace(r, took_seconds=0) for r in one.rounds] == [
        dataclasses.replace(r, took_seconds=0) for r in two.rounds
    ]
    assert one.assignment.method == method and one.assignment.seed == 7


@pytest.mark.parametrize("method", ["clusters", pytest.param("kaminpar", marks=needs_kaminpar)])
def test_other_partitioners_go_the_same_way(method: LoopMethod) -> None:
    graph = num_nodes, src, dst = uneven_graph(900, 9000, seed=6)
    work, limits = devices(1, 2, 8), [NO_LIMIT] * 3
    fitted = partition_to_fit(num_nodes, src, dst, work, limits, method=method, rounds=2)
    check(fitted, work, graph, limits)
    assert fitted.makespan <= fitted.rounds[0].makespan
    beside = partition_to_fit(num_nodes, src, dst, work, limits, method=method, rounds=0, beside_metis=True)
    metis = partition_to_fit(num_nodes, src, dst, work, limits, rounds=0)
    assert [one.name for one in beside.rounds[3:5]] == ["METIS work", "METIS nodes"]
    assert [one.sizes for one in beside.rounds[3:5]] == [one.sizes for one in metis.rounds[:2]]
    assert beside.makespan <= min(one.makespan for one in metis.rounds[:2])


@pytest.mark.parametrize("seed", range(4))
def test_on_clusters_no_starting_split_is_better(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law of large graphs, which METIS' splits are no part of."""
    monkeypatch.setattr(coarse, "_FEWEST_CLUSTERS", 60)
    graph = num_nodes, src, dst = uneven_graph(900, 9000, seed)
    work, limits, other = devices(1, 2, 5), [NO_LIMIT] * 3, {"mine": (4.0, 3.0, 2.0)}
    fitted = partition_to_fit(num_nodes, src, dst, work, limits, method="clusters", seed=seed, also=other)
    check(fitted, work, graph, limits)
    assert [one.name for one in fitted.rounds[:5]] == ["work", "nodes", "even", "mine", "moves"]
    assert all(fitted.makespan <= one.makespan for one in fitted.rounds[:4])


@pytest.mark.parametrize("fraction", [0.55, 0.45, 0.4])
def test_memory_is_kept_though_the_fast_device_then_waits(fraction: float) -> None:
    graph = num_nodes, src, dst = uneven_graph(900, 9000, seed=8)
    memory = LinearCost(fixed=1000, inner=100, edges=8, halo=60)
    work = LinearWork(devices(1, 4, 4).seconds_of, (memory,) * 3)
    limits = [fraction * memory.of(PartSizes(num_nodes, len(src), 0, 0, 0)), NO_LIMIT, NO_LIMIT]
    fitted = partition_to_fit(num_nodes, src, dst, work, limits)
    check(fitted, work, graph, limits)
    unlimited = partition_to_fit(num_nodes, src, dst, work, [NO_LIMIT] * 3)
    assert unlimited.best.bytes[0] > limits[0]
    assert fitted.makespan >= unlimited.makespan
    assert fitted.best.bytes[0] >= 0.9 * limits[0]  # what there is of the fast device's memory is used


def test_memory_that_only_a_small_cut_fits() -> None:
    """Twice the halo that was expected would not fit; that of the cut does."""
    graph = num_nodes, src, dst = grid(40)
    memory = LinearCost(inner=100, halo=100)
    work = LinearWork(devices(1, 1).seconds_of, (memory,) * 2)
    limits = [100 * num_nodes * 0.55] * 2
    with pytest.raises(DoesNotFitError):
        plan_shares(work, PartSizes(num_nodes, len(src), 0, 0, 0), limits)
    fitted = partition_to_fit(num_nodes, src, dst, work, limits)
    assert fitted.relaxed is None
    check(fitted, work, graph, limits)


def test_what_cannot_fit_is_refused_with_numbers() -> None:
    num_nodes, src, dst = uneven_graph(900, 9000, seed=8)
    memory = LinearCost(inner=1000)
    work = LinearWork(devices(1, 1).seconds_of, (memory,) * 2)
    with pytest.raises(DoesNotFitError, match=r"the devices together hold 80\.0% of it"):
        partition_to_fit(num_nodes, src, dst, work, [360_000, 360_000])
    halo = LinearWork(work.seconds_of, (LinearCost(inner=1000, halo=1000),) * 2)  # fits but for the halo
    with pytest.raises(DoesNotFitError) as raised:
        partition_to_fit(num_nodes, src, dst, halo, [460_000, 460_000], rounds=2)
    assert "no split was found that fits all memories" in str(raised.value)
    assert "are lacking." in str(raised.value) and "more like device 0" in str(raised.value)


def test_a_model_that_is_not_linear() -> None:
    class Steps:
        """Costs that jump and bend."""

        def seconds(self, part: int, sizes: PartSizes) -> float:
            bent = sizes.edges**1.1 + 200 * math.ceil(sizes.inner / 128)
            return (1 + part) * (bent + sizes.halo) + max(0, sizes.sent - 100)

        def bytes(self, part: int, sizes: PartSizes) -> int:
            return 8 * sizes.edges

    graph = num_nodes, src, dst = uneven_graph(1200, 10_000, seed=9)
    limits = [NO_LIMIT] * 3
    fitted = partition_to_fit(num_nodes, src, dst, Steps(), limits)
    check(fitted, Steps(), graph, limits)
    assert fitted.makespan < fitted.rounds[0].makespan
    assert fitted.best.idle_share < 0.1


def test_a_graph_too_large_for_moves_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_moves, "_READERS_LIMIT", 4 * 900 * 3 - 1)
    graph = num_nodes, src, dst = uneven_graph(900, 9000, seed=8)
    work, limits = devices(1, 2, 4), [NO_LIMIT] * 3
    fitted = partition_to_fit(num_nodes, src, dst, work, limits, rounds=1)
    check(fitted, work, graph, limits)
    assert [one.name for one in fitted.rounds] == ["work", "nodes", "even", "targets"]
    assert any("No single nodes were moved" in note for note in fitted.assignment.notes)


def test_small_and_odd_graphs() -> None:
    one = partition_to_fit(5, [0, 1], [1, 2], devices(1), [NO_LIMIT])
    assert one.assignment.node_counts == (5,) and [r.name for r in one.rounds] == ["work"]
    no_edges = partition_to_fit(6, [], [], devices(1, 2, cost=LinearCost(inner=1)), [NO_LIMIT] * 2)
    assert no_edges.assignment.node_counts == (4, 2)
    fixed = partition_to_fit(6, [], [], devices(1, 2), [NO_LIMIT] * 2)  # two launches of one device, whatever it holds
    assert fixed.assignment.node_counts == (5, 1)
    loops = partition_to_fit(4, [0, 1, 2, 3], [0, 1, 2, 3], devices(1, 1), [NO_LIMIT] * 2)
    assert loops.sizes == (PartSizes(2, 2, 0, 0, 0),) * 2
    full = partition_to_fit(3, [0, 1, 2], [1, 2, 0], devices(1, 5, 9), [NO_LIMIT] * 3)
    assert full.assignment.node_counts == (1, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "random"}, "unknown partition method 'random'"),
        ({"rounds": -1}, "rounds is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"also": {"mine": [1.0]}}, "'mine' has 1 share for 2 devices"),
        ({"limits": [1.0, -1]}, "the memory limit of device 1 is -1 bytes"),
        ({"limits": [1.0]}, "limits are of 1 device, and the work model is of 2"),
        ({"limits": [1.0] * 3}, "limits are of 3 devices, and the work model is of 2"),
        ({"num_nodes": 1, "src": [], "dst": []}, "2 devices for 1 node;"),
        ({"dst": [1]}, "src has 2 entries and dst 1"),
        ({"src": [0, 4]}, "entry 1 of src is 4"),
        ({"train_nodes": [4]}, "entry 0 of train_nodes is 4"),
        (
            {"symmetric": symmetric_graph(3, np.array([0]), np.array([1]), None)},
            "symmetric is a graph of 3 nodes; this one has 4",
        ),
    ],
)
def test_malformed_arguments_are_refused(change: dict, message: str) -> None:
    arguments = {"num_nodes": 4, "src": [0, 1], "dst": [1, 2], "work": devices(1, 1), "limits": [NO_LIMIT] * 2}
    with pytest.raises(ValueError, match=message):
        partition_to_fit(**(arguments | change))
