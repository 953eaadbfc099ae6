"""A whole run on one rank's shard: trainer, checkpoints, and what is left for the launching process."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from nugnn.checkpointer import Checkpointer, CheckpointPlan
from nugnn.comm.groups import Ranks
from nugnn.embedding import NodeEmbedding
from nugnn.fit_options import FitOptions
from nugnn.graph_family import GraphFamily
from nugnn.partition.shard import Shard
from nugnn.shard_graph import ShardGraph
from nugnn.trainer import Epoch, History, Trainer


def train_shard(
    make_shard: Callable[[], Shard],
    ranks: Ranks,
    model: nn.Module,
    options: FitOptions,
    on_epoch: Callable[[Epoch], Any] | None = None,
    *,
    checkpoints: CheckpointPlan | None = None,
    asked_to_stop: Callable[[], bool] = lambda: False,
    make_evaluation_shard: Callable[[], Shard] | None = None,
) -> dict[str, Any]:
    """Train on one rank's shard.

    Args:
        make_shard: Builds or loads it; called here so that nobody else keeps what training does not need.
        ranks: Who takes part.
        model: Trained in place, on the device of this rank.
        options: How.
        on_epoch: Gets each `Epoch`.
        checkpoints: Where to write them, and which one to go on from; none when None.
        asked_to_stop: Asked after each epoch when there are checkpoints; rank 0's answer counts.
        make_evaluation_shard: Of another graph, on which the metric is measured and predictions are made.

    Returns:
        Plain tensors and numbers: ``state`` (best weights; embeddings gathered) and ``logits`` of all nodes on rank 0,
        ``epochs``, ``best``, ``report`` and ``time_to_best_seconds`` on every rank. ``interrupted_after`` (an epoch)
        alone when the run stopped because it was asked to.
    """
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(ranks.device)
    graph, rows, metric = _graph_of(make_shard, ranks)
    model.to(ranks.device)
    other = None if make_evaluation_shard is None else _graph_of(make_evaluation_shard, ranks)[:2]
    family = GraphFamily(
        model,
        graph,
        rows,
        loss=options.loss,
        metric=options.metric or metric,
        class_weights=options.class_weights,
        seed=options.seed,
        precision=options.precision,
        recompute_inputs=options.recompute_inputs,
        overlap=options.overlap,
        activations=options.activations,
        evaluate_on=other,
    )
    trainer = Trainer(
        family,
        make_optimizer=options.optimizer,
        make_scheduler=options.make_scheduler,
        regularizer=options.regularizer,
    )
    checkpointer = None if checkpoints is None else Checkpointer(trainer, checkpoints, asked_to_stop)
    history = trainer.fit(
        options.epochs,
        patience=options.patience,
        evaluate_every=options.evaluate_every,
        on_epoch=on_epoch,
        history=History() if checkpointer is None else checkpointer.restore(),
        between_epochs=None if checkpointer is None else checkpointer.between_epochs,
    )
    if not history.is_finished(options.epochs, options.patience):
        return {"interrupted_after": len(history.epochs)}
    if checkpointer is not None:
        checkpointer.write(history)
    assert history.best is not None
    model.load_state_dict(history.best_state)
    logits = trainer.predict_all().cpu()
    here = history.epochs[history.num_on_another_split :] or history.epochs
    timed = here[1:] or here  # the first epoch compiles and fills caches
    median = {
        f"{name}_seconds": statistics.median(e.seconds[name] for e in timed)
        for name in ("epoch", "compute", "halo", "sync", "evaluate")
    }
    report = {
        "nodes": graph.num_nodes(),
        "edges": graph.num_edges(),
        "halo_rows": graph.index.plan.num_halo,
        "device": torch.cuda.get_device_name(ranks.device) if on_gpu else "cpu",
        "peak_memory_bytes": torch.cuda.max_memory_allocated(ranks.device) if on_gpu else _peak_resident_bytes(),
        **median,
    }
    state = gathered_state(model, graph)
    outcome: dict[str, Any] = {
        "epochs": [asdict(epoch) for epoch in history.epochs],
        "best": asdict(history.best),
        "report": report,
        "time_to_best_seconds": history.time_to_best_seconds,
    }
    return outcome | ({"state": state, "logits": logits} if ranks.rank == 0 else {})


def _graph_of(make_shard: Callable[[], Shard], ranks: Ranks) -> tuple[ShardGraph, dict[str, Tensor], str]:
    """The graph of a shard, its rows of the splits and its metric; the shard itself is dropped."""
    shard = make_shard()
    rows = {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}
    rows = {split: numbers.to(ranks.device) for split, numbers in rows.items()}
    return ShardGraph(shard, ranks, keep_edge_ids=False), rows, shard.metric


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gathered_state(model: nn.Module, graph: ShardGraph) -> dict[str, Tensor]:
    """The model's state on the CPU with every node embedding whole, in original node order; a collective call."""
    state = {key: value.detach().clone().cpu() for key, value in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, NodeEmbedding):
            state[f"{name}.weight" if name else "weight"] = module.gather(graph).cpu()
    return state
