"""Sampled boundaries: in each step a random share of the halo rows travels, scaled so that sums are right in the mean.

A pair of a node and a part that reads it is drawn with probability p, by a word that is a function of seed, step, the
node's global id and the number of the reading part. Owner and reader both compute it, so nothing is exchanged about
who travels. All layers of a step, forward and backward, have the same pairs. What travels is scaled by 1/p on arrival,
rows and gradients alike; the other halo rows are zero, and no gradient comes back from them.

Source: Wan et al., "BNS-GCN: Efficient Full-Graph Training of Graph Convolutional Networks with Partition-Parallelism
and Random Boundary Node Sampling", MLSys 2022. There a fixed number of nodes is drawn for each pair of parts, which a
small boundary rounds to none; here each pair of node and part is drawn on its own, so p is p for any boundary.

Shape suffixes: N inner, H halo, S rows sent, n those of them that travel.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nugnn.comm.halo_exchange import begin_fetch
from nugnn.comm.halo_transfer import HaloPlan
from nugnn.kernels.operator import unseen
from nugnn.kernels.philox import RandomKey, random_words

_WORDS = 2**32


@dataclass(frozen=True, eq=False)
class HaloSample:
    """What travels in one step.

    Args:
        sent: ``(n,)`` int64 places in ``send_rows`` of the plan, ascending.
        read: Likewise of halo rows, from 0 to H - 1.
        send_splits: How many of ``sent`` go to each rank.
        recv_splits: How many of ``read`` come from each rank.
        scale: 1/p.
    """

    sent: Tensor
    read: Tensor
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    scale: float


class HaloSampler:
    """Draws a step's sample, the same on owner and reader.

    Args:
        share: p, in ``(0, 1]``; a multiple of 2**-32, to which it is rounded.
    """

    def __init__(self, share: float) -> None:
        self._threshold = max(round(share * _WORDS), 1)
        self._halo_ids: WeakKeyDictionary[HaloPlan, Tensor] = WeakKeyDictionary()
        self._last: WeakKeyDictionary[HaloPlan, tuple[tuple[int, int], HaloSample]] = WeakKeyDictionary()

    @unseen
    def of_step(self, plan: HaloPlan, seed: int, step: int) -> HaloSample:
        """The sample of ``step``; a collective call for the first step of a ``plan``, to learn who halo rows are.

        Raises:
            ValueError: The plan does not know who its rows are.
        """
        if plan not in self._halo_ids:
            self._halo_ids[plan] = _halo_ids(plan)
        known = self._last.get(plan)
        if known is None or known[0] != (seed, step):
            known = self._last[plan] = (seed, step), self._drawn(plan, seed, step)
        return known[1]

    def _drawn(self, plan: HaloPlan, seed: int, step: int) -> HaloSample:
        assert plan.row_ids is not None
        readers = range(plan.ranks.world_size)
        mine = [plan.ranks.rank] * plan.ranks.world_size
        sent, send_splits = self._chosen(plan.row_ids.sent, plan.send_splits, readers, seed, step)
        read, recv_splits = self._chosen(self._halo_ids[plan], plan.recv_splits, mine, seed, step)
        return HaloSample(sent, read, send_splits, recv_splits, _WORDS / self._threshold)

    def _chosen(
        self, ids: Tensor, splits: Sequence[int], readers: Sequence[int], seed: int, step: int
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Places of the ``ids`` that are drawn, and how many of each piece; ``readers[r]`` reads the r-th piece."""
        drawn = [
            random_words(_key(seed, step, reader), piece.contiguous(), 1)[:, 0] < self._threshold
            for piece, reader in zip(ids.split(list(splits)), readers, strict=True)
        ]
        counts = torch.stack([piece.sum() for piece in drawn]).tolist()
        return torch.cat(drawn).nonzero().view(-1), tuple(counts)


def _key(seed: int, step: int, reader: int) -> RandomKey:
    return RandomKey(seed, step, zlib.crc32(f"halo rows that part {reader} reads".encode()))


def _halo_ids(plan: HaloPlan) -> Tensor:
    """``(H,)`` int64 global ids, from their owners."""
    if plan.row_ids is None:
        raise ValueError("sampled boundaries need a plan that knows who its rows are")
    node_ids = plan.row_ids.node_ids
    halo_ids = node_ids.new_empty(plan.num_halo)
    begin_fetch(node_ids, halo_ids, plan, "ids of halo rows").finish()
    return halo_ids
