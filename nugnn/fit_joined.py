"""`nugnn.fit` and ``nugnn train`` for processes that ``torchrun`` started and that have joined."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nugnn._counted import counted
from nugnn.checkpointer import CheckpointPlan
from nugnn.comm.groups import Ranks, gather_texts, join_ranks
from nugnn.devices import devices_of, own_device
from nugnn.failure import named
from nugnn.fit_plan import expect_plan, held_against_plan, request_of, tell_of_plan, use_plan
from nugnn.fit_result import FitResult, result_of
from nugnn.limited import apply_limits, check_on_devices, checked_limits, cores_of, said_of
from nugnn.planning.limits import DeviceLimits
from nugnn.resume import from_where, raise_if_interrupted
from nugnn.task import OF_ONE_FAMILY, Task, task_of
from nugnn.train_rank import train_rank
from nugnn.worker_cores import (
    ASKED_THREADS,
    fair_threads,
    give_up_cores,
    given_cores,
    own_cores,
    stay_on_given_cores,
    users_environment,
)

if TYPE_CHECKING:
    from nugnn.plan_request import PlanRequest

_COLLECTIVE_SECONDS = 7 * 24 * 3600.0
"""The processes' own watch judges; see `nugnn.torchrun`."""
_CHECKPOINTING = (
    *("checkpoint_folder", "checkpoint_every", "checkpoint_steps", "resume", "settings", "on_begin", "on_note"),
)


def fit_joined(model: Any, data: Any, ranks: Ranks, **options: Any) -> FitResult | None:
    """`nugnn.fit.fit` for processes that have joined already; every one calls it with the same model and data.

    Args:
        model: As for `fit`.
        data: As for `fit`; the same on every rank.
        ranks: From `joined`.
        **options: As for `fit`; ``workers``, ``timeout`` and ``log_folder`` are for the process that starts others and
            are not used; for a graph ``cache_folder`` has to be None. Checkpoints need a folder that
            all processes share; where they do not, none is written, and asking for some is an error.

    Returns:
        The result on rank 0, None elsewhere.

    Raises:
        ValueError: Options or data do not fit.
    """
    chosen, asked_limits = options.pop("device", "auto"), options.pop("limits", None)
    on_note = options.get("on_note") or print
    hosts = ranks.hosts or (0,) * ranks.world_size
    here = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
    request, shares = request_of(
        options.pop("shares", None),
        options.pop("plan", None),
        options.pop("cluster", None),
        ranks.world_size,
        chosen,
        asked_limits,
        lambda _: None,
        on_note if ranks.rank == 0 else lambda _: None,
        is_one_host=False,
    )
    limited = checked_limits(asked_limits if request is None else request.limits or asked_limits, ranks.world_size)
    local = [] if request is None and limited is None else _devices_here(request, chosen, here, len(set(hosts)))
    device = local[here.index(ranks.rank)] if request is not None else own_device(chosen)
    limits = None if limited is None else _limit_here(limited, ranks, here, local, device)
    if device != ranks.device:
        ranks = join_ranks(_COLLECTIVE_SECONDS, ranks.pulse, device)
    on_epoch, on_stage = options.pop("on_epoch", None), options.pop("on_stage", None)
    stage = on_stage if on_stage is not None and ranks.rank == 0 else lambda _: None
    on_rebalance = options.pop("on_rebalance", None)
    checkpointing = {name: options.pop(name, None) for name in _CHECKPOINTING}
    for name in ("workers", "timeout", "log_folder"):
        options.pop(name, None)
    on_plan = options.pop("on_plan", None)
    given = {name: options.pop(name, default) for name, default in OF_ONE_FAMILY.items()}
    task = task_of(model, data, workers=ranks.world_size, shares=shares, given=given, options=options)
    plan = _checkpoints(task, ranks, checkpointing)
    if request is not None:
        world = [local[here.index(rank)] if rank in here else None for rank in range(ranks.world_size)]
        resumed = checkpointing["checkpoint_folder"] if checkpointing["resume"] else None
        how = (world, limited, stage, on_note, resumed)
        _plan_together(task, ranks, lambda: use_plan(task, request, *how, times_operators=False))
        if ranks.rank != 0:
            expect_plan(task, request)
    is_limited = limited is not None and any(limited[rank].threads is not None for rank in here)
    _stay_apart(ranks, here, device, is_limited=is_limited)  # not before: a plan is made for all cores of the host
    if ranks.rank == 0 and checkpointing["on_note"] is not None:
        for text in task.said:
            checkpointing["on_note"](text)
    part, notes = task.joined(ranks, stage)
    if ranks.rank == 0:
        tell_of_plan(task, None if plan is None else plan.folder, on_plan)
    stage("train")
    outcome = train_rank(
        part,
        ranks,
        copy.deepcopy(model),
        task.options,
        on_epoch if ranks.rank == 0 else None,
        checkpoints=plan,
        on_note=checkpointing["on_note"] if ranks.rank == 0 else None,
        limits=limits,
        on_rebalance=on_rebalance if ranks.rank == 0 else None,
    )
    raise_if_interrupted(outcome, task.options, plan)
    reports = [json.loads(text) for text in gather_texts(ranks, json.dumps(outcome["report"]))]
    if ranks.rank != 0:
        return None
    said = [*notes, *said_of(limited, reports)]
    others = [{"report": report} for report in reports[1:]]
    return held_against_plan(task, result_of(model, [outcome, *others], said), plan)


def _devices_here(request: PlanRequest | None, chosen: str, here: Sequence[int], num_hosts: int) -> list[torch.device]:
    """Of the ranks of this host."""
    if request is None or request.known_devices is None:
        if request is not None and num_hosts > 1:
            raise ValueError(
                f"shares {request.shares_by} over {counted(num_hosts, 'host')}: what the others have is not "
                f"known here; describe "
                "them in a file and give it with --cluster, or a plan of nugnn plan with --plan"
            )
        return devices_of(chosen, len(here))[0]
    from nugnn.plan_request import found_here

    return found_here([request.known_devices[rank] for rank in here])


def _plan_together(task: Task, ranks: Ranks, use: Callable[[], None]) -> None:
    """Let rank 0 prepare the plan; a collective call."""
    is_done = torch.zeros(1, dtype=torch.int64)
    try:
        if ranks.rank == 0:
            use()
            is_done += 1
    finally:
        ranks.broadcast_(is_done)  # also after a failure: the others wait for it
    if not is_done.item():
        raise RuntimeError("worker 0 could not plan; it says why")


def _limit_here(
    limits: Sequence[DeviceLimits],
    ranks: Ranks,
    here: Sequence[int],
    devices: Sequence[torch.device],
    device: torch.device,
) -> dict[str, Any]:
    """Put this rank's limits in force; what holds from now on."""
    of_host = [limits[rank] for rank in here]
    check_on_devices(of_host, devices)
    if (placed := cores_of(of_host)) is not None:
        own, asked = placed[here.index(ranks.rank)], users_environment(os.environ).get("OMP_NUM_THREADS")
        give_up_cores()
        os.environ |= own.environment(asked)  # for what is not loaded yet
        if not own.is_limited and asked is None:
            torch.set_num_threads(own.threads)
    return apply_limits(limits[ranks.rank], device)


def _stay_apart(ranks: Ranks, here: Sequence[int], device: torch.device, *, is_limited: bool) -> None:
    """Tie this process to the cores that its environment gives it, unless processes of its host would share some.

    They would where several torchruns have each divided all cores: then each has no more threads than all processes of
    the host leave it, unless its user has said how many. Without limits only processes that compute on the CPU, as all
    of their host do, have cores of their own. A collective call.
    """
    texts = gather_texts(ranks, json.dumps([device.type, given_cores()]))
    kinds, cores = zip(*(json.loads(texts[rank]) for rank in here), strict=True)
    held = [core for own in cores for core in own or ()]
    if all(cores) and len(set(held)) == len(held) and (is_limited or set(kinds) == {"cpu"}):
        stay_on_given_cores()
        return
    give_up_cores()
    is_divided = os.environ.get(ASKED_THREADS) == ""  # by `nugnn.torchrun_cores`, not by the user
    fair = fair_threads(len(here), len(own_cores()))[here.index(ranks.rank)]
    if is_divided and not is_limited and fair < torch.get_num_threads():
        os.environ["OMP_NUM_THREADS"] = str(fair)
        torch.set_num_threads(fair)


def _checkpoints(task: Task, ranks: Ranks, given: dict[str, Any]) -> CheckpointPlan | None:
    """Where every process writes its checkpoints and which one to go on from, as rank 0 decides; a collective call."""
    begin = given["on_begin"] or (lambda _: None)
    folder = given["checkpoint_folder"]
    if folder is None:
        begin([])
        return None
    folder = Path(folder).resolve()
    mark = ""
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".shared-", dir=folder)
        os.close(descriptor)
        mark = Path(path).name
    mark = gather_texts(ranks, mark)[0]
    seen = [answer == "yes" for answer in gather_texts(ranks, "yes" if (folder / mark).exists() else "no")]
    if ranks.rank == 0:
        (folder / mark).unlink()
    if not all(seen):
        blind = named([rank for rank, sees in enumerate(seen) if not sees])
        if given["resume"] or given["checkpoint_every"] is not None or given["checkpoint_steps"] is not None:
            raise ValueError(f"{folder} is not shared: {blind} cannot see it; name one with --out that all hosts share")
        if ranks.rank == 0:
            (given["on_note"] or print)(f"no checkpoints: {folder} is not shared, {blind} cannot see it")
            begin([])
        return None
    plan = CheckpointPlan(
        folder=folder,
        every=given["checkpoint_every"],
        every_steps=given["checkpoint_steps"],
        identity=task.identity(given["settings"] or {}),
    )
    chosen = ""
    if ranks.rank == 0:
        plan, before = from_where(plan, task.options, bool(given["resume"]), given["on_note"] or print)
        begin(before)
        chosen = "" if plan.resume_from is None else plan.resume_from.name
    chosen = gather_texts(ranks, chosen)[0]
    return replace(plan, resume_from=folder / chosen if chosen else None)
