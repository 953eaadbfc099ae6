"""Which partitioner cuts a graph where none was asked for."""

from __future__ import annotations

from typing import Literal, TypeAlias

from nugnn.planning.plan import CutBy, SharesBy

Partitioner: TypeAlias = Literal["auto", "metis", "clusters", "kaminpar", "random"]

LARGE_EDGES = 30_000_000
"""From so many on METIS takes a minute for a cut, and shares that fit the devices need about ten."""


def loop_method(partitioner: Partitioner, num_edges: int, shares_by: SharesBy) -> CutBy:
    """What is asked for; of ``auto`` METIS, but "clusters" for the many cuts of ``auto`` shares of a large graph.

    Args:
        partitioner: As ``--partitioner`` names it.
        num_edges: E.
        shares_by: What asks for shares.
    """
    if partitioner != "auto":
        return partitioner
    return "clusters" if shares_by == "auto" and num_edges >= LARGE_EDGES else "metis"
