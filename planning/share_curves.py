"""How long a device takes for a fraction of a graph, and what it holds: curves, before there is a cut.

A curve is sampled from the work model and linear between samples, so that of a linear model it is exact.

Axes: P devices (parts), K samples of a curve.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from nugnn.partition.balance import Floats
from nugnn.planning.part_sizes import PartSizes, bounded
from nugnn.planning.work_model import WorkModel

_SAMPLES = 33
"""Of each curve, spaced evenly in the logarithm, besides its corners."""
Halo: TypeAlias = float | Callable[[float], float]
"""Halo rows of a part for each of its nodes: a number, or by the part's fraction of the graph."""


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


def relaxed_sizes(whole: PartSizes, fraction: float, halo: Halo, num_parts: int) -> PartSizes:
    """What a part holds that is a fraction of the graph, under the assumptions of `plan_shares`.

    Args:
        whole: Of the graph.
        fraction: Of its nodes; rounded to whole ones.
        halo: As ``halo_fraction`` there.
        num_parts: P.
    """
    num_nodes = whole.inner
    inner = round(fraction * num_nodes)
    share = inner / num_nodes
    rest = num_nodes - inner
    less = min(inner, rest)  # of two parts, the larger one sends what the smaller one reads
    of_part, of_less = (halo(x) if callable(halo) else halo for x in (share, less / num_nodes)) if less else (0.0, 0.0)
    sizes = PartSizes(
        inner, round(share * whole.edges), round(of_part * inner), round(of_less * less), round(share * whole.train)
    )
    return bounded(sizes, num_nodes, whole.edges, num_parts)


def relaxed_curves(
    work: WorkModel, whole: PartSizes, num_parts: int, halo: Halo, kinds: Sequence[Hashable] | None = None
) -> tuple[Curve, ...]:
    """The curve of each device under the assumptions of `plan_shares`; devices of one kind share theirs."""
    num_nodes = whole.inner

    def sizes_at(fraction: float) -> PartSizes:
        return relaxed_sizes(whole, fraction, halo, num_parts)

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
        return scaled_sizes(sizes, fraction / share, num_nodes)

    return _curve(work, part, _samples(min(1 / num_nodes, share), [share]), sizes_at)


def scaled_sizes(sizes: PartSizes, ratio: float, num_nodes: int) -> PartSizes:
    """Of a part that holds ``ratio`` times as much of everything, of a graph of ``num_nodes``."""
    inner = min(max(round(ratio * sizes.inner), 1), num_nodes)
    rest = num_nodes - inner  # and no more parts than that read the nodes of this one
    return PartSizes(
        inner,
        round(ratio * sizes.edges),
        round(min(ratio * sizes.halo, rest)),
        round(min(ratio * sizes.sent, inner * rest)),
        round(ratio * sizes.train),
    )


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
