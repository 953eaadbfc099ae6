"""Seconds as a function of work, through measured points: never falling, and exact where these do not fall."""

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


_APART = 1.5
"""Two points have to differ by so much in work for how steep seconds are to follow from them: others are noise."""
_LEAST_SHARE, _MOST_SHARE = 0.5, 1.5
"""Of the steepness of a proportion, above the last point: where nothing but launches was measured, more work still
takes longer somewhere, and a step in the last points does not go on for ever."""


class Curve:
    """Straight between points, and beyond them as steep as near the outermost one.

    Points that fall with more work are averaged with those before them.

    Args:
        points: Work and seconds, at least one, neither negative.

    >>> curve = Curve([(10, 2.0), (20, 3.0), (40, 9.0)])
    >>> [curve(work) for work in (0, 10, 15, 40, 60)]
    [1.0, 2.0, 2.5, 9.0, 15.0]
    >>> Curve([(10, 2.0)])(30)
    6.0
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        works, seconds = self._works, self._seconds = _never_falling(points)
        in_proportion = seconds[-1] / works[-1] if works[-1] > 0 else 0.0
        self._above, self._at_nothing = in_proportion, 0.0
        if len(works) > 1:
            below = max((w for w in works if _APART * w <= works[-1]), default=works[0])
            steepness = (seconds[-1] - seconds[works.index(below)]) / (works[-1] - below)
            self._above = min(max(steepness, _LEAST_SHARE * in_proportion), _MOST_SHARE * in_proportion)
            above = min((w for w in works if w >= _APART * works[0] and w > works[0]), default=works[-1])
            steepness = (seconds[works.index(above)] - seconds[0]) / (above - works[0])
            self._at_nothing = max(seconds[0] - works[0] * steepness, 0.0)

    def __call__(self, work: float) -> float:
        """Seconds."""
        works, seconds = self._works, self._seconds
        if work >= works[-1]:
            return seconds[-1] + self._above * (work - works[-1])
        if work < works[0]:
            return self._at_nothing + (seconds[0] - self._at_nothing) * work / works[0]
        right = bisect.bisect_right(works, work)  # there is one on either side
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
