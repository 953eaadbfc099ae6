"""What a search for parts aims at, and when nothing is left to aim for: equal ends, or a faster step of all parts.

Axes: P parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nugnn.partition.balance import Floats, normalise_shares
from nugnn.planning.levels import capacity, level
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.partition_rounds import Round
from nugnn.planning.share_curves import curve_through, scaled_sizes
from nugnn.planning.share_search import faster_shares
from nugnn.planning.single_moves import WORTH_WHILE
from nugnn.planning.work_model import WorkModel

_DAMPING = 0.7
"""How much of the way to the new targets a round goes, in the logarithm of shares: the cut answers unpredictably."""
_REACH, _LEAST_REACH = 0.08, 0.004
"""How far targets look for a faster step at first and in the end, in the logarithm of a share."""
_MOST_STEPS, _PAIRS, _FEWEST_STEPS = 50, 50_000, 8
"""Steps that are foreseen for a round's targets, and pairs of ranks in all of them: a second or two; some at least."""


@dataclass(frozen=True, eq=False)
class Devices:
    """What parts are for.

    Args:
        work: Seconds and bytes of a part on its device.
        limits: ``(P,)`` bytes of memory.
        num_nodes: Of the whole graph.
    """

    work: WorkModel
    limits: tuple[float, ...]
    num_nodes: int


@dataclass(frozen=True, eq=False)
class Counted:
    """A round, and what its parts hold of the node weights that targets are shares of.

    Args:
        round: What it came to.
        reached: ``(P,)``, summing to 1.
    """

    round: Round
    reached: Floats


class Aim(Protocol):
    """What rounds are judged by, and what the next one tries.

    Attributes:
        is_of_parts: Whether what each part takes for itself is all that counts, so that single nodes move for it.
    """

    @property
    def is_of_parts(self) -> bool: ...

    def step_seconds(self, sizes: Sequence[PartSizes]) -> float | None:
        """Of a step of all parts; None where the slowest part decides."""
        ...

    def targets(self, best: Counted, latest: Counted, devices: Devices) -> tuple[float, ...] | None:
        """Shares of the weights for the next cut; None where no cut is expected to be worth while.

        Args:
            best: Of all rounds.
            latest: The last one whose targets were of the node weights, before nodes moved.
            devices: The parts are for.
        """
        ...


@dataclass(frozen=True)
class EqualEnds:
    """All parts end together, each for itself: the slowest one decides. Memory comes first.

    Args:
        imbalance: Reached where devices wait for at most this share of the slowest one's seconds, on average.
    """

    imbalance: float = 0.02

    def __post_init__(self) -> None:
        if not self.imbalance >= 0:
            raise ValueError(f"imbalance is {self.imbalance}; it must be a number of at least 0")

    @property
    def is_of_parts(self) -> bool:
        """See `Aim`."""
        return True

    def step_seconds(self, sizes: Sequence[PartSizes]) -> float | None:
        """See `Aim.step_seconds`."""
        return None

    def targets(self, best: Counted, latest: Counted, devices: Devices) -> tuple[float, ...] | None:
        """See `Aim.targets`."""
        if best.round.lacking_bytes == 0 and best.round.idle_share <= self.imbalance:
            return None
        return levelled_targets(latest, devices)


@dataclass(frozen=True, eq=False)
class FasterStep:
    """A step of all parts is fast: those that each end as early as the others still wait for each other in between.

    How long they wait says nothing of what other shares would bring, so the end is where no others are foreseen to be
    faster. A small gain is followed, too: the cut for it may turn out better than foreseen. Where memory is lacking,
    targets are those of equal ends within the memories, since no step is possible before.

    Args:
        seconds: Foreseen of a step of parts of these sizes. Must say the same for the same sizes.
        groups: Of each device, equal for those whose targets are corrected together; each for itself when None.
    """

    seconds: Callable[[Sequence[PartSizes]], float]
    groups: Sequence[Hashable] | None = None

    @property
    def is_of_parts(self) -> bool:
        """See `Aim`."""
        return False

    def step_seconds(self, sizes: Sequence[PartSizes]) -> float | None:
        """See `Aim.step_seconds`."""
        return self.seconds(sizes)

    def targets(self, best: Counted, latest: Counted, devices: Devices) -> tuple[float, ...] | None:
        """See `Aim.targets`; those with which a step would be fastest if all sizes of the best parts grew and shrank
        with their shares.
        """
        if best.round.lacking_bytes > 0:
            return levelled_targets(latest, devices)

        def seconds(shares: Sequence[float]) -> float:
            ratios = (np.asarray(shares) / best.reached).tolist()
            sizes = [scaled_sizes(*each, devices.num_nodes) for each in zip(best.round.sizes, ratios, strict=True)]
            held = (devices.work.bytes(part, size) for part, size in enumerate(sizes))
            fits = all(need <= limit for need, limit in zip(held, devices.limits, strict=True))
            return self.seconds(sizes) if fits else math.inf

        count = len(best.reached)
        most = max(min(_MOST_STEPS, _PAIRS // count**2), _FEWEST_STEPS)
        start = tuple(best.reached.tolist())
        groups = range(count) if self.groups is None else self.groups
        found = faster_shares(start, groups, seconds, most=most, reach=_REACH, least_reach=_LEAST_REACH)
        return found if _differ(found, start) else None


def levelled_targets(latest: Counted, devices: Devices) -> tuple[float, ...] | None:
    """Targets with which all parts would end together within their memories, if all sizes of a part grew and shrank
    with its share, and not too far from those before; None where that is where they are.
    """
    before = latest.round
    curves = [
        curve_through(devices.work, part, sizes, float(share), devices.num_nodes)
        for part, (sizes, share) in enumerate(zip(before.sizes, latest.reached, strict=True))
    ]
    plan = level(curves, devices.limits)
    if plan is None:  # with the halo of this cut; the next one may have less
        caps = [max(capacity(c, limit), float(c.fractions[0])) for c, limit in zip(curves, devices.limits, strict=True)]
        wanted = normalise_shares(caps)
    else:
        wanted = plan.shares
    asked = np.asarray(before.shares)
    # what was reached may differ from what was asked; the partitioner will miss by about as much again
    found = normalise_shares((asked * (np.asarray(wanted) / latest.reached) ** _DAMPING).tolist())
    return found if _differ(found, before.shares) else None


def _differ(shares: Sequence[float], before: Sequence[float]) -> bool:
    return max(abs(share / other - 1) for share, other in zip(shares, before, strict=True)) >= WORTH_WHILE
