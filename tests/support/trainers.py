"""A trainer on a shard from options of both kinds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nugnn.graph_family import GraphFamily
from nugnn.shard_graph import ShardGraph
from nugnn.trainer import Trainer

_OF_TRAINER = (
    *("make_optimizer", "make_scheduler", "schedule_steps", "schedule", "regularizer", "clip_norm", "grad_sync"),
)


def graph_trainer(model: nn.Module, graph: ShardGraph, rows: dict[str, Tensor], **options: Any) -> Trainer:
    """Options of `Trainer` go to it, the others to `GraphFamily`."""
    own = {name: options.pop(name) for name in _OF_TRAINER if name in options}
    return Trainer(GraphFamily(model, graph, rows, **options), **own)
