"""Rows that go to other ranks, where their nodes go: one tensor after the other, so that little is held twice.

Shape suffixes: N rows before, M rows after, E values in runs before, F after.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from nugnn.comm.groups import Ranks, stacked
from nugnn.comm.halo_transfer import Exchange, Route
from nugnn.datasets.sparse import csr_matrix

_VALUES_PER_PASS = 1 << 24
"""Values copied at once: their places take 8 bytes each."""


class RowMove:
    """Which rows stay and which go, and how rows stand afterwards; made and used by all ranks together.

    Args:
        ids_N: int64 global id of each row of this rank; every id is on one rank.
        destination_N: int64, the rank that each row goes to; this one where it stays.
        ranks: Who takes part.
        by_id: Whether rows stand in the order of their ids afterwards. Otherwise those that stay keep their order, and
            those that come stand behind, sender after sender, in the order that they had there.
        arranged_as: ``(M,)`` ids in the order in which rows shall stand on this rank, in place of ``by_id``.

    Raises:
        ValueError: A destination is no rank, or ``arranged_as`` are other ids than those that come and stay.
    """

    def __init__(
        self,
        ids_N: Tensor,
        destination_N: Tensor,
        ranks: Ranks,
        *,
        by_id: bool = False,
        arranged_as: Tensor | None = None,
    ) -> None:
        self.ranks = ranks
        self.old_ids, destination_N = ids_N.cpu(), destination_N.cpu().long()
        size = ranks.world_size
        if len(destination_N) != len(ids_N):
            raise ValueError(f"there are {len(destination_N)} destinations for {len(ids_N)} rows; give one for each")
        if len(destination_N) and not (0 <= int(destination_N.min()) and int(destination_N.max()) < size):
            wrong = destination_N[(destination_N < 0) | (destination_N >= size)]
            raise ValueError(f"destination {int(wrong[0])} is no rank; they are 0 to {size - 1}")
        goes_N = destination_N != ranks.rank
        self._stay = (~goes_N).nonzero().flatten()
        going = goes_N.nonzero().flatten()
        self._sent = going[torch.argsort(destination_N[going], stable=True)]
        counts = stacked(ranks, torch.bincount(destination_N, minlength=size))
        self.counts: tuple[tuple[int, ...], ...] = tuple(map(tuple, counts.tolist()))
        """Rows that go from each rank (first) to each one, those that stay among them; the same on all ranks."""
        counts.fill_diagonal_(0)
        self._sent_splits = tuple(counts[ranks.rank].tolist())
        self._splits = tuple(counts[:, ranks.rank].tolist())
        self.num_moved = int(counts.sum())
        """Rows of all ranks that go to another one."""
        came = self._exchanged(self.old_ids.index_select(0, self._sent), self._sent_splits, self._splits)
        unordered = torch.cat([self.old_ids.index_select(0, self._stay), came])
        place = _places(unordered, by_id, arranged_as)
        self._stay_to, self._come_to = place[: len(self._stay)], place[len(self._stay) :]
        self.new_ids = torch.empty_like(unordered).index_copy_(0, place, unordered)
        """``(M,)`` int64 global id of each row of this rank afterwards."""

    def rows(self, x_N: Tensor) -> Tensor:
        """``(M, ...)`` of ``x_N (N, ...)``, dense or ``torch.sparse_csr``, without gradient, on the device of ``x_N``.

        Every rank has to call, with the same trailing shape and type.

        Raises:
            ValueError: ``x_N`` does not have N rows.
        """
        if len(x_N) != len(self.old_ids):
            raise ValueError(f"expected {len(self.old_ids)} rows, one for each node of this rank, got {len(x_N)}")
        x_N = x_N.detach()
        if x_N.layout is torch.sparse_csr:
            return self._sparse(x_N)
        sent = x_N.index_select(0, self._sent.to(x_N.device))
        came = self._exchanged(sent, self._sent_splits, self._splits)
        out_M = x_N.new_empty((len(self.new_ids), *x_N.shape[1:]))
        step = max(1, _VALUES_PER_PASS // max(1, x_N.shape[1:].numel()))
        for source, place in zip(self._stay.split(step), self._stay_to.split(step), strict=True):
            out_M.index_copy_(0, place.to(x_N.device), x_N.index_select(0, source.to(x_N.device)))
        return out_M.index_copy_(0, self._come_to.to(x_N.device), came)

    def runs(self, values_E: Tensor, starts_N: Tensor, starts_M: Tensor) -> Tensor:
        """``(F, ...)``: values that belong to rows in runs, such as edges to their destinations.

        Args:
            values_E: Values of each row, one row after the other.
            starts_N: ``(N + 1,)`` int64 on the CPU, where each row's run begins, and their end.
            starts_M: ``(M + 1,)`` the same afterwards: the sums of what `rows` makes of the lengths.
        """
        values_E = values_E.detach()
        device = values_E.device
        sent = values_E.index_select(0, _places_in_runs(starts_N, self._sent).to(device))
        sizes = sums_of(starts_N.diff()[self._sent], self._sent_splits)
        came_sizes = sums_of(starts_M.diff()[self._come_to], self._splits)
        came = self._exchanged(sent, sizes, came_sizes)
        out_F = values_E.new_empty((int(starts_M[-1]), *values_E.shape[1:]))
        for source, place in self._runs_that_stay(starts_N, starts_M):
            out_F.index_copy_(0, place.to(device), values_E.index_select(0, source.to(device)))
        return out_F.index_copy_(0, _places_in_runs(starts_M, self._come_to).to(device), came)

    @property
    def stay(self) -> tuple[Tensor, Tensor]:
        """int64 rows among the N that stay, and their places among the M."""
        return self._stay, self._stay_to

    @property
    def sent(self) -> tuple[Tensor, tuple[int, ...]]:
        """int64 rows among the N that go, by destination, and how many to each rank."""
        return self._sent, self._sent_splits

    @property
    def came(self) -> tuple[Tensor, tuple[int, ...]]:
        """Places among the M of rows that come, by sender, each one's in its order, and how many from each rank."""
        return self._come_to, self._splits

    def _runs_that_stay(self, starts_N: Tensor, starts_M: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Places among the E of the values that stay, and theirs among the F, in pieces of `_VALUES_PER_PASS` or so."""
        ends = starts_N.diff()[self._stay].cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        wanted = torch.arange(0, total + 1, _VALUES_PER_PASS)
        cuts = sorted({0, *torch.searchsorted(ends, wanted, right=True).tolist(), len(ends)})
        for a, b in pairwise(cuts):
            yield _places_in_runs(starts_N, self._stay[a:b]), _places_in_runs(starts_M, self._stay_to[a:b])

    def _sparse(self, x_N: Tensor) -> Tensor:
        device, starts_N = x_N.device, x_N.crow_indices().cpu()
        starts_M = starts_of(self.rows(starts_N.diff()))
        columns, values = (self.runs(part, starts_N, starts_M) for part in (x_N.col_indices(), x_N.values()))
        return csr_matrix(starts_M.to(device), columns, values, (len(self.new_ids), x_N.shape[1]))

    def _exchanged(self, rows: Tensor, splits: tuple[int, ...], out_splits: tuple[int, ...]) -> Tensor:
        return exchanged(rows, splits, out_splits, self.ranks, "rows that move")


def exchanged(rows: Tensor, splits: tuple[int, ...], out_splits: tuple[int, ...], ranks: Ranks, label: str) -> Tensor:
    """``splits[r]`` of ``rows`` go to each rank r; ``(sum of out_splits, ...)`` that came, sender after sender.

    A collective call; which ranks have something to say to each other has to be known to both.
    """
    out = rows.new_empty((sum(out_splits), *rows.shape[1:]))
    if not ranks.is_split:
        return out.copy_(rows)
    return Exchange(out, rows, Route(out_splits, splits, ranks, label)).finish()


def starts_of(lengths: Tensor) -> Tensor:
    """``(n + 1,)`` int64, where runs of these ``lengths`` begin, and their end.

    >>> starts_of(torch.tensor([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=starts[1:])
    return starts


def _places_in_runs(starts: Tensor, rows: Tensor) -> Tensor:
    """Places of the values of ``rows``, one row after the other.

    >>> _places_in_runs(torch.tensor([0, 2, 2, 5]), torch.tensor([2, 0])).tolist()
    [2, 3, 4, 0, 1]
    """
    lengths = starts.diff()[rows]
    before = starts_of(lengths)
    places = torch.repeat_interleave(starts[rows] - before[:-1], lengths, output_size=int(before[-1]))
    return places.add_(torch.arange(len(places)))


def _places(ids: Tensor, by_id: bool, arranged_as: Tensor | None) -> Tensor:
    """Where each of ``ids`` shall stand."""
    if arranged_as is not None:
        wanted, order = arranged_as.cpu().sort()
        if not torch.equal(wanted, ids.sort().values):
            raise ValueError(f"the rows cannot be arranged as asked: {len(ids)} come or stay, and others are listed")
        return order[torch.searchsorted(wanted, ids)]
    if not by_id:
        return torch.arange(len(ids))
    return torch.empty_like(ids).index_copy_(0, ids.argsort(), torch.arange(len(ids)))


def sums_of(lengths: Tensor, splits: tuple[int, ...]) -> tuple[int, ...]:
    """Of each piece.

    >>> sums_of(torch.tensor([1, 2, 3]), (2, 0, 1))
    (3, 0, 3)
    """
    return tuple(int(part.sum()) for part in lengths.split(list(splits)))
