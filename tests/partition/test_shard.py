"""Shards: equal to a slow definition on random multigraphs; halo and edge-data cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.sparse import select_rows
from nugnn.partition.assign import partition_nodes
from nugnn.partition.check import check_shards
from nugnn.partition.shard import build_shard, build_shards

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


def make_data(num_nodes: int, src, dst, **options) -> GraphData:
    src, dst = torch.as_tensor(src, dtype=torch.int64), torch.as_tensor(dst, dtype=torch.int64)
    return GraphData(name="made", num_nodes=num_nodes, src=src, dst=dst, **options)


def assign(data: GraphData, parts, num_parts: int):
    return partition_nodes(data.num_nodes, data.src, data.dst, [1] * num_parts, method="given", parts=parts)


@st.composite
def split_graphs(draw):
    """A random multigraph with data on nodes and edges, and parts that are all used."""
    num_nodes = draw(st.integers(1, 25))
    num_parts = draw(st.integers(1, min(num_nodes, 5)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_edges = draw(st.integers(0, 80))
    ends = rng.integers(0, num_nodes, (2, num_edges)) // draw(st.integers(1, 3))  # a divisor leaves nodes isolated
    parts = rng.permutation(np.concatenate([np.arange(num_parts), rng.integers(0, num_parts, num_nodes - num_parts)]))
    nodes = rng.permutation(num_nodes)
    splits = np.split(nodes, sorted(rng.integers(0, num_nodes + 1, 3)))
    features = torch.from_numpy(rng.random((num_nodes, 6)) * (rng.random((num_nodes, 6)) < 0.3))
    if draw(st.booleans()):
        features = features.to_sparse_csr()
    data = make_data(
        num_nodes,
        *ends,
        features=features,
        labels=torch.from_numpy(rng.integers(0, 3, num_nodes)),
        num_classes=3,
        train_nodes=torch.from_numpy(splits[0]),
        val_nodes=torch.from_numpy(splits[1]),
        test_nodes=torch.from_numpy(splits[2]),
        node_data={"position": torch.arange(num_nodes, dtype=torch.float32)[:, None] * torch.ones(2)},
        edge_data={"weight": torch.arange(num_edges, dtype=torch.float64)},
    )
    return data, parts.tolist(), num_parts


def dense(rows: torch.Tensor) -> torch.Tensor:
    return rows.to_dense() if rows.layout == torch.sparse_csr else rows


@settings(deadline=None, max_examples=200)
@given(graph=split_graphs(), order=st.sampled_from(["none", "clusters"]))
def test_shards_equal_their_definition(graph, order):
    data, parts, num_parts = graph
    shards = build_shards(data, assign(data, parts, num_parts), order=order)
    check_shards(shards)
    src, dst = data.src.tolist(), data.dst.tolist()
    inner = [[node for node in range(data.num_nodes) if parts[node] == rank] for rank in range(num_parts)]
    if order == "clusters":  # any order of a part's nodes will do, but all else has to follow it
        for nodes, shard in zip(inner, shards, strict=True):
            assert shard.order.method == "clusters"
            assert sorted(shard.global_node_ids.tolist()) == nodes
        inner = [shard.global_node_ids.tolist() for shard in shards]
    place = {node: (rank, row) for rank, nodes in enumerate(inner) for row, node in enumerate(nodes)}
    halo = [
        sorted({u for u, v in zip(src, dst, strict=True) if parts[v] == rank != parts[u]}, key=place.__getitem__)
        for rank in range(num_parts)
    ]
    for rank, shard in enumerate(shards):
        edges = sorted((e for e in range(len(dst)) if parts[dst[e]] == rank), key=lambda e: (place[dst[e]], e))
        local = inner[rank] + halo[rank]
        assert (shard.rank, shard.num_parts) == (rank, num_parts)
        assert (shard.num_nodes_global, shard.num_edges_global) == (data.num_nodes, data.num_edges)
        assert shard.global_node_ids.tolist() == inner[rank]
        assert shard.halo_global_ids.tolist() == halo[rank]
        assert shard.global_edge_ids.tolist() == edges
        assert [local[row] for row in shard.indices.tolist()] == [src[e] for e in edges]
        assert shard.indices.dtype == torch.int32
        assert shard.indptr.tolist() == [sum(place[dst[e]] < place[node] for e in edges) for node in inner[rank]] + [
            len(edges)
        ]
        assert shard.in_degrees.tolist() == [dst.count(node) for node in inner[rank]]
        assert shard.out_degrees.tolist() == [src.count(node) for node in inner[rank]]
        assert shard.recv_splits == tuple(sum(parts[u] == peer for u in halo[rank]) for peer in range(num_parts))
        sent = [[u for u in halo[peer] if parts[u] == rank] for peer in range(num_parts)]
        assert shard.send_splits == tuple(len(rows) for rows in sent)
        assert shard.global_node_ids[shard.send_rows].tolist() == [u for rows in sent for u in rows]
        for which in ("train", "val", "test"):
            wanted = getattr(data, f"{which}_nodes").tolist()
            rows = getattr(shard, f"{which}_rows")
            assert shard.global_node_ids[rows].tolist() == [node for node in inner[rank] if node in wanted]
            assert getattr(shard, f"num_{which}_global") == len(wanted)
        assert shard.node_data["feat"].layout == data.features.layout
        assert torch.equal(dense(shard.node_data["feat"]), dense(data.features)[inner[rank]])
        assert torch.equal(shard.node_data["label"], data.labels[inner[rank]])
        assert torch.equal(shard.node_data["position"], data.node_data["position"][inner[rank]])
        assert shard.edge_data["weight"].tolist() == edges
        assert (shard.num_classes, shard.multilabel, shard.name) == (3, False, "made")
        alone = build_shard(data, assign(data, parts, num_parts), rank, order=order)
        assert torch.equal(alone.global_node_ids, shard.global_node_ids)
        assert torch.equal(alone.send_rows, shard.send_rows)
        assert torch.equal(alone.indices, shard.indices)


def test_partition_07_edge_and_node_values_follow_renumbering():
    edges = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), (3, 0), (0, 3)]
    src, dst = zip(*edges, strict=True)
    data = make_data(
        4,
        src,
        dst,
        node_data={"value": 100 * torch.arange(4)},
        edge_data={"value": torch.tensor([10 * u + v for u, v in edges])},
    )
    seen = []
    for shard in build_shards(data, assign(data, [0, 1, 0, 1], 2)):
        local_ids = torch.cat([shard.global_node_ids, shard.halo_global_ids])
        u = local_ids[shard.indices.long()]
        v = torch.repeat_interleave(shard.global_node_ids, shard.in_degrees)
        assert shard.edge_data["value"].tolist() == (10 * u + v).tolist()
        assert shard.node_data["value"].tolist() == (100 * shard.global_node_ids).tolist()
        seen += shard.global_edge_ids.tolist()
    assert sorted(seen) == list(range(8))


def exchange(shards, values):
    """What a halo exchange delivers: rows that every peer sends, in the order in which they arrive."""
    outgoing = [
        rows[shard.send_rows].split(list(shard.send_splits)) for shard, rows in zip(shards, values, strict=True)
    ]
    return [
        torch.cat([rows, *(outgoing[peer][rank] for peer in range(len(shards)))]) for rank, rows in enumerate(values)
    ]


def test_halo_01_symmetric_normalisation_of_a_star_is_global():
    src = [0] * 6 + list(range(1, 7))
    dst = list(range(1, 7)) + [0] * 6
    data = make_data(7, src, dst)
    adjacency = torch.zeros(7, 7, dtype=torch.float64)
    adjacency[dst, src] = 1
    degree = adjacency.sum(1)
    expected = degree[:, None] ** -0.5 * adjacency * degree**-0.5  # times one-hot features and the identity
    shards = build_shards(data, assign(data, [0, 0, 0, 1, 1, 1, 1], 2))
    one_hot = torch.eye(7, dtype=torch.float64)
    scaled = [one_hot[shard.global_node_ids] * shard.out_degrees[:, None].double() ** -0.5 for shard in shards]
    for shard, local in zip(shards, exchange(shards, scaled), strict=True):
        destination = torch.repeat_interleave(torch.arange(shard.num_inner), shard.in_degrees)
        summed = torch.zeros(shard.num_inner, 7, dtype=torch.float64)
        summed.index_add_(0, destination, local[shard.indices.long()])
        output = summed * shard.in_degrees[:, None].double() ** -0.5
        # one product of two square roots per entry, each rounded once: a few eps
        assert torch.allclose(output, expected[shard.global_node_ids], rtol=8 * torch.finfo(torch.float64).eps, atol=0)


def test_halo_02_only_inner_rows_are_counted():
    here = torch.arange(5)
    data = make_data(
        6,
        torch.cat([here, here + 1]),
        torch.cat([here + 1, here]),
        labels=torch.zeros(6, dtype=torch.int64),
        train_nodes=torch.arange(6),
    )
    shards = build_shards(data, assign(data, [0, 0, 0, 1, 1, 1], 2))
    assert [shard.num_halo for shard in shards] == [1, 1]
    assert sum(len(shard.train_rows) for shard in shards) == 6
    total = sum(float(shard.global_node_ids[shard.train_rows].sum()) for shard in shards)
    assert total / shards[0].num_train_global == 2.5


@pytest.mark.parametrize("num_parts", [1, 2])
def test_halo_05_no_halo_at_all(num_parts):
    data = make_data(4, [0, 1, 2, 3, 3], [1, 0, 3, 2, 3])
    shards = build_shards(data, assign(data, [0, 0, num_parts - 1, num_parts - 1], num_parts))
    check_shards(shards)
    for shard in shards:
        assert shard.num_halo == 0
        assert len(shard.send_rows) == 0
        assert shard.send_splits == shard.recv_splits == (0,) * num_parts
    if num_parts == 1:
        assert shards[0].global_edge_ids.tolist() == [1, 0, 3, 2, 4]


def test_a_graph_without_edges_features_or_labels():
    data = make_data(3, [], [], edge_data={"weight": torch.zeros(0, 2)})
    shards = build_shards(data, assign(data, [1, 0, 1], 2))
    check_shards(shards)
    assert [shard.indptr.tolist() for shard in shards] == [[0, 0], [0, 0, 0]]
    assert shards[0].node_data == {}
    assert shards[0].edge_data["weight"].shape == (0, 2)


def test_multilabel_labels_and_the_metric_are_kept():
    labels = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.uint8)
    data = make_data(3, [0], [1], labels=labels, train_nodes=torch.tensor([2]))
    shard = build_shards(data, assign(data, [1, 0, 1], 2))[1]
    assert (shard.multilabel, shard.metric, shard.num_classes) == (True, "micro_f1", 2)
    assert torch.equal(shard.node_data["label"], labels[[0, 2]])
    assert shard.train_rows.tolist() == [1]


def test_misfits_are_refused():
    data = make_data(3, [0, 1], [1, 2])
    other = make_data(4, [0], [1])
    with pytest.raises(ValueError, match="the assignment covers 4 nodes, the graph 'made' has 3"):
        build_shards(data, assign(other, [0, 0, 1, 1], 2))
    with pytest.raises(ValueError, match="rank 2 does not exist; the assignment has 2 parts"):
        build_shard(data, assign(data, [0, 1, 1], 2), 2)
    clash = make_data(3, [0], [1], features=torch.zeros(3, 1), node_data={"feat": torch.zeros(3, 1)})
    with pytest.raises(ValueError, match="node_data holds 'feat', a name kept for features"):
        build_shards(clash, assign(clash, [0, 1, 1], 2))


@given(seed=st.integers(0, 1000), density=st.floats(0, 1))
def test_select_rows_of_a_sparse_tensor(seed, density):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(8, 5, generator=generator) * (torch.rand(8, 5, generator=generator) < density)
    ids = torch.randint(0, 8, (seed % 12,), generator=generator)
    assert torch.equal(select_rows(rows.to_sparse_csr(), ids).to_dense(), rows[ids])
