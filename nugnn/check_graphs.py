"""Small graphs on which a model is checked: a piece of the user's, or a random one."""

from __future__ import annotations

import torch
from torch import Tensor

from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.sparse import select_rows


def small_piece(data: GraphData, max_nodes: int) -> GraphData:
    """A connected piece of ``data`` around a training node, with all nodes in the training split and float64 data.

    A node that loses all its in-edges to the cut keeps the first of them, as a self-loop: layers that refuse nodes
    without in-edges run on the piece if they run on the whole.
    """
    keep = _ball(data, max_nodes)
    number = torch.full((data.num_nodes,), -1)
    number[keep] = torch.arange(len(keep))
    src, dst = number[data.src.long()], number[data.dst.long()]
    inside = (src >= 0) & (dst >= 0)
    has_edge = torch.zeros(len(keep), dtype=torch.bool)
    has_edge[dst[inside]] = True
    candidates = ((dst >= 0) & ~inside).nonzero().view(-1)
    candidates = candidates[~has_edge[dst[candidates]]]
    first = torch.full((len(keep),), len(dst)).scatter_reduce(0, dst[candidates], candidates, "amin")
    rescued = first[first < len(dst)]
    src[rescued] = dst[rescued]
    inside[rescued] = True
    generator = torch.Generator().manual_seed(0)
    labels = None if data.labels is None else data.labels[keep]
    if labels is None:
        labels = torch.randint(0, max(data.num_classes, 2), (len(keep),), generator=generator)
    elif labels.dim() == 1:
        unknown = labels < 0
        labels = torch.where(unknown, torch.randint(0, data.num_classes, labels.shape, generator=generator), labels)
    features = data.features
    if features is not None:
        if features.layout is not torch.strided:
            features = select_rows(features, keep).to_dense()
        else:
            features = features[keep]
        features = features.double()
    return GraphData(
        name=f"{data.name} (piece)",
        num_nodes=len(keep),
        src=src[inside],
        dst=dst[inside],
        features=features,
        labels=labels,
        num_classes=data.num_classes,
        train_nodes=torch.arange(len(keep)),
        node_data={key: _double(value[keep]) for key, value in data.node_data.items()},
        edge_data={key: _double(value[inside]) for key, value in data.edge_data.items()},
    )


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _ball(data: GraphData, max_nodes: int) -> Tensor:
    """Ids of about ``max_nodes`` nodes, breadth first; hubs' neighbours are taken in order of id."""
    if data.num_nodes <= max_nodes:
        return torch.arange(data.num_nodes)
    seed = int(data.train_nodes[0]) if len(data.train_nodes) else 0
    chosen = torch.zeros(data.num_nodes, dtype=torch.bool)
    chosen[seed] = True
    while int(chosen.sum()) < max_nodes:
        frontier = torch.zeros_like(chosen)
        frontier[data.dst.long()[chosen[data.src.long()]]] = True
        frontier[data.src.long()[chosen[data.dst.long()]]] = True
        fresh = (frontier & ~chosen).nonzero().view(-1)
        if len(fresh) == 0:
            fresh = (~chosen).nonzero().view(-1)[:1]
        chosen[fresh[: max_nodes - int(chosen.sum())]] = True
    return chosen.nonzero().view(-1)


def random_graph(num_nodes: int = 120, num_features: int = 8, num_classes: int = 4) -> GraphData:
    """A small directed graph with hubs, self-loops and parallel edges; every node has an in-edge."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(num_nodes)
    hubs = (torch.rand(6 * num_nodes, generator=generator) ** 2 * num_nodes).long()
    targets = torch.randint(0, num_nodes, (6 * num_nodes,), generator=generator)
    return GraphData(
        name="random graph",
        num_nodes=num_nodes,
        src=torch.cat([(ids + 1) % num_nodes, hubs, ids]),
        dst=torch.cat([ids, targets, ids]),
        features=torch.randn(num_nodes, num_features, generator=generator),
        labels=torch.randint(0, num_classes, (num_nodes,), generator=generator),
        num_classes=num_classes,
        train_nodes=ids,
    )
