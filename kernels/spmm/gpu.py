"""Aggregation over in-edges in Triton: gathers of whole feature rows, 16 bytes a thread, several edges in flight.

A program of one warp reduces a piece of a heavy row or a group of light rows (:mod:`nugnn.kernels.row_schedule`); rows
narrower than a warp's loads share a program in lockstep. A tile of ``rows x edges x features`` is loaded before any of
it is added, so that its loads overlap, and the next indices are fetched meanwhile. Sums are accumulated in float32
(float64 for float64) and rounded once. Gradients use the same kernels over the transposed structure: nothing is added
by two programs at once, so results are equal bit for bit from run to run. Import this module only where Triton is
installed.

Shape suffixes: N rows of the output, E edges, F = H x D features (H heads that share a weight, D features of each).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nugnn.kernels.row_schedule import RowSchedule, row_schedule
from nugnn.kernels.structure import Structure

COPY, ADD, SUB, MUL, DIV = (tl.constexpr(code) for code in range(5))
_CODES = {"copy_lhs": 0, "copy_rhs": 0, "add": 1, "sub": 2, "mul": 3, "div": 4}
NO_WEIGHT, HEAD_WEIGHT, FULL_WEIGHT = (tl.constexpr(code) for code in range(3))


# --- device code


@triton.jit
def _message(x, w, op: tl.constexpr):  # type: ignore[no-untyped-def]
    if op == ADD:
        return x + w
    elif op == SUB:
        return x - w
    elif op == MUL:
        return x * w
    elif op == DIV:
        # Triton's own division of float32 is not correctly rounded
        return tl.math.div_rn(x, w) if x.dtype == tl.float32 else x / w
    else:
        return x


@triton.jit
def _extreme_of(value, edge, axis: tl.constexpr, none: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest ``value`` along ``axis``, NaN above all, and the smallest ``edge`` that has it, else ``none``."""
    is_nan = value != value  # noqa: PLR0124
    some_nan = tl.max(is_nan.to(tl.int32), axis, keep_dims=True) > 0
    largest = tl.max(tl.where(is_nan, float("-inf"), value), axis, keep_dims=True)
    hit = tl.where(some_nan, is_nan, value == largest)
    first = tl.min(tl.where(hit, edge, none), axis)
    best = tl.max(tl.where(some_nan, float("-inf"), largest), axis)
    any_nan = tl.max(is_nan.to(tl.int32), axis) > 0
    return tl.where(any_nan, float("nan"), best), first


# A size of 1 would otherwise become a compile-time constant, which has no type to convert.
@triton.jit(do_not_specialize=["num_pieces", "num_light", "num_heads", "out_vectors", "x_vectors", "sign"])
def _aggregate_kernel(  # type: ignore[no-untyped-def]
    out, out_winner, partial, partial_winner, x, w, winner, src_scale, dst_scale,
    indptr, indices, edge_ids, group_begin, group_end, lockstep_rows, piece_begin, piece_end,
    num_pieces, num_light, num_heads, out_vectors, x_vectors, sign,
    out_vector: tl.constexpr, x_vector: tl.constexpr,
    op: tl.constexpr, weight: tl.constexpr, is_extreme: tl.constexpr, by_edge: tl.constexpr,
    has_edge_ids: tl.constexpr, has_winner: tl.constexpr, has_src_scale: tl.constexpr, has_dst_scale: tl.constexpr,
    wide_edges: tl.constexpr, accumulator: tl.constexpr, one_head: tl.constexpr, no_edge: tl.constexpr,
    rows_at_once: tl.constexpr, row_sets: tl.constexpr, unroll: tl.constexpr, block_edges: tl.constexpr,
    block_heads: tl.constexpr, block_columns: tl.constexpr, sum_each_tile: tl.constexpr,
):  # fmt: skip
    """``out[row] = reduce over edges of op(x[index], w[edge])`` for this program's rows; see :func:`_aggregate`."""
    # written so that the compiler knows how far rows are aligned, and makes wide loads
    x_columns = x_vectors * x_vector
    num_columns = out_vectors * out_vector
    column_blocks = tl.cdiv(num_columns, block_columns)
    if one_head:
        head = tl.zeros([block_heads], tl.int32)
        column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    else:
        head = tl.program_id(1) // column_blocks * block_heads + tl.arange(0, block_heads)
        column = tl.program_id(1) % column_blocks * block_columns + tl.arange(0, block_columns)
    in_heads = head < num_heads
    in_out = in_heads[:, None] & (column < num_columns)[None, :]
    in_x = in_heads[:, None] & (column < x_columns)[None, :]
    x_offset = head[:, None] * x_columns + column[None, :]
    out_offset = head[:, None] * num_columns + column[None, :]
    x_width = (num_heads * x_columns).to(tl.int64)
    out_width = (num_heads * num_columns).to(tl.int64)
    edge_type = tl.int64 if wide_edges else tl.int32
    shape: tl.constexpr = (block_heads, block_edges, rows_at_once, unroll, block_columns)
    no_weight: tl.constexpr = 1.0 if op == DIV else 0.0  # beyond the last edge: such messages are 0

    program = tl.program_id(0)
    num_piece_programs = tl.cdiv(num_pieces, rows_at_once)
    is_piece = program < num_piece_programs
    if is_piece:
        begins = piece_begin
        ends = piece_end
        first = program * rows_at_once
        last = tl.minimum(first + rows_at_once, num_pieces)
    else:
        begins = indptr
        ends = indptr + 1
        if rows_at_once == 1:
            first = tl.load(group_begin + program - num_piece_programs).to(tl.int32)
            last = tl.load(group_end + program - num_piece_programs).to(tl.int32)
        else:
            first = (program - num_piece_programs) * (rows_at_once * row_sets)
            last = tl.minimum(first + rows_at_once * row_sets, num_light)

    for start in range(first, last, rows_at_once):
        slot = start + tl.arange(0, rows_at_once)
        valid = slot < last
        row = slot.to(tl.int64)
        if rows_at_once > 1:
            is_light = valid & (program >= num_piece_programs)
            row = tl.where(is_light, tl.load(lockstep_rows + slot, mask=is_light, other=0), row)
        begin = tl.load(begins + row, mask=valid, other=0).to(edge_type)
        end = tl.load(ends + row, mask=valid, other=0).to(edge_type)
        count = tl.max(end - begin, 0)

        if is_extreme:
            best = tl.full(shape, float("-inf"), accumulator)
            best_edge = tl.full(shape, no_edge, edge_type)
        elif sum_each_tile:
            total = tl.zeros([block_heads, rows_at_once, block_columns], accumulator)
        else:
            total = tl.zeros(shape, accumulator)

        # Tiles are (heads, edges, rows, unroll, columns): the compiler spreads lanes and warps over columns, then over
        # the other axes from the left, so that most of a sum over edges stays within a thread.
        step = tl.arange(0, block_edges)[:, None, None] + tl.arange(0, unroll)[None, None, :] * block_edges
        edge = begin[None, :, None] + step
        inside = edge < end[None, :, None]
        if by_edge:
            index = edge
        else:
            index = tl.load(indices + edge, mask=inside, other=0, eviction_policy="evict_first")
        for _ in range(0, count, unroll * block_edges):
            next_edge = edge + unroll * block_edges
            next_inside = next_edge < end[None, :, None]
            if by_edge:
                next_index = next_edge
            else:
                next_index = tl.load(indices + next_edge, mask=next_inside, other=0, eviction_policy="evict_first")
            if has_edge_ids:
                edge_row = tl.load(edge_ids + edge, mask=inside, other=0, eviction_policy="evict_first").to(edge_type)
            else:
                edge_row = edge
            x_row = index.to(tl.int64) * x_width
            mask = inside[None, :, :, :, None]
            x_at = x_row[None, :, :, :, None] + x_offset[:, None, None, None, :]
            message = tl.load(x + x_at, mask=mask & in_x[:, None, None, None, :], other=0).to(accumulator)
            if weight == HEAD_WEIGHT:
                w_at = edge_row.to(tl.int64)[None, :, :, :] * num_heads + head[:, None, None, None]
                w_mask = inside[None, :, :, :] & in_heads[:, None, None, None]
                w_tile = tl.load(w + w_at, mask=w_mask, other=no_weight).to(accumulator)
                message = _message(message, w_tile[:, :, :, :, None], op)
            if weight == FULL_WEIGHT:
                w_at = (edge_row.to(tl.int64) * out_width)[None, :, :, :, None] + out_offset[:, None, None, None, :]
                w_tile = tl.load(w + w_at, mask=mask & in_out[:, None, None, None, :], other=no_weight).to(accumulator)
                message = _message(message, w_tile, op)
            if has_src_scale:
                scale = tl.load(src_scale + index, mask=inside, other=0).to(accumulator)
                message = message * scale[None, :, :, :, None]
            if has_winner:
                won_at = (index.to(tl.int64) * out_width)[None, :, :, :, None] + out_offset[:, None, None, None, :]
                won = tl.load(winner + won_at, mask=mask & in_out[:, None, None, None, :], other=-1)
                message = tl.where(won == edge_row[None, :, :, :, None], message, 0)
            if is_extreme:
                message = message * sign
                better = (message > best) | ((message != message) & (best == best))  # noqa: PLR0124
                better = better & mask
                best = tl.where(better, message, best)
                best_edge = tl.where(better, edge[None, :, :, :, None], best_edge)
            elif sum_each_tile:
                total += tl.sum(tl.sum(message, 3), 1)
            else:
                total += message
            edge = next_edge
            inside = next_inside
            index = next_index

        if is_extreme:
            value, won_edge = _extreme_of(best, best_edge, 3, no_edge)
            value, won_edge = _extreme_of(value, won_edge, 1, no_edge)
            # no message above -inf: the first edge wins, and a row without edges has none
            lowest = tl.where(end > begin, begin, -1).to(edge_type)
            won_edge = tl.where(won_edge == no_edge, lowest[None, :, None], won_edge)
        elif sum_each_tile:
            value = total
        else:
            value = tl.sum(tl.sum(total, 3), 1)
        at = (row * out_width)[None, :, None] + out_offset[:, None, :]
        store_mask = valid[None, :, None] & in_out[:, None, :]
        if is_piece:
            tl.store(partial + at, value, mask=store_mask)
            if is_extreme:
                tl.store(partial_winner + at, won_edge, mask=store_mask)
        else:
            if is_extreme:
                value = value * sign
                tl.store(out_winner + at, won_edge, mask=store_mask)
            if has_dst_scale:
                value = value * tl.load(dst_scale + row, mask=valid, other=0).to(accumulator)[None, :, None]
            tl.store(out + at, value.to(out.dtype.element_ty), mask=store_mask)


@triton.jit(do_not_specialize=["width", "sign"])
def _combine_kernel(  # type: ignore[no-untyped-def]
    out, out_winner, partial, partial_winner, dst_scale, split_rows, split_ptr, width, sign,
    is_extreme: tl.constexpr, has_dst_scale: tl.constexpr, accumulator: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """A heavy row from its pieces, in their order; of equal extremes the earlier piece wins."""
    split = tl.program_id(0)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    mask = column < width
    row = tl.load(split_rows + split).to(tl.int64)
    first = tl.load(split_ptr + split)
    last = tl.load(split_ptr + split + 1)
    width = width.to(tl.int64)
    value = tl.load(partial + first * width + column, mask=mask, other=0)
    if is_extreme:
        edge = tl.load(partial_winner + first * width + column, mask=mask, other=0)
    for piece in range(first + 1, last):
        more = tl.load(partial + piece * width + column, mask=mask, other=0)
        if is_extreme:
            more_edge = tl.load(partial_winner + piece * width + column, mask=mask, other=0)
            better = (more > value) | ((more != more) & (value == value))  # noqa: PLR0124
            value = tl.where(better, more, value)
            edge = tl.where(better, more_edge, edge)
        else:
            value += more
    if is_extreme:
        value = value * sign
        tl.store(out_winner + row * width + column, edge, mask=mask)
    if has_dst_scale:
        value = value * tl.load(dst_scale + row).to(accumulator)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_pieces", "num_heads", "column_vectors"])
def _edge_gradient_kernel(  # type: ignore[no-untyped-def]
    out, grad, x, winner, src_scale, dst_scale,
    indptr, indices, group_begin, group_end, piece_row, piece_begin, piece_end,
    num_pieces, num_heads, column_vectors,
    vector: tl.constexpr, has_x: tl.constexpr, has_winner: tl.constexpr, has_src_scale: tl.constexpr,
    has_dst_scale: tl.constexpr, is_full: tl.constexpr, wide_edges: tl.constexpr, accumulator: tl.constexpr,
    block_edges: tl.constexpr, block_heads: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """``out[e, h] = sum_d grad[row, h, d] * x[index, h, d]`` (every product, ``is_full``) for this program's edges."""
    num_columns = column_vectors * vector
    width = (num_heads * num_columns).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    in_heads = head < num_heads
    edge_type = tl.int64 if wide_edges else tl.int32
    program = tl.program_id(0)
    is_piece = program < num_pieces
    if is_piece:
        first = program
        last = program + 1
        begins = piece_begin
        ends = piece_end
    else:
        first = tl.load(group_begin + program - num_pieces).to(tl.int32)
        last = tl.load(group_end + program - num_pieces).to(tl.int32)
        begins = indptr
        ends = indptr + 1
    for slot in range(first, last):
        row = tl.full([], 0, tl.int64) + slot
        begin = tl.load(begins + row).to(edge_type)
        end = tl.load(ends + row).to(edge_type)
        if is_piece:
            row = tl.load(piece_row + slot).to(tl.int64)
        for start in range(begin, end, block_edges):
            edge = start + tl.arange(0, block_edges)
            inside = edge < end
            index = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
            scale = tl.full([block_edges], 1.0, accumulator)
            if has_src_scale:
                scale = scale * tl.load(src_scale + index, mask=inside, other=0).to(accumulator)
            if has_dst_scale:
                scale = scale * tl.load(dst_scale + row).to(accumulator)
            total = tl.zeros([block_edges, block_heads], accumulator)
            for column_start in range(0, num_columns, block_columns):
                column = column_start + tl.arange(0, block_columns)
                in_row = in_heads[:, None] & (column < num_columns)[None, :]
                offset = head[:, None] * num_columns + column[None, :]
                mask = inside[:, None, None] & in_row[None, :, :]
                grad_row = tl.load(grad + row * width + offset, mask=in_row, other=0).to(accumulator)
                product = tl.broadcast_to(grad_row[None, :, :], [block_edges, block_heads, block_columns])
                if has_x:
                    x_at = (index * width)[:, None, None] + offset[None, :, :]
                    product = product * tl.load(x + x_at, mask=mask, other=0).to(accumulator)
                if has_winner:
                    won = tl.load(winner + row * width + offset, mask=in_row, other=-1)
                    product = tl.where(won[None, :, :] == edge[:, None, None], product, 0)
                if is_full:
                    at = (edge.to(tl.int64) * width)[:, None, None] + offset[None, :, :]
                    value = (product * scale[:, None, None]).to(out.dtype.element_ty)
                    tl.store(out + at, value, mask=mask)
                else:
                    total += tl.sum(product, 2)
            if not is_full:
                at = edge.to(tl.int64)[:, None] * num_heads + head[None, :]
                value = (total * scale[:, None]).to(out.dtype.element_ty)
                tl.store(out + at, value, mask=inside[:, None] & in_heads[None, :])


@triton.jit
def _winners_at(first_winner, column, num_columns):  # type: ignore[no-untyped-def]
    return tl.load(first_winner + column, mask=column < num_columns, other=-1)[None, :]


@triton.jit(do_not_specialize=["num_pieces", "width_vectors", "block", "column_vectors", "num_bytes"])
def _winner_bits_kernel(  # type: ignore[no-untyped-def]
    bits, winner, indptr, group_begin, group_end, piece_row, piece_begin, piece_end,
    num_pieces, width_vectors, block, column_vectors, num_bytes,
    vector: tl.constexpr, columns_at_once: tl.constexpr,
    wide_edges: tl.constexpr, block_edges: tl.constexpr, block_bytes: tl.constexpr,
):  # fmt: skip
    """Bit ``c % 8`` of ``bits[e, c // 8]``: whether edge ``e`` won column ``first_column + c`` of its row."""
    edge_type = tl.int64 if wide_edges else tl.int32
    width = (width_vectors * vector).to(tl.int64)
    num_columns = column_vectors * vector
    first_column = block * columns_at_once
    byte = tl.arange(0, block_bytes)
    program = tl.program_id(0)
    is_piece = program < num_pieces
    if is_piece:
        first = program
        last = program + 1
        begins = piece_begin
        ends = piece_end
    else:
        first = tl.load(group_begin + program - num_pieces).to(tl.int32)
        last = tl.load(group_end + program - num_pieces).to(tl.int32)
        begins = indptr
        ends = indptr + 1
    for slot in range(first, last):
        row = tl.full([], 0, tl.int64) + slot
        begin = tl.load(begins + row).to(edge_type)
        end = tl.load(ends + row).to(edge_type)
        if is_piece:
            row = tl.load(piece_row + slot).to(tl.int64)
        first_winner = winner + row * width + first_column
        won_0 = _winners_at(first_winner, byte * 8, num_columns)
        won_1 = _winners_at(first_winner, byte * 8 + 1, num_columns)
        won_2 = _winners_at(first_winner, byte * 8 + 2, num_columns)
        won_3 = _winners_at(first_winner, byte * 8 + 3, num_columns)
        won_4 = _winners_at(first_winner, byte * 8 + 4, num_columns)
        won_5 = _winners_at(first_winner, byte * 8 + 5, num_columns)
        won_6 = _winners_at(first_winner, byte * 8 + 6, num_columns)
        won_7 = _winners_at(first_winner, byte * 8 + 7, num_columns)
        for start in range(begin, end, block_edges):
            edge = start + tl.arange(0, block_edges)
            # written out: a sum over eight places would be spread over the lanes of a warp, which costs far more
            packed = tl.where(won_0 == edge[:, None], 1, 0)
            packed = tl.where(won_1 == edge[:, None], packed | 2, packed)
            packed = tl.where(won_2 == edge[:, None], packed | 4, packed)
            packed = tl.where(won_3 == edge[:, None], packed | 8, packed)
            packed = tl.where(won_4 == edge[:, None], packed | 16, packed)
            packed = tl.where(won_5 == edge[:, None], packed | 32, packed)
            packed = tl.where(won_6 == edge[:, None], packed | 64, packed)
            packed = tl.where(won_7 == edge[:, None], packed | 128, packed)
            at = edge.to(tl.int64)[:, None] * num_bytes + byte[None, :]
            tl.store(bits + at, packed.to(tl.uint8), mask=(edge < end)[:, None] & (byte < num_bytes)[None, :])


@triton.jit(do_not_specialize=["num_pieces", "width_vectors", "block", "column_vectors", "num_bytes"])
def _winner_gradient_kernel(  # type: ignore[no-untyped-def]
    out, partial, grad, bits, indptr, indices, edge_ids, group_begin, group_end, piece_begin, piece_end,
    num_pieces, width_vectors, block, column_vectors, num_bytes,
    vector: tl.constexpr, columns_at_once: tl.constexpr, wide_edges: tl.constexpr, accumulator: tl.constexpr,
    block_edges: tl.constexpr, unroll: tl.constexpr, block_bytes: tl.constexpr,
):  # fmt: skip
    """``out[row] = sum over edges of grad[index]`` in the columns that the edge won, for this program's rows."""
    edge_type = tl.int64 if wide_edges else tl.int32
    width = (width_vectors * vector).to(tl.int64)
    num_columns = column_vectors * vector
    first_column = block * columns_at_once
    byte = tl.arange(0, block_bytes)
    place = tl.arange(0, 8)
    column = byte[:, None] * 8 + place[None, :]
    in_row = column < num_columns
    step = tl.arange(0, block_edges)[:, None] + tl.arange(0, unroll)[None, :] * block_edges
    program = tl.program_id(0)
    is_piece = program < num_pieces
    if is_piece:
        first = program
        last = program + 1
        begins = piece_begin
        ends = piece_end
    else:
        first = tl.load(group_begin + program - num_pieces).to(tl.int32)
        last = tl.load(group_end + program - num_pieces).to(tl.int32)
        begins = indptr
        ends = indptr + 1
    for slot in range(first, last):
        row = tl.full([], 0, tl.int64) + slot
        begin = tl.load(begins + row).to(edge_type)
        end = tl.load(ends + row).to(edge_type)
        total = tl.zeros([block_bytes, 8], accumulator)
        for start in range(begin, end, block_edges * unroll):
            edge = start + step
            inside = edge < end
            edge_row = tl.load(edge_ids + edge, mask=inside, other=0, eviction_policy="evict_first").to(tl.int64)
            index = tl.load(indices + edge, mask=inside, other=0, eviction_policy="evict_first").to(tl.int64)
            # tiles are (bytes, edges, unroll, places): a byte stands for one or two wide loads, most are not made
            bits_at = (edge_row * num_bytes)[None, :, :] + byte[:, None, None]
            in_bits = inside[None, :, :] & (byte < num_bytes)[:, None, None]
            packed = tl.load(bits + bits_at, mask=in_bits, other=0).to(tl.int32)
            grad_at = (index * width)[None, :, :, None] + (first_column + column)[:, None, None, :]
            value = tl.load(grad + grad_at, mask=(packed != 0)[:, :, :, None] & in_row[:, None, None, :], other=0)
            hit = ((packed[:, :, :, None] >> place[None, None, None, :]) & 1) != 0
            total += tl.sum(tl.sum(tl.where(hit, value.to(accumulator), 0), 2), 1)
        at = row * width + first_column + column
        if is_piece:
            tl.store(partial + at, total, mask=in_row)
        else:
            tl.store(out + at, total.to(out.dtype.element_ty), mask=in_row)


# --- launches


@dataclass(frozen=True)
class Tile:
    """What one program loads before it adds: ``unroll * rows * edges`` feature rows of ``heads * columns`` features.

    Args:
        rows: Output rows in lockstep; 1 walks the groups of the schedule.
        edges: Edges of a row side by side in a warp.
        unroll: Loads in flight in each thread, so that ``unroll * edges`` edges of a row are read at once.
        heads, columns: Features, powers of two like the others.
        row_sets: How many sets of ``rows`` a program takes one after the other; 1 where ``rows`` is 1.
        num_warps: Of a program.
    """

    rows: int
    edges: int
    unroll: int
    heads: int
    columns: int
    row_sets: int = 1
    num_warps: int = 1


_LOADS = 8
"""Loads of 16 bytes in flight in each thread."""
_BLOCK_BYTES = 1024
"""Widest part of a feature row in one program; wider rows are passes over the edges, whose features share the cache."""
_PASS_BYTES = 64
"""What one more pass costs for each edge: its index and the instructions around it, as bytes of features."""


@functools.cache
def choose_tile(num_heads: int, num_columns: int, itemsize: int, mean_degree: int, num_streams: int = 1) -> Tile:
    """A tile for rows of ``num_heads * num_columns`` features, from sizes alone: a user's step tries nothing out.

    ``num_streams``: what a thread keeps for each value beside a running sum, in values.
    """
    if num_heads == 1:
        fitting = _power_of_2(num_columns)
        sizes = [size for size in (_BLOCK_BYTES // itemsize >> shift for shift in range(4)) if size <= fitting]
        columns = fitting
        if fitting * itemsize > _BLOCK_BYTES // 8:
            columns = min(sizes, key=lambda size: -(-num_columns // size) * (size * itemsize + _PASS_BYTES))
        heads = 1
    else:
        columns = min(_power_of_2(num_columns), _BLOCK_BYTES // itemsize)
        heads = min(_power_of_2(num_heads), max(1, _BLOCK_BYTES // itemsize // columns))
    row_bytes = heads * columns * itemsize
    loads = max(1, _LOADS // num_streams)
    if row_bytes < 128 and itemsize == 2:
        loads = max(1, loads // 2)  # their float32 sums are kept for each edge slot: registers
    slots = max(1, loads * 512 // row_bytes)  # edges that one warp reads at once
    most = max(1, min(16, _power_of_2(mean_degree)))
    of_a_row = min(most, slots)
    rows = min(16, slots // of_a_row)
    # with rows side by side, few lanes for each: its sum over lanes is then short
    side_by_side = max(1, min(of_a_row, 512 // row_bytes, 32 if rows == 1 else 4))
    return Tile(rows, side_by_side, of_a_row // side_by_side, heads, columns)


@dataclass(frozen=True)
class _Edges:
    """Edges grouped by the rows of an output: those of a structure, or of its transposed."""

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor | None

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def schedule(self) -> RowSchedule:
        return row_schedule(self.indptr)


def _in_edges(structure: Structure) -> _Edges:
    return _Edges(structure.indptr, structure.indices, None)


def _out_edges(structure: Structure) -> _Edges:
    transposed = structure.transposed
    return _Edges(transposed.indptr, transposed.dst, transposed.edges)


def _aggregate(
    edges: _Edges,
    x: Tensor,
    num_heads: int,
    *,
    op: str = "copy_lhs",
    w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    sign: int = 0,
    by_edge: bool = False,
    winner: Tensor | None = None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One aggregation, with its heavy rows combined.

    Args:
        edges: Edges grouped by output row.
        x: ``(rows, F)`` contiguous; rows of ``edges.indices``, or of the edge itself (``by_edge``).
        num_heads: H.
        op: How ``x`` and ``w`` meet.
        w: ``(E, H)`` or ``(E, F)`` contiguous, by edge row; None for copies.
        out_dtype: Type of the result; that of ``x`` without.
        sign: 0 for a sum, 1 for the maximum, -1 for the minimum.
        by_edge: See ``x``.
        winner: ``(rows, F)``: only messages of the edge named there count, in the row that ``edges.indices`` names.
        src_scale: ``(rows,)`` factor of each row of ``x``.
        dst_scale: ``(N,)`` factor of each row of the result.
        tile: Overrides :func:`choose_tile`.

    Returns:
        ``(N, F)``, and the winning edges ``(N, F)`` of a maximum or minimum, -1 where a row has none.
    """
    num_rows, width, num_edges = edges.num_rows, x.shape[1], len(edges.indices)
    num_columns = width // num_heads
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    schedule = edges.schedule
    is_extreme = sign != 0
    weight = 0 if w is None else 1 if w.shape[1] == num_heads else 2
    out = torch.empty(num_rows, width, dtype=out_dtype or x.dtype, device=x.device)
    partial = torch.empty(schedule.num_pieces, width, dtype=accumulator, device=x.device)
    wide_edges = _needs_wide_edges(num_edges)
    edge_dtype = torch.int64 if wide_edges else torch.int32
    out_winner = torch.empty(num_rows if is_extreme else 0, width, dtype=edge_dtype, device=x.device)
    partial_winner = torch.empty(schedule.num_pieces if is_extreme else 0, width, dtype=edge_dtype, device=x.device)
    if num_heads == 1 and not by_edge:
        x = _aligned_rows(x, num_edges)
    x_columns = x.shape[1] // num_heads
    x_vector, out_vector = (math.gcd(columns, 16 // x.element_size()) for columns in (x_columns, num_columns))
    streams = 2 if is_extreme or winner is not None or weight == 2 else 1
    if tile is None:
        tile = choose_tile(num_heads, x_columns, x.element_size(), _cdiv(num_edges, num_rows), streams)
    num_light = len(schedule.lockstep_rows)
    programs = _cdiv(schedule.num_pieces, tile.rows) + (
        schedule.num_groups if tile.rows == 1 else _cdiv(num_light, tile.rows * tile.row_sets)
    )
    blocks = _cdiv(num_heads, tile.heads) * _cdiv(num_columns, tile.columns)
    with torch.cuda.device_of(x):
        _aggregate_kernel[(programs, blocks)](
            out, out_winner, partial, partial_winner, x, w, winner, src_scale, dst_scale,
            edges.indptr, edges.indices, edges.edge_ids, schedule.group_begin, schedule.group_end,
            schedule.lockstep_rows, schedule.piece_begin, schedule.piece_end,
            schedule.num_pieces, num_light, num_heads, num_columns // out_vector, x_columns // x_vector, sign,
            out_vector=out_vector, x_vector=x_vector,
            op=_CODES[op], weight=weight, is_extreme=is_extreme, by_edge=by_edge,
            has_edge_ids=edges.edge_ids is not None and (w is not None or winner is not None),
            has_winner=winner is not None, has_src_scale=src_scale is not None, has_dst_scale=dst_scale is not None,
            wide_edges=wide_edges, accumulator=_TRITON_TYPES[accumulator], one_head=num_heads == 1,
            no_edge=torch.iinfo(edge_dtype).max,
            rows_at_once=tile.rows, row_sets=tile.row_sets, unroll=tile.unroll, block_edges=tile.edges,
            block_heads=tile.heads, block_columns=tile.columns,
            sum_each_tile=tile.heads * tile.columns * x.element_size() >= 128,
            num_warps=tile.num_warps,
        )  # fmt: skip
        _combine(out, out_winner, partial, partial_winner, dst_scale, schedule, sign)
    return out, out_winner if is_extreme else None


def _edge_gradient(
    structure: Structure,
    grad: Tensor,
    x: Tensor | None,
    num_heads: int,
    is_full: bool,
    out_dtype: torch.dtype,
    *,
    winner: Tensor | None = None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
) -> Tensor:
    """``(E, H)``: for each edge and head the dot product of ``grad[destination]`` and ``x[source]``, scaled.

    ``is_full``: ``(E, F)`` products. Without ``x`` its entries count as 1; with ``winner`` only what the edge won.
    """
    width, num_edges = grad.shape[1], structure.num_edges
    num_columns = width // num_heads
    accumulator = torch.float64 if grad.dtype == torch.float64 else torch.float32
    schedule = row_schedule(structure.indptr)
    out = torch.empty(num_edges, width if is_full else num_heads, dtype=out_dtype, device=grad.device)
    itemsize = grad.element_size()
    vector = math.gcd(num_columns, 16 // itemsize)
    columns = min(_power_of_2(num_columns), 512 // itemsize)
    heads = min(_power_of_2(num_heads), max(1, 512 // itemsize // columns))
    block_edges = max(1, min(16, _LOADS * 512 // (heads * columns * itemsize)))
    with torch.cuda.device_of(grad):
        _edge_gradient_kernel[(schedule.num_pieces + schedule.num_groups, _cdiv(num_heads, heads))](
            out, grad, x, winner, src_scale, dst_scale,
            structure.indptr, structure.indices, schedule.group_begin, schedule.group_end,
            schedule.piece_row, schedule.piece_begin, schedule.piece_end,
            schedule.num_pieces, num_heads, num_columns // vector,
            vector=vector, has_x=x is not None, has_winner=winner is not None, has_src_scale=src_scale is not None,
            has_dst_scale=dst_scale is not None, is_full=is_full, wide_edges=_needs_wide_edges(num_edges),
            accumulator=_TRITON_TYPES[accumulator],
            block_edges=block_edges, block_heads=heads, block_columns=columns, num_warps=1,
        )  # fmt: skip
    return out


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


_BITS_FROM_WIDTH = 16
"""Narrower gradients of extremes read the winners themselves."""
_BITS_COLUMNS = 128
"""Columns for which winners are packed at once: 16 bytes an edge."""


def _winner_gradient(structure: Structure, grad: Tensor, winner: Tensor) -> Tensor:
    """``(L, F)``: the gradient of a maximum's unweighted messages.

    A source reads, of each destination, only what its edge won: one column in in-degree, found by bits that a first
    kernel packs destination by destination.
    """
    edges, width, num_edges = _out_edges(structure), grad.shape[1], structure.num_edges
    here, there = row_schedule(structure.indptr), edges.schedule
    accumulator = torch.float64 if grad.dtype == torch.float64 else torch.float32
    out = torch.empty(structure.num_src, width, dtype=grad.dtype, device=grad.device)
    partial = torch.empty(there.num_pieces, width, dtype=accumulator, device=grad.device)
    most_bytes = _cdiv(min(width, _BITS_COLUMNS), 8)
    bits = torch.empty(num_edges * most_bytes, dtype=torch.uint8, device=grad.device)
    vector = math.gcd(width, _BITS_COLUMNS, 16 // grad.element_size())
    wide_edges = _needs_wide_edges(num_edges)
    with torch.cuda.device_of(grad):
        for block in range(_cdiv(width, _BITS_COLUMNS)):
            num_columns = min(_BITS_COLUMNS, width - block * _BITS_COLUMNS)
            num_bytes = _cdiv(num_columns, 8)
            block_bytes = _power_of_2(num_bytes)
            sizes = (width // vector, block, num_columns // vector, num_bytes)
            shape = {
                "vector": vector, "columns_at_once": _BITS_COLUMNS, "wide_edges": wide_edges,
                "block_bytes": block_bytes, "num_warps": 1,
            }  # fmt: skip
            _winner_bits_kernel[(here.num_pieces + here.num_groups,)](
                bits, winner, structure.indptr, here.group_begin, here.group_end,
                here.piece_row, here.piece_begin, here.piece_end, here.num_pieces, *sizes,
                block_edges=16, **shape,
            )  # fmt: skip
            _winner_gradient_kernel[(there.num_pieces + there.num_groups,)](
                out, partial, grad, bits, edges.indptr, edges.indices, edges.edge_ids, there.group_begin,
                there.group_end, there.piece_begin, there.piece_end, there.num_pieces, *sizes,
                accumulator=_TRITON_TYPES[accumulator],
                block_edges=max(1, 64 // (block_bytes * grad.element_size())), unroll=4, **shape,
            )  # fmt: skip
        _combine(out, None, partial, None, None, there, 0)
    return out


def _combine(
    out: Tensor,
    out_winner: Tensor | None,
    partial: Tensor,
    partial_winner: Tensor | None,
    dst_scale: Tensor | None,
    schedule: RowSchedule,
    sign: int,
) -> None:
    """Finish the heavy rows of ``out`` from their pieces."""
    if schedule.num_split == 0:
        return
    width = out.shape[1]
    block = min(1024, _power_of_2(width))
    _combine_kernel[(schedule.num_split, _cdiv(width, block))](
        out, out_winner, partial, partial_winner, dst_scale, schedule.split_rows, schedule.split_ptr, width, sign,
        is_extreme=sign != 0, has_dst_scale=dst_scale is not None, accumulator=_TRITON_TYPES[partial.dtype],
        block_columns=block, num_warps=4 if block > 128 else 1,
    )  # fmt: skip


def _needs_wide_edges(num_edges: int) -> bool:
    return (
        num_edges >= 2**31 - 2**12
    )  # rows in lockstep count on, past their last edge, by less than a piece and a tile


_TRITON_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def _aligned_rows(x: Tensor, num_edges: int) -> Tensor:
    """Rows padded with zeros to a multiple of 32 bytes where they are read often enough to pay for the copy."""
    per_sector = 32 // x.element_size()
    missing = -x.shape[1] % per_sector
    if x.shape[1] * x.element_size() < 32:  # 1, 2, 4, 8 or 16 bytes: a row never straddles two sectors
        missing = _power_of_2(x.shape[1]) - x.shape[1]
    if missing == 0 or num_edges < 4 * len(x):
        return x
    return torch.nn.functional.pad(x, (0, missing))


# --- autograd


def aggregate(
    structure: Structure,
    op: str,
    reduce: str,
    u: Tensor | None,
    e: Tensor | None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
) -> Tensor:
    """:func:`nugnn.kernels.spmm.spmm` of checked, aligned operands on the device of ``structure``, nothing empty.

    float16, bfloat16, float32 or float64. ``src_scale (L,)`` and ``dst_scale (N,)`` multiply sums of ``copy_lhs`` and
    ``mul`` before their one rounding; no gradient goes to them.
    """
    dtype = next(x.dtype for x in (u, e) if x is not None)
    if reduce != "sum" and e is not None and op in ("sub", "div"):  # as on the CPU
        e = e if e.dtype == torch.float64 else e.float()
        op, e = ("add", -e) if op == "sub" else ("mul", 1.0 / e)
    num_heads = 1
    if u is None or e is None:
        x = u if u is not None else e
        assert x is not None
        features = x.shape[1:]
    else:
        features = torch.broadcast_shapes(u.shape[1:], e.shape[1:])
        u = u.expand(len(u), *features)
        num_heads = _shared_heads(e.shape[1:], features)
        if num_heads == 0:
            num_heads, e = 1, e.expand(len(e), *features)
        e = e.reshape(len(e), -1).contiguous()
        x = u
    x = x.reshape(len(x), -1).contiguous()
    w = e if u is not None else None
    if reduce == "sum":
        out: Tensor = _Sum.apply(structure, op, num_heads, x, w, src_scale, dst_scale)
    else:
        out = _Extreme.apply(structure, op, 1 if reduce == "max" else -1, num_heads, dtype, x, w)
    return out.view(structure.num_dst, *features)


def _shared_heads(shape: torch.Size, features: torch.Size) -> int:
    """H where a weight of ``shape`` is one value for each of H equal runs of features; 0 where it is another pattern.

    A weight of all features is one run of weights of its own (1, told apart by its width).
    """
    if shape == features:
        return 1
    kept = len(shape)
    while kept and shape[kept - 1] == 1:
        kept -= 1
    return math.prod(shape[:kept]) if shape[:kept] == features[:kept] else 0


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        structure: Structure,
        op: str,
        num_heads: int,
        x: Tensor,
        w: Tensor | None,
        src_scale: Tensor | None,
        dst_scale: Tensor | None,
    ) -> Tensor:
        out, _ = _aggregate(
            _in_edges(structure), x, num_heads, op=op, w=w, by_edge=op == "copy_rhs", src_scale=src_scale,
            dst_scale=dst_scale,
        )  # fmt: skip
        ctx.structure, ctx.op, ctx.num_heads, ctx.dtype = structure, op, num_heads, x.dtype
        ctx.w_shape, ctx.w_dtype = (None, None) if w is None else (w.shape, w.dtype)
        needs_w = op in ("mul", "div")
        keeps_x = needs_w and ctx.needs_input_grad[4]
        ctx.save_for_backward(x if keeps_x else None, w if needs_w else None, src_scale, dst_scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        structure: Structure = ctx.structure
        x, w, src_scale, dst_scale = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad_w = None
        if ctx.needs_input_grad[3]:
            if ctx.op == "copy_rhs":
                grad_x = grad.index_select(0, structure.dst)
            else:
                grad_x, _ = _aggregate(
                    _out_edges(structure), grad, ctx.num_heads, op=ctx.op if w is not None else "copy_lhs", w=w,
                    src_scale=dst_scale, dst_scale=src_scale,
                )  # fmt: skip
        if ctx.needs_input_grad[4]:
            grad_w = _weight_gradient(ctx, grad, x, w, src_scale, dst_scale)
        return None, None, None, grad_x, grad_w, None, None


def _weight_gradient(
    ctx: Any, grad: Tensor, x: Tensor | None, w: Tensor | None, src_scale: Tensor | None, dst_scale: Tensor | None
) -> Tensor:
    structure: Structure = ctx.structure
    num_heads, is_full = ctx.num_heads, ctx.w_shape[1] != ctx.num_heads
    if ctx.op in ("add", "sub"):
        rows = grad if is_full else grad.view(len(grad), num_heads, -1).sum(-1)
        return (rows if ctx.op == "add" else -rows).to(ctx.w_dtype).index_select(0, structure.dst)
    assert w is not None
    if ctx.op == "mul":
        return _edge_gradient(
            structure, grad, x, num_heads, is_full, ctx.w_dtype, src_scale=src_scale, dst_scale=dst_scale
        )
    wide = torch.float64 if ctx.dtype == torch.float64 else torch.float32
    products = _edge_gradient(structure, grad, x, num_heads, is_full, wide)
    return (-products / (w.to(wide) ** 2)).to(ctx.w_dtype)


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        structure: Structure,
        op: str,
        sign: int,
        num_heads: int,
        dtype: torch.dtype,
        x: Tensor,
        w: Tensor | None,
    ) -> Tensor:
        out, winner = _aggregate(
            _in_edges(structure), x, num_heads, op=op, w=w, by_edge=op == "copy_rhs", sign=sign, out_dtype=dtype
        )
        ctx.structure, ctx.op, ctx.num_heads = structure, op, num_heads
        ctx.w_shape, ctx.w_dtype = (None, None) if w is None else (w.shape, w.dtype)
        ctx.save_for_backward(winner, *((x, w) if op == "mul" else (None, None)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        structure: Structure = ctx.structure
        winner, x, w = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad_w = None
        if ctx.needs_input_grad[5]:
            if ctx.op == "copy_rhs":
                grad_x = _edge_gradient(structure, grad, None, 1, True, grad.dtype, winner=winner)
            elif w is None and grad.shape[1] >= _BITS_FROM_WIDTH:
                grad_x = _winner_gradient(structure, grad, winner)
            else:
                grad_x, _ = _aggregate(
                    _out_edges(structure), grad, ctx.num_heads, op="copy_lhs" if w is None else "mul", w=w,
                    winner=winner,
                )  # fmt: skip
        if ctx.needs_input_grad[6]:
            is_full = ctx.w_shape[1] != ctx.num_heads
            grad_w = _edge_gradient(structure, grad, x, ctx.num_heads, is_full, ctx.w_dtype, winner=winner)
        return None, None, None, None, None, grad_x, grad_w
