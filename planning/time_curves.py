"""Seconds as a function of work, through measured points: never falling, exact where it was measured."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple


class Amount(NamedTuple):
    """What an operator has to do: bytes, or operations of a product.

    Args:
        edges: That part of it which grows with the edges of an operator on a graph; 0 for all others.
        rest: All other.
    """

    edges: float
    rest: float

    def weighed(self, edge_weight: float) -> float:
        """As one number, a byte of an edge being ``edge_weight`` of others."""
        return edge_weight * self.edges + self.rest


class Curve:
    """Straight between points, and beyond them as steep as between the outermost two.

    Points that fall with more work are averaged with those before them. Above the last point seconds grow at least
    half as fast as in proportion: where nothing but launches was measured, more work still takes longer somewhere.

    Args:
        points: Work and seconds, at least one, neither negative.

    >>> curve = Curve([(10, 2.0), (20, 3.0), (40, 9.0)])
    >>> [curve(work) for work in (0, 10, 15, 40, 60)]
    [1.0, 2.0, 2.5, 9.0, 15.0]
    >>> Curve([(10, 2.0)])(30)
    6.0
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._works, self._seconds = _never_falling(points)

    def __call__(self, work: float) -> float:
        """Seconds."""
        works, seconds = self._works, self._seconds
        if len(works) == 1:
            return seconds[0] * work / works[0] if works[0] > 0 else seconds[0]
        if work <= works[0]:
            at_nothing = seconds[0] - works[0] * (seconds[1] - seconds[0]) / (works[1] - works[0])
            at_nothing = max(at_nothing, 0.0)  # the steepness is positive, so it is no more than the first
            return at_nothing + (seconds[0] - at_nothing) * (work / works[0] if works[0] > 0 else 1.0)
        if work >= works[-1]:
            steepness = (seconds[-1] - seconds[-2]) / (works[-1] - works[-2])
            return seconds[-1] + max(steepness, seconds[-1] / works[-1] / 2) * (work - works[-1])
        right = bisect.bisect_right(works, work)
        share = (work - works[right - 1]) / (works[right] - works[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])


def _never_falling(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Points in order of work; equal works become their mean, falling ones the mean of their seconds."""
    by_work: dict[float, list[float]] = {}
    for work, seconds in points:
        by_work.setdefault(work, []).append(seconds)
    works = sorted(by_work)
    pools: list[tuple[float, int]] = []  # mean, and how many points have it
    for work in works:
        pools.append((sum(by_work[work]) / len(by_work[work]), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, few), (high, more) = pools.pop(), pools.pop()
            pools.append(((low * few + high * more) / (few + more), few + more))
    return works, [mean for mean, count in pools for _ in range(count)]


_WEIGHTS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
_LEAST_VARIATION = 1.1
"""Edges for a row have to differ by so much for what each of them takes to be told apart."""


def edge_weight(amounts: Sequence[Amount], seconds: Sequence[float]) -> float:
    """How much a byte of an edge counts beside the others, so that work alone tells the seconds best.

    Args:
        amounts: Of the measured points.
        seconds: Likewise.

    Returns:
        1 where it cannot be told: fewer than three points, or all of about as many edges for a row.
    """
    ratios = [a.edges / a.rest for a in amounts if a.edges > 0 and a.rest > 0]
    if len(ratios) < max(3, len(amounts)) or max(ratios) < _LEAST_VARIATION * min(ratios):
        return 1.0
    return min(_WEIGHTS, key=lambda weight: (round(_misfit(amounts, seconds, weight), 6), abs(weight - 1)))


def _misfit(amounts: Sequence[Amount], seconds: Sequence[float], weight: float) -> float:
    """Relative squares that the best straight line leaves."""
    works = [a.weighed(weight) for a in amounts]
    inverse = [1 / s if s > 0 else 0.0 for s in seconds]
    # least squares of a + b * work in units of each point's seconds
    aa, ab = sum(i * i for i in inverse), sum(i * i * w for i, w in zip(inverse, works, strict=True))
    bb = sum(i * i * w * w for i, w in zip(inverse, works, strict=True))
    ay, by = sum(inverse), sum(i * w for i, w in zip(inverse, works, strict=True))
    determinant = aa * bb - ab * ab
    if determinant <= 0:
        return float("inf")
    a, b = (ay * bb - by * ab) / determinant, (aa * by - ab * ay) / determinant
    return sum((1 - i * (a + b * w)) ** 2 for i, w in zip(inverse, works, strict=True))
