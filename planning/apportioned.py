"""Whole numbers in given proportions, which add up: samples of a batch, nodes of a graph."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def apportioned(count: int, sizes: Sequence[float]) -> tuple[int, ...]:
    """``count`` in the proportions of ``sizes``, by largest remainder; among equal ones the lower rank's goes up.

    >>> apportioned(7, (18, 6)), apportioned(24, (0.7, 0.2, 0.1))
    ((5, 2), (17, 5, 2))
    """
    total = sum(sizes)
    counts = [int(count * size // total) for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda rank: (-(count * sizes[rank] % total), rank))
    for rank in by_remainder[: count - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def one_each(counts: Sequence[int]) -> tuple[int, ...]:
    """With one in place of each 0, taken from whoever has most; as they are where there are not enough.

    >>> one_each((4, 0, 0)), one_each((1, 0))
    ((2, 1, 1), (1, 0))
    """
    if sum(counts) < len(counts):
        return tuple(counts)
    found = list(counts)
    most = [(-count, rank) for rank, count in enumerate(counts) if count > 1]
    heapq.heapify(most)
    for rank in [rank for rank, count in enumerate(counts) if count == 0]:
        less, giver = most[0]
        heapq.heapreplace(most, (less + 1, giver))
        found[giver], found[rank] = -less - 1, 1
    return tuple(found)
