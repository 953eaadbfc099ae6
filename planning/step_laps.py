"""From the laps of timed steps to seconds of a trace's records."""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nugnn.planning.operator_costs import bytes_of
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
        host_seconds: The host's part of ``seconds``, until it could have gone on.
        after_no_rest: As ``seconds``, of steps right after another one of the same trainer; ``seconds`` may be of steps
            that follow those of others.
        after_short_rest: Of steps before which the device stood still for `nugnn.planning.after_rest.SHORT_REST`.
        after_long_rest: Likewise.
    """

    names: tuple[str, ...]
    laps: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]
    host_seconds: tuple[float, ...]
    after_no_rest: tuple[float, ...] = ()
    after_short_rest: tuple[float, ...] = ()
    after_long_rest: tuple[float, ...] = ()

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
