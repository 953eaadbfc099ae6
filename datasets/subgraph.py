"""A graph cut down to some of its nodes."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nugnn.datasets.graph_data import GraphData, Split
from nugnn.datasets.sparse import select_rows


def induced_subgraph(data: GraphData, nodes: Tensor) -> GraphData:
    """The nodes of ``nodes`` and every edge between two of them.

    Rows keep the order of ``nodes``; edges keep theirs, so within a destination the order of in-edges, on which ties
    and LSTM aggregation depend, stays that of the whole graph.

    Args:
        data: Any graph; not modified.
        nodes: ``(n,)`` distinct node ids of ``data``.

    Returns:
        A graph of ``n`` nodes with the same classes and metric; of each split the nodes that are in ``nodes``.

    Raises:
        ValueError: ``nodes`` is empty, or an id is out of range or given twice.
    """
    where = f"graph {data.name!r}"
    if len(nodes) == 0:
        raise ValueError(f"{where}: a subgraph of no nodes")
    low, high = int(nodes.min()), int(nodes.max())
    if low < 0 or high >= data.num_nodes:
        raise ValueError(f"{where}: node id {low if low < 0 else high} is out of range for {data.num_nodes} nodes")
    row_of = torch.full((data.num_nodes,), -1)
    row_of[nodes] = torch.arange(len(nodes))
    if int((row_of >= 0).sum()) != len(nodes):
        raise ValueError(f"{where}: a node id is given twice")
    src, dst = row_of[data.src.long()], row_of[data.dst.long()]
    inside = (src >= 0) & (dst >= 0)

    def kept(ids: Tensor) -> Tensor:
        rows = row_of[ids]
        return rows[rows >= 0]

    def kept_split(split: Split) -> Split:
        train, val, test = map(kept, split)
        return train, val, test

    train, val, test = kept_split(data.split)
    return dataclasses.replace(
        data,
        num_nodes=len(nodes),
        src=src[inside].to(data.src.dtype),
        dst=dst[inside].to(data.dst.dtype),
        features=None if data.features is None else select_rows(data.features, nodes),
        labels=None if data.labels is None else data.labels[nodes],
        train_nodes=train,
        val_nodes=val,
        test_nodes=test,
        splits=tuple(map(kept_split, data.splits)),
        node_data={name: select_rows(rows, nodes) for name, rows in data.node_data.items()},
        edge_data={name: rows[inside] for name, rows in data.edge_data.items()},
        original_ids=None if data.original_ids is None else data.original_ids[nodes.numpy()],
    )
