"""A trainer on a shard from options of both kinds; what a worker of `nugnn.fit` does, on ranks that are there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nugnn.checkpoint import newest_checkpoint
from nugnn.checkpointer import CheckpointPlan
from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.fingerprint import graph_facts, run_identity
from nugnn.fit_options import FitOptions
from nugnn.graph_family import GraphFamily
from nugnn.graph_part import GraphPart
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.shard_graph import ShardGraph
from nugnn.train_rank import train_rank
from nugnn.trainer import Trainer

_OF_TRAINER = (
    *("make_optimizer", "make_scheduler", "schedule_steps", "schedule", "regularizer", "clip_norm", "grad_sync"),
)


def graph_trainer(model: nn.Module, graph: ShardGraph, rows: dict[str, Tensor], **options: Any) -> Trainer:
    """Options of `Trainer` go to it, the others to `GraphFamily`."""
    own = {name: options.pop(name) for name in _OF_TRAINER if name in options}
    return Trainer(GraphFamily(model, graph, rows, **options), **own)


def fit_rank(
    ranks: Ranks,
    model: nn.Module,
    data: GraphData,
    shares: list[float],
    *,
    checkpoint_folder: Path | None = None,
    resume: bool = False,
    on_note: Callable[[str], Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The outcome of `train_rank` with options of `nugnn.fit`: ``epochs``, and ``logits`` and ``state`` on rank 0."""
    parts = partition_nodes(data.num_nodes, data.src, data.dst, shares, seed=0)
    how, plan = FitOptions(**options), None
    if checkpoint_folder is not None:
        identity = run_identity(model, graph_facts(data), how)
        newest = newest_checkpoint(checkpoint_folder)[0] if resume else None
        assert newest is not None or not resume
        from_folder = None if newest is None else newest.folder
        plan = CheckpointPlan(folder=checkpoint_folder, every=None, identity=identity, resume_from=from_folder)
    part = GraphPart(lambda ranks: build_shard(data, parts, ranks.rank))
    return train_rank(part, ranks, copy.deepcopy(model), how, checkpoints=plan, on_note=on_note)
