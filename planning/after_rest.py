"""What computing takes longer after a rest: caches of a core that stands still are lost, and a step fills them anew.

It is measured on whole steps that follow a short and a long rest, beside steps that follow none, and replayed as a part
of the computing that follows a wait.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from nugnn.planning.step_laps import StepLaps
from nugnn.planning.timed_operators import Quantity
from nugnn.planning.trace_records import Strict

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SHORT_REST, LONG_REST = 3e-3, 20e-3
"""Seconds of the rests that steps are timed after."""
_LEAST_CONSTANT = 1e-4
_LEAST_DEVIATION = 1e-6
"""Of a median, in seconds: clocks and calls take so long."""


class RestedStep(Strict):
    """A step of one size.

    Args:
        seconds: That it takes without a rest.
        most_seconds: That it takes longer after the longest rest than right after another one of the same trainer.
        lost_seconds: Of these, what is in ``seconds`` already, since caches had been others' before.
    """

    seconds: _Positive
    most_seconds: Quantity
    lost_seconds: Quantity = 0.0


class AfterRest(Strict):
    """What steps of a device take longer after a rest, by how long both are.

    After a rest of ``r`` seconds it is the part ``1 - exp(-r / constant_seconds)`` of the most that it can be.

    Args:
        constant_seconds: Of the rest.
        steps: Of some sizes, the shortest first.
    """

    constant_seconds: _Positive
    steps: tuple[RestedStep, ...] = Field(min_length=1)

    def most_and_lost(self, step_seconds: float) -> tuple[float, float]:
        """Of a step that takes ``step_seconds`` without a rest; as the nearest one beyond those that were measured.

        >>> steps = RestedStep(seconds=1, most_seconds=4), RestedStep(seconds=3, most_seconds=2, lost_seconds=1)
        >>> [AfterRest(constant_seconds=1, steps=steps).most_and_lost(x) for x in (0.5, 2.0, 9.0)]
        [(4.0, 0.0), (3.0, 0.5), (2.0, 1.0)]
        """
        seconds, most, lost = np.array([(x.seconds, x.most_seconds, x.lost_seconds) for x in self.steps]).T
        return float(np.interp(step_seconds, seconds, most)), float(np.interp(step_seconds, seconds, lost))


def after_rest_of(measured: Sequence[StepLaps]) -> AfterRest | None:
    """What follows from steps that were timed at some sizes; None where none followed a rest, or none took longer.

    Steps of all sizes lose about as much. What one loses beside the others is shrunk by the share of its square that
    its own variance explains, so that a size whose steps vary more than that counts as the others (James and Stein).

    Args:
        measured: Steps at each size.
    """
    known = [each for each in measured if each.after_no_rest and each.after_short_rest and each.after_long_rest]
    if not known:
        return None
    short, long, already, variances = [], [], [], []
    for each in known:
        none = statistics.median(each.after_no_rest)
        short.append(statistics.median(each.after_short_rest) - none)
        long.append(statistics.median(each.after_long_rest) - none)
        already.append(each.median_seconds - none)
        variances.append(_variance_of_median(each.after_no_rest) + _variance_of_median(each.after_long_rest))
    squares = sum(y * y / variance for y, variance in zip(long, variances, strict=True))
    products = sum(x * y / variance for x, y, variance in zip(short, long, variances, strict=True))
    constant = _constant_of(products / squares if squares else 1.0)
    whole = _part(LONG_REST, constant)
    most = _shrunk(long, variances)
    if most is None:
        return None
    lost = _shrunk(already, variances) or [0.0] * len(known)
    steps = [
        RestedStep(seconds=each.median_seconds, most_seconds=x / whole, lost_seconds=y)
        for each, x, y in zip(known, most, lost, strict=True)
    ]
    return AfterRest(constant_seconds=constant, steps=tuple(sorted(steps, key=lambda each: each.seconds)))


def _shrunk(values: Sequence[float], variances: Sequence[float]) -> list[float] | None:
    """Values of 0 or more, as far as they differ from their mean beyond their noise; None where that is below 0."""
    mean = sum(x / v for x, v in zip(values, variances, strict=True)) / sum(1 / v for v in variances)
    if mean <= 0:
        return None
    off = [x - mean for x in values]
    beyond = [x * max(0.0, 1 - v / x**2) if x else 0.0 for x, v in zip(off, variances, strict=True)]
    return [max(mean + x, 0.0) for x in beyond]


def _variance_of_median(samples: Sequence[float]) -> float:
    """By the spread of the middle half."""
    deviation = 0.0
    if len(samples) >= 4:
        low, _, high = statistics.quantiles(samples, n=4)
        deviation = math.sqrt(math.pi / 2 / len(samples)) * (high - low) / 1.349  # of a normal distribution
    return max(deviation, _LEAST_DEVIATION) ** 2


def _constant_of(ratio: float) -> float:
    """The constant with which a short rest takes ``ratio`` of a long one; not longer than the long rest."""
    low, high = _LEAST_CONSTANT, LONG_REST
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _part(SHORT_REST, middle) > ratio * _part(LONG_REST, middle) else (low, middle)
    return math.sqrt(low * high)


def _part(rest: float, constant: float) -> float:
    return -math.expm1(-rest / constant)


@dataclass(eq=False)
class Rests:
    """Rests of one rank, and what its computing loses to them.

    A step fills its caches once: what it loses in all is what its longest rest takes.

    Args:
        most_seconds: That a step can lose.
        constant_seconds: See `AfterRest`.
        already_lost: What of it the seconds of operators have in them.

    >>> rests = Rests(2.0, 1.0)
    >>> rests.add(1.0)
    >>> lost = [rests.lost(), rests.lost()]
    >>> rests.add(100.0)
    >>> [round(x, 3) for x in (*lost, rests.lost())]
    [1.264, 0.0, 0.736]
    """

    most_seconds: float
    constant_seconds: float
    already_lost: float = 0.0
    _rest: float = 0.0
    _lost: float = 0.0

    def __post_init__(self) -> None:
        self.begin_step()

    @classmethod
    def of_step(cls, after_rest: AfterRest | None, step_seconds: float) -> Rests:
        """Of a rank whose step takes so long without a rest."""
        if after_rest is None:
            return cls(0.0, 1.0)
        most, lost = after_rest.most_and_lost(step_seconds)
        return cls(most, after_rest.constant_seconds, lost)

    def add(self, seconds: float) -> None:
        """The rank waits."""
        self._rest += seconds

    def lost(self) -> float:
        """What computing that begins now takes longer."""
        most = self.most_seconds * _part(self._rest, self.constant_seconds)
        found, self._lost, self._rest = max(most - self._lost, 0.0), max(most, self._lost), 0.0
        return found

    def begin_step(self) -> None:
        """Another step begins, whose caches are lost again."""
        self._lost = self.already_lost
