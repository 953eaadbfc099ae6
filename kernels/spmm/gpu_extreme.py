"""Maxima and minima of wide source rows in Triton, and their gradient, about as fast as a sum.

A winner is kept as its place among the row's edges. For 16-bit types value and place are one 32-bit integer, whose
maximum is a single instruction: a first pass turns rows into integers in the order of their values, and the place fills
the lower half, smaller places being larger. For float32 a thread keeps value and place. Signed zeros are equal, NaN is
above all, and the first of equal edges wins, as in :mod:`nugnn.kernels.spmm.reference`.

Backward gathers the destinations' winners over each source's out-edges, and loads of a destination's gradient only what
the edge has won: each value is read once. Rows are walked as in :mod:`nugnn.kernels.spmm.gpu_aggregate`; nothing is
added by two programs at once, so results are equal bit for bit from run to run.

Shape suffixes: N destinations, L sources, E edges, F features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.operator import unseen
from nugnn.kernels.padded import padded_width, whole_rows
from nugnn.kernels.row_schedule import row_schedule
from nugnn.kernels.spmm.gpu_aggregate import TRITON_TYPES, aligned_rows, combine_pieces, needs_wide_edges
from nugnn.kernels.spmm.tiles import LOADS, Tile, cdiv, power_of_2, wide_tile
from nugnn.kernels.structure import MOST_SHORT_PLACES, Structure

LEAST_BYTES = 64
"""Narrower rows are left to :mod:`nugnn.kernels.spmm.gpu_aggregate`, which walks several in lockstep."""
_LOWEST = tl.constexpr(-(2**31))
_NO_PLACE = tl.constexpr(2**31 - 1)
_FIRST = tl.constexpr(0xFFFF)
"""Key of the first place of a row; further places have smaller ones."""


def takes(x: Tensor) -> bool:
    """Whether this module's kernels are for rows like ``x (L, F)``."""
    is_known = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_known and x.shape[1] * x.element_size() >= LEAST_BYTES


@triton.jit
def _float_order(bits, is_min: tl.constexpr, infinity: tl.constexpr):  # type: ignore[no-untyped-def]
    """16-bit floats as integers of the same order (the reverse, ``is_min``), zeros alike and NaN last."""
    magnitude = bits & 0x7FFF
    ordered = bits ^ ((bits >> 15) & 0x7FFF)
    if is_min:
        ordered = ~ordered
        ordered = tl.where(magnitude == 0, -1, ordered)
    else:
        ordered = tl.where(magnitude == 0, 0, ordered)
    return tl.where(magnitude > infinity, 0x7FFF, ordered)


@triton.jit
def _order_kernel(  # type: ignore[no-untyped-def]
    out, x, num_rows, num_columns, x_stride, out_stride: tl.constexpr, is_min: tl.constexpr, infinity: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    inside = (row < num_rows)[:, None]
    at = (row * x_stride)[:, None] + column[None, :]
    bits = tl.load(x + at, mask=inside & (column < num_columns)[None, :], other=0)
    at = (row * out_stride)[:, None] + column[None, :]
    tl.store(out + at, _float_order(bits, is_min, infinity), mask=inside & (column < out_stride)[None, :])


def _ordered_rows(x: Tensor, is_min: bool) -> Tensor:
    """``(L, F')`` int16, rows padded: see `_float_order`."""
    x = whole_rows(x)
    num_rows, width = x.shape
    stride = padded_width(width, 2)
    out = torch.empty(num_rows, stride, dtype=torch.int16, device=x.device)
    columns = min(256, power_of_2(stride))
    rows = 2048 // columns
    _order_kernel[(cdiv(num_rows, rows), cdiv(stride, columns))](
        out, x.view(torch.int16), num_rows, width, x.stride(0), out_stride=stride, is_min=is_min,
        infinity=_infinity(x.dtype), block_rows=rows, block_columns=columns, num_warps=4,
    )  # fmt: skip
    return out


def _infinity(dtype: torch.dtype) -> int:
    """The bits of infinity: larger ones, without the sign, are NaN."""
    return 0x7F80 if dtype == torch.bfloat16 else 0x7C00


@triton.jit
def _first_of_largest(a, a_place, b, b_place):  # type: ignore[no-untyped-def]
    largest = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    bits = largest.to(tl.int32, bitcast=True)
    a_is = a.to(tl.int32, bitcast=True) == bits
    b_is = b.to(tl.int32, bitcast=True) == bits
    place = tl.where(a_is, tl.where(b_is, tl.minimum(a_place, b_place), a_place), b_place)
    return largest, place


@triton.jit
def _larger_int(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit
def _keep_largest(  # type: ignore[no-untyped-def]
    total, place, tile, at_place, lane_edge, unroll_axis, is_min: tl.constexpr, is_packed: tl.constexpr,
    block_edges: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """``total (edges, columns)`` and ``place`` with a ``tile (edges, unroll, columns)`` taken in, in order of edges."""
    if is_packed:
        first = _FIRST - at_place - lane_edge[:, None] - unroll_axis[None, :] * block_edges
        key = (tile.to(tl.int32) << 16) | first[:, :, None]
        total = tl.maximum(total, tl.reduce(key, 1, _larger_int))
    else:
        if is_min:
            message = 0.0 - tile
        else:
            message = 0.0 + tile  # -0 becomes 0
        bits = message.to(tl.int32, bitcast=True)
        for j in tl.static_range(unroll):
            # one register of the thread: zeros are added to it, which costs nothing
            mine = tl.sum(tl.where((unroll_axis == j)[None, :, None], bits, 0), 1).to(tl.float32, bitcast=True)
            larger = tl.maximum(total, mine, propagate_nan=tl.PropagateNan.ALL)
            is_new = larger.to(tl.int32, bitcast=True) != total.to(tl.int32, bitcast=True)
            place = tl.where(is_new, at_place + j * block_edges, place)
            total = larger
    return total, place


@triton.jit
def _load_rows(x_at, index, in_row, x_stride: tl.constexpr, even: tl.constexpr):  # type: ignore[no-untyped-def]
    at = x_at[None, None, :] + (index.to(tl.int64) * x_stride)[:, :, None]
    if even:
        return tl.load(at)
    else:
        return tl.load(at, mask=in_row[None, None, :], other=0)


@triton.jit
def _value_of(ordered, is_min: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits whose `_float_order` is ``ordered``."""
    if is_min:
        ordered = ~ordered
    return ordered ^ ((ordered >> 15) & 0x7FFF)


@triton.jit(do_not_specialize=["num_pieces", "last_column"])
def _extreme_kernel(  # type: ignore[no-untyped-def]
    out, winner, partial, partial_winner, x, indptr, indices, group_begin, group_end, piece_row, piece_begin, piece_end,
    num_pieces, last_column, width: tl.constexpr, x_columns: tl.constexpr, x_stride: tl.constexpr,
    winner_stride: tl.constexpr, is_min: tl.constexpr, is_packed: tl.constexpr, wide_edges: tl.constexpr,
    block_edges: tl.constexpr, unroll: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """The largest of ``x[index]`` (smallest, ``is_min``) over this program's rows, and the place of its edge."""
    tile_edges: tl.constexpr = unroll * block_edges
    edge_type: tl.constexpr = tl.int64 if wide_edges else tl.int32
    even: tl.constexpr = x_columns % block_columns == 0
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    in_row = column < x_columns
    in_out = column <= last_column  # not a second bound known at compile time, see `_aggregate_kernel`
    x_at = x + column
    lane_edge = tl.arange(0, block_edges)
    unroll_axis = tl.arange(0, unroll)
    step = lane_edge[:, None] + unroll_axis[None, :] * block_edges
    program = tl.program_id(0)
    is_piece = program < num_pieces
    if is_piece:
        begins = piece_begin
        ends = piece_end
        first = program
        last = program + 1
    else:
        begins = indptr
        ends = indptr + 1
        first = tl.load(group_begin + program - num_pieces).to(tl.int32)
        last = tl.load(group_end + program - num_pieces).to(tl.int32)
    for slot in range(first, last):
        begin = tl.load(begins + slot).to(edge_type)
        end = tl.load(ends + slot).to(edge_type)
        num_edges = (end - begin).to(tl.int32)
        first_index = indices + begin
        last_edge = num_edges - 1
        place = tl.full([block_edges, block_columns], _NO_PLACE, tl.int32)
        if is_packed:
            total = tl.full([block_edges, block_columns], _LOWEST, tl.int32)
        else:
            total = tl.full([block_edges, block_columns], float("-inf"), tl.float32)
        # beyond the last edge the last one is taken again, at a later place: it never wins, and nothing needs a mask
        some = (step >= 0) & (num_edges > 0)
        index = tl.load(first_index + tl.minimum(step, last_edge), mask=some, other=0, eviction_policy="evict_first")
        for at in range(0, num_edges, tile_edges):
            after = tl.minimum(at + tile_edges + step, last_edge)
            next_index = tl.load(first_index + after, eviction_policy="evict_first")
            tile = _load_rows(x_at, index, in_row, x_stride, even)
            total, place = _keep_largest(
                total, place, tile, at, lane_edge, unroll_axis, is_min, is_packed, block_edges, unroll
            )
            index = next_index
        if is_packed:
            key = tl.reduce(total, 0, _larger_int)
            won = _FIRST - (key & 0xFFFF)
            value = _value_of(key >> 16, is_min).to(tl.int16).to(out.dtype.element_ty, bitcast=True).to(tl.float32)
        else:
            place = tl.where(place == _NO_PLACE, place, place + lane_edge[:, None])
            value, won = tl.reduce((total, place), 0, _first_of_largest)
            won = tl.where(won == _NO_PLACE, 0, won)  # nothing above -inf: the first edge
            if is_min:
                value = -value
        if num_edges == 0:
            won = tl.full([block_columns], -1, tl.int32)
            value = tl.full([block_columns], float("inf") if is_min else float("-inf"), tl.float32)
        row = tl.full([], 0, tl.int64) + slot
        at = row * width + column
        if is_piece:
            heavy = tl.load(piece_row + slot).to(tl.int64)
            tl.store(partial + at, -value if is_min else value, mask=in_out)
            tl.store(partial_winner + at, won + (begin - tl.load(indptr + heavy)).to(tl.int32), mask=in_out)
        else:
            tl.store(out + at, value.to(out.dtype.element_ty), mask=in_out)
            tl.store(winner + row * winner_stride + column, won.to(winner.dtype.element_ty), mask=in_out)


@unseen
def wide_extreme(structure: Structure, x: Tensor, *, is_min: bool, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Largest (``is_min``: smallest) of the source rows of each destination's in-edges, and which edge it is.

    Args:
        structure: With edges, on the device of ``x``.
        x: ``(L, F)`` that `takes` accepts, each row contiguous.
        is_min: See above.
        tile: Overrides `wide_tile`; one row at a time.

    Returns:
        ``(N, F)`` in the type of ``x``, -inf (inf) without in-edges; and ``(N, F)`` places among the in-edges of the
        destination, -1 without any, rows padded: int16 where no row has more than `MOST_SHORT_PLACES` edges,
        else int32.
    """
    schedule, num_rows, width = row_schedule(structure.indptr), structure.num_dst, x.shape[1]
    assert schedule.piece_edges <= 0xFFFF  # the place of an edge in a key
    is_packed = x.element_size() == 2
    rows = _ordered_rows(x, is_min) if is_packed else aligned_rows(x, structure.num_edges)
    place_dtype = torch.int16 if schedule.most_edges <= MOST_SHORT_PLACES else torch.int32
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    winner = torch.empty(num_rows, padded_width(width, 2), dtype=place_dtype, device=x.device)
    partial = torch.empty(schedule.num_pieces, width, dtype=torch.float32, device=x.device)
    partial_winner = torch.empty(schedule.num_pieces, width, dtype=torch.int32, device=x.device)
    if tile is None:
        mean_degree = cdiv(structure.num_edges, num_rows)
        tile = wide_tile(rows.shape[1], x.element_size(), mean_degree, LOADS // 2 if is_packed else LOADS)
    with torch.cuda.device_of(x):
        _extreme_kernel[(schedule.num_pieces + schedule.num_groups, cdiv(width, tile.columns))](
            out, winner, partial, partial_winner, rows, structure.indptr, structure.indices,
            schedule.group_begin, schedule.group_end, schedule.piece_row, schedule.piece_begin, schedule.piece_end,
            schedule.num_pieces, width - 1, x_columns=rows.shape[1], x_stride=rows.stride(0), width=width,
            winner_stride=winner.stride(0), is_min=is_min, is_packed=is_packed,
            wide_edges=needs_wide_edges(structure.num_edges),
            block_edges=tile.edges, unroll=tile.unroll, block_columns=tile.columns, num_warps=tile.num_warps,
        )  # fmt: skip
        combine_pieces(out, winner, partial, partial_winner, None, schedule, -1 if is_min else 1)
    return out, winner


@triton.jit(do_not_specialize=["num_pieces"])
def _won_gradient_kernel(  # type: ignore[no-untyped-def]
    out, partial, grad, winner, indptr, indices, places, group_begin, group_end, piece_begin, piece_end, num_pieces,
    width: tl.constexpr, winner_stride: tl.constexpr, wide_edges: tl.constexpr, accumulator: tl.constexpr,
    block_edges: tl.constexpr, unroll: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """``out[row] = sum over edges of grad[index]`` where the edge has won, for this program's rows."""
    tile_edges: tl.constexpr = unroll * block_edges
    edge_type: tl.constexpr = tl.int64 if wide_edges else tl.int32
    even: tl.constexpr = winner_stride % block_columns == 0
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    in_winner = column < winner_stride
    in_row = column < width
    step = tl.arange(0, block_edges)[:, None] + tl.arange(0, unroll)[None, :] * block_edges
    program = tl.program_id(0)
    is_piece = program < num_pieces
    if is_piece:
        begins = piece_begin
        ends = piece_end
        first = program
        last = program + 1
    else:
        begins = indptr
        ends = indptr + 1
        first = tl.load(group_begin + program - num_pieces).to(tl.int32)
        last = tl.load(group_end + program - num_pieces).to(tl.int32)
    for slot in range(first, last):
        begin = tl.load(begins + slot).to(edge_type)
        end = tl.load(ends + slot).to(edge_type)
        num_edges = (end - begin).to(tl.int32)
        total = tl.zeros([block_edges, block_columns], accumulator)
        first_index = indices + begin
        first_place = places + begin
        index = tl.load(first_index + step, mask=step < num_edges, other=0, eviction_policy="evict_first")
        place = tl.load(first_place + step, mask=step < num_edges, other=-2, eviction_policy="evict_first")
        for at in range(0, num_edges, tile_edges):
            after = at + tile_edges + step
            next_index = tl.load(first_index + after, mask=after < num_edges, other=0, eviction_policy="evict_first")
            next_place = tl.load(first_place + after, mask=after < num_edges, other=-2, eviction_policy="evict_first")
            won = _load_rows(winner + column, index, in_winner, winner_stride, even)
            hit = won == place[:, :, None]
            if width % block_columns != 0:
                hit = hit & in_row[None, None, :]
            grad_at = (grad + column)[None, None, :] + (index.to(tl.int64) * width)[:, :, None]
            total += tl.sum(tl.load(grad_at, mask=hit, other=0).to(accumulator), 1)
            index = next_index
            place = next_place
        value = tl.sum(total, 0)
        at_row = (tl.full([], 0, tl.int64) + slot) * width + column
        if is_piece:
            tl.store(partial + at_row, value, mask=in_row)
        else:
            tl.store(out + at_row, value.to(out.dtype.element_ty), mask=in_row)


@unseen
def wide_extreme_gradient(structure: Structure, grad: Tensor, winner: Tensor, tile: Tile | None = None) -> Tensor:
    """``(L, F)``, the gradient of `wide_extreme`'s operand from that of its result, ``grad (N, F)`` contiguous."""
    transposed, places, width = structure.transposed, structure.out_places, grad.shape[1]
    schedule = row_schedule(transposed.indptr)
    out = torch.empty(structure.num_src, width, dtype=grad.dtype, device=grad.device)
    partial = torch.empty(schedule.num_pieces, width, dtype=torch.float32, device=grad.device)
    if tile is None:
        mean_degree = cdiv(structure.num_edges, structure.num_src)
        tile = wide_tile(winner.stride(0), winner.element_size(), mean_degree, LOADS // 2)  # values fill registers, too
    with torch.cuda.device_of(grad):
        _won_gradient_kernel[(schedule.num_pieces + schedule.num_groups, cdiv(width, tile.columns))](
            out, partial, grad, winner, transposed.indptr, transposed.dst, places,
            schedule.group_begin, schedule.group_end, schedule.piece_begin, schedule.piece_end, schedule.num_pieces,
            width=width, winner_stride=winner.stride(0), wide_edges=needs_wide_edges(structure.num_edges),
            accumulator=TRITON_TYPES[partial.dtype],
            block_edges=tile.edges, unroll=tile.unroll, block_columns=tile.columns, num_warps=tile.num_warps,
        )  # fmt: skip
        combine_pieces(out, None, partial, None, None, schedule, 0)
    return out
