"""A plan as tables of at most 80 columns: devices, shares by one number beside, and the step of each rank."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from nugnn._counted import counted
from nugnn.planned import Planned
from nugnn.planning.calibration import SOURCES, Calibration, error_text, in_words
from nugnn.planning.in_words import seconds_text, short_device
from nugnn.planning.plan import Plan, PlannedDevice, SecondsKind
from nugnn.planning.timeline import Timeline, picture
from nugnn.screen import say, show_table

_MOST_ROWS = 16
"""Devices that have a row each; of more, those that are alike share one."""
_LEAST_SHARE = 1e-4
"""That is told: a device that is to hold a node of millions leaves the column as narrow as it is."""
_MOST_PICTURED = 8
_LABEL = 17
"""Columns of lines on a device's limits, and of the longest names: see `nugnn.planning.in_words.short_device`."""
SIMULATED = "simulated: by data sheets, never held against a run on them"


def show_plan(planned: Planned, console: Console) -> None:
    """Print the tables, the picture, and how far such predictions have been off."""
    planned = planned.corrected()
    plan = planned.plan
    show_table(console, devices_table(plan, min(80, console.width)))
    show_table(console, baselines_table(plan))
    if planned.forecast.timeline is not None:
        shown, ranks = _pictured(plan, planned.forecast.timeline)
        console.print(picture(shown, width=min(80, console.width), numbers=ranks), markup=False, highlight=False)
    if plan.calibration is not None:
        say(console, f"predictions: {in_words(plan.calibration)}")


def _pictured(plan: Plan, timeline: Timeline) -> tuple[Timeline, list[int]]:
    """All ranks, or of many that one of each kind of device that is busy longest; and their numbers."""
    if len(plan.devices) <= _MOST_PICTURED:
        return timeline, list(range(len(plan.devices)))
    longest: dict[str, int] = {}
    for rank, device in enumerate(plan.devices):
        other = longest.setdefault(_limited(device), rank)
        if device.busy_seconds > plan.devices[other].busy_seconds:
            longest[_limited(device)] = rank
    ranks = sorted(longest.values(), key=lambda rank: -plan.devices[rank].busy_seconds)[:_MOST_PICTURED]
    of_each = (timeline.names, timeline.events, timeline.ends)
    return Timeline(*(tuple(each[rank] for rank in ranks) for each in of_each)), ranks  # type: ignore[arg-type]


def devices_table(plan: Plan, width: int = 80) -> Table:
    """What each device gets, and what is expected of it; without its least columns where ``width`` is too little."""
    step = "epoch" if plan.family == "graph" else "step"
    title = f"{plan.data.name}: {seconds_text(plan.step_seconds)} an {step}, predicted"
    if plan.family == "samples":
        title = f"{plan.data.name}: {seconds_text(plan.step_seconds)} a step, predicted; an epoch of "
        title += f"{counted(plan.steps_per_epoch, 'step')} {seconds_text(plan.epoch_seconds)}"
    if said := _corrected(plan):
        title += f"\n({said})"
    if plan.is_simulated:
        title += f"\n({SIMULATED if plan.calibration is None or not plan.calibration.runs else 'by data sheets'})"
    unit, size = _unit(plan.step_seconds)
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    counts = ["nodes", "edges", "halo"] if plan.family == "graph" else ["batch"]
    names = ["share", *counts, f"{unit}: work", "halo", "sync", "wait", "GiB of"]
    rows = [(which, _label(devices[0]), _cells(plan, devices, size)) for which, devices in _rows(plan)]
    whose = "rank" if len(rows) == len(plan.devices) else ""
    table.add_column(whose, justify="right", no_wrap=True)
    table.add_column("device", no_wrap=True)
    lines = [names, *(cells for _, _, cells in rows)]
    widths = [1 + max(len(line[column]) for line in lines) for column in range(len(names))]
    which_width = 1 + max(len(each) for each in [whose, *(which for which, _, _ in rows)])
    label_width = 1 + max(len(line) for _, label, _ in rows for line in ["device", *label.split("\n")])
    kept = _columns_within(width - which_width - label_width, widths, len(counts))
    for column in kept:
        table.add_column(names[column], justify="right", no_wrap=True)
    for which, label, cells in rows:
        table.add_row(which, label, *(cells[column] for column in kept))
    if len(kept) < len(names):
        table.caption = f"{counted(len(names) - len(kept), 'column')} more where the terminal is wider; --json has all"
    return table


def _columns_within(width: int, widths: Sequence[int], num_counts: int) -> list[int]:
    """Whole columns are left out, never parts of numbers: what a plan is least about first."""
    work = 1 + num_counts
    kept = list(range(len(widths)))
    least_first = [*range(num_counts, 1, -1), work + 2, work + 1, work + 3, 1, work + 4, work]
    for column in least_first:
        if sum(widths[each] for each in kept) <= width:
            break
        kept.remove(column)
    return kept


def _unit(seconds: float) -> tuple[str, float]:
    """In which all times of a table are shown."""
    return next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("us", 1e-6))


def _rows(plan: Plan) -> list[tuple[str, list[PlannedDevice]]]:
    """A row for each device by its rank, or for those of a host or cluster that are alike where there are many."""
    if len(plan.devices) <= _MOST_ROWS:
        return [(str(rank), [device]) for rank, device in enumerate(plan.devices)]
    groups: dict[str, list[PlannedDevice]] = {}
    for device in plan.devices:
        groups.setdefault(_limited(device), []).append(device)
    return [(f"{len(devices)} x", devices) for devices in groups.values()]


def _label(device: PlannedDevice) -> str:
    """The device's name, and below it what of it is used: that is where devices of one name differ."""
    limits = device.limits
    given = (("sms", limits.sms), ("memory", limits.memory_fraction), ("threads", limits.threads))
    said = ", ".join(f"{name} {value:g}" for name, value in given if value is not None)
    indented = textwrap.wrap(said, _LABEL, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([short_device(device.name), *indented])


def _limited(device: PlannedDevice) -> str:
    return device.name + ("" if device.limits.is_none else f" {device.limits}")


def _cells(plan: Plan, devices: Sequence[PlannedDevice], unit: float) -> list[str]:
    """Of one device, or of some that are alike: what they have in the median, the most that one takes."""

    def middle(of: Any) -> float:
        return statistics.median(of(device) for device in devices)

    slowest = max(devices, key=lambda device: device.busy_seconds)
    share = middle(lambda d: d.share)
    cells = [f"{100 * share:.3g}%" if share >= _LEAST_SHARE else f"<{100 * _LEAST_SHARE:g}%"]
    names = ("inner", "edges", "halo") if plan.family == "graph" else ("batch",)
    cells += [count_text(middle(lambda d, name=name: getattr(d.sizes, name))) for name in names]
    kinds: tuple[SecondsKind, ...] = ("compute", "halo", "sync", "wait")
    cells += [_short(slowest.seconds.get(kind, 0.0) / unit) for kind in kinds]
    fullest = max(devices, key=lambda device: device.memory_bytes / device.memory_limit_bytes)
    return [*cells, f"{fullest.memory_bytes / 2**30:.2g}/{fullest.memory_limit_bytes / 2**30:.3g}"]


def _short(value: float) -> str:
    """At most three digits, hundredths at the smallest."""
    if value < 0.005:
        return "0"
    return f"{value:.2f}" if value < 1 else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def baselines_table(plan: Plan) -> Table:
    """Shares by one number of each device's specification, and what the plan gains over them."""
    table = Table(title="beside shares by one number", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("shares")
    for name in ("predicted", "plan is", "memory"):
        table.add_column(name, justify="right")
    words = {"even": "even", "flops": "by FLOP/s", "bandwidth": "by bandwidth"}
    for baseline in plan.baselines:
        gain = baseline.step_seconds / plan.step_seconds if plan.step_seconds else 1.0
        beside = "(ideal parts)" if baseline.is_ideal else f"{gain:.2f} x as fast"
        fits = "fits" if baseline.fits else "does not fit"
        table.add_row(words[baseline.name], seconds_text(baseline.step_seconds), beside, fits)
    if any(baseline.is_ideal for baseline in plan.baselines):
        table.caption = "ideal parts: not cut, of exactly these shares"
        table.caption_justify = "left"
    return table


def _corrected(plan: Plan) -> str:
    """That its times have a factor, and how far such times have been off."""
    found = plan.calibration
    if found is None or not found.is_applied or found.told_error is None:
        return ""
    return f"times {found.factor:.3g} x, as measured runs say; off by {error_text(found.told_error)} in the mean"


def compared_table(plan: Plan, reports: Sequence[dict[str, Any]]) -> Table:
    """After a run: what was predicted beside what was measured, of each worker's epoch.

    Args:
        plan: What was expected.
        reports: Of the ranks, see `nugnn.fit_result.FitResult`.
    """
    plan = plan.corrected()
    title = "an epoch, predicted and measured"
    if plan.stands_on is not None:
        title += f" (predicted from {SOURCES[plan.stands_on]})"
    if said := _corrected(plan):
        title += f"\n({said})"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("worker")
    for name in ("epoch", "measured", "compute", "measured", "exchanges", "measured"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, (device, report) in enumerate(zip(plan.devices, reports, strict=True)):
        compute, exchanges = plan.compute_and_exchanges(device)
        measured = report["halo_seconds"] + report["sync_seconds"]
        pairs = (
            (plan.epoch_seconds, report["epoch_seconds"]),
            (compute, report["compute_seconds"]),
            (exchanges, measured),
        )
        table.add_row(str(rank), *(seconds_text(value) for pair in pairs for value in pair))
    return table


def held_lines(prediction: Mapping[str, Any]) -> list[str]:
    """How far this run was off, and how far such plans have been off so far.

    Args:
        prediction: Of ``result.json``, see `nugnn.held_run.HeldRun.to_dict`.
    """
    told, measured = seconds_text(prediction["told_seconds"]), seconds_text(prediction["measured_seconds"])
    found = prediction["calibration"]
    source = "" if found is None else f" from {SOURCES[found['stands_on']]}"
    lines = [f"this run: an epoch was predicted as {told}{source} and took {measured}, {_off(prediction['error'])}"]
    if prediction["not_kept"] is not None:
        lines[0] += f"; not kept for later plans, since {prediction['not_kept']}"
    if found is not None:
        so_far = Calibration.model_validate(found)
        lines.append(f"predictions so far: {in_words(so_far, 'times of later plans have the factor')}")
    return lines


def _off(error: float) -> str:
    """How measured seconds are beside told ones, whose error is told over measured, less 1.

    >>> _off(0.04), _off(-0.2), _off(11.2)
    ('3.8 % less', '25 % more', '0.082 x as long')
    """
    ratio = 1 / (1 + error)
    if not 0.5 <= ratio <= 2:
        return f"{ratio:.2g} x as long"
    return f"{error_text(abs(ratio - 1))} {'more' if ratio > 1 else 'less'}"


def count_text(count: float) -> str:
    """With three digits.

    >>> count_text(999), count_text(1234), count_text(1_615_685_872)
    ('999', '1.23k', '1.62G')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"
