"""Bytes that steps really took at their peak, beside those that their trace has: what torch's own kernels use inside.

A trace does not see what cuDNN, cuBLAS or a reduction takes while it runs, and which of their kernels runs depends on
the sizes: a convolution in float32 was seen to take ten times the memory of the whole step. So peaks are measured where
operators are timed, and what is predicted of other sizes is corrected by them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from typing import Self

from pydantic import Field, model_validator

from nugnn.planning.trace_records import Strict


class MeasuredPeak(Strict):
    """Of one step.

    Args:
        predicted: Bytes that its trace has at most.
        measured: Bytes that torch's allocator gave out.
    """

    predicted: int = Field(gt=0)
    measured: int = Field(ge=0)


class MeasuredPeaks(Strict):
    """Of a model's steps at some sizes on one device: exact at these, straight between two.

    Below the smallest as much is added as there, and above the largest it is in proportion.

    Args:
        points: At least one.

    >>> peaks = MeasuredPeaks.of([(100, 130), (200, 900), (400, 440)])
    >>> [peaks.bytes(predicted) for predicted in (50, 100, 150, 200, 300, 400, 800)]
    [80, 130, 515, 900, 670, 440, 880]
    """

    points: tuple[MeasuredPeak, ...] = Field(min_length=1)

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> MeasuredPeaks:
        """Of predicted and measured bytes; of several steps of which the same was predicted the most counts."""
        most: dict[int, int] = {}
        for predicted, measured in pairs:
            most[predicted] = max(measured, most.get(predicted, 0))
        return cls(points=tuple(MeasuredPeak(predicted=p, measured=m) for p, m in sorted(most.items())))

    @model_validator(mode="after")
    def _grow(self) -> Self:
        if any(b.predicted <= a.predicted for a, b in itertools.pairwise(self.points)):
            raise ValueError("predicted bytes of the points must grow from one to the next")
        return self

    def bytes(self, predicted: int) -> int:
        """Of a step whose trace has ``predicted`` bytes at most."""
        first, last = self.points[0], self.points[-1]
        if predicted <= first.predicted:
            return max(first.measured - (first.predicted - predicted), 0)
        if predicted >= last.predicted:
            return round(last.measured * predicted / last.predicted)
        right = bisect.bisect_right([p.predicted for p in self.points], predicted)
        below, above = self.points[right - 1], self.points[right]
        share = (predicted - below.predicted) / (above.predicted - below.predicted)
        return round(below.measured + share * (above.measured - below.measured))
