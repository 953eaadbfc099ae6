"""One call from a graph and a model to a trained model: in this process, or over unequal worker processes."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nugnn import job
from nugnn.activations import refuse_needless_offload
from nugnn.call_inputs import checked_inputs
from nugnn.checkpointer import CheckpointPlan
from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.devices import devices_of
from nugnn.fingerprint import run_identity
from nugnn.fit_options import FitOptions, checked_options
from nugnn.fit_result import FitResult, result_of
from nugnn.inductive import visible_in_training
from nugnn.interrupt import FirstSignalAsks
from nugnn.launch import launch
from nugnn.member import member_from
from nugnn.model_on_shard import refuse_empty_features
from nugnn.partition.shard import may_be_reordered
from nugnn.resume import from_where, raise_if_interrupted
from nugnn.seam import install
from nugnn.shares import checked_shares, shards_on_disk, whole_shard
from nugnn.train_shard import train_shard
from nugnn.trainer import Epoch

if TYPE_CHECKING:
    import dgl

_LOG = logging.getLogger(__name__)


def fit(
    model: nn.Module,
    data: GraphData | dgl.DGLGraph,
    *,
    workers: int = 1,
    shares: Sequence[float] | None = None,
    partitioner: str = "metis",
    order: str = "auto",
    device: str = "auto",
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
        device: ``cpu``, ``cuda``, ``auto`` (a GPU for each worker where there are enough), or one for each worker, such
            as ``cuda:0,cpu``.
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
        ValueError: Options or data do not fit, or torchrun started this process beside others.
        TypeError: ``model`` or ``data`` is something else, or there is no option of a name; says what was meant.
        nugnn.check.ModelDiffers: The check found a module that depends on how the graph is split.
        nugnn.launch.WorkerFailed: A worker died, timed out, or found the user's input wrong.
        nugnn.checkpoint.CheckpointError: There is a checkpoint, but it is damaged or of another run.
        nugnn.interrupt.Interrupted: A signal asked for the end, and the checkpoint is written.
    """
    install()
    data = checked_inputs("nugnn.fit", model, data)
    _refuse_torchrun()
    fit_options = checked_options(options, data, inspect.signature(fit).parameters)
    if data.features is not None:
        refuse_empty_features(data.features)
    stage = on_stage or (lambda _: None)
    seen = visible_in_training(model, data) if inductive else data
    weights = checked_shares(shares, workers, seen, "training nodes" if inductive else "nodes")
    devices, said = devices_of(device, workers)
    refuse_needless_offload(fit_options.activations, devices)
    note = on_note or _LOG.warning
    if said:
        note(said)
    if checkpoint_folder is None and (resume or checkpoint_every is not None):
        raise ValueError("resume and checkpoint_every need a checkpoint_folder")
    plan: CheckpointPlan | None = None
    before: list[Epoch] = []
    if checkpoint_folder is not None:
        identity = run_identity(model, data, fit_options, {"inductive": inductive} | dict(settings or {}))
        plan = CheckpointPlan(folder=Path(checkpoint_folder).resolve(), every=checkpoint_every, identity=identity)
        plan, before = from_where(plan, fit_options, resume, note)
    if on_begin is not None:
        on_begin(before)
    if workers == 1:
        return _fit_here(model, data, seen, devices[0], order, check, fit_options, plan, on_epoch, stage)
    notes: list[str] = []
    with job.private_job_folder() as folder:

        def prepare() -> None:
            if check:
                from nugnn.check import check_model

                stage("check")
                check_model(model, data, loss=fit_options.loss, regularizer=fit_options.regularizer)
            stage("partition")
            shards, remarks = shards_on_disk(seen, weights, partitioner, order, cache_folder, folder / "shards")
            notes.extend(remarks)
            work = {"model": model, "options": fit_options, "shards": shards, "checkpoints": plan, "devices": devices}
            if inductive:
                whole = folder / "whole"
                work["evaluation_shards"], _ = shards_on_disk(data, weights, partitioner, order, cache_folder, whole)
            job.write_job(folder, work)

        with FirstSignalAsks((folder / job.STOP).touch, lambda: stage("stop")) as signals:

            def relay(event: dict[str, Any]) -> None:
                if plan is not None and event == {"kind": "stage", "name": "train"}:
                    signals.arm()  # before, a run has nothing to save
                _relay(event, on_epoch, stage)

            stage("start")
            launch(folder, workers, timeout=timeout, on_event=relay, log_folder=log_folder, prepare=prepare)
        outcomes = [torch.load(folder / f"outcome-{rank}.pt", weights_only=True) for rank in range(workers)]
    raise_if_interrupted(outcomes[0], fit_options, plan)
    return result_of(model, outcomes, notes)


def _refuse_torchrun() -> None:
    if member_from(os.environ) is not None:
        raise ValueError(
            "nugnn.fit starts its own workers, but this process is one of several that torchrun started, and each "
            "would train for itself. Run the script without torchrun; or use `torchrun -m nugnn train`; or write the "
            "loop with nugnn.init and nugnn.shard"
        )


def _fit_here(
    model: nn.Module,
    data: GraphData,
    seen: GraphData,
    device: torch.device,
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
    asked = threading.Event()
    with FirstSignalAsks(asked.set, lambda: stage("stop")) as signals:
        if plan is not None:
            signals.arm()
        outcome = train_shard(
            lambda: whole_shard(seen, order, notes),
            Ranks(device=device),
            copy.deepcopy(model),
            options,
            on_epoch,
            checkpoints=plan,
            asked_to_stop=asked.is_set,
            make_evaluation_shard=None if seen is data else lambda: whole_shard(data, order, []),
        )
    raise_if_interrupted(outcome, options, plan)
    return result_of(model, [outcome], notes)


def _depends_on_rows(model: nn.Module, data: GraphData, options: FitOptions) -> str | None:
    """What the check says against a model, such as one that holds a row for each node in the order of ids; or None."""
    from nugnn.check import ModelDiffers, ModelFails, check_model

    try:
        check_model(model, data, loss=options.loss, regularizer=options.regularizer)
    except (ModelDiffers, ModelFails) as error:
        return str(error)
    return None


def _relay(event: dict[str, Any], on_epoch: Callable[[Epoch], Any] | None, stage: Callable[[str], Any]) -> None:
    if event["kind"] == "epoch" and on_epoch is not None:
        on_epoch(Epoch(**event["epoch"]))
    elif event["kind"] == "stage":
        stage(event["name"])
