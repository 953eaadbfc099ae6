"""Shared by the law tests: graphs that are hard to split, and a training run whose every number can be compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.embedding import NodeEmbedding
from nugnn.partition.assign import partition_nodes
from nugnn.partition.order import OrderChoice
from nugnn.partition.shard import build_shard
from nugnn.shard_graph import ShardGraph
from trainers import graph_trainer

NUM_FEATURES, NUM_CLASSES = 6, 4


def make_graph(
    seed: int = 0,
    *,
    num_nodes: int = 61,
    directed: bool = True,
    self_loops: bool = True,
    multilabel: bool = False,
    features: bool = True,
    dtype: torch.dtype = torch.float64,
) -> GraphData:
    """A graph with a hub, parallel edges, isolated nodes, and training nodes only among the first third."""
    generator = torch.Generator().manual_seed(seed)
    used = num_nodes - 3  # the last nodes have no edges at all
    src = (torch.rand(5 * num_nodes, generator=generator) ** 2 * used).long()
    dst = torch.randint(0, used, (5 * num_nodes,), generator=generator)
    src, dst = (
        torch.cat([src, torch.zeros(20, dtype=torch.int64), src[:4]]),
        torch.cat([dst, torch.arange(1, 21), dst[:4]]),
    )
    if not directed:
        src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    if self_loops:
        ids = torch.arange(num_nodes)
        src, dst = torch.cat([src, ids]), torch.cat([dst, ids])
    labels = torch.randint(0, NUM_CLASSES, (num_nodes,), generator=generator)
    if multilabel:
        labels = torch.randint(0, 2, (num_nodes, NUM_CLASSES), generator=generator, dtype=torch.uint8)
    third = num_nodes // 3
    return GraphData(
        name="hard to split",
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        features=torch.randn(num_nodes, NUM_FEATURES, generator=generator).to(dtype) if features else None,
        labels=labels,
        num_classes=NUM_CLASSES,
        train_nodes=torch.arange(third),
        val_nodes=torch.arange(third, 2 * third),
        test_nodes=torch.arange(2 * third, num_nodes),
        edge_data={"weight": (torch.rand(len(src), generator=generator) + 0.5).to(dtype)},
    )


def make_parts(data: GraphData, num_parts: int, how: str) -> Tensor:
    """A part for each node: ``metis`` or ``random`` with equal shares, ``unequal`` (random, 16:8:4:2:1),
    ``metis_unequal`` (8:4:2:1), or ``no_train``.
    """
    if how == "no_train":
        # the last part holds no training node; the first the rest of the graph
        parts = torch.arange(data.num_nodes) % max(num_parts - 1, 1)
        parts[data.test_nodes] = num_parts - 1
        return parts
    shares = [2.0**-part for part in range(num_parts)] if "unequal" in how else [1.0] * num_parts
    method = "metis" if how.startswith("metis") else "random"
    return partition_nodes(data.num_nodes, data.src, data.dst, shares, method=method, seed=3).part


@dataclass
class Run:
    """What a run of a few steps did, rows in original order."""

    logits: Tensor
    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    metrics: dict[str, float]


def run_steps(
    ranks: Ranks,
    data: GraphData,
    parts: Tensor,
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    num_steps: int = 5,
    order: OrderChoice = "none",
    **trainer_options: Any,
) -> Run:
    """Train on this rank's shard; the same function serves one rank and many."""
    assignment = partition_nodes(
        data.num_nodes, data.src, data.dst, [1.0] * ranks.world_size, method="given", parts=parts
    )
    shard = build_shard(data, assignment, ranks.rank, order=order)
    graph = ShardGraph(shard, ranks)
    rows = {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}
    own = copy.deepcopy(model)
    trainer = graph_trainer(
        own, graph, rows, make_optimizer=make_optimizer, metric=data.metric, seed=7, **trainer_options
    )
    losses = [trainer.train_epoch()]
    gradients = {name: _whole(own, graph, name, p.grad) for name, p in own.named_parameters() if p.grad is not None}
    losses += [trainer.train_epoch() for _ in range(num_steps - 1)]
    parameters = {name: _whole(own, graph, name, value) for name, value in own.state_dict().items()}
    return Run(trainer.predict_all(), losses, gradients, parameters, trainer.evaluate())


def _whole(model: nn.Module, graph: ShardGraph, name: str, value: Tensor) -> Tensor:
    """Rows of a node embedding from every rank; anything else as it is."""
    module = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(module, NodeEmbedding):
        return value.detach().clone()
    ids = torch.cat(graph.ranks.gather_rows(graph.global_node_ids))
    rows = torch.cat(graph.ranks.gather_rows(value.detach().contiguous()))
    return torch.empty_like(rows).index_copy_(0, ids, rows)


def largest_difference(one: Run, many: Run) -> tuple[float, str]:
    """Largest entry-wise difference with the name of the worst, relative to the largest entry of its group.

    Groups: logits, losses, all gradients, all parameters. A gradient that is truly zero (a bias before a batch norm) is
    rounding noise on its own scale.
    """
    assert one.gradients.keys() == many.gradients.keys()
    assert one.parameters.keys() == many.parameters.keys()
    groups = [
        {"logits": (one.logits, many.logits)},
        {"losses": (torch.tensor(one.losses), torch.tensor(many.losses))},
        {f"gradient of {name}": (one.gradients[name], many.gradients[name]) for name in one.gradients},
        {name: (one.parameters[name], many.parameters[name]) for name in one.parameters},
    ]
    worst = (0.0, "equal")
    for group in groups:
        scale = max(float(a.double().abs().max()) for a, _ in group.values() if a.numel())
        for name, (a, b) in group.items():
            assert a.shape == b.shape, f"{name}: {tuple(a.shape)} and {tuple(b.shape)}"
            if a.numel():
                difference = float((a.double() - b.double()).abs().max()) / scale
                worst = max(worst, (difference if math.isfinite(difference) else math.inf, name))
    return worst
