"""PairNorm takes a mean over all nodes. On one part of a split graph the mean has to come from all parts.

    nugnn check examples/global_norm.py:Local     # names `norm (LocalPairNorm)`, exit code 2
    nugnn check examples/global_norm.py:Global    # equal

`nugnn.global_mean` needs the graph that nuGNN hands to the model, also on one worker.
"""

import nugnn  # isort: skip - before dgl, which it lets import beside a newer torch

import torch
from dgl.nn import GraphConv
from torch import nn


class LocalPairNorm(nn.Module):
    """As published (Zhao and Akoglu, ICLR 2020): right on one device, wrong on a part."""

    def forward(self, graph, x):
        x = x - x.mean(dim=0)
        return x / x.square().sum(dim=1).mean().sqrt()


class GlobalPairNorm(nn.Module):
    """The same values on one device, and on any number of parts."""

    def forward(self, graph, x):
        x = x - nugnn.global_mean(x, graph)
        return x / nugnn.global_mean(x.square().sum(dim=1), graph).sqrt()


class Local(nn.Module):
    """Two graph convolutions with a norm between them."""

    norm_class: type[nn.Module] = LocalPairNorm

    def __init__(self, in_features: int, num_classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.first, self.second = GraphConv(in_features, hidden), GraphConv(hidden, num_classes)
        self.norm = self.norm_class()

    def forward(self, graph, x):
        return self.second(graph, torch.relu(self.norm(graph, self.first(graph, x))))


class Global(Local):
    """The same with the mean over the whole graph."""

    norm_class = GlobalPairNorm
