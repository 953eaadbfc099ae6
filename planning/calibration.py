"""Predicted steps held against measured ones: one factor that brings them together, and the error bar that is left."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.operator_times import OperatorTimes, host_seconds_of_launch
from nugnn.planning.step_program import launches_of_graph
from nugnn.planning.trace import StepTrace


def alone_seconds(trace: StepTrace, times: OperatorTimes, *, is_captured: bool = False) -> float:
    """Seconds of a step on one device that waits for nobody.

    A CPU does one operator after the other. A GPU does, too, while the host puts them into its queue: the slower one of
    the two sets the pace of many steps.

    Args:
        trace: At numbers.
        times: Of its operators.
        is_captured: Whether its passes run as a CUDA graph: one launch, and those of what follows.
    """
    busy = sum(times.seconds(record, trace.storages) for record in trace.operators)
    every_one = sum(record.launches for record in trace.operators if record.kind != "metadata")
    launched = launches_of_graph(trace) if is_captured else every_one
    return max(busy, launched * host_seconds_of_launch(times, is_captured=is_captured))


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was trained.

    Args:
        trace: At the sizes of the step.
        seconds: It took.
        name: For people.
        is_captured: Whether it ran as a CUDA graph.
    """

    trace: StepTrace
    seconds: float
    name: str = ""
    is_captured: bool = False


@dataclass(frozen=True)
class Calibration:
    """A table corrected by measured steps, and how far off it was.

    Args:
        times: The corrected table.
        names: Of the steps.
        measured: Their seconds.
        predicted: Before the correction.
        corrected: Each with the factor that follows from the others; of a single step, its own.
    """

    times: MeasuredTimes
    factor: float
    names: tuple[str, ...]
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    corrected: tuple[float, ...]

    @property
    def errors_before(self) -> tuple[float, ...]:
        """Of each step, predicted / measured - 1, without correction."""
        return tuple(p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True))

    @property
    def errors_after(self) -> tuple[float, ...]:
        """The same with it. One step alone says nothing about others: NaN."""
        if len(self.measured) == 1:
            return (math.nan,)
        return tuple(p / m - 1 for p, m in zip(self.corrected, self.measured, strict=True))

    @property
    def error_bar(self) -> float:
        """Mean absolute error of a prediction with the corrected table, as a share; NaN after a single step."""
        return statistics.fmean(abs(error) for error in self.errors_after)

    def summary(self) -> str:
        """Some lines for people."""
        before = statistics.fmean(abs(error) for error in self.errors_before)
        count = len(self.measured)
        after = (
            f"± {self.error_bar:.1%} in the mean, each step by the factor of the others" if count > 1 else "not known"
        )
        lines = [
            f"{count} measured step{'s' if count > 1 else ''}: factor {self.factor:.3f}; "
            f"error ± {before:.1%} without it, {after}"
        ]
        for name, m, p, error in zip(self.names, self.measured, self.predicted, self.errors_before, strict=True):
            lines.append(f"  {name or 'a step'}: {1e3 * m:.3f} ms measured, {1e3 * p:.3f} ms predicted, {error:+.1%}")
        return "\n".join(lines)


def calibrated(times: MeasuredTimes, steps: Sequence[MeasuredStep]) -> Calibration:
    """``times`` with the factor by which these steps took longer than it says: the median of theirs.

    Args:
        times: Of the device that made the steps.
        steps: At least one.

    Raises:
        ValueError: There is no step, or one that took no time.
    """
    if not steps:
        raise ValueError("there is no measured step to calibrate with; give one at least")
    for step in steps:
        if not (step.seconds > 0 and math.isfinite(step.seconds)):
            raise ValueError(f"the measured step {step.name!r} took {step.seconds} seconds, must be more than 0")
    predicted = [alone_seconds(step.trace, times, is_captured=step.is_captured) for step in steps]
    ratios = [step.seconds / p for step, p in zip(steps, predicted, strict=True)]
    factor = statistics.median(ratios)
    corrected = [p * statistics.median(ratios[:i] + ratios[i + 1 :] or ratios) for i, p in enumerate(predicted)]
    return Calibration(
        times=times.with_factor(factor),
        factor=factor,
        names=tuple(step.name for step in steps),
        measured=tuple(step.seconds for step in steps),
        predicted=tuple(predicted),
        corrected=tuple(corrected),
    )
