"""A model's logits on every node of a graph, over unequal worker processes if need be."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nugnn import job
from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.launch import launch
from nugnn.model_on_shard import ModelOnShard
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import Shard, build_shard, iter_shards
from nugnn.partition.store import write_shards
from nugnn.seam import install
from nugnn.shard_graph import ShardGraph


def infer(
    model: nn.Module,
    data: GraphData,
    *,
    workers: int = 1,
    shares: Sequence[float] | None = None,
    partitioner: str = "metis",
    timeout: float = 600.0,
    log_folder: Path | None = None,
) -> Tensor:
    """Logits of every node, by ``model`` in evaluation mode; ``model`` itself is left as it was.

    Args:
        model: As `nugnn.fit` takes and returns it.
        data: The graph; labels are not needed.
        workers: Number of processes; 1 computes in this one.
        shares: Part of the nodes each worker gets, any positive numbers; equal when None.
        partitioner: ``metis``, ``clusters``, ``kaminpar`` or ``random``.
        timeout: Seconds after which a silent worker counts as lost.
        log_folder: Where the workers' logs go; they are dropped when None.

    Returns:
        ``(num_nodes, C)`` in the order of the nodes of ``data``.

    Raises:
        ValueError: Options, data and model do not fit.
        nugnn.launch.WorkerFailed: A worker died, timed out, or found the user's input wrong.
    """
    install()
    weights = [1.0] * workers if shares is None else list(shares)
    if workers < 1 or len(weights) != workers:
        raise ValueError(f"shares: {len(weights)} numbers for {workers} workers")
    if workers > data.num_nodes:
        raise ValueError(f"{workers} workers for {data.num_nodes} nodes; each worker needs at least one")
    if workers == 1:
        whole = partition_nodes(data.num_nodes, data.src, data.dst, [1.0])
        return infer_shard(build_shard(data, whole, 0), Ranks(), copy.deepcopy(model))
    with job.private_job_folder() as folder:

        def prepare() -> None:
            assignment = partition_nodes(data.num_nodes, data.src, data.dst, weights, method=partitioner)  # type: ignore[arg-type]
            write_shards(folder / "shards", iter_shards(data, assignment), key="private", versions={})
            job.write_job(folder, {"model": model, "shards": folder / "shards"})

        launch(
            folder,
            workers,
            module="nugnn.inference_worker",
            timeout=timeout,
            log_folder=log_folder,
            prepare=prepare,
        )
        outcome: dict[str, Any] = torch.load(folder / "logits.pt", weights_only=True)
    logits: Tensor = outcome["logits"]
    return logits


def infer_shard(shard: Shard, ranks: Ranks, model: nn.Module) -> Tensor:
    """``(num_nodes_global, C)`` logits of every node, on every rank; a collective call."""
    return ModelOnShard(model, ShardGraph(shard, ranks, keep_edge_ids=False)).predict_all()
