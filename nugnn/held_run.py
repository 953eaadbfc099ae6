"""Plans and measured runs held against each other: what a kind of prediction is worth, and one run more of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from nugnn.kept_pairs import keep_pair, kept_pairs, num_of_other_versions
from nugnn.plan_settings import other_settings
from nugnn.planned import Planned
from nugnn.planning.calibration import Calibration, calibrated
from nugnn.planning.in_use import CoreUse, said_of_others
from nugnn.planning.plan import Plain, Plan
from nugnn.planning.run_pairs import (
    LEAST_SECONDS,
    MOST_SECONDS,
    SCHEMA,
    RankPair,
    RunPair,
    device_text,
    kind_of,
    subject_of,
)
from nugnn.worker_environment import num_cores

LEAST_EPOCHS = 3
"""The first one compiles and fills caches; a median of two others is the least."""
_OTHER_THAN_PREDICTED: dict[str, Any] = {"halo_mode": "exact", "grad_sync": "fp32", "micro_batches": 1}
"""Settings that are predicted as if they had these values."""


@dataclass(frozen=True, kw_only=True)
class HeldRun:
    """A planned run beside what was predicted of it.

    Args:
        predicted_seconds: Of an epoch, as the plan's step says.
        told_seconds: The same as it was told: with the factor of earlier runs where that was applied.
        measured_seconds: Of an epoch of the slowest rank, in the median.
        calibration: Of all runs of this kind so far, this one included if it was kept; None where the plan does not say
            what it stands on.
        not_kept: Why it says nothing of later predictions; None where it was kept.
    """

    predicted_seconds: float
    told_seconds: float
    measured_seconds: float
    calibration: Calibration | None
    not_kept: str | None

    @property
    def error(self) -> float:
        """Told over measured seconds, less 1."""
        return self.told_seconds / self.measured_seconds - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain types."""
        plain = asdict(self) | {"error": self.error}
        return plain | {"calibration": None if self.calibration is None else self.calibration.model_dump()}


def with_calibration(planned: Planned, on_note: Callable[[str], Any] = lambda _: None) -> Planned:
    """A plan that says how far predictions of its kind have been off on its devices.

    Args:
        planned: With or without what it said when it was made.
        on_note: Gets a sentence where kept files had to be ignored.
    """
    plan = planned.plan
    return replace(planned, plan=plan.model_copy(update={"calibration": calibration_of(plan, on_note)}))


def calibration_of(plan: Plan, on_note: Callable[[str], Any] = lambda _: None) -> Calibration | None:
    """What kept runs say of a plan's prediction; None where it does not say what it stands on."""
    kind = kind_of(plan)
    if kind is None:
        return None
    kept = kept_pairs(kind)
    if kept.note:
        on_note(kept.note)
    return calibrated(kept.pairs, kind.stands_on, subject_of(plan), num_of_other_versions(kind))


def held_run(
    plan: Plan,
    settings: Mapping[str, Plain],
    reports: Sequence[dict[str, Any]],
    *,
    epochs: int,
    has_moved: bool,
    is_resumed: bool = False,
) -> HeldRun:
    """Hold a run against its plan, and keep it for later plans if it is what was planned.

    Args:
        plan: Of the run, as it was told.
        settings: Of the run, see `nugnn.plan_settings.settings_of`.
        reports: Of the ranks, see `nugnn.fit_result.FitResult`.
        epochs: That were trained.
        has_moved: Whether nodes moved between workers.
        is_resumed: Whether it went on from a checkpoint, whose epochs may have been kept before.
    """
    measured = max(report["epoch_seconds"] for report in reports)
    why_not = "it went on from a checkpoint" if is_resumed else None
    why_not = why_not or _why_not_kept(plan, settings, reports, measured, epochs, has_moved=has_moved)
    if why_not is None:
        pair = _pair(plan, reports, measured, epochs)
        try:
            keep_pair(pair)
        except OSError as error:
            why_not = f"the cache folder cannot be written ({error.strerror or error})"
    return HeldRun(
        predicted_seconds=plan.epoch_seconds,
        told_seconds=plan.corrected().epoch_seconds,
        measured_seconds=measured,
        calibration=calibration_of(plan),
        not_kept=why_not,
    )


def _why_not_kept(
    plan: Plan,
    settings: Mapping[str, Plain],
    reports: Sequence[dict[str, Any]],
    measured: float,
    epochs: int,
    *,
    has_moved: bool,
) -> str | None:
    """None where measured and predicted seconds are of the same thing."""
    if plan.stands_on is None:
        return "the plan does not say what its times stand on"
    if epochs < LEAST_EPOCHS:
        return f"it had fewer than {LEAST_EPOCHS} epochs, of which the first compiles"
    if has_moved:
        return "nodes moved between workers"
    if not all(LEAST_SECONDS <= seconds <= MOST_SECONDS for seconds in (plan.epoch_seconds, measured)):
        return f"an epoch of {plan.epoch_seconds:g} s, or of {measured:g} s, is none"
    if plan.versions.get("torch") != str(torch.__version__):
        return "it was planned with another version of torch"
    if said := other_settings(plan.settings, settings):
        return f"it was planned for {said}"
    if (others := _said_of_others(plan, reports)) is not None:
        return others
    if plan.settings.get("activations") == "offload":
        return "it is predicted as if activations were keep"
    approximate = {name: value for name, value in plan.settings.items() if name in _OTHER_THAN_PREDICTED}
    if len(plan.devices) == 1:
        approximate = {name: value for name, value in approximate.items() if name == "micro_batches"}
    elif plan.settings.get("halo_wire") == "auto":
        return "it is predicted as if halo_wire were fp32"
    for name, value in approximate.items():
        if value != _OTHER_THAN_PREDICTED[name]:
            return f"it is predicted as if {name} were {_OTHER_THAN_PREDICTED[name]}"
    return None


def _said_of_others(plan: Plan, reports: Sequence[dict[str, Any]]) -> str | None:
    """That others had the workers' cores, in words; None where they did not, or nobody can tell."""
    if len({device.host for device in plan.devices}) > 1:  # of others nobody knows the cores
        return None
    threads = [device.multiprocessors if device.kind == "cpu" else 0 for device in plan.devices]
    waits = [report.get("core_wait") for report in reports]
    uses = [CoreUse.from_plain(report.get("core_use")) for report in reports]
    return said_of_others(waits, uses, threads, num_cores())


def _pair(plan: Plan, reports: Sequence[dict[str, Any]], measured: float, epochs: int) -> RunPair:
    kind, ranks = kind_of(plan), []
    assert kind is not None
    for device, report in zip(plan.devices, reports, strict=True):
        compute, exchanges = plan.compute_and_exchanges(device)
        ranks.append(
            RankPair(
                device=device_text(device),
                predicted_compute_seconds=compute,
                measured_compute_seconds=max(report["compute_seconds"], 0.0),
                predicted_exchange_seconds=exchanges,
                measured_exchange_seconds=report["halo_seconds"] + report["sync_seconds"],
            )
        )
    return RunPair(
        schema=SCHEMA,
        kind=kind,
        subject=subject_of(plan),
        name=f"{plan.model_text} on {plan.data.name}",
        predicted_seconds=plan.epoch_seconds,
        measured_seconds=measured,
        epochs=epochs,
        ranks=tuple(ranks),
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
