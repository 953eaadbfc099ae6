"""Shares of a graph that make the slowest of unequal devices as fast as their memories allow, before there is a cut.

How long a device takes for a fraction of the graph is a curve (`nugnn.planning.share_curves`); with the curves the best
shares follow without a search (`nugnn.planning.levels`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nugnn._counted import counted
from nugnn.planning.lacking import DoesNotFitError, what_is_lacking
from nugnn.planning.levels import SharePlan, level
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.share_curves import Halo, relaxed_curves
from nugnn.planning.work_model import WorkModel


def plan_shares(
    work: WorkModel,
    whole: PartSizes,
    limits: Sequence[float],
    *,
    halo_fraction: Halo = 0.5,
) -> SharePlan:
    """The shares with the least slowest device, where parts are fractions of the graph in every respect.

    A part with fraction f of N nodes has that fraction of edges and training nodes, ``halo_fraction * f * N`` halo
    rows, and sends ``halo_fraction * min(f, 1 - f) * N``; of both no more than a part of any cut can have: see
    `nugnn.planning.part_sizes.bounded`.

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
        raise ValueError(
            f"{counted(num_parts, 'device')} for {counted(whole.inner, 'node')}; every device needs at least one"
        )
