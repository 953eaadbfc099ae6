"""The part of a graph that inductive training may see."""

from __future__ import annotations

from torch import nn

from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.subgraph import induced_subgraph
from nugnn.embedding import NodeEmbedding


def visible_in_training(model: nn.Module, data: GraphData) -> GraphData:
    """The part of ``data`` that inductive training may see: the training nodes and the edges between them.

    Raises:
        ValueError: There are no training nodes, or ``model`` learns a row for each node, also for those it never sees.
    """
    if len(data.train_nodes) == 0:
        raise ValueError(f"{data.name}: inductive training needs training nodes, there are none")
    if any(isinstance(module, NodeEmbedding) for module in model.modules()):
        raise ValueError(
            f"{data.name}: inductive training needs features; a row learned for each node says nothing about nodes "
            "that training does not see"
        )
    return induced_subgraph(data, data.train_nodes)
