"""Shares that make a whole step faster, found by trying: one kind of device gets more or less, the others the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

Seconds = Callable[[Sequence[float]], float]
"""Of a step with these shares; infinite where memories do not hold them. Must give the same for the same shares."""


def faster_shares(
    start: Sequence[float],
    groups: Sequence[Hashable],
    seconds: Seconds,
    *,
    most: int,
    reach: float,
    least_reach: float,
) -> tuple[float, ...]:
    """After shares of one group of devices after the other grew or shrank, as long as that helps.

    Args:
        start: ``(P,)`` positive shares, summing to 1.
        groups: ``(P,)`` of each device; shares of a group grow and shrink together.
        seconds: What is made less.
        most: Times that ``seconds`` is asked, at most by one turn of all groups more.
        reach: How far a share grows or shrinks at first, in its logarithm; half as far where nothing helped.
        least_reach: Where the search ends.

    Returns:
        The best shares that were tried, ``start`` itself among them.

    >>> found = faster_shares([0.5, 0.5], [0, 1], lambda s: max(s[0], 3 * s[1]), most=99, reach=0.4, least_reach=1e-3)
    >>> [round(share, 2) for share in found]
    [0.75, 0.25]
    """
    best, least = tuple(start), seconds(start)
    masks = [np.array([own == group for own in groups]) for group in dict.fromkeys(groups)]
    left = most if len(masks) > 1 else 0
    if len(masks) == 2:  # of two, what one gets is what the other gives
        masks = masks[:1]
    while left > 0 and reach > least_reach:
        before = best
        for mask in masks:
            for factor in (math.exp(reach), math.exp(-reach)):
                moved = np.where(mask, factor, 1.0) * np.asarray(best)
                tried = tuple((moved / moved.sum()).tolist())
                left -= 1
                if (found := seconds(tried)) < least:
                    best, least = tried, found
                    break
        if best is before:
            reach /= 2
    return best
