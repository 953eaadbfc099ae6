"""DGL's partition format: there and back is the same graph, and DGL and nugnn read what the other wrote."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nugnn  # noqa: F401  # lets dgl import under this torch
from nugnn.datasets import GraphData, read_path
from nugnn.partition.assign import partition_nodes
from nugnn.partition.dgl_partition import read_dgl_partition, write_dgl_partition


def graph(seed=0, num_nodes=12, num_edges=30, dtype=torch.int64, **changes):
    rng = torch.Generator().manual_seed(seed)
    src, dst = torch.randint(num_nodes, (2, num_edges), generator=rng).to(dtype)
    order = torch.randperm(num_nodes, generator=rng)
    fields = {
        "features": torch.randn(num_nodes, 3, generator=rng),
        "labels": torch.randint(3, (num_nodes,), generator=rng),
        "num_classes": 4,
        "train_nodes": order[:3],
        "val_nodes": order[3:5],
        "splits": ((order[:3], order[3:5], order[:0]), (order[5:7], order[:1], order[1:2])),
        "node_data": {"old": torch.arange(num_nodes) % 2 == 0},
        "edge_data": {"weight": torch.rand(num_edges, generator=rng), "new": torch.arange(num_edges) % 3 == 0},
        "original_ids": np.array([f"node {i}" for i in range(num_nodes)]),
    }
    return GraphData(name="g", num_nodes=num_nodes, src=src, dst=dst, **(fields | changes))


def parts_of(data, num_parts, seed=0):
    return partition_nodes(data.num_nodes, data.src, data.dst, [1] * num_parts, method="random", seed=seed)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    num_parts=st.integers(1, 4),
    num_edges=st.integers(0, 40),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_there_and_back_is_the_same_graph_and_the_same_parts(tmp_path_factory, seed, num_parts, num_edges, dtype):
    data = graph(seed, num_edges=num_edges, dtype=dtype)
    assignment = parts_of(data, num_parts, seed)
    path = write_dgl_partition(data, assignment, tmp_path_factory.mktemp("parts"))
    back, parts = read_dgl_partition(path)
    assert back.content_hash() == data.content_hash()
    assert torch.equal(parts.part, assignment.part)
    assert (parts.method, parts.edge_cut, parts.halo_rows) == ("given", assignment.edge_cut, assignment.halo_rows)
    assert read_path(path).content_hash() == data.content_hash()


def test_dgl_loads_what_was_written(tmp_path, monkeypatch):
    from dgl.distributed import load_partition

    monkeypatch.setenv("DGL_DIST_DEBUG", "1")  # DGL then checks the parts itself
    data = graph()
    assignment = parts_of(data, 3)
    path = write_dgl_partition(data, assignment, tmp_path)
    num_inner = num_edges = 0
    for part in range(3):
        g, node_feats, edge_feats, book, name, ntypes, etypes = load_partition(str(path), part)
        inner = g.ndata["inner_node"].bool()
        assert (name, ntypes, etypes) == ("g", ["_N"], [("_N", "_E", "_N")])
        assert torch.equal(book.nid2partid(g.ndata["_ID"]), g.ndata["part_id"])
        nodes = (assignment.part == part).nonzero().squeeze(1)
        assert torch.equal(node_feats["_N/feat"], data.features[nodes])
        assert len(edge_feats["_N:_E:_N/weight"]) == int(g.edata["inner_edge"].sum())
        num_inner += int(inner.sum())
        num_edges += len(edge_feats["_N:_E:_N/weight"])
        in_degrees = torch.bincount(data.dst, minlength=data.num_nodes)[nodes]
        assert torch.equal(g.in_degrees()[inner], in_degrees), "all in-edges of a part's nodes are there"
    assert (num_inner, num_edges) == (data.num_nodes, data.num_edges)


def test_what_dgl_wrote_is_read(tmp_path):
    from dgl.distributed import partition_graph

    data = graph(num_nodes=40, num_edges=150, splits=(), node_data={}, original_ids=None)
    g = data.to_dgl()
    g.ndata["row"] = torch.arange(40)
    g.edata["row"] = torch.arange(150)
    partition_graph(g, "dgls", 3, str(tmp_path), part_method="metis")
    back, parts = read_dgl_partition(tmp_path / "dgls.json")
    row, edge = back.node_data["row"], back.edge_data["row"]
    assert (back.name, parts.num_parts) == ("dgls", 3)
    assert torch.equal(row[back.src], data.src[edge])
    assert torch.equal(row[back.dst], data.dst[edge])
    assert torch.equal(back.features, data.features[row])
    assert torch.equal(back.labels, data.labels[row])
    assert torch.equal(row[back.train_nodes].sort().values, data.train_nodes)
    assert torch.equal(back.edge_data["weight"], data.edge_data["weight"][edge])
    assert bool((parts.part.diff() >= 0).all()), "DGL numbers the nodes part after part"


def test_parts_that_do_not_fit_are_refused(tmp_path):
    data = graph()
    with pytest.raises(ValueError, match="for 12 nodes, graph 'g' has 5"):
        write_dgl_partition(graph(num_nodes=5, splits=()), parts_of(data, 2), tmp_path)
    path = write_dgl_partition(data, parts_of(data, 2), tmp_path)
    text = path.read_text()
    for old, new, message in [
        ('"num_parts": 2', '"num_parts": 3', "node_map has 2 ranges for 3 parts"),
        ('"num_nodes": 12', '"num_nodes": 13', "node_map ends at 12, the graph has 13"),
        ('"part_graph"', '"part_graph_graphbolt"', "saved for GraphBolt, as pickles"),
        ("part0/graph.dgl", "../graph.dgl", "outside the folder of the JSON file"),
        ("part0/graph.dgl", "part1/graph.dgl", "its inner nodes are not those from 0 to 5"),
        ('"_N": 0', '"_N": 0', None),
    ]:
        path.write_text(text.replace(old, new))
        if message:
            with pytest.raises(ValueError, match=message) as caught:
                read_dgl_partition(path)
            assert str(tmp_path) in str(caught.value)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"g\.json is not JSON"):
        read_dgl_partition(path)
