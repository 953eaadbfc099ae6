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
from nugnn.embedding import shard_embeddings
from nugnn.kernels.rows import rows_of, tag
from nugnn.launch import launch
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import Shard, build_shard, iter_shards
from nugnn.partition.store import write_shards
from nugnn.seam import install
from nugnn.session import intercept, model_dtype
from nugnn.shard_graph import ShardGraph


class ModelOnShard:
    """A model on this rank's part of a graph: what training, evaluation and prediction have in common.

    Args:
        model: Called as ``model(graph, features)``, or ``model(graph)`` when the graph has no features. Its node
            embeddings are split.
        graph: From `nugnn.shard`; the ``ndata`` column ``feat`` (dense or sparse CSR) is optional.
        seed: Of dropout masks.
    """

    def __init__(self, model: nn.Module, graph: ShardGraph, *, seed: int = 0) -> None:
        self.model, self.graph = model, graph
        shard_embeddings(model, graph)
        self.features_ND = self._features()
        self.interceptor = intercept(model, graph, seed=seed)

    def _features(self) -> Tensor | None:
        if "feat" not in self.graph.ndata:
            return None
        feat = self.graph.ndata["feat"]
        if 0 in feat.shape[1:]:
            raise ValueError(
                f"features of shape {tuple(feat.shape)} hold no value; leave them out, or give them columns"
            )
        return tag(feat.to(model_dtype(self.model)), rows_of(feat))

    def forward(self) -> Tensor:
        """``(N, C)`` logits of the inner nodes; inside a step of the interceptor."""
        inputs = (self.graph,) if self.features_ND is None else (self.graph, self.features_ND)
        logits_NC: Tensor = self.model(*inputs)
        if logits_NC.shape[:1] != (self.graph.num_nodes(),):
            raise ValueError(
                f"the model returned shape {tuple(logits_NC.shape)}; it has to return one row for each of the "
                f"{self.graph.num_nodes()} nodes it was given"
            )
        return logits_NC

    @torch.no_grad()
    def predict(self, step: int = 0) -> Tensor:
        """``(N, C)`` logits of the inner nodes in evaluation mode; a collective call.

        Args:
            step: Number of the training step after which this is; keys whatever the model draws at random.
        """
        was_training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with self.interceptor.step(step):
                return self.forward()
        finally:
            for module, training in was_training.items():
                module.training = training

    def predict_all(self, step: int = 0) -> Tensor:
        """``(num_nodes_global, C)`` logits in the original node order, on every rank; a collective call."""
        logits = self.predict(step)
        ids = torch.cat(self.graph.ranks.gather_rows(self.graph.global_node_ids))
        rows = torch.cat(self.graph.ranks.gather_rows(logits.contiguous()))
        return torch.empty_like(rows).index_copy_(0, ids, rows)


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
        partitioner: ``metis`` or ``random``.
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
