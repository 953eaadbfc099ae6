"""From steps that were timed inside, at several sizes, to a table of times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from nugnn.planning import device_facts
from nugnn.planning.after_rest import after_rest_of
from nugnn.planning.measured_peaks import MeasuredPeaks
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.step_laps import StepLaps, seconds_of_records, watching_at
from nugnn.planning.step_program import launches_of_graph
from nugnn.planning.time_curves import Amount
from nugnn.planning.timed_operators import amount_of, joined_operators, operators_at
from nugnn.planning.trace import StepTrace

_BUSY = 0.9
"""A GPU's step is as long as its operators where the host needs less than this part of them."""


def whole_over_sum(laps: StepLaps, total: float) -> float:
    """The factor that makes operators add up to their step, as far as it is more than the noise of the two.

    The logarithm of the factor is shrunk by the share of its square that its own variance explains (James and Stein).

    Args:
        laps: Of one place.
        total: What its operators add up to.
    """
    if total <= 0:
        return 1.0
    off = math.log(laps.median_seconds / total)
    noise = _variance_of_median(laps.seconds) + _variance_of_median([sum(each) for each in laps.laps])
    return math.exp(off * max(0.0, 1 - noise / off**2)) if off else 1.0


def _variance_of_median(samples: Sequence[float]) -> float:
    """Of its logarithm, by the spread of the middle half."""
    if len(samples) < 4:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4)
    deviation = math.log(high / low) / 1.349  # of a normal distribution with such quartiles
    return math.pi / 2 * deviation**2 / len(samples)


def times_of(
    trace: StepTrace,
    measured: Sequence[tuple[PartSizes, StepLaps]],
    device: torch.device,
    *,
    limits: str = "",
    captured_seconds: float | None = None,
    peaks: Sequence[int] | None = None,
) -> MeasuredTimes:
    """The table that follows from timed steps.

    The operators of a step add up to what it took as a whole: timing inside it changes how memory comes and goes, and
    with it what operators take on a CPU. On a GPU this holds for steps in which the host is ahead of it: its operators
    alone, and the step, take longer than the host needs. Any other step is as long as its host, whatever there was to
    do for the GPU.

    Args:
        trace: With formulas.
        measured: Sizes, and what steps there took. What watching takes follows from the shortest step.
        device: On which.
        limits: Of the device, in words.
        captured_seconds: Of the host, for a step that runs as a CUDA graph; None where there are none.
        peaks: Bytes that the steps took at most, in the order of ``measured``; None where it was not looked at.
    """
    shortest = min((laps for _, laps in measured), key=lambda laps: laps.median_seconds)
    is_gpu = trace.device == "cuda"
    traces = [trace.at(sizes) for sizes, _ in measured]
    seconds = []
    for at, (_, laps) in zip(traces, measured, strict=True):
        watching = 0.0 if is_gpu else watching_at(shortest, laps)
        taken = seconds_of_records(at, laps.names, laps.median_laps, watching=watching)
        total = sum(taken)
        host_seconds = max(statistics.median(each.host_seconds) for each in (shortest, laps))
        if not is_gpu or host_seconds < _BUSY * min(total, laps.median_seconds):
            factor = whole_over_sum(laps, total)
            taken = [each * factor for each in taken]
        seconds.append(taken)
    growth_moved([[amount_of(record, at.storages) for record in at.operators] for at in traces], seconds)
    operators = (each for at, taken in zip(traces, seconds, strict=True) for each in operators_at(trace, at, taken))
    num_launched = sum(record.launches for record in trace.operators if record.kind != "metadata")
    return MeasuredTimes(
        schema="nugnn.times/1",
        device=device_facts.device_name(device),
        kind="cuda" if is_gpu else "cpu",
        uuid=device_facts.device_uuid(device),
        limits=limits,
        multiprocessors=device_facts.num_multiprocessors(device),
        launch_seconds=min(shortest.host_seconds) / num_launched if is_gpu else 0.0,
        captured_launch_seconds=None if captured_seconds is None else captured_seconds / launches_of_graph(trace),
        after_rest=None if is_gpu else after_rest_of([laps for _, laps in measured]),
        operators=joined_operators(operators),
        peaks=None if peaks is None else MeasuredPeaks.of(zip((at.peak_bytes() for at in traces), peaks, strict=True)),
        versions=device_facts.versions(has_gpu=is_gpu) | trace.versions,
    )


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
