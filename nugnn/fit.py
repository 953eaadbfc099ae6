"""One call from data and a model to a trained model: in this process, or over unequal worker processes."""

from __future__ import annotations

import copy
import functools
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
from nugnn.checkpointer import CheckpointPlan
from nugnn.comm.groups import Ranks
from nugnn.devices import devices_of
from nugnn.fit_plan import held_against_plan, request_of, tell_of_plan, use_plan
from nugnn.fit_result import FitResult, result_of
from nugnn.history import Epoch
from nugnn.interrupt import FirstSignalAsks
from nugnn.launch import launch
from nugnn.limited import Limits, check_on_devices, checked_limits, cores_on, said_of
from nugnn.member import member_from
from nugnn.options import checked_workers
from nugnn.resume import from_where, raise_if_interrupted
from nugnn.task import Task, task_of
from nugnn.train_rank import train_rank

if TYPE_CHECKING:
    import dgl
    from torch.utils.data import Dataset

    from nugnn.datasets.graph_data import GraphData
    from nugnn.datasets.samples.sample_data import SampleData
    from nugnn.planned import Planned
    from nugnn.planning.cluster import Cluster
    from nugnn.planning.plan import Plan

_LOG = logging.getLogger(__name__)


def fit(
    model: nn.Module,
    data: GraphData | dgl.DGLGraph | SampleData | Dataset[Any] | str,
    *,
    workers: int = 1,
    shares: Sequence[float] | str | None = None,
    plan: Plan | Path | str | None = None,
    cluster: Cluster | Path | str | None = None,
    val: Dataset[Any] | None = None,
    test: Dataset[Any] | None = None,
    partitioner: str = "auto",
    order: str = "auto",
    device: str = "auto",
    limits: Limits | None = None,
    check: bool = True,
    timeout: float = 600.0,
    on_epoch: Callable[[Epoch], Any] | None = None,
    on_stage: Callable[[str], Any] | None = None,
    log_folder: Path | None = None,
    cache_folder: Path | None = None,
    checkpoint_folder: Path | None = None,
    checkpoint_every: int | None = None,
    checkpoint_steps: int | None = None,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
    inductive: bool = False,
    on_begin: Callable[[list[Epoch]], Any] | None = None,
    on_note: Callable[[str], Any] | None = None,
    on_rebalance: Callable[[dict[str, Any]], Any] | None = None,
    on_plan: Callable[[Planned], Any] | None = None,
    **options: Any,
) -> FitResult:
    """Train ``model`` on the full graph or on batches of samples, over ``workers`` unequal processes, as one would.

    Works in a script without a ``__main__`` guard and in a notebook. ``model`` itself is left as it was.

    Args:
        model: For a graph any DGL model, unmodified: called as ``model(graph, features)``, or ``model(graph)`` without
            features. For samples any module: called as ``model(x)``.
        data: A graph: `GraphData`, or a homogeneous ``DGLGraph`` with ``ndata`` columns ``feat``, ``label`` and
            ``train_mask``, ``val_mask``, ``test_mask``. Or samples to train on: a map-style data set whose items are
            ``(x, label)``; or what `nugnn.datasets.samples.load_samples` returns, or takes: ``"digits-images"``.
        workers: Number of processes; 1 trains in this one.
        shares: Part of the nodes, or of each batch, that each worker gets, any positive numbers; equal when None.
            ``auto``: such that the slowest worker is as fast as memories allow, by prediction, see ``docs/plan.md``;
            ``flops`` or ``bandwidth``: by one number of each device's specification; ``even``.
        plan: A plan of ``nugnn plan``, or its file, in place of ``shares``: the devices that it names are used, within
            its limits.
        cluster: A ``cluster.yaml``, or what `nugnn.planning.cluster.read_cluster` made of it: its devices of this host
            are used, within its limits, and ``shares`` are found with its rates and links.
        val: For a data set of samples, those that choose the best epoch.
        test: Likewise those to measure on.
        partitioner: ``metis``, ``clusters``, ``kaminpar`` or ``random``; ``auto`` is METIS, but ``clusters`` for
            ``shares="auto"`` of a large graph, see ``docs/partition.md``. For graphs alone, as are ``order``,
            ``cache_folder`` and ``inductive``.
        order: Of the nodes inside a part: ``auto`` for locality where that pays, or ``none``; results are the same.
        device: ``cpu``, ``cuda``, ``auto`` (a GPU for each worker where there are enough), or one for each worker, such
            as ``cuda:0,cpu``.
        limits: What of its device each worker may use, see `nugnn.planning.limits.DeviceLimits`: one for each worker,
            as such or as text (``["none", "sms=32"]``), or one text (``"none;sms=32"``). A limited worker is a process
            of its own, also a single one. Limits change no bit of what workers compute.
        check: Compare 1 and 3 parts of a small piece of the graph before training over several workers, and also before
            one worker's nodes are reordered, which are left alone where they differ. Of samples: compare five in one
            part with three and two before a model of the user's own trains over several workers.
        timeout: Seconds after which a silent worker counts as lost.
        on_epoch: Gets each `Epoch`.
        on_stage: Gets the name of each stage: ``start`` (of the workers), ``check``, ``partition`` (``parts_cached``
            where parts are found in ``cache_folder``, ``parts_planned`` where a plan has them), ``train``, and
            ``stop`` (from a thread of its own) when a signal asked for the end.
        log_folder: Where the workers' logs go; they are dropped when None.
        cache_folder: Keep and reuse partitions here.
        checkpoint_folder: Write checkpoints here, the last one at the end; earlier ones in it are removed unless
            ``resume``. A first SIGINT or SIGTERM then ends the run after the epoch (on samples: the step) in progress,
            with a checkpoint; a second one ends it at once.
        checkpoint_every: Epochs between checkpoints.
        checkpoint_steps: Optimizer steps between checkpoints, for samples: also in mid-epoch. One every five minutes
            where neither is given.
        resume: Go on from the newest intact checkpoint; start with the first epoch when there is none at all.
        settings: Names and plain values that a resumed run has to share with its checkpoint, beside those of ``model``,
            ``data`` and ``options``.
        inductive: Train on the training nodes and the edges between them alone; measure and predict on all of ``data``.
        on_begin: Called once before anything is started, when options and checkpoint were found to fit; gets the
            epochs that the checkpoint holds, none without one.
        on_note: Gets sentences for the user, about checkpoints and moves of nodes; they are logged when None.
        on_rebalance: Gets each move of nodes between workers when it has been made, as `FitResult.moves` lists them.
        on_plan: Gets the plan once it is made, where there is one.
        **options: See `FitOptions` for graphs and `nugnn.sample_options.SampleOptions` for samples.

    Raises:
        ValueError: Options or data do not fit, or torchrun started this process beside others.
        TypeError: ``model`` or ``data`` is something else, or there is no option of a name; says what was meant.
        nugnn.check.ModelDiffers: The check found a module that depends on how the graph or batch is split.
        nugnn.launch.WorkerFailed: A worker died, timed out, or found the user's input wrong.
        nugnn.checkpoint.CheckpointError: There is a checkpoint, but it is damaged or of another run.
        nugnn.interrupt.Interrupted: A signal asked for the end, and the checkpoint is written.
    """
    _refuse_torchrun()
    checked_workers(workers)
    stage = on_stage or (lambda _: None)
    note = on_note or _LOG.warning
    request, numbers = request_of(shares, plan, cluster, workers, device, limits, stage, note)
    task = task_of(
        model,
        data,
        workers=workers,
        shares=numbers,
        given={
            **{"partitioner": partitioner, "order": order, "check": check, "cache_folder": cache_folder},
            **{"inductive": inductive, "val": val, "test": test},
        },
        options=options,
        others=list(inspect.signature(fit).parameters),
    )
    devices, said = devices_of(device, workers) if request is None else request.devices(device, workers)
    task.check_devices(devices)
    limited = checked_limits(limits if request is None else request.limits or limits, workers)
    if limited is not None:
        check_on_devices(limited, devices)
    if said:
        note(said)
    checkpoints = None
    before: list[Epoch] = []
    if checkpoint_folder is not None:
        checkpoints = CheckpointPlan(
            folder=Path(checkpoint_folder).resolve(),
            every=checkpoint_every,
            every_steps=checkpoint_steps,
            identity=task.identity(settings or {}),
        )
        checkpoints, before = from_where(checkpoints, task.options, resume, note)
    elif resume or checkpoint_every is not None or checkpoint_steps is not None:
        raise ValueError("resume, checkpoint_every and checkpoint_steps need a checkpoint_folder")
    if request is not None:
        use_plan(task, request, devices, limited, stage, note, checkpoint_folder if resume else None)
    for text in task.said if on_note is not None else []:
        note(text)
    if on_begin is not None:
        on_begin(before)
    tell_plan = functools.partial(tell_of_plan, task, checkpoint_folder, on_plan)
    if workers == 1 and limited is None:
        return _fit_here(model, task, devices[0], checkpoints, on_epoch, stage, note, tell_plan)
    notes: list[str] = []
    with job.private_job_folder() as folder:

        def prepare() -> None:
            part, remarks = task.stored(folder, stage)
            notes.extend(remarks)
            tell_plan()
            work = {"model": model, "options": task.options, "part": part, "devices": devices}
            work |= {"checkpoints": checkpoints, "limits": limited}
            job.write_job(folder, work)

        with FirstSignalAsks((folder / job.STOP).touch, lambda: stage("stop")) as signals:

            def relay(event: dict[str, Any]) -> None:
                if checkpoints is not None and event == {"kind": "stage", "name": "train"}:
                    signals.arm()  # before, a run has nothing to save
                _relay(event, on_epoch, stage, note, on_rebalance or (lambda _: None))

            stage("start")
            launch(
                folder,
                workers,
                module=task.worker,
                timeout=timeout,
                on_event=relay,
                log_folder=log_folder,
                prepare=prepare,
                cores=cores_on(devices, limited),
            )
        outcomes = [torch.load(folder / f"outcome-{rank}.pt", weights_only=True) for rank in range(workers)]
    raise_if_interrupted(outcomes[0], task.options, checkpoints)
    said_of_limits = said_of(limited, [outcome["report"] for outcome in outcomes])
    return held_against_plan(task, result_of(model, outcomes, [*notes, *said_of_limits]), checkpoints)


def _refuse_torchrun() -> None:
    if member_from(os.environ) is not None:
        raise ValueError(
            "nugnn.fit starts its own workers, but this process is one of several that torchrun started, and each "
            "would train for itself. Run the script without torchrun; or use `torchrun -m nugnn train`; or write the "
            "loop with nugnn.init and nugnn.shard"
        )


def _fit_here(
    model: nn.Module,
    task: Task,
    device: torch.device,
    checkpoints: CheckpointPlan | None,
    on_epoch: Callable[[Epoch], Any] | None,
    stage: Callable[[str], Any],
    note: Callable[[str], Any],
    tell_plan: Callable[[], None],
) -> FitResult:
    """Train in this process."""
    part, notes = task.here(stage)
    tell_plan()
    stage("train")
    asked = threading.Event()
    with FirstSignalAsks(asked.set, lambda: stage("stop")) as signals:
        if checkpoints is not None:
            signals.arm()
        outcome = train_rank(
            part,
            Ranks(device=device),
            copy.deepcopy(model),
            task.options,
            on_epoch,
            checkpoints=checkpoints,
            asked_to_stop=asked.is_set,
            on_note=note,
        )
    raise_if_interrupted(outcome, task.options, checkpoints)
    return held_against_plan(task, result_of(model, [outcome], notes), checkpoints)


def _relay(
    event: dict[str, Any],
    on_epoch: Callable[[Epoch], Any] | None,
    stage: Callable[[str], Any],
    note: Callable[[str], Any],
    moved: Callable[[dict[str, Any]], Any],
) -> None:
    if event["kind"] == "epoch" and on_epoch is not None:
        on_epoch(Epoch(**event["epoch"]))
    elif event["kind"] == "stage":
        stage(event["name"])
    elif event["kind"] == "note":
        note(event["text"])
    elif event["kind"] == "move":
        moved(event["move"])
