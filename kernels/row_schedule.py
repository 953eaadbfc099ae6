"""How the rows of a sparse structure become programs of similar work: heavy rows in pieces, light rows in groups.

A kernel over rows launches ``num_pieces + num_groups`` programs. Program ``p < num_pieces`` reduces edges
``[piece_begin[p], piece_end[p])`` of the heavy row ``piece_row[p]`` into row ``p`` of a workspace with ``num_pieces``
rows. Program ``num_pieces + g`` finishes the light rows ``[group_begin[g], group_end[g])``, empty ones among them, each
with the edges ``indptr`` gives it. A second kernel over ``num_split`` rows then combines the workspace rows
``[split_ptr[s], split_ptr[s + 1])``, in this order, into row ``split_rows[s]``. Every row of the output is so written
exactly once, by plain stores, and the order of additions depends on the structure alone: results are equal bit for bit
from run to run.

Kernels that walk several short rows in lockstep take them from ``lockstep_rows`` instead of the groups: rows of similar
degree stand side by side there, and neighbours in the graph's order are still near.

Shape suffixes: P pieces, G groups, S split rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from nugnn.kernels.structure import integer_dtype

PIECE_EDGES = 512
"""Rows with more edges are split: such a row would run alone at the end of a kernel."""
GROUP_COST = 256
"""Edges, plus :data:`ROW_COST` a row, after which a group ends: enough to pay for the start of a program."""
ROW_COST = 8
"""What a row costs beside its edges, in edges: its offsets, its reduction and its store."""
_SMALL = 1 << 21
"""Below this number of edges a GPU would run out of programs before the last has ended, so pieces are smaller."""
_WINDOW = 512
"""Rows among which :attr:`RowSchedule.lockstep_rows` sorts by degree: few, so that their sources share the cache."""


@dataclass(frozen=True, eq=False)
class RowSchedule:
    """Balanced work over the rows of one structure; the module's docstring says how kernels use it.

    All tensors lie on the device of the structure. Row numbers and counts are int32 where they fit.

    Args:
        piece_edges: Most edges of a piece, and of a row that is not split.
        most_edges: Those of the row that has most.
        group_begin: ``(G,)`` first light row of each group.
        group_end: ``(G,)`` the row after its last; never below ``group_begin``, no heavy row between.
        piece_row: ``(P,)`` the heavy row of each piece; pieces of a row are adjacent and in edge order.
        piece_begin: ``(P,)`` int64 first edge.
        piece_end: ``(P,)`` int64 the edge after its last.
        split_rows: ``(S,)`` the heavy rows, ascending.
        split_ptr: ``(S + 1,)`` pieces of each.
        lockstep_rows: All light rows, sorted by descending degree within windows of neighbours.
    """

    piece_edges: int
    most_edges: int
    group_begin: Tensor
    group_end: Tensor
    piece_row: Tensor
    piece_begin: Tensor
    piece_end: Tensor
    split_rows: Tensor
    split_ptr: Tensor
    lockstep_rows: Tensor

    @property
    def num_pieces(self) -> int:
        return len(self.piece_row)

    @property
    def num_groups(self) -> int:
        return len(self.group_begin)

    @property
    def num_split(self) -> int:
        return len(self.split_rows)


_schedules = WeakIdKeyDictionary()
_part_schedules = WeakIdKeyDictionary()


def row_schedule(indptr: Tensor, rows: tuple[int, int] | None = None) -> RowSchedule:
    """The schedule for ``indptr`` of a structure or transposed structure; made once for each such tensor.

    The first call waits for the device (numbers of pieces and groups are needed on the host), later ones do not.

    Args:
        indptr: ``(N + 1,)`` int64.
        rows: First row and the row after the last where a kernel makes these alone, numbered from the first one; all
            when None. They are cut as in the schedule of all, so that their sums are the same bits.
    """
    if rows is None:
        if indptr not in _schedules:
            _schedules[indptr] = make_row_schedule(indptr, *_sizes(indptr))
        schedule: RowSchedule = _schedules[indptr]
        return schedule
    parts: dict[tuple[int, int], RowSchedule] = _part_schedules.setdefault(indptr, {})
    if rows not in parts:
        first, end = rows
        parts[rows] = make_row_schedule(indptr[first : end + 1], *_sizes(indptr))
    return parts[rows]


def _sizes(indptr: Tensor) -> tuple[int, int]:
    small = len(indptr) == 0 or int(indptr[-1]) < _SMALL
    return (PIECE_EDGES // 4, 32) if small else (PIECE_EDGES, GROUP_COST)


def make_row_schedule(indptr: Tensor, piece_edges: int = PIECE_EDGES, group_cost: int = GROUP_COST) -> RowSchedule:
    """A schedule with given sizes, on the device of ``indptr``.

    Args:
        indptr: ``(N + 1,)`` int64 offsets of the rows' edges.
        piece_edges: Rows with more edges are split into pieces of at most so many, all within one edge of equal.
        group_cost: A group of light rows ends where its edges plus :data:`ROW_COST` a row reach this.

    Raises:
        ValueError: A size is not positive.
    """
    if piece_edges < 1 or group_cost < 1:
        raise ValueError(f"row schedule: piece_edges is {piece_edges}, group_cost {group_cost}; both must be positive")
    device, num_rows = indptr.device, len(indptr) - 1
    row_dtype = integer_dtype(num_rows + 1)
    degrees = indptr.diff()
    heavy = degrees > piece_edges

    split_rows = heavy.nonzero().flatten()
    pieces_S = (degrees[split_rows] + piece_edges - 1) // piece_edges
    split_ptr = torch.zeros(len(split_rows) + 1, dtype=torch.int64, device=device)
    torch.cumsum(pieces_S, 0, out=split_ptr[1:])
    split_P = torch.repeat_interleave(torch.arange(len(split_rows), device=device), pieces_S)
    row_P = split_rows[split_P]
    number_P = torch.arange(len(split_P), device=device) - split_ptr[split_P]
    begin_P = indptr[row_P] + number_P * degrees[row_P] // pieces_S[split_P]
    end_P = indptr[row_P] + (number_P + 1) * degrees[row_P] // pieces_S[split_P]

    cost = torch.where(heavy, 0, degrees + ROW_COST)
    bucket = (torch.cumsum(cost, 0) - cost) // group_cost
    starts = torch.ones(num_rows, dtype=torch.bool, device=device)
    starts[1:] = (bucket[1:] != bucket[:-1]) | heavy[1:] | heavy[:-1]
    begin_G = starts.nonzero().flatten()
    end_G = torch.cat([begin_G[1:], begin_G.new_full((min(1, num_rows),), num_rows)])
    light_G = ~heavy[begin_G]

    light = (~heavy).nonzero().flatten()
    key = light // _WINDOW * (piece_edges + 1) + (piece_edges - degrees[light])
    return RowSchedule(
        piece_edges,
        int(degrees.max()) if num_rows else 0,
        begin_G[light_G].to(row_dtype),
        end_G[light_G].to(row_dtype),
        row_P.to(row_dtype),
        begin_P,
        end_P,
        split_rows.to(row_dtype),
        split_ptr.to(integer_dtype(len(split_P) + 1)),
        light[torch.argsort(key, stable=True)].to(row_dtype),
    )
