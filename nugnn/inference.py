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
from nugnn.devices import devices_of
from nugnn.launch import launch
from nugnn.model_on_shard import ModelOnShard
from nugnn.options import checked_workers
from nugnn.partition.shard import Shard
from nugnn.seam import install
from nugnn.shard_graph import ShardGraph
from nugnn.shares import checked_shares, shards_on_disk, whole_shard


def infer(
    model: nn.Module,
    data: GraphData,
    *,
    workers: int = 1,
    shares: Sequence[float] | None = None,
    partitioner: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    timeout: float = 600.0,
    log_folder: Path | None = None,
) -> Tensor:
    """Logits of every node, by ``model`` in evaluation mode; ``model`` itself is left as it was.

    Args:
        model: As `nugnn.fit` takes and returns it.
        data: The graph; labels are not needed.
        workers: Number of processes; 1 computes in this one.
        shares: Part of the nodes each worker gets, any positive numbers; equal when None.
        partitioner: As for `nugnn.fit`.
        device: As for `nugnn.fit`.
        precision: As for `nugnn.fit`.
        timeout: Seconds after which a silent worker counts as lost.
        log_folder: Where the workers' logs go; they are dropped when None.

    Returns:
        ``(num_nodes, C)`` in the order of the nodes of ``data``.

    Raises:
        ValueError: Options, data and model do not fit.
        nugnn.launch.WorkerFailed: A worker died, timed out, or found the user's input wrong.
    """
    install()
    weights = checked_shares(shares, checked_workers(workers), data)
    devices, _ = devices_of(device, workers)
    if workers == 1:
        return infer_shard(whole_shard(data, "none", []), Ranks(device=devices[0]), copy.deepcopy(model), precision)
    with job.private_job_folder() as folder:

        def prepare() -> None:
            shards, _ = shards_on_disk(data, weights, partitioner, "none", None, folder / "shards")
            job.write_job(folder, {"model": model, "shards": shards, "devices": devices, "precision": precision})

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


def infer_shard(shard: Shard, ranks: Ranks, model: nn.Module, precision: str = "fp32") -> Tensor:
    """``(num_nodes_global, C)`` logits of every node, on the CPU of every rank; a collective call."""
    graph = ShardGraph(shard, ranks, keep_edge_ids=False)
    return ModelOnShard(model.to(ranks.device), graph, precision=precision).predict_all().cpu()
