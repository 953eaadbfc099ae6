"""Bytes that steps really took at their peak, beside those that their trace has: what torch's own kernels use inside.

A trace does not see what cuDNN, cuBLAS or a reduction takes while it runs, and which of their kernels runs depends on
the sizes: a convolution in float32 was seen to take ten times the memory of the whole step. So peaks are measured where
operators are timed, and what is predicted of other sizes is corrected by them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from pydantic import ConfigDict, Field

from nugnn.planning.time_curves import Curve
from nugnn.planning.trace_records import Strict


class MeasuredPeak(Strict):
    """Of one step.

    Args:
        predicted: Bytes that its trace has at most.
        measured: Bytes that torch's allocator gave out.
    """

    predicted: int = Field(ge=0)
    measured: int = Field(ge=0)


class MeasuredPeaks(Strict):
    """Of a model's steps at some sizes on one device.

    Args:
        points: At least one.

    >>> peaks = MeasuredPeaks.of([(100, 130), (200, 260)])
    >>> [peaks.bytes(predicted) for predicted in (100, 150, 200, 400)]
    [130, 195, 260, 520]
    """

    model_config = ConfigDict(ignored_types=(cached_property,))

    points: tuple[MeasuredPeak, ...] = Field(min_length=1)

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> MeasuredPeaks:
        """Of predicted and measured bytes."""
        return cls(points=tuple(MeasuredPeak(predicted=p, measured=m) for p, m in pairs))

    def bytes(self, predicted: int) -> int:
        """Of a step whose trace has ``predicted`` bytes at most."""
        return round(self._curve(predicted))

    @cached_property
    def _curve(self) -> Curve:
        return Curve([(p.predicted, p.measured) for p in self.points])
