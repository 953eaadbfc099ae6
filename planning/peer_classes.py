"""Ranks by classes whose members send and receive as much: what each of them sends to each of its peers, and over what.

Exchanges among thousands of ranks are foreseen from the few classes that there are.

Axes: P ranks, K classes.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

_SPREADING = 20
"""Rounds in which a table is fitted to the totals of its rows and columns."""
_BLOCK = 512
"""Ranks whose ways are added up at once, so that little memory is taken besides that of a table of all pairs."""
_SUM_BITS = 52
"""Of a sum of floating numbers: so many that it is exact where all numbers are multiples of its last bit."""


class WaysToClasses(NamedTuple):
    """From each rank to all of its peers of each class.

    Args:
        seconds_per_byte: ``(P, K)`` of a byte to each of them, one after the other.
        latency_seconds: ``(P, K)`` of the longest way; 0 to a class in which the rank has no peer.
    """

    seconds_per_byte: Floats
    latency_seconds: Floats


def ways_to_classes(bytes_per_second: Floats, latency_seconds: Floats, class_of: Ints) -> WaysToClasses:
    """Ranks with the same ways, to whichever of the peers of each class, get the same bits: they count as alike.

    For that the seconds of a byte are rounded to multiples of so small a number that they add up exactly in any order:
    of the slowest way by less than ``P * 2**-52``.

    Args:
        bytes_per_second: ``(P, P)`` of the row's rank with the column's; the diagonal does not count, here and below.
        latency_seconds: ``(P, P)``.
        class_of: ``(P,)`` numbers from 0 up, each of which occurs.
    """
    count, order = len(class_of), np.argsort(class_of, kind="stable")
    is_sorted, place = bool((np.diff(class_of) >= 0).all()), np.argsort(order)  # of each rank in that order
    starts = np.searchsorted(class_of[order], np.arange(class_of.max() + 1))
    columns = [slice(*ends) for ends in itertools.pairwise([*starts.tolist(), count])]
    slowest = bytes_per_second.min(where=~np.eye(count, dtype=bool), initial=math.inf)
    least = 2.0 ** (math.ceil(math.log2(count / slowest)) - _SUM_BITS) if slowest < math.inf else 1.0
    seconds, longest = np.empty((count, len(columns))), np.empty((count, len(columns)))
    for first in range(0, count, _BLOCK):
        block = slice(first, min(first + _BLOCK, count))
        diagonal = np.arange(block.stop - first), place[block]
        rates, latencies = bytes_per_second[block], latency_seconds[block]
        rates, latencies = (rates, latencies.copy()) if is_sorted else (rates[:, order], latencies[:, order])
        multiples = np.rint((1.0 / least) / rates)
        multiples[diagonal] = latencies[diagonal] = 0.0
        for number, column in enumerate(columns):
            seconds[block, number] = least * multiples[:, column].sum(1)
            longest[block, number] = latencies[:, column].max(1)
    return WaysToClasses(seconds, longest)


def num_peers(counts: npt.NDArray) -> Floats:
    """``(K, K)`` of a rank of the row's class, how many peers it has in the column's.

    Args:
        counts: ``(K,)`` ranks of each class.
    """
    return np.tile(np.asarray(counts, np.float64), (len(counts), 1)) - np.eye(len(counts))


def fitted(rows: Floats, columns: Floats, peers: Floats) -> Floats:
    """``(K, K)`` what each rank of the row's class sends to each of its peers in the column's, as if it preferred none.

    Args:
        rows: ``(K,)`` that a rank of each class sends.
        columns: ``(K,)`` that it receives.
        peers: As `num_peers` has them.
    """
    table, senders = np.outer(rows, columns) * (peers > 0), np.ascontiguousarray(peers.T)
    for _ in range(_SPREADING):
        table *= _ratio(columns, (table * senders).sum(0))[None, :]
        table *= _ratio(rows, (table * peers).sum(1))[:, None]
    return np.asarray(table, np.float64)


def _ratio(wanted: Floats, found: Floats) -> Floats:
    return np.divide(wanted, found, out=np.zeros_like(wanted), where=found > 0)
