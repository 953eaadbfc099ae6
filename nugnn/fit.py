"""One call from a graph and a model to a trained model: in this process, or over unequal worker processes."""

from __future__ import annotations

import logging
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nugnn import job
from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.launch import launch
from nugnn.loss import RowLoss
from nugnn.metrics import METRICS
from nugnn.partition.assign import partition_nodes
from nugnn.partition.cache import cached_shards
from nugnn.partition.shard import Shard, build_shard, iter_shards
from nugnn.partition.store import write_shards
from nugnn.seam import install
from nugnn.shard_graph import ShardGraph
from nugnn.trainer import Epoch, Trainer

if TYPE_CHECKING:
    import dgl

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How to train; what `fit` takes by name and hands to the ranks.

    Args:
        epochs: Upper bound of epochs.
        patience: Stop after so many epochs without a better validation metric; None to train all.
        evaluate_every: Epochs between evaluations; the last one is always evaluated.
        lr: Learning rate of Adam.
        weight_decay: L2 penalty of Adam.
        weight_decay_first_layer_only: Apply it to the parameters of ``model.layers[0]`` (or of the first child that
            has parameters) only.
        make_optimizer: Replaces Adam; gets the model.
        loss: Replaces cross-entropy; one value per row.
        metric: Replaces the metric of the data.
        class_weights: ``(C,)``, for the loss.
        regularizer: Parameter-only term added to the loss once.
        seed: Of dropout masks.
    """

    epochs: int = 200
    patience: int | None = None
    evaluate_every: int = 1
    lr: float = 0.01
    weight_decay: float = 5e-4
    weight_decay_first_layer_only: bool = False
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    loss: RowLoss | None = None
    metric: str | None = None
    class_weights: Tensor | None = None
    regularizer: Callable[[nn.Module], Tensor] | None = None
    seed: int = 0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adam with decay on all parameters or on the first layer's; or what ``make_optimizer`` returns."""
        if self.make_optimizer is not None:
            return self.make_optimizer(model)
        if not self.weight_decay_first_layer_only:
            return torch.optim.Adam(model.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        first = {id(p) for p in _first_layer(model).parameters()}
        groups = [
            {"params": [p for p in model.parameters() if id(p) in first], "weight_decay": self.weight_decay},
            {"params": [p for p in model.parameters() if id(p) not in first], "weight_decay": 0.0},
        ]
        return torch.optim.Adam([group for group in groups if group["params"]], lr=self.lr)


def _first_layer(model: nn.Module) -> nn.Module:
    layers = getattr(model, "layers", None)
    if isinstance(layers, nn.ModuleList) and len(layers):
        return layers[0]
    for child in model.children():
        if any(True for _ in child.parameters()):
            return child
    return model


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run learned.

    Args:
        model: With the weights of the best validation epoch (node embeddings of all nodes, in original order).
        history: One `nugnn.trainer.Epoch` per epoch, as rank 0 saw it.
        best: The epoch the weights are from.
        logits: ``(num_nodes, C)`` of those weights, in original node order.
        rank_reports: For each rank: ``nodes``, ``edges``, ``halo_rows``, ``peak_memory_bytes``, ``epoch_seconds``
            (median), and its split into ``compute_seconds``, ``halo_seconds`` and ``sync_seconds``.
        time_to_best_seconds: From the first epoch's start to the end of the best one.
        notes: Sentences for the user, from the partitioner.
    """

    model: nn.Module
    history: list[Epoch]
    best: Epoch
    logits: Tensor
    rank_reports: list[dict[str, float]]
    time_to_best_seconds: float
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        best = f"epoch {self.best.number} of {len(self.history)}, val {self.best.val:.4f}, test {self.best.test:.4f}"
        return f"FitResult({type(self.model).__name__}, best {best}, {len(self.rank_reports)} workers)"

    @property
    def epoch_seconds(self) -> float:
        """Median over epochs, of the slowest rank."""
        return max(report["epoch_seconds"] for report in self.rank_reports)


def fit(
    model: nn.Module,
    data: GraphData | dgl.DGLGraph,
    *,
    workers: int = 1,
    shares: Sequence[float] | None = None,
    partitioner: str = "metis",
    check: bool = True,
    timeout: float = 600.0,
    on_epoch: Callable[[Epoch], Any] | None = None,
    on_stage: Callable[[str], Any] | None = None,
    log_folder: Path | None = None,
    cache_folder: Path | None = None,
    **options: Any,
) -> FitResult:
    """Train ``model`` on the full graph, over ``workers`` unequal processes, as one device would.

    Works in a script without a ``__main__`` guard and in a notebook. ``model`` itself is left as it was.

    Args:
        model: Any DGL model, unmodified: called as ``model(graph, features)``, or ``model(graph)`` without features.
        data: The graph; a homogeneous ``DGLGraph`` with ``ndata`` columns ``feat``, ``label`` and ``train_mask``,
            ``val_mask``, ``test_mask`` is converted.
        workers: Number of processes; 1 trains in this one.
        shares: Part of the nodes each worker gets, any positive numbers; equal when None.
        partitioner: ``metis`` or ``random``.
        check: Before training over several workers, compare 1 and 3 parts of a small piece of the graph.
        timeout: Seconds after which a silent worker counts as lost.
        on_epoch: Gets each `Epoch`.
        on_stage: Gets the name of each stage: ``start`` (of the workers), ``check``, ``partition``, ``train``.
        log_folder: Where the workers' logs go; they are dropped when None.
        cache_folder: Keep and reuse partitions here.
        **options: See `FitOptions`.

    Raises:
        ValueError: Options or data do not fit.
        nugnn.check.ModelDiffers: The check found a module that depends on how the graph is split.
        nugnn.launch.WorkerFailed: A worker died, timed out, or found the user's input wrong.
    """
    install()
    data = data if isinstance(data, GraphData) else GraphData.from_dgl(data)
    fit_options = FitOptions(**options)
    stage = on_stage or (lambda _: None)
    weights = [1.0] * workers if shares is None else list(shares)
    if workers < 1 or len(weights) != workers:
        raise ValueError(f"shares: {len(weights)} numbers for {workers} workers")
    if workers > data.num_nodes:
        raise ValueError(f"{workers} workers for {data.num_nodes} nodes; each worker needs at least one")
    _check_options(fit_options, data)
    if workers == 1:
        stage("train")
        assignment = partition_nodes(data.num_nodes, data.src, data.dst, [1.0])
        outcome = train_shard(lambda: build_shard(data, assignment, 0), Ranks(), _copy(model), fit_options, on_epoch)
        return _result(model, data, [outcome], assignment.notes)
    notes: list[str] = []
    with job.private_job_folder() as folder:

        def prepare() -> None:
            if check:
                from nugnn.check import check_model

                stage("check")
                check_model(model, data, loss=fit_options.loss, regularizer=fit_options.regularizer)
            stage("partition")
            shards, said = _shards_on_disk(data, weights, partitioner, cache_folder or folder)
            notes.extend(said)
            job.write_job(folder, {"model": model, "options": fit_options, "shards": shards})

        stage("start")
        launch(
            folder,
            workers,
            timeout=timeout,
            on_event=lambda event: _relay(event, on_epoch, stage),
            log_folder=log_folder,
            prepare=prepare,
        )
        outcomes = [torch.load(folder / f"outcome-{rank}.pt", weights_only=True) for rank in range(workers)]
    return _result(model, data, outcomes, notes)


def _check_options(options: FitOptions, data: GraphData) -> None:
    """Refuse what does not fit the labels, before anything is started."""
    if data.labels is None:
        raise ValueError(f"{data.name}: the graph has no labels, so there is nothing to train for")
    metric, is_multilabel = options.metric or data.metric, data.labels.dim() == 2
    if metric not in METRICS:
        raise ValueError(f"metric {metric!r} is not known; choose one of {', '.join(METRICS)}")
    if metric in ("accuracy", "micro_f1") and is_multilabel != (metric == "micro_f1"):
        raise ValueError(
            f"metric {metric} does not fit {data.name}, whose nodes have "
            + ("several labels each; use micro_f1" if is_multilabel else "one label each; use accuracy")
        )
    weights = options.class_weights
    if weights is not None and weights.shape != (data.num_classes,):
        raise ValueError(f"class_weights has shape {tuple(weights.shape)}, the data {data.num_classes} classes")


def _shards_on_disk(
    data: GraphData, shares: Sequence[float], partitioner: str, folder: Path
) -> tuple[Path, tuple[str, ...]]:
    """A folder of shards and the partitioner's notes."""
    if (folder / "job.pickle").exists() or folder.name.startswith("nugnn-job-"):
        assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, method=partitioner)  # type: ignore[arg-type]
        write_shards(folder / "shards", iter_shards(data, assignment), key="private", versions={})
        return folder / "shards", tuple(assignment.notes)
    from nugnn.partition.store import load_meta

    made = cached_shards(folder, data, shares, method=partitioner)  # type: ignore[arg-type]
    return made, tuple(load_meta(made).notes)


def _copy(model: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(model)


def _relay(event: dict[str, Any], on_epoch: Callable[[Epoch], Any] | None, stage: Callable[[str], Any]) -> None:
    if event["kind"] == "epoch" and on_epoch is not None:
        on_epoch(Epoch(**event["epoch"]))
    elif event["kind"] == "stage":
        stage(event["name"])


def train_shard(
    make_shard: Callable[[], Shard],
    ranks: Ranks,
    model: nn.Module,
    options: FitOptions,
    on_epoch: Callable[[Epoch], Any] | None = None,
) -> dict[str, Any]:
    """Train on one rank's shard.

    Args:
        make_shard: Builds or loads it; called here so that nobody else keeps what training does not need.
        ranks: Who takes part.
        model: Trained in place.
        options: How.
        on_epoch: Gets each `Epoch`.

    Returns:
        Plain tensors and numbers: ``state`` (best weights; embeddings gathered) and ``logits`` of all nodes on rank 0,
        ``epochs``, ``best``, ``report`` and ``time_to_best_seconds`` on every rank.
    """
    shard = make_shard()
    graph = ShardGraph(shard, ranks, keep_edge_ids=False)
    rows = {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}
    metric = options.metric or shard.metric
    del shard
    trainer = Trainer(
        model,
        graph,
        rows,
        make_optimizer=options.optimizer,
        loss=options.loss,
        metric=metric,
        class_weights=options.class_weights,
        regularizer=options.regularizer,
        seed=options.seed,
    )
    begin = time.perf_counter()
    ends: list[float] = []

    def note(epoch: Epoch) -> None:
        ends.append(time.perf_counter() - begin)
        if on_epoch is not None:
            on_epoch(epoch)

    history = trainer.fit(
        options.epochs, patience=options.patience, evaluate_every=options.evaluate_every, on_epoch=note
    )
    assert history.best is not None
    model.load_state_dict(history.best_state)
    logits = trainer.predict_all()
    timed = history.epochs[1:] or history.epochs  # the first epoch compiles and fills caches
    median = {
        f"{name}_seconds": statistics.median(e.seconds[name] for e in timed)
        for name in ("epoch", "compute", "halo", "sync", "evaluate")
    }
    report = {
        "nodes": graph.num_nodes(),
        "edges": graph.num_edges(),
        "halo_rows": graph.index.plan.num_halo,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **median,
    }
    state = gathered_state(model, graph)
    outcome: dict[str, Any] = {
        "epochs": [asdict(epoch) for epoch in history.epochs],
        "best": asdict(history.best),
        "report": report,
        "time_to_best_seconds": ends[history.best.number - 1],
    }
    return outcome | ({"state": state, "logits": logits} if ranks.rank == 0 else {})


def gathered_state(model: nn.Module, graph: ShardGraph) -> dict[str, Tensor]:
    """The model's state with every node embedding whole, in original node order; a collective call."""
    from nugnn.embedding import NodeEmbedding

    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, NodeEmbedding):
            state[f"{name}.weight" if name else "weight"] = module.gather(graph)
    return state


def _result(model: nn.Module, data: GraphData, outcomes: list[dict[str, Any]], notes: Sequence[str]) -> FitResult:
    trained = _copy(model)
    trained.load_state_dict(outcomes[0]["state"])
    trained.eval()
    return FitResult(
        model=trained,
        history=[Epoch(**epoch) for epoch in outcomes[0]["epochs"]],
        best=Epoch(**outcomes[0]["best"]),
        logits=outcomes[0]["logits"],
        rank_reports=[outcome["report"] for outcome in outcomes],
        time_to_best_seconds=outcomes[0]["time_to_best_seconds"],
        notes=tuple(notes),
    )
