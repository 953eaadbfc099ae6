"""The order of rows: nested clusters together, parts kept, taken only where it helps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.synthetic import planted_communities, products_like
from nugnn.partition import order as order_module
from nugnn.partition.assign import partition_nodes
from nugnn.partition.check import check_shards
from nugnn.partition.clusters import grouped
from nugnn.partition.order import find_order, locality_order, near_share, neighbour_lists, why_not_worth_it
from nugnn.partition.shard import build_shards
from nugnn.partition.store import load_meta, load_shard, write_shards

NUM_NODES = 3_000


def lists_of(src: np.ndarray, dst: np.ndarray, num_nodes: int, parts: np.ndarray | None = None):
    edge_order, indptr = grouped(dst, num_nodes)
    return neighbour_lists(indptr, src[edge_order].astype(np.int32), src, dst, parts)


@pytest.fixture(scope="module")
def communities() -> GraphData:
    return products_like(NUM_NODES, num_features=4)


def test_planted_communities_become_runs(communities):
    graph = lists_of(communities.src.numpy(), communities.dst.numpy(), NUM_NODES)
    order, num_clusters = locality_order(graph, most_rows=2 * NUM_NODES // 16)
    assert sorted(order.tolist()) == list(range(NUM_NODES))
    assert 8 <= num_clusters <= 16
    found = planted_communities(NUM_NODES).numpy()[order]
    runs = 1 + int((np.diff(found) != 0).sum())
    # 16 where every node is where it belongs; most have about ten edges, so that some belong nowhere clearly
    assert runs <= NUM_NODES // 10


def test_a_path_of_shuffled_ids_becomes_local_again():
    ids = np.random.default_rng(0).permutation(4_096)
    src, dst = np.concatenate([ids[:-1], ids[1:]]), np.concatenate([ids[1:], ids[:-1]])
    graph = lists_of(src, dst, 4_096)
    position = np.empty(4_096, np.int64)
    position[locality_order(graph, most_rows=512)[0]] = np.arange(4_096)
    # an edge leaves the window only where a cluster of up to 512 ends: one in a hundred is a generous bound
    assert near_share(graph, position, 512) >= 0.99
    assert near_share(graph, np.arange(4_096), 512) <= 0.3


def test_parts_keep_their_nodes_and_directed_edges_count(communities):
    parts = np.arange(NUM_NODES) % 3
    src, dst = communities.src.numpy(), communities.dst.numpy()
    one_way = src < dst  # now symmetric in nothing: every edge has to be listed at both ends
    graph = lists_of(src[one_way], dst[one_way], NUM_NODES, parts)
    assert len(graph.indices) == 2 * one_way.sum()
    order, _ = locality_order(graph, most_rows=500)
    assert (np.diff(parts[order]) >= 0).all()
    assert sorted(order.tolist()) == list(range(NUM_NODES))
    mirrored = lists_of(src, dst, NUM_NODES, parts)
    assert len(mirrored.indices) == len(src)


def test_a_local_order_is_left_alone():
    ring = np.arange(2_000)
    graph = lists_of(np.concatenate([ring, (ring + 1) % 2_000]), np.concatenate([(ring + 1) % 2_000, ring]), 2_000)
    order, report = find_order(graph, ring, 200, only_if_better=True)
    assert order is ring
    assert report.method == "none"
    assert "stay within a cache as they are" in report.sentence
    assert report.notes == ()


def test_clusters_that_help_nothing_are_not_taken():
    rng = np.random.default_rng(0)
    u, v = rng.integers(0, 2_000, (2, 40_000))  # no communities at all
    graph = lists_of(np.concatenate([u, v]), np.concatenate([v, u]), 2_000)
    given = np.arange(2_000)
    order, report = find_order(graph, given, 100, only_if_better=True)
    assert order is given
    assert report.method == "none"
    assert "clusters would keep" in report.sentence
    forced, report = find_order(graph, given, 100, only_if_better=False)
    assert report.method == "clusters"
    assert sorted(forced.tolist()) == given.tolist()


def test_what_automatic_ordering_leaves_alone():
    row_bytes = 400
    fits = order_module.CACHE_BYTES // row_bytes
    assert "too few" in why_not_worth_it(10 * fits, 999_999, row_bytes)
    assert "fit the cache" in why_not_worth_it(fits, 10_000_000, row_bytes)
    assert why_not_worth_it(fits + 1, 10_000_000, row_bytes) == ""


def test_automatic_ordering_over_three_parts_on_disk(communities, monkeypatch, tmp_path):
    monkeypatch.setattr(order_module, "_FEWEST_EDGES", 1_000)
    monkeypatch.setattr(order_module, "CACHE_BYTES", 256 * 200)
    assignment = partition_nodes(NUM_NODES, communities.src, communities.dst, [3, 2, 1])
    shards = build_shards(communities, assignment, order="auto")
    check_shards(shards)
    assert all(shard.order.method == "clusters" for shard in shards)
    assert shards[0].order.near_after > shards[0].order.near_before
    assert any((shard.global_node_ids.diff() < 0).any() for shard in shards)
    meta = write_shards(tmp_path, shards, key="k", versions={}, notes=["first"])
    assert meta.notes[0] == "first"
    assert "Nodes reordered into" in meta.notes[1]
    assert load_meta(tmp_path) == meta
    loaded = load_shard(tmp_path, 1)
    assert loaded.order == shards[1].order
    assert torch.equal(loaded.global_node_ids, shards[1].global_node_ids)


def test_an_unknown_order_is_refused(communities):
    assignment = partition_nodes(NUM_NODES, communities.src, communities.dst, [1])
    with pytest.raises(ValueError, match="unknown order 'rcm'; choose 'auto', 'none' or 'clusters'"):
        build_shards(communities, assignment, order="rcm")
