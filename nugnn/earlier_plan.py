"""A plan that was made before: read with its parts, and held against the run that is to use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nugnn.plan_settings import check_memory, other_settings
from nugnn.plan_subject import model_facts
from nugnn.planned import Planned
from nugnn.planning import device_facts
from nugnn.planning.forecast import Forecast
from nugnn.planning.plan import DataFacts, Plain, Plan, PlanError, read_plan
from nugnn.planning.plan_parts import read_parts
from nugnn.planning.trace import StepTrace


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedRun:
    """A run as far as plans are held against it.

    Args:
        facts: Of the data.
        model: To be trained.
        settings: See `nugnn.plan_settings.settings_of`.
        devices: Of the workers; None for those of other hosts.
        trace: Gives its step by kind of device; asked for where a plan was made for other settings.
    """

    facts: DataFacts
    model: nn.Module
    settings: Mapping[str, Plain]
    devices: Sequence[torch.device | None]
    trace: Callable[[], Mapping[str, StepTrace]]


def plan_for(run: PlannedRun, plan: Plan, path: Path | None, on_note: Callable[[str], Any]) -> Planned:
    """The plan, if it is for ``run``; of other options it is said which, and what that means for its memory.

    Args:
        run: That is to use it.
        plan: Of the file ``path``, or given in Python.
        path: None for one without parts.
        on_note: Gets sentences for the user.

    Raises:
        PlanError: It is of something else, or its parts do not fit under this run's options.
    """
    devices = [None if each is None else _Device(each) for each in run.devices]
    plan.check(run.facts, model_facts(run.model), devices)
    found = read_whole(plan, path)
    if not (said := other_settings(plan.settings, run.settings)):
        return found
    note = f"the plan was made for {said}: its shares are used, its seconds and bytes are not those of this run"
    try:
        traces = run.trace()
    except Exception as error:  # whatever a model says to random data
        on_note(f"{note}; whether its parts fit is not known: {error}")
        return found
    check_memory(plan, traces, said, str(run.settings.get("overlap", "off")))
    on_note(note)
    return found


def read_whole(plan: Plan, path: Path | None) -> Planned:
    """A plan that was made before, as if made now; with its cut where it has one and is read from a file."""
    part = None if plan.cut is None or path is None else read_parts(plan, path)
    seconds = tuple(dict(device.seconds) for device in plan.devices)
    return Planned(plan=plan, part=part, forecast=Forecast(step_seconds=plan.step_seconds, seconds=seconds))


def kept_plan(path: Path) -> Planned | None:
    """A plan in the cache, if it is whole."""
    try:
        return read_whole(read_plan(path), path)
    except PlanError:
        return None


class _Device:
    """A device of this machine as plans know it."""

    def __init__(self, device: torch.device) -> None:
        self.kind, self.name, self.uuid = (
            device.type,
            device_facts.device_name(device),
            device_facts.device_uuid(device),
        )
