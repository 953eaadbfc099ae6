"""Whether epochs have become longer since nodes moved, beyond what they differ by anyway.

Source: the median absolute deviation as in Hampel, "The influence curve and its role in robust estimation", JASA 1974.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEAST_WINDOW = 3
"""Epochs of each kind; of fewer, nothing is known of how much they differ."""
_ERRORS = 4.0
"""Standard errors that a difference has to exceed. Of two windows of five epochs with the same normally distributed
seconds the second one does so in 0.4 % of cases."""
_ERROR_OF_MEDIAN = math.sqrt(math.pi / 2) / statistics.NormalDist().inv_cdf(0.75)
"""Standard error of the median of n normal values, times the root of n, for a median absolute deviation of 1."""


def longer_by(before: Sequence[float], after: Sequence[float]) -> float:
    """Seconds by which the median of ``after`` is above that of ``before``; 0 where that is no more than noise.

    The noise follows from both windows: the median distance of an epoch from the median of its own window. So a few
    epochs out of line, less than half of a window, neither hide nor feign a difference.

    >>> longer_by([10, 11, 9, 10.5, 9.5], [20, 21, 19, 20.5, 90])
    10.5
    >>> longer_by([10, 11, 9, 10.5, 9.5], [11, 11, 9, 90, 90])
    0.0
    """
    if min(len(before), len(after)) < LEAST_WINDOW:
        return 0.0
    difference = statistics.median(after) - statistics.median(before)
    distance = statistics.median([*_distances(before), *_distances(after)])
    error = _ERROR_OF_MEDIAN * distance * math.sqrt(1 / len(before) + 1 / len(after))
    return difference if difference > _ERRORS * error else 0.0


def _distances(seconds: Sequence[float]) -> list[float]:
    """From the median; of an odd number that one is left out, as its own distance says nothing."""
    middle = statistics.median(seconds)
    return sorted(abs(each - middle) for each in seconds)[len(seconds) % 2 :]
