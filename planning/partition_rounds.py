"""What ways of splitting a graph came to, one after the other, and the best of them.

Axes: P parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nugnn.partition.assign import Assignment
from nugnn.planning.levels import SharePlan
from nugnn.planning.part_sizes import PartSizes


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one way of splitting came to.

    Args:
        name: "work", "nodes", "even", "METIS work", "METIS nodes" or a name that the caller gave: tried at the start;
            "targets" where the partitioner ran again with corrected targets; "moves" where single nodes moved, "relief"
            where they did so for want of memory alone.
        shares: Targets of the partitioner; for "moves" and "relief" those of the parts that were moved.
        sizes: Of each part.
        seconds: Predicted, of each part.
        bytes: Predicted, of each part.
        lacking_bytes: By how much limits are exceeded, added up.
        took_seconds: Wall-clock time of this round.
        step_seconds: Predicted, of all parts together, where that was asked for.
    """

    name: str
    shares: tuple[float, ...]
    sizes: tuple[PartSizes, ...]
    seconds: tuple[float, ...]
    bytes: tuple[int, ...]
    lacking_bytes: float
    took_seconds: float
    step_seconds: float | None = None

    @property
    def makespan(self) -> float:
        """Seconds of the slowest part; of a step of all of them, where that is known."""
        return max(self.seconds) if self.step_seconds is None else self.step_seconds

    @property
    def rank(self) -> tuple[float, float, float]:
        """What is kept is the least of these: memory first, then the slowest part, then all of them together."""
        return self.lacking_bytes, self.makespan, math.fsum(self.seconds)

    @property
    def idle_share(self) -> float:
        """Mean share of an epoch in which devices wait for the slowest."""
        return 1 - math.fsum(self.seconds) / (len(self.seconds) * self.makespan) if self.makespan > 0 else 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedParts:
    """The best split that was found.

    Args:
        assignment: Its parts, checked; ``shares_asked`` are the shares of nodes that they have.
        rounds: All that was tried, in order.
        best_round: Position of this split in ``rounds``.
        relaxed: What was expected before there was a cut; None where halo as expected did not fit the memories.
    """

    assignment: Assignment
    rounds: tuple[Round, ...]
    best_round: int
    relaxed: SharePlan | None

    @property
    def best(self) -> Round:
        return self.rounds[self.best_round]

    @property
    def sizes(self) -> tuple[PartSizes, ...]:
        return self.best.sizes

    @property
    def seconds(self) -> tuple[float, ...]:
        """Predicted for each part."""
        return self.best.seconds

    @property
    def makespan(self) -> float:
        return self.best.makespan
