"""Where `nugnn.fit` meets plans: asked for, prepared, told and kept; nothing of them is loaded where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from nugnn.limited import Limits, checked_limits
from nugnn.planning.limits import DeviceLimits
from nugnn.task import Task

if TYPE_CHECKING:
    from nugnn.checkpointer import CheckpointPlan
    from nugnn.fit_result import FitResult
    from nugnn.plan_request import PlanRequest
    from nugnn.planned import Planned
    from nugnn.planning.cluster import Cluster
    from nugnn.planning.plan import Plan

Say = Callable[[str], Any]
PLAN_FILE = "plan.json"
"""In the folder of a run, of its checkpoints, or of a cache."""


def request_of(
    shares: Sequence[float] | str | None,
    plan: Plan | Path | str | None,
    cluster: Cluster | Path | str | None,
    workers: int,
    device: str,
    limits: Limits | None,
    stage: Say,
    note: Say,
    *,
    is_one_host: bool = True,
) -> tuple[PlanRequest | None, Sequence[float] | None]:
    """What is to be planned, if anything; and shares as numbers where nothing is. Arguments are those of `nugnn.fit`.

    Raises:
        ValueError: Two of them say different things; a file is none, or is of another number of workers.
    """
    if plan is None and cluster is None and (not isinstance(shares, str) or shares == "even"):
        return None, None if isinstance(shares, str) else shares
    from nugnn.plan_request import plan_request

    request = plan_request(shares, plan, cluster, workers, is_one_host=is_one_host, on_stage=stage, on_note=note)
    if limits is not None:  # of no worker is something else than not said
        request.refuse_other_limits(checked_limits(limits, workers) or (DeviceLimits(),) * workers)
    request.refuse_other_kinds(device)
    return request, None


def use_plan(
    task: Task,
    request: PlanRequest,
    devices: Sequence[torch.device | None],
    limits: Sequence[DeviceLimits] | None,
    stage: Say,
    note: Say,
    resumed: Path | None = None,
    *,
    times_operators: bool = True,
) -> None:
    """Let ``task`` prepare what was asked for.

    Args:
        task: Of the run.
        request: What was asked for.
        devices: Of all workers; None for those of other hosts.
        limits: What each may use.
        stage: Called with what is done next.
        note: Gets sentences for the user.
        resumed: Folder of the checkpoints of a run that goes on, where its plan was kept.
        times_operators: Whether processes may be started that time the model's operators on the devices.

    Raises:
        ValueError: The plan is of something else, or the model cannot be foreseen.
    """
    from nugnn.plan_training import TrainingPlan

    kept = None if resumed is None else Path(resumed) / PLAN_FILE
    is_kept = kept is not None and kept.is_file()
    stage("plan_read" if request.plan is not None else "plan_resumed" if is_kept else "plan")
    task.use_plan(
        TrainingPlan(
            request=request,
            devices=devices,
            cluster=None if request.plan is not None else request.cluster_for(devices, limits, stage, note),
            limits=limits,
            times_operators=times_operators and request.cluster is None,
            on_stage=stage,
            kept=kept,
            on_note=note,
        )
    )


def expect_plan(task: Task, request: PlanRequest) -> None:
    """Let ``task`` take over what another rank has planned."""
    from nugnn.plan_training import TrainingPlan

    task.plan = TrainingPlan(request=request, devices=(), cluster=None)


def tell_of_plan(task: Task, checkpoint_folder: Path | None, on_plan: Callable[[Planned], Any] | None) -> None:
    """The plan, now that it is made, for a resumed run and for whoever wants it."""
    if task.plan is None or task.plan.planned is None:
        return
    from nugnn.held_run import with_calibration

    task.plan.planned = with_calibration(task.plan.planned, task.plan.on_note)
    if checkpoint_folder is not None:
        task.plan.keep(Path(checkpoint_folder))
    if on_plan is not None:
        on_plan(task.plan.planned)


def held_against_plan(task: Task, result: FitResult, checkpoints: CheckpointPlan | None) -> FitResult:
    """The result of a run with its plan, where there was one, and with what came of that; kept for later plans."""
    if task.plan is None or task.plan.planned is None:
        return result
    from nugnn.held_run import held_run
    from nugnn.plan_settings import settings_of

    plan, epochs, has_moved = task.plan.planned.plan, len(result.history), bool(result.moves)
    is_resumed = checkpoints is not None and checkpoints.resume_from is not None
    how = (plan, settings_of(cast(Any, task.options), task.model), result.rank_reports)
    held = held_run(*how, epochs=epochs, has_moved=has_moved, is_resumed=is_resumed)
    return replace(result, plan=plan, held=held)
