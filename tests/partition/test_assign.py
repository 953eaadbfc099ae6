"""Assignments: laws over random multigraphs, and the inputs that made other partitioners crash or lie."""

from __future__ import annotations

import importlib.util
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.partition import assign, metis
from nugnn.partition.assign import degree_weights, partition_nodes

METHODS = ["metis", "clusters", "random"]
if importlib.util.find_spec("kaminpar") is not None:  # optional
    METHODS.append("kaminpar")


@st.composite
def problems(draw):
    """A directed multigraph with hubs, isolated nodes, parallel arcs and self-loops, and unequal shares."""
    num_nodes = draw(st.integers(1, 60))
    num_parts = draw(st.integers(1, min(num_nodes, 9)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_edges = draw(st.integers(0, 200))
    src = (num_nodes * rng.random(num_edges) ** 2).astype(np.int64)
    dst = rng.integers(0, max(1, num_nodes * 3 // 4), num_edges)
    shares = draw(st.lists(st.floats(0.01, 10), min_size=num_parts, max_size=num_parts))
    return num_nodes, src, dst, shares


def ring(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Both directions of a ring."""
    here = np.arange(num_nodes)
    there = (here + 1) % num_nodes
    return np.concatenate([here, there]), np.concatenate([there, here])


def path(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    here = np.arange(num_nodes - 1)
    return np.concatenate([here, here + 1]), np.concatenate([here + 1, here])


def targets(shares: list[float], num_nodes: int) -> list[float]:
    """The documented targets: shares below one node raised to one node, the rest scaled down; the oracle is a search.

    Water-filling: the target of part p is ``max(1, lam * share)`` with the one ``lam`` for which they sum to N.
    """
    low, high = 0.0, num_nodes / min(shares) * 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(max(1.0, middle * s) for s in shares) > num_nodes else (middle, high)
    return [max(1.0, low * s) for s in shares]


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None, max_examples=150)
@given(problem=problems(), seed=st.integers(0, 5))
def test_every_node_has_a_part_and_every_part_its_share(method, problem, seed):
    num_nodes, src, dst, shares = problem
    result = partition_nodes(num_nodes, src, dst, shares, method=method, seed=seed)
    part = result.part.numpy()
    assert result.part.dtype == torch.int32
    assert part.shape == (num_nodes,)
    counts = [int((part == rank).sum()) for rank in range(len(shares))]
    assert sum(counts) == num_nodes
    assert min(counts) >= 1
    for count, target in zip(counts, targets(shares, num_nodes), strict=True):
        # the documented tolerance for unit weights; 1e-6: the search above
        assert abs(count - target) <= max(0.02 * target, 1) + 1e-6


@settings(deadline=None, max_examples=100)
@given(problem=problems(), method=st.sampled_from(METHODS))
def test_reported_counts_equal_a_recount(problem, method):
    num_nodes, src, dst, shares = problem
    result = partition_nodes(num_nodes, src, dst, shares, method=method)
    part = result.part.tolist()
    arcs = list(zip(src.tolist(), dst.tolist(), strict=True))
    crossing = [(u, v) for u, v in arcs if part[u] != part[v]]
    assert result.edge_cut == len(set(crossing))
    assert result.cut_weight == len(crossing)
    assert result.node_counts == tuple(part.count(rank) for rank in range(len(shares)))
    assert result.edge_counts == tuple(sum(part[v] == rank for _, v in arcs) for rank in range(len(shares)))
    halos = [{u for u, v in crossing if part[v] == rank} for rank in range(len(shares))]
    assert result.halo_rows == tuple(len(halo) for halo in halos)
    assert result.shares_asked == pytest.approx([share / sum(shares) for share in shares])


@settings(deadline=None, max_examples=40)
@given(problem=problems(), seed=st.integers(0, 3))
def test_weighted_nodes_meet_their_shares(problem, seed):
    num_nodes, src, dst, shares = problem
    weights = degree_weights(num_nodes, dst, alpha=0.5, beta=2.0)
    expected = [0.5 + 2.0 * int((dst == node).sum()) for node in range(num_nodes)]
    assert weights.tolist() == expected
    result = partition_nodes(num_nodes, src, dst, shares, seed=seed, node_weights=weights, tolerance=0.05)
    total = sum(expected)
    for rank, target in enumerate(targets(shares, num_nodes)):
        load = float(weights[result.part == rank].sum())
        asked = target / num_nodes * total
        assert abs(load - asked) <= max([0.05 * asked, *expected]) + 1e-6 * total


def test_degree_weights_by_name_balance_the_in_edges():
    rng = np.random.default_rng(3)
    src, dst = rng.integers(0, 2000, 30_000), (2000 * rng.random(30_000) ** 2).astype(np.int64)
    result = partition_nodes(2000, src, dst, [3, 1], node_weights="degree")
    load = result.node_counts[0] + result.edge_counts[0]
    heaviest = 1 + np.bincount(dst).max()
    assert abs(load - 24_000) <= max(0.02 * 24_000, heaviest)
    with pytest.raises(ValueError, match="unknown node_weights 'edges'"):
        partition_nodes(2000, src, dst, [3, 1], node_weights="edges")


@pytest.mark.parametrize("method", METHODS)
def test_equal_arguments_give_an_equal_assignment_and_seeds_matter(method, monkeypatch):
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 500, (2, 4000))
    if method == "kaminpar":  # on several threads it does not promise as much
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    results = [partition_nodes(500, src, dst, [2, 1, 1], method=method, seed=seed).part for seed in (4, 4, 5)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_metis_cuts_less_than_random_and_finds_planted_parts():
    rng = np.random.default_rng(1)
    inside = [rng.integers(low, high, (2, 3000)) for low, high in ((0, 300), (300, 400))]
    src, dst = np.concatenate([*inside, [[0], [300]]], axis=1)
    result = partition_nodes(400, src, dst, [0.75, 0.25])
    assert result.edge_cut == 1
    assert result.node_counts == (300, 100)
    assert partition_nodes(400, src, dst, [0.75, 0.25], method="random").edge_cut > 1000


def test_partition_01_parallel_edges_are_merged_and_counted():
    src, dst = (np.tile(ids, 3) for ids in ring(8))
    result = partition_nodes(8, src, dst, [1, 1])
    assert result.node_counts == (4, 4)
    assert (result.edge_cut, result.cut_weight) == (4, 12)
    assert result.edge_counts == (24, 24)
    assert any("Merged 32 parallel edges" in note for note in result.notes)


def test_partition_02_one_based_ids_are_refused_before_native_code(monkeypatch):
    monkeypatch.setattr(metis, "call_metis", lambda *args, **options: pytest.fail("native code was reached"))
    with pytest.raises(ValueError, match="entry 2 of dst is 4; it must be at least 0 and below 4"):
        partition_nodes(4, [1, 2, 3], [2, 3, 4], [1, 1])
    with pytest.raises(ValueError, match="entry 1 of src is -1; it must be at least 0 and below 4"):
        partition_nodes(4, [0, -1], [1, 2], [1, 1])


@pytest.mark.parametrize("num_parts", [5, 6])
@pytest.mark.parametrize("first", [1.0, 50.0])
def test_partition_03_small_graphs_fill_every_part(num_parts, first):
    result = partition_nodes(6, *path(6), [first] + [1.0] * (num_parts - 1))
    assert sorted(result.node_counts) == ([1] * 4 + [2] if num_parts == 5 else [1] * 6)


def test_partition_03_more_parts_than_nodes_are_refused():
    with pytest.raises(ValueError, match="more parts than nodes: 8 parts for 6 nodes"):
        partition_nodes(6, *path(6), [1] * 8)


def test_partition_04_two_constraints_both_hold():
    side = 30
    ids = np.arange(side * side).reshape(side, side)
    here = np.concatenate([ids[:, :-1].ravel(), ids[:-1].ravel()])
    there = np.concatenate([ids[:, 1:].ravel(), ids[1:].ravel()])
    weights = np.stack([np.ones(900), np.random.default_rng(0).integers(1, 21, 900)], axis=1)
    for tolerance in (0.7, 0.02):  # METIS writes 0.7 as 1.7
        both = np.concatenate([here, there]), np.concatenate([there, here])
        result = partition_nodes(900, *both, [0.5, 0.5], node_weights=weights, tolerance=tolerance)
        assert max(result.node_counts) <= (1 + tolerance) * 450 <= 765
        for rank in (0, 1):
            load = weights[result.part.numpy() == rank, 1].sum()
            assert abs(load - weights[:, 1].sum() / 2) <= max(tolerance * weights[:, 1].sum() / 2, 20)


def test_opposed_constraints_are_repaired_column_by_column():
    """Two clusters, one heavy in column 0, one in column 1: equal in sum, so METIS alone misses both columns."""
    rng = np.random.default_rng(2)
    src, dst = np.concatenate([rng.integers(0, 200, (2, 4000)), rng.integers(200, 400, (2, 4000))], axis=1)
    weights = np.ones((400, 2))
    weights[:200, 0], weights[200:, 1] = 9.0, 9.0
    result = partition_nodes(400, src, dst, [1, 1], node_weights=weights)
    for rank in (0, 1):
        loads = weights[result.part.numpy() == rank].sum(axis=0)
        assert (np.abs(loads - 1000) <= 20).all()  # 2 % of 1000, above the heaviest node (9)
    assert any("repaired by moving" in note for note in result.notes)


@pytest.mark.parametrize("method", METHODS)
def test_partition_04_constraints_that_cannot_be_met_are_reported_as_failure(method):
    """9 nodes, a column for each 6 of them, halves: each part must hold 2 to 4 of every six (3 asked, 1 node allowed).

    At most 4 of every six means a part of at most 4 nodes; at least 2 of every six, one of at least 5.
    """
    sixes = list(itertools.combinations(range(9), 6))
    weights = np.array([[node in six for six in sixes] for node in range(9)], dtype=float)
    with pytest.raises(
        ValueError, match=r"no assignment within tolerance 0\.02 was found: part \d has .* column \d"
    ) as e:
        partition_nodes(9, *path(9), [1, 1], method=method, node_weights=weights)
    assert "raise `tolerance`" in str(e.value)


@pytest.mark.parametrize("weight", [10_000_000, 1e-6])
def test_partition_05_the_cut_is_recounted_in_64_bits(weight):
    src, dst = ring(2000)
    result = partition_nodes(2000, src, dst, [1, 1], edge_weights=np.full(4000, weight))
    assert result.edge_cut == 4
    assert result.cut_weight == pytest.approx(4 * weight, rel=1e-12)
    assert isinstance(result.cut_weight, type(weight))
    assert result.node_counts == (1000, 1000)


@pytest.mark.parametrize("scale", [1, 10**13, 1e-300, 1e-6, 1e250])
def test_partition_05_heavy_edges_are_spared_whatever_the_unit(scale):
    """A ring with two light edges opposite each other: they are the cheapest cut into halves."""
    src, dst = ring(100)
    light = np.isin(np.minimum(src, dst), [24, 74]) & (np.abs(src - dst) == 1)
    weights = np.where(light, 1, 1000) * scale
    result = partition_nodes(100, src, dst, [1, 1], edge_weights=weights)
    assert result.cut_weight == pytest.approx(4 * scale, rel=1e-12)


def test_partition_06_no_edges_and_no_nodes():
    result = partition_nodes(5, [], [], [1, 1])
    assert result.node_counts == (3, 2)
    assert result.halo_rows == (0, 0)
    assert result.edge_cut == 0
    assert any("no edge" in note for note in result.notes)
    with pytest.raises(ValueError, match="an empty graph cannot be partitioned"):
        partition_nodes(0, [], [], [1, 1])


def test_self_loops_alone_count_as_no_edges():
    result = partition_nodes(4, [0, 1, 2, 3], [0, 1, 2, 3], [1, 3])
    assert result.node_counts == (1, 3)
    assert any("no edge between two nodes" in note for note in result.notes)


def test_a_one_way_graph_is_symmetrised():
    result = partition_nodes(100, np.arange(99), np.arange(1, 100), [1, 1])
    assert (result.edge_cut, result.node_counts) == (1, (50, 50))


def test_given_parts_are_taken_and_their_distance_noted():
    result = partition_nodes(4, *path(4), [1, 1], method="given", parts=torch.tensor([0, 1, 1, 1]))
    assert result.part.tolist() == [0, 1, 1, 1]
    assert result.edge_cut == 2
    assert result.notes == ()  # one node off is the granularity
    far = partition_nodes(100, *path(100), [1, 1], method="given", parts=[0] * 10 + [1] * 90)
    assert "part 0 has 10.00% of the node weight where 50.00% was asked for" in far.notes[0]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([0, 1, 2, 0], "node 2 is given to part 2; parts are 0 to 1"),
        ([0, 1, -1, 0], "node 2 is given to part -1"),
        ([0, 1], "parts must be 4 integers"),
        ([0.0, 1.0, 0.0, 1.0], "parts must be 4 integers"),
        ([0, 0, 0, 0], "part 1 has no node"),
    ],
)
def test_malformed_given_parts_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        partition_nodes(4, *path(4), [1, 1], method="given", parts=parts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": []}, "shares is empty"),
        ({"shares": [1, 0]}, "share 1 is 0; every share must be a positive finite number"),
        ({"shares": [1, math.nan]}, "share 1 is nan"),
        ({"shares": [1e300, 1e-300]}, "too small to represent"),
        ({"method": "scotch"}, "unknown partition method 'scotch'; choose 'metis', 'clusters', 'kaminpar'"),
        ({"method": "given"}, "needs `parts`"),
        ({"parts": [0, 1, 0, 1]}, "only 'given' takes them"),
        ({"seed": -1}, "seed is -1"),
        ({"tolerance": math.inf}, "tolerance is inf"),
        ({"edge_weights": [1, 1]}, "edge_weights must be 6"),
        ({"edge_weights": [1, 1, 0, 1, 1, 1]}, "edge weight 2 is 0"),
        ({"edge_weights": [2**60] * 6}, "divide them by a constant"),
        ({"edge_weights": [1e308] * 6}, "divide them by a constant"),
        ({"node_weights": [1, 1, 1]}, r"node_weights must be numbers of shape \(4,\) or \(4, K\)"),
        ({"node_weights": [1, 1, -1, 1]}, "the weight of node 2 is -1.0"),
        ({"node_weights": [0, 0, 0, 0]}, "positive finite sum"),
    ],
)
def test_malformed_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        partition_nodes(4, *path(4), **{"shares": [1, 1], **options})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weights", [None, "drawn"])
def test_a_symmetric_graph_that_is_there_gives_the_same_parts(method, weights, monkeypatch):
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 300, (2, 1500))
    edge_weights = None if weights is None else rng.integers(1, 9, len(src))
    how = {"method": method, "edge_weights": edge_weights}
    expected = partition_nodes(300, src, dst, [2, 1], **how)
    graph = metis.symmetric_graph(300, src, dst, edge_weights)
    monkeypatch.setattr(assign, "symmetric_graph", None)  # it need not be made again
    for _ in range(2):  # and is left as it was
        made = partition_nodes(300, src, dst, [2, 1], symmetric=graph, **how)
        assert torch.equal(made.part, expected.part) or method == "kaminpar"  # which threads may decide
        assert made.cut_weight == expected.cut_weight or method == "kaminpar"
        assert made.notes == expected.notes
    with pytest.raises(ValueError, match="symmetric is a graph of 300 nodes; this one has 301"):
        partition_nodes(301, src, dst, [2, 1], symmetric=graph, **how)


def test_edges_need_two_integer_ends():
    with pytest.raises(ValueError, match="src has 3 entries and dst 2"):
        partition_nodes(4, [0, 1, 2], [1, 2], [1, 1])
    with pytest.raises(ValueError, match="src must be one-dimensional integers"):
        partition_nodes(4, [0.0, 1.0], [1, 2], [1, 1])
