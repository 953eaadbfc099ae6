"""Which of several devices that are alike takes which part, such that heavy traffic stays on fast links.

Axes: P parts and as many ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_MOST_SWEEPS = 8
_MOST_SWAPS = 500_000
"""Swaps that are weighed, in all."""


@dataclass(frozen=True, eq=False)
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


def traffic_rows(src: npt.NDArray, dst: npt.NDArray, part: npt.NDArray, num_parts: int) -> npt.NDArray[np.int64]:
    """``(P, P)``: nodes of the row's part that the column's part reads.

    Args:
        src: ``(E,)`` source of each edge.
        dst: ``(E,)`` destination.
        part: ``(N,)`` part of each node.
        num_parts: P.
    """
    reader = part[dst].astype(np.int64)
    crossing = np.flatnonzero(part[src] != reader)
    pairs = np.unique(reader[crossing] * np.int64(len(part)) + src[crossing])
    reader, node = np.divmod(pairs, np.int64(len(part)))
    counts = np.bincount(part[node].astype(np.int64) * num_parts + reader, minlength=num_parts**2)
    return counts.reshape(num_parts, num_parts)


def exchange_seconds(rows: Floats, row_bytes: float, bytes_per_second: Floats, latency_seconds: Floats) -> Floats:
    """``(P,)`` seconds of one exchange on each rank: both ways at once, its peers one after the other.

    Args:
        rows: ``(P, P)`` rows sent from the row's rank to the column's.
        row_bytes: Of a row.
        bytes_per_second: ``(P, P)`` of each pair.
        latency_seconds: ``(P, P)``.
    """
    per_pair = row_bytes * rows / bytes_per_second + latency_seconds * (rows > 0)
    return np.maximum(per_pair.sum(axis=1), per_pair.sum(axis=0))


def place(
    rows: npt.NDArray,
    row_bytes: float,
    bytes_per_second: Floats,
    latency_seconds: Floats,
    kinds: Sequence[Hashable],
) -> Placement:
    """Parts on ranks, each on a device like the one it was made for; never slower than part p on rank p.

    Two starts, the parts as they are and parts put beside those they exchange most with, are improved by swapping
    pairs as long as that helps the slowest rank, or all together where it stays.

    Args:
        rows: ``(P, P)`` rows sent from the row's part to the column's in one exchange.
        row_bytes: Of a row.
        bytes_per_second: ``(P, P)`` between ranks, infinite on the diagonal.
        latency_seconds: ``(P, P)`` between ranks.
        kinds: Of each rank's device: parts are swapped between equal ones only.
    """
    search = _Search(np.asarray(rows, np.float64), row_bytes, bytes_per_second, latency_seconds, kinds)
    identity = np.arange(len(kinds))
    unplaced = search.cost(identity)
    found = [identity]
    if search.can_gain:
        found += [search.improved(start) for start in (identity, search.greedy())]
    best = min(found, key=search.cost)
    return Placement(tuple(best.tolist()), search.cost(best)[0], unplaced[0])


class _Search:
    def __init__(
        self, rows: Floats, row_bytes: float, rates: Floats, latencies: Floats, kinds: Sequence[Hashable]
    ) -> None:
        self._rows, self._row_bytes, self._rates, self._latencies = rows, row_bytes, rates, latencies
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self._kind = np.array([numbers[kind] for kind in kinds])
        between = ~np.eye(len(kinds), dtype=bool)
        are_links_alike = len(np.unique(rates[between])) <= 1 and len(np.unique(latencies[between])) <= 1
        self.can_gain = not are_links_alike and len(numbers) < len(kinds) and bool(rows.any())

    def cost(self, rank_of: npt.NDArray) -> tuple[float, float]:
        at = np.ix_(rank_of, rank_of)
        each = exchange_seconds(self._rows, self._row_bytes, self._rates[at], self._latencies[at])
        return float(each.max()), float(each.sum())

    def greedy(self) -> npt.NDArray:
        """Ranks filled in order, each with the part that exchanges most with those near it, by the rates between."""
        count = len(self._kind)
        both = self._rows + self._rows.T
        rank_of = np.full(count, -1)
        left = np.ones(count, bool)
        part_at: list[int] = []
        finite = np.where(np.isfinite(self._rates), self._rates, 0.0)
        for rank in range(count):
            fitting = np.flatnonzero(left & (self._kind == self._kind[rank]))
            pull = both[np.ix_(fitting, part_at)] @ finite[rank, :rank] if part_at else -both[fitting].sum(axis=1)
            part = int(fitting[int(np.argmax(pull))])
            rank_of[part] = rank
            left[part] = False
            part_at.append(part)
        return rank_of

    def improved(self, start: npt.NDArray) -> npt.NDArray:
        """After swaps of two parts, as long as one helps."""
        rank_of, best = start.copy(), self.cost(start)
        weighed = 0
        for _ in range(_MOST_SWEEPS):
            before = best
            for a in range(len(rank_of)):
                for b in np.flatnonzero(self._kind[:a] == self._kind[a]):
                    weighed += 1
                    rank_of[[a, b]] = rank_of[[b, a]]
                    now = self.cost(rank_of)
                    if now < best:
                        best = now
                    else:
                        rank_of[[a, b]] = rank_of[[b, a]]
            if best == before or weighed > _MOST_SWAPS:
                break
        return rank_of
