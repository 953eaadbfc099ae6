"""What every Triton kernel over a row schedule does first: find out which rows and edges its program has.

A *unit* is a piece of a heavy row or a group of light rows, in the order :mod:`nugnn.kernels.row_schedule` gives them.
Kernels walk it as ``for row in range(first, last)`` with the edges of :func:`edges_of_row`. Import this module only
where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.row_schedule import RowSchedule


def schedule_arguments(schedule: RowSchedule) -> tuple[Any, ...]:
    """Tensors that :func:`rows_of_unit` reads, in its order."""
    return schedule.piece_row, schedule.piece_begin, schedule.piece_end, schedule.group_begin, schedule.group_end


def num_units(schedule: RowSchedule) -> int:
    """Pieces and groups."""
    return schedule.num_pieces + schedule.num_groups


@triton.jit
def rows_of_unit(unit, num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end):  # type: ignore[no-untyped-def]
    """``(is_piece, first row, row after the last, begin, end)`` of a unit; the last two are edges, of a piece only."""
    is_piece = unit < num_pieces
    group = unit - num_pieces
    row_of_piece = tl.load(piece_row + unit, mask=is_piece, other=0).to(tl.int64)
    first = tl.where(is_piece, row_of_piece, tl.load(group_begin + group, mask=group >= 0, other=0).to(tl.int64))
    last = tl.where(is_piece, row_of_piece + 1, tl.load(group_end + group, mask=group >= 0, other=0).to(tl.int64))
    begin = tl.load(piece_begin + unit, mask=is_piece, other=0)
    end = tl.load(piece_end + unit, mask=is_piece, other=0)
    return is_piece, first, last, begin, end


@triton.jit
def edges_of_row(indptr, row, is_piece, piece_begin, piece_end):  # type: ignore[no-untyped-def]
    """``(begin, end)``, int64: all edges of ``row``, or those of the piece."""
    begin = tl.where(is_piece, piece_begin, tl.load(indptr + row))
    end = tl.where(is_piece, piece_end, tl.load(indptr + row + 1))
    return begin, end


@triton.jit
def _sum_pieces_kernel(  # type: ignore[no-untyped-def]
    part, out, split_ptr, width, block_pieces: tl.constexpr, block_columns: tl.constexpr, acc: tl.constexpr
):
    split = tl.program_id(0)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    begin = tl.load(split_ptr + split).to(tl.int64)
    end = tl.load(split_ptr + split + 1).to(tl.int64)
    total = tl.zeros((block_columns,), acc)
    for start in range(begin, end, block_pieces):
        pieces = start + tl.arange(0, block_pieces)
        mask = (pieces < end)[:, None] & (columns < width)[None, :]
        total += tl.sum(tl.load(part + pieces[:, None] * width + columns[None, :], mask=mask, other=0.0), axis=0)
    tl.store(out + split.to(tl.int64) * width + columns, total, mask=columns < width)


def sum_pieces(part: Tensor, schedule: RowSchedule) -> Tensor:
    """``(num_split, W)``: the rows of ``part (num_pieces, W)``, float32 or float64, added up for each split row."""
    width = part.shape[1]
    out = part.new_empty(schedule.num_split, width)
    if out.numel():
        acc = tl.float64 if part.dtype == torch.float64 else tl.float32
        _sum_pieces_kernel[(schedule.num_split, triton.cdiv(width, 128))](
            part, out, schedule.split_ptr, width, block_pieces=16, block_columns=128, acc=acc, num_warps=4
        )
    return out
