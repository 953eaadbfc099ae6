"""Which of several devices that are alike takes which part, such that heavy traffic stays on fast links.

Axes: P parts and as many ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nugnn.planning.links import Links

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

_MOST_SWAPS = 20_000
"""Weighed from a start before it is left, some seconds; a sweep that has begun is finished."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where parts run.

    Args:
        rank_of: ``(P,)`` the rank of each part.
        seconds: Of one exchange, of the rank that takes longest.
        seconds_unplaced: The same where part p runs on rank p.
    """

    rank_of: tuple[int, ...]
    seconds: float
    seconds_unplaced: float

    @property
    def is_identity(self) -> bool:
        return self.rank_of == tuple(range(len(self.rank_of)))


def place(rows: npt.NDArray, row_bytes: float, links: Links, kinds: Sequence[Hashable]) -> Placement:
    """Parts on ranks, each on a device like the one it was made for; never slower than part p on rank p.

    Two starts, the parts as they are and parts put beside those they exchange most with, are improved by swapping
    pairs as long as that helps the slowest rank, or all together where it stays.

    Args:
        rows: ``(P, P)`` rows sent from the row's part to the column's in one exchange.
        row_bytes: Of a row.
        links: Between ranks.
        kinds: Of each rank's device: parts are swapped between equal ones only.
    """
    search = _Search(row_bytes * np.asarray(rows, np.float64), links, kinds)
    identity = np.arange(len(kinds))
    unplaced = search.cost(identity)
    found = [identity]
    if search.can_gain:
        found += [search.improved(start) for start in (identity, search.greedy())]
    best = min(found, key=search.cost)
    return Placement(
        rank_of=tuple(np.argsort(best).tolist()), seconds=search.cost(best)[0], seconds_unplaced=unplaced[0]
    )


class _Search:
    """Orders of parts: ``part_at[r]`` is the part on rank r."""

    def __init__(self, sent_bytes: Floats, links: Links, kinds: Sequence[Hashable]) -> None:
        self._sent, self._links = sent_bytes, links
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self._kind = np.array([numbers[kind] for kind in kinds])
        others = ~np.eye(len(kinds), dtype=bool)
        are_alike = all(
            len(np.unique(each[others])) <= 1 for each in (links.bytes_per_second, links.latency_seconds)
        ) and not any(links.stages)
        is_one_host = len(set(links.hosts)) <= 1
        self.can_gain = not (are_alike and is_one_host) and len(numbers) < len(kinds) and bool(sent_bytes.any())

    def cost(self, part_at: Ints) -> tuple[float, float]:
        seconds = self._links.exchange_seconds(self._sent[np.ix_(part_at, part_at)])
        return float(seconds.max()), float(seconds.sum())

    def greedy(self) -> Ints:
        """Ranks filled in order, each with the part that exchanges most with those near it, by the rates between."""
        count = len(self._kind)
        both = self._sent + self._sent.T
        rates = np.where(np.isfinite(self._links.bytes_per_second), self._links.bytes_per_second, 0.0)
        part_at = np.full(count, -1)
        is_left = np.ones(count, bool)
        for rank in range(count):
            fitting = np.flatnonzero(is_left & (self._kind == self._kind[rank]))
            before = part_at[:rank]
            pull = both[np.ix_(fitting, before)] @ rates[rank, :rank] if rank else -both[fitting].sum(axis=1)
            part_at[rank] = fitting[int(np.argmax(pull))]
            is_left[part_at[rank]] = False
        return part_at

    def improved(self, start: Ints) -> Ints:
        """After swaps of two parts, as long as one helps."""
        part_at, best = start.copy(), self.cost(start)
        weighed = 0
        while weighed < _MOST_SWAPS:
            before = best
            for a in range(len(part_at)):
                for b in np.flatnonzero(self._kind[:a] == self._kind[a]).tolist():
                    weighed += 1
                    part_at[a], part_at[b] = part_at[b], part_at[a]
                    now = self.cost(part_at)
                    if now < best:
                        best = now
                    else:
                        part_at[a], part_at[b] = part_at[b], part_at[a]
            if best == before:
                break
        return part_at
