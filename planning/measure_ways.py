"""What rows that travel take each rank within its limits, by the exchange that training makes, all ranks at once.

Rows are there, packed, when a clock starts on all ranks; it stops on each when it has what its peer sent. Packing, and
what a rank does with rows that have come, are operators of a step and timed with the others; so is the zeroing that
stands for rows of peers in such a step (`nugnn.comm.lone_ranks`), which is therefore taken off here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nugnn.comm.groups import Ranks
from nugnn.comm.halo_auto import rounds_of_pairs
from nugnn.comm.halo_transfer import Exchange, Route
from nugnn.comm.lone_ranks import LoneRanks
from nugnn.comm.together import seconds_together
from nugnn.planning.measured_ways import Way

_LEAST_BYTES = 64 << 10
"""Of an exchange one way: what is smaller is latency."""
_NCCL_BYTES, _GLOO_BYTES = 256 << 20, 8 << 20
"""At most."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_LEAST_SECONDS_PER_BYTE = 1e-13


@dataclass(frozen=True)
class Travel:
    """What travels in a step.

    Args:
        rows: ``(P, P)``, from the row's rank to the column's in one exchange.
        row_bytes: Widths of rows on the wire in exchanges of the step.
    """

    rows: tuple[tuple[int, ...], ...]
    row_bytes: tuple[int, ...]


def measure_ways(ranks: Ranks, travel: Travel, *, seconds: float) -> tuple[Way, ...]:
    """Of every rank to every peer, as many pairs at once as there are; the same on every rank. A collective call.

    Args:
        ranks: Who takes part, all idle.
        travel: Between them.
        seconds: For all of it together, about; each size is measured three times at least.
    """
    turns = rounds_of_pairs(ranks.world_size)
    table = torch.zeros(ranks.world_size, ranks.world_size, 2, dtype=torch.float64)
    with ranks.pulse.waiting("measuring what rows that travel take"):
        for pairs in turns:
            partner = dict([*pairs, *((b, a) for a, b in pairs)]).get(ranks.rank)
            loads = [_Load(ranks, partner, *size) for size in _sizes(ranks, partner, travel)]
            net = _net_seconds(loads, ranks, seconds / len(turns))
            if partner is not None:
                table[ranks.rank, partner] = torch.tensor(_line(net, [load.num_bytes for load in loads]))
        ranks.sum_(table)
    others = [(a, b) for a in range(ranks.world_size) for b in range(ranks.world_size) if a != b]
    return tuple(
        Way(rank=a, peer=b, bytes_per_second=1 / float(table[a, b, 1]), latency_seconds=float(table[a, b, 0]))
        for a, b in others
    )


def _sizes(ranks: Ranks, partner: int | None, travel: Travel) -> list[tuple[int, int, int]]:
    """Rows sent and received, and bytes of a row: a single row, then two sizes of the step."""
    narrow, wide = min(travel.row_bytes), max(travel.row_bytes)
    sizes = [(1, 1, narrow)]
    for width, share in ((narrow, 0.5 if narrow == wide else 1.0), (wide, 1.0)):
        most = (_NCCL_BYTES if ranks.carries_cuda else _GLOO_BYTES) // width
        least = -(-_LEAST_BYTES // width)
        ends = (0, 0) if partner is None else (ranks.rank, partner)
        sent, received = (round(share * travel.rows[a][b]) for a, b in (ends, ends[::-1]))
        shrunk = min(1.0, most / max(sent, received, 1))
        sizes.append((max(int(shrunk * sent), least), max(int(shrunk * received), least), width))
    return sizes


class _Load:
    """An exchange with one peer, or with nobody, that can be repeated; and what of it a step without peers does."""

    def __init__(self, ranks: Ranks, partner: int | None, sent: int, received: int, row_bytes: int) -> None:
        counts = [[n if rank == partner else 0 for rank in range(ranks.world_size)] for n in (sent, received)]
        splits, out_splits = map(tuple, counts)
        self.num_bytes = max(sum(splits), sum(out_splits)) * row_bytes
        kind: dict[str, Any] = {"dtype": torch.uint8, "device": ranks.device}
        self._rows, self._out = (torch.zeros((sum(n), row_bytes), **kind) for n in (splits, out_splits))
        alone = LoneRanks.of(ranks.world_size, ranks.device, ranks.rank)
        what = "rows that are timed"
        self._route, self._alone = (Route(out_splits, splits, who, what) for who in (ranks, alone))

    def travel(self) -> None:
        Exchange(self._out, self._rows, self._route).finish()

    def alone(self) -> None:
        Exchange(self._out, self._rows, self._alone).finish()


def _net_seconds(loads: Sequence[_Load], ranks: Ranks, seconds: float) -> list[float]:
    """Of each load, medians over rounds in which they take turns: with peers, less what it is without."""
    taken: list[tuple[list[float], list[float]]] = [([], []) for _ in loads]
    rounds = _MOST_ROUNDS
    for number in range(-1, _MOST_ROUNDS):
        if number == rounds:
            break
        begin = time.perf_counter()
        for load, (together, alone) in zip(loads, taken, strict=True):
            together.append(seconds_together(load.travel, ranks))
            alone.append(seconds_together(load.alone, ranks))
        if number == -1:  # it makes connections
            taken = [([], []) for _ in loads]
        elif number == 0:
            longest = float(ranks.max_(torch.tensor([time.perf_counter() - begin], dtype=torch.float64)))
            rounds = int(np.clip(seconds / max(longest, 1e-6), _LEAST_ROUNDS, _MOST_ROUNDS))
    return [max(statistics.median(together) - statistics.median(alone), 0.0) for together, alone in taken]


def _line(net: Sequence[float], num_bytes: Sequence[int]) -> tuple[float, float]:
    """Latency, and seconds of a byte, through the smallest load and all others together."""
    latency, total = net[0], sum(net[1:])
    beyond = total - latency * (len(net) - 1)
    return latency, max(beyond, total / 2, _LEAST_SECONDS_PER_BYTE * sum(num_bytes[1:])) / sum(num_bytes[1:])
