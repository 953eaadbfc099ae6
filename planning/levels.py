"""Every device filled to the same level of seconds, or to the brim of its memory: the best shares follow from curves.

Axes: P devices (parts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nugnn.partition.balance import Floats
from nugnn.planning.share_curves import Curve


@dataclass(frozen=True, kw_only=True)
class SharePlan:
    """Shares and what is expected of them.

    Args:
        shares: Fraction of the graph's work for each device, summing to 1.
        seconds: Expected of each device.
        bytes: Expected of each device.
        full: For each device, whether its memory is what keeps its share from growing.
    """

    shares: tuple[float, ...]
    seconds: tuple[float, ...]
    bytes: tuple[float, ...]
    full: tuple[bool, ...]

    @property
    def makespan(self) -> float:
        """Seconds of the slowest device."""
        return max(self.seconds)


def capacity(curve: Curve, limit: float) -> float:
    """Largest fraction that fits into ``limit`` bytes; 0 where the least part does not."""
    return 0.0 if curve.bytes[0] > limit else _most(curve.most_bytes, curve.fractions, limit)


def level(curves: Sequence[Curve], limits: Sequence[float]) -> SharePlan | None:
    """Shares that sum to 1 with the least slowest device within the limits; None where they hold less than 1.

    Of a linear model and `relaxed_curves` the result is optimal: seconds are then concave in the fraction, so
    either all devices are on the rising side of their curves, or one holds so much that it is best given all it can.
    """
    plans = (flooded(curves, limits), _all_on_one(curves, limits))
    found = [plan for plan in plans if plan is not None]
    return min(found, key=lambda plan: plan.makespan) if found else None  # of equal ones the first


def _all_on_one(curves: Sequence[Curve], limits: Sequence[float]) -> SharePlan | None:
    """The least part for every device but one, that one chosen as the best that fits."""
    first = np.array([curve.fractions[0] for curve in curves])
    waits = np.array([curve.seconds[0] for curve in curves])
    fits = np.array([curve.bytes[0] <= limit for curve, limit in zip(curves, limits, strict=True)])
    best, least = -1, math.inf
    for device, curve in enumerate(curves):
        share = 1 - (first.sum() - first[device])
        held = np.interp(share, curve.fractions, curve.bytes)
        if share < first[device] or held > limits[device] or not np.delete(fits, device).all():
            continue
        slowest = max(float(np.interp(share, curve.fractions, curve.seconds)), *np.delete(waits, device).tolist(), 0.0)
        if slowest < least:
            best, least = device, slowest
    if best < 0:
        return None
    first[best] = 1 - (first.sum() - first[best])
    return _plan(first, curves, [False] * len(curves))


def _plan(shares: Floats, curves: Sequence[Curve], full: Sequence[bool]) -> SharePlan:
    return SharePlan(
        shares=tuple(shares.tolist()),
        seconds=tuple(float(np.interp(s, c.fractions, c.seconds)) for s, c in zip(shares, curves, strict=True)),
        bytes=tuple(float(np.interp(s, c.fractions, c.bytes)) for s, c in zip(shares, curves, strict=True)),
        full=tuple(full),
    )


def flooded(curves: Sequence[Curve], limits: Sequence[float]) -> SharePlan | None:
    """:func:`level` where no device may hold all but the others' least parts: equal curves get equal shares.

    As in filling connected vessels, on curves that do not fall.

    At a level of T seconds device p takes the largest fraction whose seconds are at most T, and its least one at any
    level. The sum over devices grows with T, linearly between the corners of the curves, so the level at which it is 1
    lies between two corners that a search among them finds.
    """
    alike: dict[tuple[int, float], int] = {}  # devices that share a curve and have as much memory are asked once
    place = [alike.setdefault((id(curve), limit), len(alike)) for curve, limit in zip(curves, limits, strict=True)]
    first = [place.index(number) for number in range(len(alike))]
    of_each = [capacity(curves[device], limits[device]) for device in first]
    caps = [of_each[number] for number in place]
    if min(caps) <= 0 or math.fsum(caps) < 1 - 1e-12:  # rounding of the sum
        return None
    cut = [_up_to(curves[device], caps[device]) for device in first]
    levels = np.unique(np.concatenate([seconds for _, seconds in cut]))

    def most(at: float) -> Floats:
        return np.array([_most(seconds, fractions, at) for fractions, seconds in cut])[place]

    def least(at: float) -> Floats:
        return np.array([_least(seconds, fractions, at) for fractions, seconds in cut])[place]

    low, high = 0, len(levels) - 1  # the first level at which the devices hold all
    while low < high:
        middle = (low + high) // 2
        if most(levels[middle]).sum() >= 1:
            high = middle
        else:
            low = middle + 1
    upper = least(levels[low])
    if upper.sum() >= 1 and low:
        lower = most(levels[low - 1])
    else:
        lower, upper = upper, most(levels[low])  # the level is a corner, where some curves are flat
    room = float(upper.sum() - lower.sum())
    shares = lower + (upper - lower) * (min(max((1 - lower.sum()) / room, 0.0), 1.0) if room > 0 else 0.0)
    shares = shares / shares.sum()
    full = [
        bool(cap < curve.fractions[-1] and share >= cap * (1 - 1e-9))
        for share, cap, curve in zip(shares, caps, curves, strict=True)
    ]
    return _plan(shares, curves, full)


def _up_to(curve: Curve, cap: float) -> tuple[Floats, Floats]:
    """Fractions and seconds of the curve, ending at ``cap``."""
    inside = curve.fractions < cap
    return (
        np.append(curve.fractions[inside], cap),
        np.append(curve.most_seconds[inside], np.interp(cap, curve.fractions, curve.most_seconds)),
    )


def _most(costs: Floats, fractions: Floats, limit: float) -> float:
    """Largest fraction that costs at most ``limit``; the first one where all cost more."""
    after = int(np.searchsorted(costs, limit, side="right"))
    if after == 0:
        return float(fractions[0])
    if after == len(costs):
        return float(fractions[-1])
    return _between(costs, fractions, limit, after)


def _least(costs: Floats, fractions: Floats, limit: float) -> float:
    """Smallest fraction that costs ``limit`` or more; the last one where all cost less."""
    after = int(np.searchsorted(costs, limit, side="left"))
    if after == 0:
        return float(fractions[0])
    if after == len(costs):
        return float(fractions[-1])
    return _between(costs, fractions, limit, after)


def _between(costs: Floats, fractions: Floats, limit: float, after: int) -> float:
    way = (limit - costs[after - 1]) / (costs[after] - costs[after - 1])
    return float(fractions[after - 1] + way * (fractions[after] - fractions[after - 1]))
