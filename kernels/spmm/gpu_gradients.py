"""Triton kernels for gradients that are no aggregation of whole rows: of edge operands, and of maxima and minima.

Shape suffixes: N destinations, L sources, E edges, F = H x D features.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.operator import unseen
from nugnn.kernels.row_schedule import row_schedule
from nugnn.kernels.spmm.gpu_aggregate import TRITON_TYPES, combine_pieces, needs_wide_edges, out_edges
from nugnn.kernels.spmm.tiles import LOADS, cdiv, power_of_2
from nugnn.kernels.structure import Structure


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


@unseen
def edge_gradient(
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
    columns = min(power_of_2(num_columns), 512 // itemsize)
    heads = min(power_of_2(num_heads), max(1, 512 // itemsize // columns))
    block_edges = max(1, min(16, LOADS * 512 // (heads * columns * itemsize)))
    with torch.cuda.device_of(grad):
        _edge_gradient_kernel[(schedule.num_pieces + schedule.num_groups, cdiv(num_heads, heads))](
            out, grad, x, winner, src_scale, dst_scale,
            structure.indptr, structure.indices, schedule.group_begin, schedule.group_end,
            schedule.piece_row, schedule.piece_begin, schedule.piece_end,
            schedule.num_pieces, num_heads, num_columns // vector,
            vector=vector, has_x=x is not None, has_winner=winner is not None, has_src_scale=src_scale is not None,
            has_dst_scale=dst_scale is not None, is_full=is_full, wide_edges=needs_wide_edges(num_edges),
            accumulator=TRITON_TYPES[accumulator],
            block_edges=block_edges, block_heads=heads, block_columns=columns, num_warps=1,
        )  # fmt: skip
    return out


BITS_FROM_WIDTH = 16
"""Narrower gradients of extremes read the winners themselves."""
_BITS_COLUMNS = 128
"""Columns for which winners are packed at once: 16 bytes an edge."""


@unseen
def winner_gradient(structure: Structure, grad: Tensor, winner: Tensor) -> Tensor:
    """``(L, F)``: the gradient of a maximum's unweighted messages.

    A source reads, of each destination, only what its edge won: one column in in-degree, found by bits that a first
    kernel packs destination by destination.
    """
    edges, width, num_edges = out_edges(structure, has_edge_rows=True), grad.shape[1], structure.num_edges
    here, there = row_schedule(structure.indptr), edges.schedule
    accumulator = torch.float64 if grad.dtype == torch.float64 else torch.float32
    out = torch.empty(structure.num_src, width, dtype=grad.dtype, device=grad.device)
    partial = torch.empty(there.num_pieces, width, dtype=accumulator, device=grad.device)
    most_bytes = cdiv(min(width, _BITS_COLUMNS), 8)
    bits = torch.empty(num_edges * most_bytes, dtype=torch.uint8, device=grad.device)
    vector = math.gcd(width, _BITS_COLUMNS, 16 // grad.element_size())
    wide_edges = needs_wide_edges(num_edges)
    with torch.cuda.device_of(grad):
        for block in range(cdiv(width, _BITS_COLUMNS)):
            num_columns = min(_BITS_COLUMNS, width - block * _BITS_COLUMNS)
            num_bytes = cdiv(num_columns, 8)
            block_bytes = power_of_2(num_bytes)
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
                accumulator=TRITON_TYPES[accumulator],
                block_edges=max(1, 64 // (block_bytes * grad.element_size())), unroll=4, **shape,
            )  # fmt: skip
        combine_pieces(out, None, partial, None, None, there, 0)
    return out
