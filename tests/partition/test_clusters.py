"""Label propagation and contraction: bounds kept, planted clusters found, the same on any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.partition import clusters
from nugnn.partition.clusters import (
    NeighbourLists,
    contract,
    grouped,
    propagate_labels,
    rows_in_order,
    unweighted_lists,
)


def lists(num_nodes: int, edges: np.ndarray, parts: np.ndarray | None = None) -> NeighbourLists:
    """Undirected ``edges`` ``(M, 2)`` listed at both ends."""
    both = np.concatenate([edges, edges[:, ::-1]])
    order, indptr = grouped(both[:, 1], num_nodes)
    return unweighted_lists(indptr, both[order, 0].astype(np.int32), parts)


def planted(num_clusters: int, size: int, inside: int, across: int, seed: int) -> tuple[NeighbourLists, np.ndarray]:
    """``inside`` random edges per node within clusters, ``across`` between any two nodes, ids shuffled."""
    rng = np.random.default_rng(seed)
    num_nodes = num_clusters * size
    u = np.repeat(np.arange(num_nodes), inside)
    near = np.stack([u, u // size * size + rng.integers(0, size, len(u))], axis=1)
    far = rng.integers(0, num_nodes, (across * num_nodes, 2))
    ids = rng.permutation(num_nodes)
    cluster = np.empty(num_nodes, np.int64)
    cluster[ids] = np.arange(num_nodes) // size
    return lists(num_nodes, ids[np.concatenate([near, far])]), cluster


def test_planted_clusters_are_found():
    graph, truth = planted(num_clusters=12, size=150, inside=10, across=2, seed=0)
    labels = propagate_labels(graph, np.array([1800]))
    pairs = {(int(a), int(b)) for a, b in zip(labels, truth, strict=True)}
    assert len(pairs) == len(set(truth.tolist())) == 12


@pytest.mark.parametrize("capacity", [1, 2, 7, 40])
def test_no_cluster_outgrows_its_capacity(capacity):
    graph, _ = planted(num_clusters=12, size=50, inside=6, across=2, seed=1)
    counts = np.bincount(propagate_labels(graph, np.array([capacity])))
    assert counts.max() <= capacity
    assert counts.sum() == graph.num_nodes


def test_each_label_can_have_its_own_capacity():
    graph = lists(9, np.array([(u, v) for u in range(9) for v in range(u)]))
    start = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1], np.int32)
    assert not propagate_labels(graph, np.array([9, 9]), labels=start).any(), "a clique becomes one cluster"
    # label 0 has room for one of the three others
    assert np.bincount(propagate_labels(graph, np.array([7, 9]), labels=start)).tolist() == [7, 2]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), num_nodes=st.integers(1, 40), num_parts=st.integers(1, 3))
def test_contraction_equals_its_definition(seed, num_nodes, num_parts):
    rng = np.random.default_rng(seed)
    edges = rng.integers(0, num_nodes, (rng.integers(0, 120), 2))
    parts = rng.integers(0, num_parts, num_nodes)
    graph = lists(num_nodes, edges, parts)
    weights = rng.integers(1, 5, len(graph.indices))
    graph = NeighbourLists(graph.indptr, graph.indices, weights, rng.integers(1, 9, num_nodes), parts)
    labels = propagate_labels(graph, np.array([rng.integers(9, 100)]))
    assert (parts[labels] == parts).all(), "a label began as a node of the same part"
    small, cluster_of = contract(graph, labels)
    assert len(np.unique(labels)) == small.num_nodes
    assert (np.unique(labels)[cluster_of] == labels).all()
    assert small.parts[cluster_of].tolist() == parts.tolist()
    expected_nodes = np.zeros(small.num_nodes, np.int64)
    np.add.at(expected_nodes, cluster_of, graph.node_weights)
    assert small.node_weights.tolist() == expected_nodes.tolist()
    expected = np.zeros((small.num_nodes, small.num_nodes), np.int64)
    destination = np.repeat(np.arange(num_nodes), np.diff(graph.indptr))
    for u, v, weight in zip(graph.indices, destination, weights, strict=True):
        if parts[u] == parts[v] and labels[u] != labels[v]:
            expected[cluster_of[v], cluster_of[u]] += weight
    found = np.zeros_like(expected)
    row = np.repeat(np.arange(small.num_nodes), np.diff(small.indptr))
    np.add.at(found, (row, small.indices), small.weights)
    assert found.tolist() == expected.tolist()
    assert len(small.indices) == (expected > 0).sum(), "an arc between two clusters is listed once"


def test_a_hub_with_more_neighbours_than_it_looks_at():
    # of 40,000 neighbours every third is looked at; all of one block of a hundred bear one label
    num_leaves = 40_000
    edges = np.stack([np.zeros(num_leaves, np.int64), np.arange(1, num_leaves + 1)], axis=1)
    start = np.zeros(num_leaves + 1, np.int32)
    start[1:] = 1 + (np.arange(num_leaves) % 10 < 4)
    labels = propagate_labels(lists(num_leaves + 1, edges), np.array([num_leaves + 1] * 3), labels=start, most_passes=1)
    assert labels[0] == 1  # six neighbours in ten


@pytest.mark.parametrize("num_keys", [1, 7, 300])
def test_grouping_is_stable_on_either_path(num_keys, monkeypatch):
    keys = np.random.default_rng(0).integers(0, num_keys, 2_000)
    expected = np.argsort(keys, kind="stable")
    for few in (10_000, 0):
        monkeypatch.setattr(clusters, "_FEW_KEYS", few)
        order, offsets = grouped(keys, num_keys)
        assert order.tolist() == expected.tolist()
        assert np.diff(offsets).tolist() == np.bincount(keys, minlength=num_keys).tolist()


def test_threads_do_not_change_the_outcome():
    graph, _ = planted(num_clusters=20, size=60, inside=5, across=4, seed=2)
    before = torch.get_num_threads()
    outcomes = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            labels = propagate_labels(graph, np.array([100]), seed=5)
            small, _ = contract(graph, labels)
            outcomes.append((labels.tolist(), small.indptr.tolist(), small.indices.tolist(), small.weights.tolist()))
    finally:
        torch.set_num_threads(before)
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_rows_follow_an_order_on_either_path(monkeypatch):
    rng = np.random.default_rng(0)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 6, 50))])
    entries, order = rng.permutation(int(indptr[-1])), rng.permutation(50)
    expected = np.concatenate([entries[indptr[row] : indptr[row + 1]] for row in order])
    for few in (10_000, 0):
        monkeypatch.setattr(clusters, "_FEW_KEYS", few)
        found, starts = rows_in_order(entries, indptr, order)
        assert found.tolist() == expected.tolist()
        assert np.diff(starts).tolist() == np.diff(indptr)[order].tolist()
