"""Shares of a graph that make the slowest of unequal devices as fast as their memories allow, before there is a cut.

How long a device takes for a fraction of the graph is a curve, sampled from the work model and linear between samples,
so that of a linear model it is exact. With the curves the best shares follow without a search: every device is filled
to the same level of seconds, or to the brim of its memory.

Axes: P devices (parts), K samples of a curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from nugnn.partition.balance import Floats
from nugnn.planning.in_words import in_bytes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.work_model import WorkModel

_SAMPLES = 33
"""Of each curve, spaced evenly in the logarithm, besides its corners."""
_MOST_LINES, _MOST_CHOICES = 16, 4
"""Of a message that says what is lacking: devices; kinds of devices of which there could be more."""
_LEAST_FACTOR = 1e-4
"""Of the bytes; numbers that much smaller are no advice."""
_NOTHING = PartSizes(0, 0, 0, 0, 0)
Halo: TypeAlias = float | Callable[[float], float]
"""Halo rows of a part for each of its nodes: a number, or by the part's fraction of the graph."""


class DoesNotFitError(ValueError):
    """No division of the graph fits the memories; the message says what is lacking where, and what would do."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Cost of a device by the fraction of the graph that it holds.

    Args:
        fractions: ``(K,)`` ascending, the first one that of the least part there can be, the last one at most 1.
        seconds: ``(K,)`` of an epoch.
        bytes: ``(K,)`` of memory.
    """

    fractions: Floats
    seconds: Floats
    bytes: Floats

    @cached_property
    def most_seconds(self) -> Floats:
        """The most that any fraction up to each takes: less halo may make a large part faster than a middling one."""
        return np.maximum.accumulate(self.seconds)

    @cached_property
    def most_bytes(self) -> Floats:
        return np.maximum.accumulate(self.bytes)


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


def plan_shares(
    work: WorkModel,
    whole: PartSizes,
    limits: Sequence[float],
    *,
    halo_fraction: Halo = 0.5,
) -> SharePlan:
    """The shares with the least slowest device, where parts are fractions of the graph in every respect.

    A part with fraction f of N nodes has that fraction of edges and training nodes, ``min(halo_fraction * f, 1 - f) *
    N`` halo rows, and sends ``halo_fraction * min(f, 1 - f) * N``.

    Args:
        work: The model.
        whole: Of the whole graph: nodes, edges, training nodes; ``halo`` and ``sent`` are not looked at.
        limits: Bytes of memory of each device, infinite for no limit; there are as many parts.
        halo_fraction: Halo rows of a part for each of its nodes, as far as there are so many; a function of f where
            small parts have relatively more of them.

    Returns:
        The plan. Devices whose least part takes longer than the level of the others hold one node.

    Raises:
        DoesNotFitError: the memories together do not hold the graph, by the model and ``halo_fraction``.
        ValueError: an argument is malformed, or there are more devices than nodes.
    """
    memory = checked_limits(limits)
    check_whole(whole, len(memory))
    if not callable(halo_fraction) and not (math.isfinite(halo_fraction) and halo_fraction >= 0):
        raise ValueError(f"halo_fraction is {halo_fraction}; it must be a number of at least 0")
    curves = relaxed_curves(work, whole, len(memory), halo_fraction)
    plan = level(curves, memory)
    if plan is None:
        raise DoesNotFitError(what_is_lacking(work, curves, memory))
    return plan


def checked_limits(limits: Sequence[float]) -> tuple[float, ...]:
    """Positive numbers, infinite ones allowed.

    Raises:
        ValueError: there is none, or one is not positive.
    """
    memory = tuple(float(limit) for limit in limits)
    if not memory:
        raise ValueError("limits is empty; give the bytes of one device for each part")
    for device, limit in enumerate(memory):
        if not limit > 0:
            raise ValueError(f"the memory limit of device {device} is {limit:g} bytes; it must be positive")
    return memory


def check_whole(whole: PartSizes, num_parts: int) -> None:
    """Refuse a graph that cannot give each part a node."""
    if whole.inner < num_parts:
        raise ValueError(f"{num_parts} devices for {whole.inner} nodes; every device needs at least one")


def relaxed_sizes(whole: PartSizes, fraction: float, halo: Halo, *, alone: bool = False) -> PartSizes:
    """What a part holds that is a fraction of the graph, under the assumptions of :func:`plan_shares`.

    Args:
        whole: Of the graph.
        fraction: Of its nodes; rounded to whole ones.
        halo: As ``halo_fraction`` there.
        alone: Whether there is no other part.
    """
    num_nodes = whole.inner
    inner = round(fraction * num_nodes)
    share = inner / num_nodes
    rest = num_nodes - inner
    per_node = 0.0 if alone else halo(share) if callable(halo) else halo
    return PartSizes(
        inner,
        round(share * whole.edges),
        round(min(per_node * inner, rest)),
        round(per_node * min(inner, rest)),
        round(share * whole.train),
    )


def relaxed_curves(
    work: WorkModel, whole: PartSizes, num_parts: int, halo: Halo, kinds: Sequence[Hashable] | None = None
) -> tuple[Curve, ...]:
    """The curve of each device under the assumptions of :func:`plan_shares`; devices of one kind share theirs."""
    num_nodes = whole.inner
    alone = num_parts == 1

    def sizes_at(fraction: float) -> PartSizes:
        return relaxed_sizes(whole, fraction, halo, alone=alone)

    corners = {num_nodes // 2, num_nodes - num_nodes // 2}
    if not callable(halo):
        corners.add(round(num_nodes / (1 + halo)))
    fractions = _samples(1 / num_nodes, [corner / num_nodes for corner in sorted(corners - {0})])
    fractions = np.unique(np.rint(fractions * num_nodes)) / num_nodes  # whole nodes
    made: dict[Hashable, Curve] = {}
    for part, kind in enumerate(range(num_parts) if kinds is None else kinds):
        if kind not in made:
            made[kind] = _curve(work, part, fractions, sizes_at)
    return tuple(made[kind] for kind in (range(num_parts) if kinds is None else kinds))


def curve_through(work: WorkModel, part: int, sizes: PartSizes, share: float, num_nodes: int) -> Curve:
    """The curve of a device that holds ``sizes`` at ``share``, if all of them grow and shrink with its share."""

    def sizes_at(fraction: float) -> PartSizes:
        ratio = fraction / share
        inner = min(max(round(ratio * sizes.inner), 1), num_nodes)
        return PartSizes(
            inner,
            round(ratio * sizes.edges),
            round(min(ratio * sizes.halo, num_nodes - inner)),
            round(ratio * sizes.sent),
            round(ratio * sizes.train),
        )

    return _curve(work, part, _samples(min(1 / num_nodes, share), [share]), sizes_at)


def _samples(first: float, corners: Sequence[float]) -> Floats:
    spaced = np.geomspace(first, 1.0, _SAMPLES) if first < 1 else np.ones(1)
    return np.unique(np.concatenate([[first], spaced, [c for c in corners if first <= c <= 1], [1.0]]))


def _curve(work: WorkModel, part: int, fractions: Floats, sizes_at: Callable[[float], PartSizes]) -> Curve:
    sizes = [sizes_at(fraction) for fraction in fractions.tolist()]
    seconds = np.array([work.seconds(part, size) for size in sizes], np.float64)
    held = np.array([work.bytes(part, size) for size in sizes], np.float64)
    if not (np.isfinite(seconds).all() and np.isfinite(held).all()):
        raise ValueError(f"the work model gives numbers for device {part} that are not finite")
    return Curve(fractions, seconds, held)


def capacity(curve: Curve, limit: float) -> float:
    """Largest fraction that fits into ``limit`` bytes; 0 where the least part does not."""
    return 0.0 if curve.bytes[0] > limit else _most(curve.most_bytes, curve.fractions, limit)


def level(curves: Sequence[Curve], limits: Sequence[float]) -> SharePlan | None:
    """Shares that sum to 1 with the least slowest device within the limits; None where they hold less than 1.

    Of a linear model and :func:`relaxed_curves` the result is optimal: seconds are then concave in the fraction, so
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
    caps = [capacity(curve, limit) for curve, limit in zip(curves, limits, strict=True)]
    if min(caps) <= 0 or math.fsum(caps) < 1 - 1e-12:  # rounding of the sum
        return None
    cut = [_up_to(curve, cap) for curve, cap in zip(curves, caps, strict=True)]
    levels = np.unique(np.concatenate([seconds for _, seconds in cut]))

    def most(at: float) -> Floats:
        return np.array([_most(seconds, fractions, at) for fractions, seconds in cut])

    def least(at: float) -> Floats:
        return np.array([_least(seconds, fractions, at) for fractions, seconds in cut])

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


def what_is_lacking(
    work: WorkModel, curves: Sequence[Curve], limits: Sequence[float], names: Sequence[str] | None = None
) -> str:
    """Why :func:`level` found nothing, with what would do: more devices, or fewer bytes for each node, edge and row.

    Args:
        work: The model.
        curves: Of each device.
        limits: Bytes of each.
        names: Of each; devices of one name are spoken of together. Their numbers when None.
    """
    called = [f"device {device}" for device in range(len(curves))] if names is None else list(names)
    by_speed = level(curves, [math.inf] * len(curves))
    assert by_speed is not None, "without limits every graph fits"
    caps = [capacity(curve, limit) for curve, limit in zip(curves, limits, strict=True)]
    held = math.fsum(caps)
    alike: dict[tuple[str, str], list[str]] = {}
    for device, (cap, limit, need) in enumerate(zip(caps, limits, by_speed.bytes, strict=True)):
        if math.isinf(limit):
            continue
        room = f"{in_bytes(limit)} hold {cap:.1%}" if cap else f"{in_bytes(limit)} do not hold a single node"
        wanted = f"its share by speed, {by_speed.shares[device]:.1%}, needs {in_bytes(need)}"
        said = f"{room}; {wanted}{f', {in_bytes(need - limit)} more' if need > limit else ''}"
        alike.setdefault((called[device], said), []).append(called[device])
    lines = [
        f"{name[0].upper()}{name[1:]}: {said}." if len(own) == 1 else f"{len(own)} x {name}: {said}, each."
        for (name, said), own in alike.items()
    ]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"And so on for {len(lines) - _MOST_LINES} more."]
    empty = list(dict.fromkeys(called[device] for device, cap in enumerate(caps) if cap <= 0))
    if held >= 1 and empty:  # every device has to hold something
        which = f"{', '.join(empty[:_MOST_LINES])} {'does' if len(empty) == 1 else 'do'}"
        lines.insert(0, f"the graph does not fit: {which} not hold a single node; the others would hold all of it.")
    else:
        lines.insert(0, f"the graph does not fit: the devices together hold {held:.1%} of it.")
    more: dict[tuple[str, str], str] = {}
    for device, cap in enumerate(caps):
        if cap > 0 and held < 1:
            count = math.ceil((1 - held) / cap - 1e-9)
            key = (in_bytes(limits[device]), f"{cap:.1%}")
            more.setdefault(key, f"{count} more like {called[device]}")
    if more:
        choices = list(more.values())[:_MOST_CHOICES]
        lines.append(f"It would fit with {' or '.join(choices)}, as far as the model tells.")
    factor = fitting_factor(work, curves, limits)
    if factor is None or factor < _LEAST_FACTOR:
        lines.append("Smaller numbers would not do: what a part takes whatever its size is too much already.")
    else:
        shown = f"{math.floor(100 * factor) / 100:.2f}" if factor >= 0.01 else f"{factor:.1g}"
        half = "numbers of 16 bits for 32 would do" if factor >= 0.5 else "numbers of 16 bits for 32 would not do"
        lines.append(
            f"It would fit if nodes, edges and rows took {shown} of their bytes: {half}, or features and layers "
            f"of about {shown} of their width, where indices are a small part."
        )
    return "\n".join(lines)


def fitting_factor(work: WorkModel, curves: Sequence[Curve], limits: Sequence[float]) -> float | None:
    """By what all bytes that grow with a part must be multiplied for the graph to fit; None where 0 is not enough."""
    fixed = [float(work.bytes(part, _NOTHING)) for part in range(len(curves))]

    def fits(factor: float) -> bool:
        smaller = [
            Curve(curve.fractions, curve.seconds, base + factor * np.maximum(curve.bytes - base, 0))
            for curve, base in zip(curves, fixed, strict=True)
        ]
        return level(smaller, limits) is not None

    if not fits(0.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
