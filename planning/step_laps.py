"""From the laps of timed steps to seconds of a trace's records, and to a table."""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nugnn.planning import device_facts
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.operator_costs import bytes_of
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.time_curves import Amount
from nugnn.planning.timed_operators import amount_of, joined_operators, operators_at
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import TraceError

_LEAST_ALIKE = 0.8
"""Of the operators of two steps; with fewer they are steps of different models."""


@dataclass(frozen=True)
class StepLaps:
    """What the steps of a trainer took, timed as a whole and operator by operator.

    Args:
        names: Of the operators, as in `OperatorRecord.op`.
        laps: Seconds of each in each timed step: ``(steps, operators)``.
        seconds: Of whole steps that nobody timed inside, from the first operator until the device is done; of several
            steps one after the other, the mean.
        watched_seconds: Of the steps that were timed inside.
        host_seconds: The host's part of ``seconds``, until it could have gone on.
    """

    names: tuple[str, ...]
    laps: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]
    watched_seconds: tuple[float, ...]
    host_seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_laps(self) -> list[float]:
        return [statistics.median(laps) for laps in zip(*self.laps, strict=True)]


def watching_seconds(laps: Sequence[float], whole: float) -> float:
    """What it took to time one operator: without it in each lap, these add up to the whole step's seconds.

    >>> round(watching_seconds([0.5, 1.0, 3.0], 2.5), 9)
    0.75
    """
    left = sorted(laps)
    gone = 0.0
    for place, lap in enumerate(left):  # laps as short as that would have taken no time
        each = (sum(left[place:]) - whole) / (len(left) - place)
        if each <= lap:
            return max(each, 0.0)
        gone = lap
    return gone


_MOST_WATCHING = 2.5
"""Times as much as in the shortest step: in large ones Python's own data are no longer in the caches."""


def watching_at(shortest: StepLaps, other: StepLaps) -> float:
    """`watching_seconds` of other steps than the shortest, whose noise is too large to follow from them alone."""
    least = watching_seconds(shortest.median_laps, shortest.median_seconds)
    own = watching_seconds(other.median_laps, other.median_seconds)
    return min(max(own, least), _MOST_WATCHING * least)


def seconds_of_records(
    at: StepTrace, names: Sequence[str], laps: Sequence[float], *, watching: float = 0.0
) -> list[float]:
    """Seconds of each record.

    On a CPU other operators may run at other sizes (`nugnn.kernels.spmm.sums`): where the step differs from the trace,
    its records there share the time of what ran in their place, by the bytes that they move. Metadata has no time of
    its own: the operator that follows gets it.

    Args:
        at: The trace, at the sizes of the step.
        names: Of the operators that were timed.
        laps: Their seconds.
        watching: Taken off each of them; see `watching_seconds`.

    Raises:
        TraceError: The step is another one than the trace's.
    """
    laps = [max(lap - watching, 0.0) for lap in laps]
    ops = [record.op for record in at.operators]
    if list(names) == ops:
        seconds = list(laps)
    else:
        matcher = difflib.SequenceMatcher(None, names, ops, autojunk=False)
        if matcher.ratio() < _LEAST_ALIKE:
            raise TraceError(
                f"the step that was timed has other operators than the trace: {len(names)}, and {len(ops)} in the "
                f"trace, of which {matcher.ratio():.0%} are alike; trace the model as it is trained, on the same device"
            )
        seconds = [0.0] * len(ops)
        for _, begin, end, first, last in matcher.get_opcodes():
            if end - begin == last - first:
                seconds[first:last] = laps[begin:end]
                continue
            first, last = (first, last) if first < last else (max(first - 1, 0), max(first, 1))
            shares = [bytes_of(record, at.storages) + 1 for record in at.operators[first:last]]
            for place, share in zip(range(first, last), shares, strict=True):
                seconds[place] += sum(laps[begin:end]) * share / sum(shares)
    return _without_metadata(at, seconds)


def growth_moved(amounts: Sequence[Sequence[Amount]], seconds: Sequence[list[float]]) -> None:
    """What operators of constant work take longer in larger steps becomes, in place, the time of others.

    Such an operator, as the optimizer, finds its operands no longer in the cache, or what came before it frees memory:
    in a table by work alone this would be nobody's, so the operator before it that grows gets it, or the first.

    Args:
        amounts: Of the records of each step.
        seconds: Likewise.
    """
    num_records = len(seconds[0])
    grows = [len({each[i] for each in amounts}) > 1 for i in range(num_records)]
    if not any(grows):
        return
    to = grows.index(True)
    for i in range(num_records):
        if grows[i]:
            to = i
            continue
        least = min(each[i] for each in seconds)
        for each in seconds:
            each[to] += each[i] - least
            each[i] = least


def _without_metadata(at: StepTrace, seconds: list[float]) -> list[float]:
    carried, last = 0.0, None
    for place, record in enumerate(at.operators):
        if record.kind == "metadata":
            carried, seconds[place] = carried + seconds[place], 0.0
        else:
            seconds[place] += carried
            carried, last = 0.0, place
    if last is not None:
        seconds[last] += carried
    return seconds


_BUSY = 0.9
"""A GPU's step is as long as its operators where the host needs less than this part of it."""


def times_of(
    trace: StepTrace, measured: Sequence[tuple[PartSizes, StepLaps]], device: torch.device, *, limits: str = ""
) -> MeasuredTimes:
    """The table that follows from timed steps.

    The operators of a step add up to what it took as a whole: timing inside it changes how memory comes and goes, and
    with it what operators take on a CPU. On a GPU this holds for steps in which the host is ahead of it.

    Args:
        trace: With formulas.
        measured: Sizes, and what steps there took. What watching takes follows from the shortest step.
        device: On which.
        limits: Of the device, in words.
    """
    shortest = min((laps for _, laps in measured), key=lambda laps: laps.median_seconds)
    is_gpu = trace.device == "cuda"
    host_seconds = min(shortest.host_seconds)
    traces = [trace.at(sizes) for sizes, _ in measured]
    seconds = []
    for at, (_, laps) in zip(traces, measured, strict=True):
        watching = 0.0 if is_gpu else watching_at(shortest, laps)
        taken, whole = seconds_of_records(at, laps.names, laps.median_laps, watching=watching), laps.median_seconds
        if sum(taken) > 0 and (not is_gpu or host_seconds < _BUSY * whole):
            taken = [each * whole / sum(taken) for each in taken]
        seconds.append(taken)
    growth_moved([[amount_of(record, at.storages) for record in at.operators] for at in traces], seconds)
    operators = (each for at, taken in zip(traces, seconds, strict=True) for each in operators_at(trace, at, taken))
    num_launched = sum(record.kind != "metadata" for record in trace.operators)
    return MeasuredTimes(
        schema="nugnn.times/1",
        device=device_facts.device_name(device),
        kind="cuda" if is_gpu else "cpu",
        uuid=device_facts.device_uuid(device),
        limits=limits,
        multiprocessors=device_facts.num_multiprocessors(device),
        launch_seconds=host_seconds / num_launched if is_gpu else 0.0,
        operators=joined_operators(operators),
        versions=device_facts.versions(has_gpu=is_gpu) | trace.versions,
    )
