"""The Triton kernel that reduces gathered rows, and its launch; :mod:`nugnn.kernels.spmm.gpu` says how it works.

Shape suffixes: N rows of the output, E edges, F = H x D features (H heads that share a weight, D features of each).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.operator import unseen
from nugnn.kernels.padded import empty_rows, is_padded, padded_copy, padded_width, with_padding
from nugnn.kernels.row_schedule import RowSchedule, row_schedule
from nugnn.kernels.spmm.tiles import Tile, cdiv, choose_tile, power_of_2
from nugnn.kernels.structure import Structure

COPY, ADD, SUB, MUL, DIV = (tl.constexpr(code) for code in range(5))
_CODES = {"copy_lhs": 0, "copy_rhs": 0, "add": 1, "sub": 2, "mul": 3, "div": 4}
NO_WEIGHT, HEAD_WEIGHT, FULL_WEIGHT = (tl.constexpr(code) for code in range(3))


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


@triton.jit
def _load(pointer, inside, in_row, other, masks_edges: tl.constexpr, masks_row: tl.constexpr):  # type: ignore[no-untyped-def]
    if masks_edges and masks_row:
        return tl.load(pointer, mask=inside & in_row, other=other)
    elif masks_edges:
        return tl.load(pointer, mask=inside, other=other)
    elif masks_row:
        return tl.load(pointer, mask=in_row, other=other)
    else:
        return tl.load(pointer)


@triton.jit
def _take_edges(  # type: ignore[no-untyped-def]
    total, best_edge, index, edge, inside, x_at, x_rest, num_first, x_offset, w_at, winner_at, edge_ids, src_scale,
    in_x, in_out, in_heads, sign, num_heads: tl.constexpr, x_stride: tl.constexpr, rest_stride: tl.constexpr,
    out_width: tl.constexpr, even_x: tl.constexpr, even_out: tl.constexpr, op: tl.constexpr, weight: tl.constexpr,
    is_extreme: tl.constexpr, has_rest: tl.constexpr, has_edge_ids: tl.constexpr, has_winner: tl.constexpr,
    has_src_scale: tl.constexpr, accumulator: tl.constexpr, sum_each_tile: tl.constexpr, masks_edges: tl.constexpr,
):  # fmt: skip
    """Add one tile to ``total``, or keep its largest messages there; see :func:`_aggregate_kernel` for its axes."""
    no_weight: tl.constexpr = 1.0 if op == DIV else 0.0  # beyond the last edge: such messages are 0
    edge_row = edge
    if has_edge_ids:
        if masks_edges:
            edge_row = tl.load(edge_ids + edge, mask=inside, other=0, eviction_policy="evict_first")
        else:
            edge_row = tl.load(edge_ids + edge, eviction_policy="evict_first")
    mask = inside[None, :, :, :, None]
    if has_rest:
        row = index.to(tl.int64)
        row_at = tl.where(index < num_first, x_at + row * x_stride, x_rest + row * rest_stride)
        at = row_at[None, :, :, :, None] + x_offset
    else:
        x_row = index.to(tl.int64) * x_stride
        at = x_at + x_row[None, :, :, :, None]
    message = _load(at, mask, in_x, 0.0, masks_edges, not even_x).to(accumulator)
    if weight == HEAD_WEIGHT:
        at = w_at + (edge_row.to(tl.int64) * num_heads)[None, :, :, :]
        w_tile = _load(at, inside[None, :, :, :], in_heads, no_weight, masks_edges, not even_x)
        message = _message(message, w_tile.to(accumulator)[:, :, :, :, None], op)
    if weight == FULL_WEIGHT:
        at = w_at + (edge_row.to(tl.int64) * out_width)[None, :, :, :, None]
        w_tile = _load(at, mask, in_out, no_weight, masks_edges, not even_out)
        message = _message(message, w_tile.to(accumulator), op)
    if has_src_scale:
        scale = _load(src_scale + index, inside, inside, 0.0, masks_edges, False)
        message = message * scale.to(accumulator)[None, :, :, :, None]
    if has_winner:
        at = winner_at + (index.to(tl.int64) * out_width)[None, :, :, :, None]
        won = _load(at, mask, in_out, -1, masks_edges, not even_out)
        message = tl.where(won == edge_row[None, :, :, :, None], message, 0.0)
    if is_extreme:
        message = message * sign
        better = (message > total) | ((message != message) & (total == total))  # noqa: PLR0124
        if masks_edges:
            better = better & mask
        total = tl.where(better, message, total)
        best_edge = tl.where(better, edge[None, :, :, :, None], best_edge)
    elif sum_each_tile:
        total += tl.sum(tl.sum(message, 3), 1)
    else:
        total += message
    return total, best_edge


# Widths are compile-time constants: an address is then one instruction, and whole blocks need no mask.
@triton.jit(do_not_specialize=["num_pieces", "num_light", "num_first", "sign", "last_column"])
def _aggregate_kernel(  # type: ignore[no-untyped-def]
    out, out_winner, partial, partial_winner, x, x_rest, w, winner, src_scale, dst_scale, add,
    indptr, indices, edge_ids, group_begin, group_end, lockstep_rows, piece_begin, piece_end,
    num_pieces, num_light, num_first, sign, last_column, num_heads: tl.constexpr, num_columns: tl.constexpr,
    x_columns: tl.constexpr, x_stride: tl.constexpr, rest_stride: tl.constexpr, out_stride: tl.constexpr,
    add_stride: tl.constexpr, zero_columns: tl.constexpr, adds: tl.constexpr,
    op: tl.constexpr, weight: tl.constexpr, is_extreme: tl.constexpr, by_edge: tl.constexpr, has_rest: tl.constexpr,
    has_edge_ids: tl.constexpr, has_winner: tl.constexpr, has_src_scale: tl.constexpr, has_dst_scale: tl.constexpr,
    wide_edges: tl.constexpr, accumulator: tl.constexpr, no_edge: tl.constexpr,
    rows_at_once: tl.constexpr, row_sets: tl.constexpr, unroll: tl.constexpr, block_edges: tl.constexpr,
    block_heads: tl.constexpr, block_columns: tl.constexpr, sum_each_tile: tl.constexpr,
):  # fmt: skip
    """``out[row] = reduce over edges of op(x[index], w[edge])`` for this program's rows; see :func:`aggregate_rows`.

    Tiles are (heads, edges, rows, unroll, columns): the compiler spreads lanes and warps over columns, then over the
    other axes from the left, so that most of a sum over edges stays within a thread.
    """
    column_blocks: tl.constexpr = (num_columns + block_columns - 1) // block_columns
    out_width: tl.constexpr = num_heads * num_columns
    even_x: tl.constexpr = x_columns % block_columns == 0 and num_heads % block_heads == 0
    even_out: tl.constexpr = num_columns % block_columns == 0 and num_heads % block_heads == 0
    tile_edges: tl.constexpr = unroll * block_edges
    edge_type: tl.constexpr = tl.int64 if wide_edges else tl.int32
    head = tl.program_id(1) // column_blocks * block_heads + tl.arange(0, block_heads)
    column = tl.program_id(1) % column_blocks * block_columns + tl.arange(0, block_columns)
    in_heads = head < num_heads
    in_out = in_heads[:, None] & (column < num_columns)[None, :]
    in_x = in_heads[:, None] & (column < x_columns)[None, :]
    out_offset = head[:, None] * num_columns + column[None, :]
    x_offset = (head[:, None] * x_columns + column[None, :])[:, None, None, None, :]
    if has_rest:
        x_at = x
        x_rest -= num_first.to(tl.int64) * rest_stride  # so that rows of both are found by their index
    else:
        x_at = x + x_offset
    w_at = w
    if weight == HEAD_WEIGHT:
        w_at = w + head[:, None, None, None]
    if weight == FULL_WEIGHT:
        w_at = w + out_offset[:, None, None, None, :]
    winner_at = winner
    if has_winner:
        winner_at = winner + out_offset[:, None, None, None, :]
    in_x_tile = in_x[:, None, None, None, :]
    in_out_tile = in_out[:, None, None, None, :]
    in_heads_tile = in_heads[:, None, None, None]
    step = tl.arange(0, block_edges)[:, None, None] + tl.arange(0, unroll)[None, None, :] * block_edges

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
        if is_extreme:
            total = tl.full([block_heads, block_edges, rows_at_once, unroll, block_columns], float("-inf"), accumulator)
            best_edge = tl.full([block_heads, block_edges, rows_at_once, unroll, block_columns], no_edge, edge_type)
        else:
            best_edge = tl.full([], no_edge, edge_type)
            if sum_each_tile:
                total = tl.zeros([block_heads, rows_at_once, block_columns], accumulator)
            else:
                total = tl.zeros([block_heads, block_edges, rows_at_once, unroll, block_columns], accumulator)

        slot = start + tl.arange(0, rows_at_once)
        valid = slot < last
        row = slot.to(tl.int64)
        if rows_at_once == 1:
            # whole tiles first: without masks a tile takes two thirds of the instructions
            begin = tl.load(begins + start).to(edge_type)
            end = tl.load(ends + start).to(edge_type)
            rest = begin + (end - begin) // tile_edges * tile_edges
            if by_edge:
                index = (begin + step).to(edge_type)
            else:
                index = tl.load(indices + begin + step, mask=step < end - begin, other=0, eviction_policy="evict_first")
            for at in range(begin, rest, tile_edges):
                edge = (at + step).to(edge_type)
                inside = edge + tile_edges < end
                if by_edge:
                    next_index = edge + tile_edges
                else:
                    next_at = indices + at + tile_edges + step
                    next_index = tl.load(next_at, mask=inside, other=0, eviction_policy="evict_first")
                total, best_edge = _take_edges(
                    total, best_edge, index, edge, inside, x_at, x_rest, num_first, x_offset, w_at, winner_at, edge_ids,
                    src_scale, in_x_tile, in_out_tile, in_heads_tile, sign, num_heads, x_stride, rest_stride, out_width,
                    even_x, even_out, op, weight, is_extreme, has_rest, has_edge_ids, has_winner, has_src_scale,
                    accumulator, sum_each_tile, False,
                )  # fmt: skip
                index = next_index
            if rest < end:
                edge = (rest + step).to(edge_type)
                total, best_edge = _take_edges(
                    total, best_edge, index, edge, edge < end, x_at, x_rest, num_first, x_offset, w_at, winner_at,
                    edge_ids, src_scale, in_x_tile, in_out_tile, in_heads_tile, sign, num_heads, x_stride, rest_stride,
                    out_width, even_x, even_out, op, weight, is_extreme, has_rest, has_edge_ids, has_winner,
                    has_src_scale, accumulator, sum_each_tile, True,
                )  # fmt: skip
            lowest = tl.where(end > begin, begin, -1).to(edge_type)
        else:
            is_light = valid & (program >= num_piece_programs)
            row = tl.where(is_light, tl.load(lockstep_rows + slot, mask=is_light, other=0), row)
            begin = tl.load(begins + row, mask=valid, other=0).to(edge_type)
            end = tl.load(ends + row, mask=valid, other=0).to(edge_type)
            edge = begin[None, :, None] + step
            inside = edge < end[None, :, None]
            if by_edge:
                index = edge
            else:
                index = tl.load(indices + edge, mask=inside, other=0, eviction_policy="evict_first")
            for _ in range(0, tl.max(end - begin, 0), tile_edges):
                next_edge = edge + tile_edges
                next_inside = next_edge < end[None, :, None]
                if by_edge:
                    next_index = next_edge
                else:
                    next_index = tl.load(indices + next_edge, mask=next_inside, other=0, eviction_policy="evict_first")
                total, best_edge = _take_edges(
                    total, best_edge, index, edge, inside, x_at, x_rest, num_first, x_offset, w_at, winner_at, edge_ids,
                    src_scale, in_x_tile, in_out_tile, in_heads_tile, sign, num_heads, x_stride, rest_stride, out_width,
                    even_x, even_out, op, weight, is_extreme, has_rest, has_edge_ids, has_winner, has_src_scale,
                    accumulator, sum_each_tile, True,
                )  # fmt: skip
                edge = next_edge
                inside = next_inside
                index = next_index
            lowest = tl.where(end > begin, begin, -1).to(edge_type)[None, :, None]

        if is_extreme:
            value, won_edge = _extreme_of(total, best_edge, 3, no_edge)
            value, won_edge = _extreme_of(value, won_edge, 1, no_edge)
            # no message above -inf: the first edge wins, and a row without edges has none
            won_edge = tl.where(won_edge == no_edge, lowest, won_edge)
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
            at = (row * out_stride)[None, :, None] + out_offset[:, None, :]
            if adds:
                add_at = (row * add_stride)[None, :, None] + out_offset[:, None, :]
                value += tl.load(add + add_at, mask=store_mask, other=0).to(accumulator)
            if zero_columns > 0:  # one head: zeros behind its columns
                # Not `in_out`: with two bounds known at compile time, the LLVM of Triton 3.6 lets bits of one lane into
                # the address of another (`tests/kernels/test_machine_code.py`).
                value = tl.where((column <= last_column)[None, None, :], value, 0.0)
                store_mask = valid[None, :, None] & (column < num_columns + zero_columns)[None, None, :]
            tl.store(out + at, value.to(out.dtype.element_ty), mask=store_mask)


@triton.jit(do_not_specialize=["width", "out_stride", "winner_stride", "add_stride", "zero_columns", "sign"])
def _combine_kernel(  # type: ignore[no-untyped-def]
    out, out_winner, partial, partial_winner, dst_scale, add, split_rows, split_ptr,
    width, out_stride, winner_stride, add_stride, zero_columns, sign,
    is_extreme: tl.constexpr, has_dst_scale: tl.constexpr, adds: tl.constexpr, accumulator: tl.constexpr,
    block_columns: tl.constexpr,
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
        tl.store(out_winner + row * winner_stride.to(tl.int64) + column, edge, mask=mask)
    if has_dst_scale:
        value = value * tl.load(dst_scale + row).to(accumulator)
    at = row * out_stride.to(tl.int64) + column
    if adds:
        value += tl.load(add + row * add_stride.to(tl.int64) + column, mask=mask, other=0).to(accumulator)
    tl.store(out + at, tl.where(mask, value, 0).to(out.dtype.element_ty), mask=column < width + zero_columns)


def needs_wide_edges(num_edges: int) -> bool:
    return (
        num_edges >= 2**31 - 2**12
    )  # rows in lockstep count on, past their last edge, by less than a piece and a tile


TRITON_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@dataclass(frozen=True)
class Edges:
    """Edges grouped by the rows of an output: those of a structure, or of its transposed.

    Args:
        indptr: Of all rows.
        indices: Of all edges.
        edge_ids: Likewise, or None.
        rows: First row of the output and the row after its last; all when None. A row is the same bits in any output.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor | None
    rows: tuple[int, int] | None = None

    @property
    def offsets(self) -> Tensor:
        """``indptr`` of the rows of the output."""
        return self.indptr if self.rows is None else self.indptr[self.rows[0] : self.rows[1] + 1]

    @property
    def mean_degree(self) -> int:
        """Of all rows: what is chosen by it decides about the order in which a row is summed."""
        return cdiv(len(self.indices), max(1, len(self.indptr) - 1))

    @property
    def schedule(self) -> RowSchedule:
        return row_schedule(self.indptr, self.rows)


def in_edges(structure: Structure) -> Edges:
    return Edges(structure.indptr, structure.indices, None)


def out_edges(structure: Structure, *, has_edge_rows: bool, rows: tuple[int, int] | None = None) -> Edges:
    """``has_edge_rows``: something is read for each edge, so that it has to be known which edge that is."""
    transposed = structure.transposed
    return Edges(transposed.indptr, transposed.dst, transposed.edges if has_edge_rows else None, rows)


@unseen
def aggregate_rows(
    edges: Edges,
    x: Tensor,
    num_heads: int,
    *,
    rest: Tensor | None = None,
    op: str = "copy_lhs",
    w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    sign: int = 0,
    by_edge: bool = False,
    winner: Tensor | None = None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
    first_row: int = 0,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One aggregation, with its heavy rows combined.

    Args:
        edges: Edges grouped by output row.
        x: ``(rows, F)``, each row contiguous; rows of ``edges.indices``, or of the edge itself (``by_edge``).
        num_heads: H.
        rest: ``(rows, F)`` likewise, numbered on after those of ``x``; None for none. For one head; padded if ``x`` is.
        op: How ``x`` and ``w`` meet.
        w: ``(E, H)`` or ``(E, F)`` contiguous, by edge row; None for copies.
        out_dtype: Type of the result; that of ``x`` without.
        sign: 0 for a sum, 1 for the maximum, -1 for the minimum.
        by_edge: See ``x``.
        winner: ``(rows, F)``: only messages of the edge named there count, in the row that ``edges.indices`` names.
        src_scale: ``(rows,)`` factor of each row of ``x``.
        dst_scale: ``(N,)`` factor of each row of the result.
        add_to: ``(N, F)``, each row contiguous: what sums are added to before their one rounding.
        out: Where the result is written, of type ``out_dtype``, each row contiguous; ``add_to`` itself to add in place.
            A new tensor when None.
        first_row: Of ``out``, where the result begins.
        tile: Overrides :func:`choose_tile`.

    Returns:
        ``(N, F)``, its rows padded if those of ``x`` are, or ``out``; and the winning edges ``(N, F)`` of a maximum
        or minimum, -1 where a row has none.
    """
    offsets, width, num_edges = edges.offsets, x.shape[1], len(edges.indices)
    num_rows = len(offsets) - 1
    num_columns = width // num_heads
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    schedule = edges.schedule
    is_extreme = sign != 0
    weight = 0 if w is None else 1 if w.shape[1] == num_heads else 2
    out_dtype = out_dtype or x.dtype
    if out is not None:
        assert not is_extreme and out.dtype == out_dtype and first_row + num_rows <= len(out)
    elif is_padded(x) and num_heads == 1 and not is_extreme:
        out = empty_rows(num_rows, width, out_dtype, x.device)
    else:
        out = torch.empty(num_rows, width, dtype=out_dtype, device=x.device)
    # of the whole: a single row of it, which is contiguous at any stride, does not show what is behind
    zero_columns = with_padding(out).shape[1] - width
    out_rows = out[first_row:] if first_row else out
    partial = torch.empty(schedule.num_pieces, width, dtype=accumulator, device=x.device)
    wide_edges = needs_wide_edges(num_edges)
    edge_dtype = torch.int64 if wide_edges else torch.int32
    out_winner = torch.empty(num_rows if is_extreme else 0, width, dtype=edge_dtype, device=x.device)
    partial_winner = torch.empty(schedule.num_pieces if is_extreme else 0, width, dtype=edge_dtype, device=x.device)
    if rest is not None:
        assert num_heads == 1 and rest.shape[1] == width and rest.dtype == x.dtype
        x, rest = _alike(x, rest)
    elif num_heads == 1 and not by_edge:
        x = aligned_rows(x, num_edges)
    x_columns = x.shape[1] // num_heads  # padding included
    streams = 2 if is_extreme or winner is not None or weight == 2 else 1
    if tile is None:
        tile = choose_tile(num_heads, x_columns, x.element_size(), edges.mean_degree, streams)
    # left out where nothing reads them: the gradient of a plain sum is then the kernel of its forward pass
    edge_ids = edges.edge_ids if w is not None or winner is not None else None
    num_light = len(schedule.lockstep_rows)
    programs = cdiv(schedule.num_pieces, tile.rows) + (
        schedule.num_groups if tile.rows == 1 else cdiv(num_light, tile.rows * tile.row_sets)
    )
    blocks = cdiv(num_heads, tile.heads) * cdiv(num_columns, tile.columns)
    with torch.cuda.device_of(x):
        _aggregate_kernel[(programs, blocks)](
            out_rows, out_winner, partial, partial_winner, x, rest, w, winner, src_scale, dst_scale, add_to,
            offsets, edges.indices, edge_ids, schedule.group_begin, schedule.group_end,
            schedule.lockstep_rows, schedule.piece_begin, schedule.piece_end,
            schedule.num_pieces, num_light, len(x), sign, num_columns - 1,
            num_heads=num_heads, num_columns=num_columns, x_columns=x_columns,
            x_stride=x.stride(0), rest_stride=0 if rest is None else rest.stride(0), out_stride=out.stride(0),
            add_stride=0 if add_to is None else add_to.stride(0),
            zero_columns=zero_columns, adds=add_to is not None,
            op=_CODES[op], weight=weight, is_extreme=is_extreme, by_edge=by_edge,
            has_rest=rest is not None, has_edge_ids=edge_ids is not None,
            has_winner=winner is not None, has_src_scale=src_scale is not None, has_dst_scale=dst_scale is not None,
            wide_edges=wide_edges, accumulator=TRITON_TYPES[accumulator],
            no_edge=torch.iinfo(edge_dtype).max,
            rows_at_once=tile.rows, row_sets=tile.row_sets, unroll=tile.unroll, block_edges=tile.edges,
            block_heads=tile.heads, block_columns=tile.columns,
            sum_each_tile=tile.heads * tile.columns * x.element_size() >= 128,
            num_warps=tile.num_warps,
        )  # fmt: skip
        combine_pieces(out_rows, out_winner, partial, partial_winner, dst_scale, schedule, sign, add_to, zero_columns)
    return out, out_winner if is_extreme else None


def combine_pieces(
    out: Tensor,
    out_winner: Tensor | None,
    partial: Tensor,
    partial_winner: Tensor | None,
    dst_scale: Tensor | None,
    schedule: RowSchedule,
    sign: int,
    add_to: Tensor | None = None,
    zero_columns: int | None = None,
) -> None:
    """Finish the heavy rows of ``out`` from their pieces.

    ``add_to`` as in `aggregate_rows`; ``zero_columns`` behind each row, found here when None.
    """
    if schedule.num_split == 0:
        return
    width = out.shape[1]
    zero_columns = with_padding(out).shape[1] - width if zero_columns is None else zero_columns
    block = min(1024, power_of_2(width))
    _combine_kernel[(schedule.num_split, cdiv(width, block))](
        out, out_winner, partial, partial_winner, dst_scale, add_to, schedule.split_rows, schedule.split_ptr,
        width, out.stride(0), 0 if out_winner is None else out_winner.stride(0),
        0 if add_to is None else add_to.stride(0), zero_columns, sign,
        is_extreme=sign != 0, has_dst_scale=dst_scale is not None, adds=add_to is not None,
        accumulator=TRITON_TYPES[partial.dtype], block_columns=block, num_warps=4 if block > 128 else 1,
    )  # fmt: skip


def _alike(x: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Both with padding, or neither: a single row, which is contiguous at any stride, does not show what is behind."""
    x, rest = with_padding(x), with_padding(rest)
    columns = max(x.shape[1], rest.shape[1])
    x, rest = (y if y.shape[1] == columns else F.pad(y, (0, columns - y.shape[1])) for y in (x, rest))
    return x, rest


def aligned_rows(x: Tensor, num_edges: int) -> Tensor:
    """Rows padded with zeros to a multiple of 32 bytes; copied for it where they are read often enough to pay."""
    x = with_padding(x)
    if padded_width(x.shape[1], x.element_size()) == x.shape[1] or num_edges < 4 * len(x):
        return x
    return with_padding(padded_copy(x))
