"""One call from a graph and a model to a trained model: in this process, or over unequal worker processes."""

from __future__ import annotations

import logging
import resource
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nugnn import job
from nugnn.checkpoint import newest_checkpoint, remove_checkpoints
from nugnn.checkpointer import Checkpointer, CheckpointPlan
from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.subgraph import induced_subgraph
from nugnn.embedding import NodeEmbedding
from nugnn.fingerprint import check_same_run, run_identity
from nugnn.interrupt import FirstSignalAsks, Interrupted
from nugnn.launch import launch
from nugnn.loss import RowLoss
from nugnn.metrics import METRICS
from nugnn.partition.assign import partition_nodes
from nugnn.partition.cache import cached_shards
from nugnn.partition.shard import Shard, build_shard, iter_shards, may_be_reordered
from nugnn.partition.store import load_meta, write_shards
from nugnn.seam import install
from nugnn.shard_graph import ShardGraph
from nugnn.trainer import Epoch, History, MakeScheduler, Trainer
from nugnn.trainer_state import recorded_history

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
        make_scheduler: Makes a learning-rate schedule; gets the optimizer. It steps once after each epoch.
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
    make_scheduler: MakeScheduler | None = None
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
    order: str = "auto",
    check: bool = True,
    timeout: float = 600.0,
    on_epoch: Callable[[Epoch], Any] | None = None,
    on_stage: Callable[[str], Any] | None = None,
    log_folder: Path | None = None,
    cache_folder: Path | None = None,
    checkpoint_folder: Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
    inductive: bool = False,
    on_begin: Callable[[list[Epoch]], Any] | None = None,
    on_note: Callable[[str], Any] | None = None,
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
        partitioner: ``metis``, ``clusters``, ``kaminpar`` or ``random``.
        order: Of the nodes inside a part: ``auto`` for locality where that pays, or ``none``; results are the same.
        check: Compare 1 and 3 parts of a small piece of the graph before training over several workers, and also before
            one worker's nodes are reordered, which are left alone where they differ.
        timeout: Seconds after which a silent worker counts as lost.
        on_epoch: Gets each `Epoch`.
        on_stage: Gets the name of each stage: ``start`` (of the workers), ``check``, ``partition``, ``train``, and
            ``stop`` (from a thread of its own) when a signal asked for the end.
        log_folder: Where the workers' logs go; they are dropped when None.
        cache_folder: Keep and reuse partitions here.
        checkpoint_folder: Write checkpoints here, the last one at the end; earlier ones in it are removed unless
            ``resume``. A first SIGINT or SIGTERM then ends the run after the epoch in progress, with a checkpoint; a
            second one ends it at once.
        checkpoint_every: Epochs between checkpoints; one every five minutes when None.
        resume: Go on from the newest intact checkpoint; start with the first epoch when there is none at all.
        settings: Names and plain values that a resumed run has to share with its checkpoint, beside those of ``model``,
            ``data`` and ``options``.
        inductive: Train on the training nodes and the edges between them alone; measure and predict on all of ``data``.
        on_begin: Called once before anything is started, when options and checkpoint were found to fit; gets the
            epochs that the checkpoint holds, none without one.
        on_note: Gets sentences about checkpoints for the user; they are logged when None.
        **options: See `FitOptions`.

    Raises:
        ValueError: Options or data do not fit.
        nugnn.check.ModelDiffers: The check found a module that depends on how the graph is split.
        nugnn.launch.WorkerFailed: A worker died, timed out, or found the user's input wrong.
        nugnn.checkpoint.CheckpointError: There is a checkpoint, but it is damaged or of another run.
        nugnn.interrupt.Interrupted: A signal asked for the end, and the checkpoint is written.
    """
    install()
    data = data if isinstance(data, GraphData) else GraphData.from_dgl(data)
    fit_options = FitOptions(**options)
    stage = on_stage or (lambda _: None)
    weights = [1.0] * workers if shares is None else list(shares)
    if workers < 1 or len(weights) != workers:
        raise ValueError(f"shares: {len(weights)} numbers for {workers} workers")
    _check_options(fit_options, data)
    seen = visible_in_training(model, data) if inductive else data
    if workers > seen.num_nodes:
        what = "training nodes" if inductive else "nodes"
        raise ValueError(f"{workers} workers for {seen.num_nodes} {what}; each worker needs at least one")
    if checkpoint_folder is None and (resume or checkpoint_every is not None):
        raise ValueError("resume and checkpoint_every need a checkpoint_folder")
    plan: CheckpointPlan | None = None
    before: list[Epoch] = []
    if checkpoint_folder is not None:
        identity = run_identity(model, data, fit_options, {"inductive": inductive} | dict(settings or {}))
        plan = CheckpointPlan(folder=Path(checkpoint_folder).resolve(), every=checkpoint_every, identity=identity)
        plan, before = _from_where(plan, fit_options, resume, on_note or _LOG.warning)
    if on_begin is not None:
        on_begin(before)
    if workers == 1:
        return _fit_here(model, data, seen, order, check, fit_options, plan, on_epoch, stage)
    notes: list[str] = []
    with job.private_job_folder() as folder:

        def prepare() -> None:
            if check:
                from nugnn.check import check_model

                stage("check")
                check_model(model, data, loss=fit_options.loss, regularizer=fit_options.regularizer)
            stage("partition")
            shards, said = _shards_on_disk(seen, weights, partitioner, order, cache_folder, folder / "shards")
            notes.extend(said)
            work = {"model": model, "options": fit_options, "shards": shards, "checkpoints": plan}
            if inductive:
                whole = folder / "whole"
                work["evaluation_shards"], _ = _shards_on_disk(data, weights, partitioner, order, cache_folder, whole)
            job.write_job(folder, work)

        with FirstSignalAsks((folder / job.STOP).touch, lambda: stage("stop")) as signals:

            def relay(event: dict[str, Any]) -> None:
                if plan is not None and event == {"kind": "stage", "name": "train"}:
                    signals.arm()  # before, a run has nothing to save
                _relay(event, on_epoch, stage)

            stage("start")
            launch(folder, workers, timeout=timeout, on_event=relay, log_folder=log_folder, prepare=prepare)
        outcomes = [torch.load(folder / f"outcome-{rank}.pt", weights_only=True) for rank in range(workers)]
    _raise_if_interrupted(outcomes[0], fit_options, plan)
    return _result(model, data, outcomes, notes)


def _fit_here(
    model: nn.Module,
    data: GraphData,
    seen: GraphData,
    order: str,
    check: bool,
    options: FitOptions,
    plan: CheckpointPlan | None,
    on_epoch: Callable[[Epoch], Any] | None,
    stage: Callable[[str], Any],
) -> FitResult:
    """Train in this process."""
    notes: list[str] = []
    if order != "none" and check and may_be_reordered(data):
        stage("check")
        if (fault := _depends_on_rows(model, data, options)) is not None:
            order = "none"
            notes.append(f"Nodes in the order of their ids, since the model seems to depend on it: {fault}")
    stage("train")

    def whole(graph: GraphData) -> Shard:
        one_part = partition_nodes(graph.num_nodes, graph.src, graph.dst, [1.0])
        shard = build_shard(graph, one_part, 0, order=order)  # type: ignore[arg-type]
        notes.extend(shard.order.notes)
        return shard

    asked = threading.Event()
    with FirstSignalAsks(asked.set, lambda: stage("stop")) as signals:
        if plan is not None:
            signals.arm()
        outcome = train_shard(
            lambda: whole(seen),
            Ranks(),
            _copy(model),
            options,
            on_epoch,
            checkpoints=plan,
            asked_to_stop=asked.is_set,
            make_evaluation_shard=None if seen is data else lambda: whole(data),
        )
    _raise_if_interrupted(outcome, options, plan)
    return _result(model, data, [outcome], notes)


def _depends_on_rows(model: nn.Module, data: GraphData, options: FitOptions) -> str | None:
    """What the check says against a model, such as one that holds a row for each node in the order of ids; or None."""
    from nugnn.check import ModelDiffers, ModelFails, check_model

    try:
        check_model(model, data, loss=options.loss, regularizer=options.regularizer)
    except (ModelDiffers, ModelFails) as error:
        return str(error)
    return None


def _from_where(
    plan: CheckpointPlan, options: FitOptions, resume: bool, note: Callable[[str], Any]
) -> tuple[CheckpointPlan, list[Epoch]]:
    """``plan`` with the checkpoint to go on from, and its epochs; the folder is emptied when the run starts anew.

    Raises:
        CheckpointError: No checkpoint is intact, or it is of another run.
        ValueError: It has more epochs than the run asks for.
    """
    if not resume:
        remove_checkpoints(plan.folder)
        return plan, []
    checkpoint, problems = newest_checkpoint(plan.folder)
    if checkpoint is None:
        note(f"no checkpoint in {plan.folder} yet: starting with epoch 1")
        return plan, []
    check_same_run(checkpoint, plan.identity)
    if checkpoint.epoch > options.epochs:
        raise ValueError(
            f"{checkpoint.folder} was written after epoch {checkpoint.epoch}, but only {options.epochs} epochs are "
            f"asked for; ask for {checkpoint.epoch} or more"
        )
    for problem in problems:
        note(problem)
    note(f"going on after epoch {checkpoint.epoch}, from {checkpoint.folder}")
    return replace(plan, resume_from=checkpoint.folder), recorded_history(checkpoint).epochs


def _raise_if_interrupted(outcome: dict[str, Any], options: FitOptions, plan: CheckpointPlan | None) -> None:
    if "interrupted_after" in outcome:
        assert plan is not None
        number = outcome["interrupted_after"]
        raise Interrupted(
            f"interrupted after epoch {number} of {options.epochs}; the checkpoint is in {plan.folder}, resume=True "
            "goes on from it",
            number,
        )


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


def _shards_on_disk(
    data: GraphData, shares: Sequence[float], partitioner: str, order: str, cache_folder: Path | None, own_folder: Path
) -> tuple[Path, tuple[str, ...]]:
    """A folder of shards, in the cache if there is one, and what was noted when they were made."""
    if cache_folder is None:
        assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, method=partitioner)  # type: ignore[arg-type]
        shards = iter_shards(data, assignment, order=order)  # type: ignore[arg-type]
        return own_folder, write_shards(own_folder, shards, key="private", versions={}, notes=assignment.notes).notes
    made = cached_shards(cache_folder, data, shares, method=partitioner, order=order)  # type: ignore[arg-type]
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
    *,
    checkpoints: CheckpointPlan | None = None,
    asked_to_stop: Callable[[], bool] = lambda: False,
    make_evaluation_shard: Callable[[], Shard] | None = None,
) -> dict[str, Any]:
    """Train on one rank's shard.

    Args:
        make_shard: Builds or loads it; called here so that nobody else keeps what training does not need.
        ranks: Who takes part.
        model: Trained in place.
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
    graph, rows, metric = _graph_of(make_shard, ranks)
    other = None if make_evaluation_shard is None else _graph_of(make_evaluation_shard, ranks)[:2]
    trainer = Trainer(
        model,
        graph,
        rows,
        make_optimizer=options.optimizer,
        make_scheduler=options.make_scheduler,
        loss=options.loss,
        metric=options.metric or metric,
        class_weights=options.class_weights,
        regularizer=options.regularizer,
        seed=options.seed,
        evaluate_on=other,
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
    logits = trainer.predict_all()
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
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
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
    return ShardGraph(shard, ranks, keep_edge_ids=False), rows, shard.metric


def gathered_state(model: nn.Module, graph: ShardGraph) -> dict[str, Tensor]:
    """The model's state with every node embedding whole, in original node order; a collective call."""
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
