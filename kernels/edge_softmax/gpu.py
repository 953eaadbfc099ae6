"""Edge softmax in Triton: the edges of a destination lie together, so a program reads them twice, the second time from
cache.

Pieces of heavy rows first leave their maximum and sum, which one program per row merges in a fixed order. Import this
module only where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.operator import unseen
from nugnn.kernels.row_programs import edges_of_row, num_units, rows_of_unit, schedule_arguments, sum_pieces
from nugnn.kernels.row_schedule import RowSchedule, row_schedule

_TILE = 256
"""Values that one warp holds at once: 8 per thread."""


@triton.jit
def _tile_at(rows, end, columns, width):  # type: ignore[no-untyped-def]
    """Offsets of ``(rows, columns)``, and which of them exist."""
    return rows.to(tl.int64)[:, None] * width + columns[None, :], (rows < end)[:, None] & (columns < width)[None, :]


@triton.jit
def _merge(largest, total, scores):  # type: ignore[no-untyped-def]
    """Running maximum and sum of exponentials after a block of scores; ``-inf`` where masked."""
    now_largest = tl.maximum(largest, tl.max(scores, axis=0))
    base = tl.where(now_largest == float("-inf"), 0.0, now_largest)
    grown = tl.sum(tl.exp2((scores - base[None, :]) * 1.4426950408889634), axis=0)
    return now_largest, total * tl.exp2((largest - base) * 1.4426950408889634) + grown


@triton.jit(do_not_specialize=["num_pieces"])
def _softmax_kernel(  # type: ignore[no-untyped-def]
    out, part, scores, indptr, num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end,
    width: tl.constexpr, block_edges: tl.constexpr, block_columns: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """A unit of rows; a piece leaves its maximum and sum only."""
    unit = tl.program_id(0)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_piece, first, last, begin_of_piece, end_of_piece = rows_of_unit(
        unit, num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end
    )
    for row in range(first, last):
        begin, end = edges_of_row(indptr, row, is_piece, begin_of_piece, end_of_piece)
        largest = tl.full((block_columns,), float("-inf"), acc)
        total = tl.zeros((block_columns,), acc)
        for start in range(begin, end, block_edges):
            at, mask = _tile_at(start + tl.arange(0, block_edges), end, columns, width)
            tile = tl.load(scores + at, mask=mask, other=float("-inf")).to(acc)
            largest, total = _merge(largest, total, tile)
        if is_piece:
            at_piece = part + unit.to(tl.int64) * (2 * width) + columns
            tl.store(at_piece, largest, mask=columns < width)
            tl.store(at_piece + width, total, mask=columns < width)
        else:
            _write_weights(out, scores, begin, end, largest, total, columns, width, block_edges, acc)


@triton.jit
def _write_weights(  # type: ignore[no-untyped-def]
    out, scores, begin, end, largest, total, columns,
    width: tl.constexpr, block_edges: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.where(total == 0, 1.0, total)
    for start in range(begin, end, block_edges):
        at, mask = _tile_at(start + tl.arange(0, block_edges), end, columns, width)
        tile = tl.load(scores + at, mask=mask, other=float("-inf")).to(acc)
        weights = tl.exp2((tile - base[None, :]) * 1.4426950408889634) / total[None, :]
        tl.store(out + at, weights.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _merge_pieces_kernel(  # type: ignore[no-untyped-def]
    merged, part, split_ptr,
    width: tl.constexpr, block_pieces: tl.constexpr, block_columns: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of a split row from those of its pieces."""
    split = tl.program_id(0)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    begin = tl.load(split_ptr + split).to(tl.int64)
    end = tl.load(split_ptr + split + 1).to(tl.int64)
    largest = tl.full((block_columns,), float("-inf"), acc)
    total = tl.zeros((block_columns,), acc)
    for start in range(begin, end, block_pieces):
        at, mask = _tile_at(start + tl.arange(0, block_pieces), end, columns, 2 * width)
        mask = mask & (columns < width)[None, :]
        piece_largest = tl.load(part + at, mask=mask, other=float("-inf"))
        piece_total = tl.load(part + at + width, mask=mask, other=0.0)
        now_largest = tl.maximum(largest, tl.max(piece_largest, axis=0))
        base = tl.where(now_largest == float("-inf"), 0.0, now_largest)
        grown = tl.sum(piece_total * tl.exp2((piece_largest - base[None, :]) * 1.4426950408889634), axis=0)
        total = total * tl.exp2((largest - base) * 1.4426950408889634) + grown
        largest = now_largest
    at_split = merged + split.to(tl.int64) * (2 * width) + columns
    tl.store(at_split, largest, mask=columns < width)
    tl.store(at_split + width, total, mask=columns < width)


@triton.jit
def _piece_weights_kernel(  # type: ignore[no-untyped-def]
    out, scores, merged, split_of_piece, piece_begin, piece_end,
    width: tl.constexpr, block_edges: tl.constexpr, block_columns: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """The weights of a piece, once its whole row is known."""
    piece = tl.program_id(0)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    at_split = merged + tl.load(split_of_piece + piece).to(tl.int64) * (2 * width) + columns
    largest = tl.load(at_split, mask=columns < width, other=0.0)
    total = tl.load(at_split + width, mask=columns < width, other=1.0)
    begin, end = tl.load(piece_begin + piece), tl.load(piece_end + piece)
    _write_weights(out, scores, begin, end, largest, total, columns, width, block_edges, acc)


@triton.jit(do_not_specialize=["num_pieces"])
def _softmax_backward_kernel(  # type: ignore[no-untyped-def]
    out, part, weights, grad, indptr, num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end,
    width: tl.constexpr, block_edges: tl.constexpr, block_columns: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """``out = w (g - sum over the row of w g)`` for a unit of rows; a piece leaves its share of the sum only."""
    unit = tl.program_id(0)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_piece, first, last, begin_of_piece, end_of_piece = rows_of_unit(
        unit, num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end
    )
    for row in range(first, last):
        begin, end = edges_of_row(indptr, row, is_piece, begin_of_piece, end_of_piece)
        total = tl.zeros((block_columns,), acc)
        for start in range(begin, end, block_edges):
            at, mask = _tile_at(start + tl.arange(0, block_edges), end, columns, width)
            weight_tile = tl.load(weights + at, mask=mask, other=0.0).to(acc)
            total += tl.sum(weight_tile * tl.load(grad + at, mask=mask, other=0.0).to(acc), axis=0)
        if is_piece:
            tl.store(part + unit.to(tl.int64) * width + columns, total, mask=columns < width)
        else:
            _write_grad(out, weights, grad, begin, end, total, columns, width, block_edges, acc)


@triton.jit
def _write_grad(  # type: ignore[no-untyped-def]
    out, weights, grad, begin, end, total, columns,
    width: tl.constexpr, block_edges: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, block_edges):
        at, mask = _tile_at(start + tl.arange(0, block_edges), end, columns, width)
        weight_tile = tl.load(weights + at, mask=mask, other=0.0).to(acc)
        result = weight_tile * (tl.load(grad + at, mask=mask, other=0.0).to(acc) - total[None, :])
        tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _piece_grad_kernel(  # type: ignore[no-untyped-def]
    out, weights, grad, totals, split_of_piece, piece_begin, piece_end,
    width: tl.constexpr, block_edges: tl.constexpr, block_columns: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    at_split = totals + tl.load(split_of_piece + piece).to(tl.int64) * width + columns
    total = tl.load(at_split, mask=columns < width, other=0.0)
    begin, end = tl.load(piece_begin + piece), tl.load(piece_end + piece)
    _write_grad(out, weights, grad, begin, end, total, columns, width, block_edges, acc)


def softmax(indptr: Tensor, scores_EC: Tensor) -> Tensor:
    """Softmax over the edges of each row, column by column.

    Args:
        indptr: ``(N + 1,)`` int64.
        scores_EC: ``(E, C)`` contiguous; float32, bfloat16 and float16 are computed in float32, float64 in itself.

    Returns:
        ``(E, C)`` in the dtype of ``scores_EC``; zeros where all scores of a row are ``-inf``.
    """
    out = torch.empty_like(scores_EC)
    if out.numel() == 0:
        return out
    schedule, (grid_columns, sizes) = row_schedule(indptr), _sizes(scores_EC)
    part = torch.empty(schedule.num_pieces, 2, scores_EC.shape[1], dtype=_wide(scores_EC), device=out.device)
    _softmax_kernel[(num_units(schedule), grid_columns)](
        out, part, scores_EC, indptr, schedule.num_pieces, *schedule_arguments(schedule), **sizes
    )
    if schedule.num_split:
        merged = part.new_empty(schedule.num_split, 2, scores_EC.shape[1])
        of_pieces = {"block_pieces" if name == "block_edges" else name: value for name, value in sizes.items()}
        _merge_pieces_kernel[(schedule.num_split, grid_columns)](merged, part, schedule.split_ptr, **of_pieces)
        _piece_weights_kernel[(schedule.num_pieces, grid_columns)](
            out, scores_EC, merged, _split_of_piece(schedule), schedule.piece_begin, schedule.piece_end, **sizes
        )
    return out


@unseen
def softmax_backward(indptr: Tensor, weights_EC: Tensor, grad_EC: Tensor) -> Tensor:
    """Gradient of the scores from the weights: ``w (g - sum over the row of w g)``, in the dtype of the weights."""
    out = torch.empty_like(weights_EC)
    if out.numel() == 0:
        return out
    schedule, (grid_columns, sizes) = row_schedule(indptr), _sizes(weights_EC)
    part = torch.empty(schedule.num_pieces, weights_EC.shape[1], dtype=_wide(weights_EC), device=out.device)
    _softmax_backward_kernel[(num_units(schedule), grid_columns)](
        out, part, weights_EC, grad_EC, indptr, schedule.num_pieces, *schedule_arguments(schedule), **sizes
    )
    if schedule.num_split:
        totals = sum_pieces(part, schedule)
        _piece_grad_kernel[(schedule.num_pieces, grid_columns)](
            out,
            weights_EC,
            grad_EC,
            totals,
            _split_of_piece(schedule),
            schedule.piece_begin,
            schedule.piece_end,
            **sizes,
        )
    return out


def _split_of_piece(schedule: RowSchedule) -> Tensor:
    """``(P,)`` which split row each piece belongs to."""
    splits = torch.arange(schedule.num_split, device=schedule.split_ptr.device)
    return torch.repeat_interleave(splits, schedule.split_ptr.diff().long(), output_size=schedule.num_pieces)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _sizes(x_EC: Tensor) -> tuple[int, dict[str, Any]]:
    """Number of column blocks, and the compile-time arguments of every kernel here."""
    width = x_EC.shape[1]
    block_columns = min(64, triton.next_power_of_2(width))
    acc = tl.float64 if x_EC.dtype == torch.float64 else tl.float32
    sizes = {"width": width, "block_edges": max(4, min(64, _TILE // block_columns)), "block_columns": block_columns}
    return triton.cdiv(width, block_columns), {**sizes, "acc": acc, "num_warps": 1}
