"""Induced subgraphs: the law of the adjacency matrix, and what becomes of everything beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.sparse import select_rows
from nugnn.datasets.subgraph import induced_subgraph


def make_graph(seed: int = 0, num_nodes: int = 12, num_edges: int = 40) -> GraphData:
    generator = torch.Generator().manual_seed(seed)
    src, dst = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    order = torch.randperm(num_nodes, generator=generator)
    return GraphData(
        name="random",
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        features=torch.randn(num_nodes, 3, generator=generator),
        labels=torch.randint(0, 3, (num_nodes,), generator=generator),
        num_classes=3,
        train_nodes=order[:4],
        val_nodes=order[4:8],
        test_nodes=order[8:],
        node_data={"year": torch.arange(num_nodes)},
        edge_data={"value": torch.arange(num_edges)},
        original_ids=np.array([f"node {row}" for row in range(num_nodes)]),
    )


def adjacency(data: GraphData) -> np.ndarray:
    counts = np.zeros((data.num_nodes, data.num_nodes), dtype=int)
    np.add.at(counts, (data.src.numpy(), data.dst.numpy()), 1)
    return counts


@given(st.integers(0, 100), st.permutations(range(12)), st.integers(1, 12))
def test_adjacency_is_that_of_the_chosen_rows_and_columns(seed: int, order: list[int], count: int) -> None:
    data, nodes = make_graph(seed), torch.tensor(order[:count])
    part = induced_subgraph(data, nodes)
    assert (adjacency(part) == adjacency(data)[np.ix_(nodes, nodes)]).all()
    assert torch.equal(part.node_data["year"], nodes)
    edges = part.edge_data["value"]
    assert torch.equal(edges, edges.sort().values)
    assert torch.equal(nodes[part.src], data.src[edges]) and torch.equal(nodes[part.dst], data.dst[edges])
    for mine, whole in zip(part.split, data.split, strict=True):
        assert set(nodes[mine].tolist()) == set(whole.tolist()) & set(nodes.tolist())
    assert part.original_ids is not None and part.original_ids.tolist() == [f"node {node}" for node in nodes.tolist()]
    assert part.num_classes == 3 and part.metric == data.metric


def test_sparse_features_stay_sparse() -> None:
    import dataclasses

    data = make_graph()
    assert data.features is not None
    dense = data.features * (data.features > 0)
    nodes = torch.tensor([5, 0, 7])
    part = induced_subgraph(dataclasses.replace(data, features=dense.to_sparse_csr()), nodes)
    assert part.features is not None and part.features.layout == torch.sparse_csr
    assert torch.equal(part.features.to_dense(), dense[nodes])
    assert torch.equal(select_rows(dense, nodes), dense[nodes])


@pytest.mark.parametrize(
    ("nodes", "words"), [([], "no nodes"), ([0, 12], "12 is out of range"), ([-1, 2], "-1 is out"), ([3, 3], "twice")]
)
def test_wrong_nodes_are_refused(nodes: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        induced_subgraph(make_graph(), torch.tensor(nodes, dtype=torch.int64))
