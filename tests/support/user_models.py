"""Models as users write them: good ones, and ones whose result depends on how the graph is split."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from dgl import nn as dgl_nn
from torch import Tensor, nn


class TwoLayers(nn.Module):
    """GraphConv, ``self.norm``, GraphConv."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([dgl_nn.GraphConv(in_features, 16), dgl_nn.GraphConv(16, num_classes)])
        self.norm: nn.Module = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.3)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layers[1](graph, self.dropout(self.norm(self.layers[0](graph, x)).relu()))


class Wide(TwoLayers):
    """Takes one of nuGNN's options."""

    def __init__(self, in_features: int, num_classes: int, hidden: int = 8) -> None:
        super().__init__(in_features, num_classes)
        self.layers[0], self.layers[1] = dgl_nn.GraphConv(in_features, hidden), dgl_nn.GraphConv(hidden, num_classes)
        self.norm = nn.BatchNorm1d(hidden)


class Functions(nn.Module):
    """Message, reduce and apply functions of the user."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.message, self.own, self.out = nn.Linear(2 * width, 8), nn.Linear(width, 8), nn.Linear(8, classes)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.update_all(
                lambda edges: {"m": self.message(torch.cat([edges.src["h"], edges.dst["h"]], 1)).tanh()},
                lambda nodes: {"a": nodes.mailbox["m"].std(1, correction=0) + nodes.mailbox["m"].amax(1)},
                lambda nodes: {"a": nodes.data["a"] + self.own(nodes.data["h"])},
            )
            return self.out(graph.ndata["a"].relu())


class PairNorm(nn.Module):
    """Zhao and Akoglu, ICLR 2020: takes the mean over all rows, which on a part are not all."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0)
        return x / x.pow(2).sum(1).mean().sqrt()


class WithPairNorm(TwoLayers):
    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__(in_features, num_classes)
        self.norm = PairNorm()


class _AddNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class WithNoise(TwoLayers):
    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__(in_features, num_classes)
        self.norm = _AddNoise()


class _AddForeignNoise(nn.Module):
    """Draws where nothing that watches torch can see it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.random.default_rng().random(tuple(x.shape)))


class WithForeignNoise(TwoLayers):
    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__(in_features, num_classes)
        self.norm = _AddForeignNoise()


class CenteredInline(TwoLayers):
    """The mean over all rows is taken between two modules."""

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = self.layers[0](graph, x)
        return self.layers[1](graph, (h - h.mean(0)).relu())


class SoftmaxOverNodes(TwoLayers):
    """Only its last step is wrong."""

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return super().forward(graph, x).log_softmax(0)


class Nested(nn.Module):
    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.block = WithPairNorm(in_features, num_classes)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.block(graph, x)


class ReadsEdges(TwoLayers):
    """Needs the ids of the whole graph's nodes, which a part refuses."""

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        source, _ = graph.all_edges()
        return super().forward(graph, x) + x[source].sum()


class Fussy(TwoLayers):
    """Refuses small parts, in its own words."""

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        if graph.num_nodes() < 25:
            raise ValueError(f"Fussy wants 25 nodes, got {graph.num_nodes()}")
        return super().forward(graph, x)


class DiesInEpochTwo(TwoLayers):
    """Takes its process with it, on rank 1."""

    steps = 0

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        self.steps += self.training
        if self.steps == 2 and graph.ranks.rank == 1:
            os._exit(86)
        return super().forward(graph, x)


class ForgetsRows(TwoLayers):
    """Returns one row for the whole graph."""

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return super().forward(graph, x).mean(0, keepdim=True)
