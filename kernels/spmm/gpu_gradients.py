"""Triton kernel for gradients of edge operands, which are no aggregation of rows.

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
from nugnn.kernels.spmm.gpu_aggregate import TRITON_TYPES, needs_wide_edges
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
    grad, x = grad.contiguous(), None if x is None else x.contiguous()  # padded rows are not
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
