"""Fused attention in Triton: scores, softmax, dropout and weighted sum in one pass over the edges of each row.

A program walks the edges of a row a block at a time and keeps a running maximum, sum and weighted sum for all heads
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), so nothing of the size of the edges is
written. Backward computes the scores again from the two numbers per row and head that forward keeps: once over
destinations, which gives their gradients and the sum that the softmax gradient subtracts, and once over sources. Heavy
rows are split by the schedule and their pieces combined in a fixed order, so results are equal bit for bit from run to
run. Import this module only where Triton is installed.

What decides the time is the gathered rows: one of ``heads * dim`` values for each edge in forward and in the pass over
destinations, two in the pass over sources (one for GAT). A warp reads a row in 16-byte loads, several rows at once.

Shape suffixes: N inner (destination) rows, L local (source) rows, H heads, D features of a head, P pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.operator import unseen
from nugnn.kernels.philox import DerivedKey
from nugnn.kernels.philox.gpu import key_word, philox_tile
from nugnn.kernels.philox.reference import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1
from nugnn.kernels.row_programs import edges_of_row, num_units, rows_of_unit, schedule_arguments, sum_pieces
from nugnn.kernels.row_schedule import row_schedule
from nugnn.kernels.structure import Structure

LOG2_E = 1.4426950408889634
MAX_DIM = 4096
"""Widest head a program can hold."""
_NO_IDS, _ID_TENSOR, _ID_SHIFT = 0, 1, 2
_MAX_PARTIAL_ROWS = 16384
"""Programs of the pass over sources for GATv2: each leaves one row of the sum that is the gradient of ``attn``."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program covers a row: ``block_edges`` edges of ``block_heads`` heads at once, on ``num_warps`` warps.

    With ``num_stages`` above 1 the rows of the next blocks are fetched to shared memory meanwhile.
    """

    block_edges: int
    block_heads: int
    block_dim: int
    num_warps: int
    num_stages: int = 1


def choose_tile(num_heads: int, dim: int, dtype: torch.dtype, num_gathers: int) -> Tile:
    """All heads in one program while they have at most 512 values, and as many edges as the registers hold."""
    block_dim = triton.next_power_of_2(dim)
    block_heads = min(triton.next_power_of_2(num_heads), max(1, 512 // block_dim))
    values = block_heads * block_dim
    budget = (512 if dtype == torch.float64 else 1024) // num_gathers
    num_warps = 1 if values <= 512 else (2 if values <= 1024 else (4 if values <= 2048 else 8))
    return Tile(max(1, min(32, budget * num_warps // values)), block_heads, block_dim, num_warps)


@dataclass(frozen=True, slots=True)
class DropoutArguments:
    """What the kernels need to make a mask: key words, threshold, and how an edge finds its global id."""

    mode: int
    ids: Tensor
    threshold: int
    scale: float
    key: DerivedKey


def no_dropout(like: Tensor) -> DropoutArguments:
    return DropoutArguments(_NO_IDS, like, 0, 1.0, (0, 0))


def dropout_by_tensor(ids_E: Tensor, threshold: int, scale: float, key: DerivedKey) -> DropoutArguments:
    """Edge ``e`` has the global id ``ids_E[e]``, int64."""
    return DropoutArguments(_ID_TENSOR, ids_E, threshold, scale, key)


def dropout_by_shift(shift_N: Tensor, threshold: int, scale: float, key: DerivedKey) -> DropoutArguments:
    """Edge ``e`` into ``v`` has the global id ``e + shift_N[v]``, int64."""
    return DropoutArguments(_ID_SHIFT, shift_N, threshold, scale, key)


# -- pieces of the kernels --------------------------------------------------------------------------------------------


@triton.jit
def _kept(  # type: ignore[no-untyped-def]
    ids, first_head, threshold, k0, k1, block_heads: tl.constexpr,
    m0: tl.constexpr, m1: tl.constexpr, w0: tl.constexpr, w1: tl.constexpr, rounds: tl.constexpr,
):  # fmt: skip
    """``(block_edges, block_heads)`` whether dropout keeps the weight of an edge and head.

    The four words of a Philox block are those of four neighbouring heads, so a block is computed once for them all.
    """
    num_blocks: tl.constexpr = (block_heads + 3) // 4
    blocks = first_head // 4 + tl.arange(0, num_blocks)
    c0, c1, c2, c3 = philox_tile(ids[:, None], blocks[None, :], key_word(k0), key_word(k1), m0, m1, w0, w1, rounds)
    if block_heads == 1:
        lane = first_head % 4
        words = tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))
    elif block_heads == 2:
        low = first_head % 4 == 0
        words = tl.reshape(tl.join(tl.where(low, c0, c2), tl.where(low, c1, c3)), (ids.shape[0], 2))
    else:
        words = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (ids.shape[0], block_heads))
    return words.to(tl.int64) >= threshold


@triton.jit
def _leaky(z, slope: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.where(z > 0, z, z * slope)


@triton.jit
def _load_tile(  # type: ignore[no-untyped-def]
    pointer, rows, first_head, num_heads: tl.constexpr, dim: tl.constexpr,
    block_heads: tl.constexpr, block_dim: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """``(block_edges, block_heads, block_dim)`` values of the given rows; 0 beyond the last head and feature.

    Loaded as a matrix, so that a warp spreads over the values of a row and keeps its edges in registers: sums over
    edges are then additions, not exchanges between threads.
    """
    flat = tl.arange(0, block_heads * block_dim)
    heads, dims = first_head + flat // block_dim, flat % block_dim
    address = pointer + (rows.to(tl.int64) * (num_heads * dim))[:, None] + (heads * dim + dims)[None, :]
    if num_heads % block_heads == 0 and dim == block_dim:
        tile = tl.load(address)
    else:
        tile = tl.load(address, mask=((heads < num_heads) & (dims < dim))[None, :], other=0.0)
    return tl.reshape(tile.to(acc), (rows.shape[0], block_heads, block_dim))


@triton.jit
def _first_edge(ends, begin, count):  # type: ignore[no-untyped-def]
    """The other end of a row's first edge, which stands in past the row's last: loads of rows then need no mask."""
    return tl.load(ends + begin, mask=count > 0, other=0)


@triton.jit
def _hidden_scores(  # type: ignore[no-untyped-def]
    z, linear, absolute, block_edges: tl.constexpr, block_heads: tl.constexpr, block_dim: tl.constexpr
):
    """``sum over d of a leaky(z)`` as that of ``a (1 + slope) / 2 z + a (1 - slope) / 2 |z|``.

    Both products of a feature stand side by side in one sum, which is then a chain of multiply-adds. In backward, where
    ``z`` is used again, the compiler would move values between threads for it.
    """
    products = tl.join(z * linear[None, :, :], tl.abs(z) * absolute[None, :, :])
    return tl.sum(tl.reshape(products, (block_edges, block_heads, 2 * block_dim)), axis=2)


@triton.jit
def _edge_ids(edges, dst_rows, ids, live, mode: tl.constexpr):  # type: ignore[no-untyped-def]
    """Global id of each edge; ``dst_rows`` is a row or one for each edge."""
    if mode == 1:
        return tl.load(ids + edges, mask=live, other=0)
    return edges.to(tl.int64) + tl.load(ids + dst_rows)


@triton.jit(do_not_specialize=["num_pieces", "threshold", "k0", "k1"])
def _forward_kernel(  # type: ignore[no-untyped-def]
    out, stats, part_out, part_stats, x, src_score, dst_side, attn, indptr, indices,
    num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end,
    ids, keep_scale, threshold, k0, k1,
    gatv2: tl.constexpr, slope: tl.constexpr, mode: tl.constexpr,
    num_heads: tl.constexpr, dim: tl.constexpr,
    block_edges: tl.constexpr, block_heads: tl.constexpr, block_dim: tl.constexpr, stages: tl.constexpr,
    acc: tl.constexpr,
    m0: tl.constexpr, m1: tl.constexpr, w0: tl.constexpr, w1: tl.constexpr, rounds: tl.constexpr,
):  # fmt: skip
    """One unit of destination rows, one group of heads."""
    stride: tl.constexpr = num_heads * dim
    unit = tl.program_id(0)
    first_head = tl.program_id(1) * block_heads
    heads = first_head + tl.arange(0, block_heads)
    dims = tl.arange(0, block_dim)
    in_heads = heads < num_heads
    columns = heads[:, None] * dim + dims[None, :]
    in_columns = in_heads[:, None] & (dims < dim)[None, :]
    if gatv2:
        # powers of two from here on: exp2 is what the hardware has
        score_weights = tl.load(attn + columns, mask=in_columns, other=0.0).to(acc) * 1.4426950408889634
        linear, absolute = score_weights * ((1 + slope) / 2), score_weights * ((1 - slope) / 2)
    is_piece, first, last, begin_of_piece, end_of_piece = rows_of_unit(
        unit, num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end
    )
    for row in range(first, last):
        begin, end = edges_of_row(indptr, row, is_piece, begin_of_piece, end_of_piece)
        if gatv2:
            dst_row = tl.load(dst_side + row * stride + columns, mask=in_columns, other=0.0).to(acc)
        else:
            dst_score = tl.load(dst_side + row * num_heads + heads, mask=in_heads, other=0.0).to(acc)
        largest = tl.full((block_heads,), float("-inf"), acc)
        total = tl.zeros((block_heads,), acc)
        weighted = tl.zeros((block_heads, block_dim), acc)
        count = (end - begin).to(tl.int32)
        first_source = _first_edge(indices, begin, count)
        for start in tl.range(0, count, block_edges, num_stages=stages):
            offsets = start + tl.arange(0, block_edges)
            live = offsets < count
            sources = tl.load(indices + begin + offsets, mask=live, other=first_source).to(tl.int64)
            x_tile = _load_tile(x, sources, first_head, num_heads, dim, block_heads, block_dim, acc)
            if gatv2:
                scores = _hidden_scores(
                    x_tile + dst_row[None, :, :], linear, absolute, block_edges, block_heads, block_dim
                )
            else:
                address = src_score + sources[:, None] * num_heads + heads[None, :]
                z = tl.load(address, mask=in_heads[None, :], other=0.0).to(acc) + dst_score[None, :]
                scores = _leaky(z, slope) * 1.4426950408889634
            scores = tl.where(live[:, None], scores, float("-inf"))
            now_largest = tl.maximum(largest, tl.max(scores, axis=0))
            base = tl.where(now_largest == float("-inf"), 0.0, now_largest)
            shrink = tl.exp2(largest - base)
            weights = tl.exp2(scores - base[None, :])
            total = total * shrink + tl.sum(weights, axis=0)
            if mode != 0:
                kept = _kept(
                    _edge_ids(begin + offsets, row, ids, live, mode), first_head, threshold, k0, k1, block_heads,
                    m0, m1, w0, w1, rounds,
                )  # fmt: skip
                weights = tl.where(kept, weights, 0.0)
            weighted = weighted * shrink[:, None] + tl.sum(weights[:, :, None] * x_tile, axis=0)
            largest = now_largest
        if is_piece:
            at = part_stats + unit.to(tl.int64) * (2 * num_heads) + heads
            tl.store(at, largest, mask=in_heads)
            tl.store(at + num_heads, total, mask=in_heads)
            tl.store(part_out + unit.to(tl.int64) * stride + columns, weighted, mask=in_columns)
        else:
            _finish_row(
                out, stats, row, largest, total, weighted, keep_scale, heads, columns, in_heads, in_columns,
                num_heads, stride, mode,
            )  # fmt: skip


@triton.jit
def _finish_row(  # type: ignore[no-untyped-def]
    out, stats, row, largest, total, weighted, keep_scale, heads, columns, in_heads, in_columns,
    num_heads: tl.constexpr, stride: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """Normalise and store a row, with its maximum and the reciprocal of its sum for backward."""
    total = tl.where(total == 0, 1.0, total)
    result = weighted / total[:, None]
    if mode != 0:
        result = result * tl.load(keep_scale)
    tl.store(out + row * stride + columns, result.to(out.dtype.element_ty), mask=in_columns)
    at = stats + row * (3 * num_heads) + heads
    tl.store(at, tl.where(largest == float("-inf"), 0.0, largest), mask=in_heads)
    tl.store(at + num_heads, 1.0 / total, mask=in_heads)


@triton.jit
def _combine_forward_kernel(  # type: ignore[no-untyped-def]
    out, stats, part_out, part_stats, split_rows, split_ptr, keep_scale,
    mode: tl.constexpr, num_heads: tl.constexpr, dim: tl.constexpr,
    block_pieces: tl.constexpr, block_heads: tl.constexpr, block_dim: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """A split row from its pieces, in their order."""
    stride: tl.constexpr = num_heads * dim
    first_head = tl.program_id(1) * block_heads
    heads = first_head + tl.arange(0, block_heads)
    dims = tl.arange(0, block_dim)
    in_heads = heads < num_heads
    columns = heads[:, None] * dim + dims[None, :]
    in_columns = in_heads[:, None] & (dims < dim)[None, :]
    row = tl.load(split_rows + tl.program_id(0)).to(tl.int64)
    begin = tl.load(split_ptr + tl.program_id(0)).to(tl.int64)
    end = tl.load(split_ptr + tl.program_id(0) + 1).to(tl.int64)
    largest = tl.full((block_heads,), float("-inf"), acc)
    total = tl.zeros((block_heads,), acc)
    weighted = tl.zeros((block_heads, block_dim), acc)
    for start in range(begin, end, block_pieces):
        pieces = start + tl.arange(0, block_pieces)
        mask = (pieces < end)[:, None] & in_heads[None, :]
        at = part_stats + pieces[:, None] * (2 * num_heads) + heads[None, :]
        piece_largest = tl.load(at, mask=mask, other=float("-inf"))
        piece_total = tl.load(at + num_heads, mask=mask, other=0.0)
        now_largest = tl.maximum(largest, tl.max(piece_largest, axis=0))
        base = tl.where(now_largest == float("-inf"), 0.0, now_largest)
        shrink = tl.exp2(largest - base)
        piece_shrink = tl.exp2(piece_largest - base[None, :])
        total = total * shrink + tl.sum(piece_total * piece_shrink, axis=0)
        tile = _load_tile(
            part_out, tl.minimum(pieces, end - 1), first_head, num_heads, dim, block_heads, block_dim, acc
        )
        weighted = weighted * shrink[:, None] + tl.sum(tile * piece_shrink[:, :, None], axis=0)
        largest = now_largest
    _finish_row(
        out, stats, row, largest, total, weighted, keep_scale, heads, columns, in_heads, in_columns,
        num_heads, stride, mode,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pieces", "threshold", "k0", "k1"])
def _backward_dst_kernel(  # type: ignore[no-untyped-def]
    grad_dst, stats, part, grad, x, src_score, dst_side, attn, indptr, indices,
    num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end,
    ids, keep_scale, threshold, k0, k1,
    gatv2: tl.constexpr, slope: tl.constexpr, mode: tl.constexpr,
    num_heads: tl.constexpr, dim: tl.constexpr,
    block_edges: tl.constexpr, block_heads: tl.constexpr, block_dim: tl.constexpr, stages: tl.constexpr,
    acc: tl.constexpr,
    m0: tl.constexpr, m1: tl.constexpr, w0: tl.constexpr, w1: tl.constexpr, rounds: tl.constexpr,
):  # fmt: skip
    """One unit of destination rows: ``delta = sum of w * dw`` and the gradient of the destination's side.

    The score gradients ``w (dw - delta)`` of a row add up to 0, so of the two slopes of the leaky rectifier only the
    difference counts: the gradient is ``(1 - slope)`` times their sum over the positive side. It splits into sums that
    need no ``delta``, so one pass serves. A piece leaves ``(delta, sum of w dw, sum of w)``, the last two over z > 0.
    """
    stride: tl.constexpr = num_heads * dim
    part_width: tl.constexpr = num_heads + 2 * (stride if gatv2 else num_heads)
    unit = tl.program_id(0)
    first_head = tl.program_id(1) * block_heads
    heads = first_head + tl.arange(0, block_heads)
    dims = tl.arange(0, block_dim)
    in_heads = heads < num_heads
    columns = heads[:, None] * dim + dims[None, :]
    in_columns = in_heads[:, None] & (dims < dim)[None, :]
    if gatv2:
        attn_row = tl.load(attn + columns, mask=in_columns, other=0.0).to(acc)
        score_weights = attn_row * 1.4426950408889634
        linear, absolute = score_weights * ((1 + slope) / 2), score_weights * ((1 - slope) / 2)
    is_piece, first, last, begin_of_piece, end_of_piece = rows_of_unit(
        unit, num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end
    )
    for row in range(first, last):
        begin, end = edges_of_row(indptr, row, is_piece, begin_of_piece, end_of_piece)
        grad_row = tl.load(grad + row * stride + columns, mask=in_columns, other=0.0).to(acc)
        base = tl.load(stats + row * (3 * num_heads) + heads, mask=in_heads, other=0.0)
        reciprocal = tl.load(stats + row * (3 * num_heads) + num_heads + heads, mask=in_heads, other=0.0)
        delta = tl.zeros((block_heads,), acc)
        if gatv2:
            dst_row = tl.load(dst_side + row * stride + columns, mask=in_columns, other=0.0).to(acc)
            active_grads = tl.zeros((block_heads, block_dim), acc)
            active_weights = tl.zeros((block_heads, block_dim), acc)
        else:
            dst_score = tl.load(dst_side + row * num_heads + heads, mask=in_heads, other=0.0).to(acc)
            active_grads = tl.zeros((block_heads,), acc)
            active_weights = tl.zeros((block_heads,), acc)
        count = (end - begin).to(tl.int32)
        first_source = _first_edge(indices, begin, count)
        for start in tl.range(0, count, block_edges, num_stages=stages):
            offsets = start + tl.arange(0, block_edges)
            live = offsets < count
            sources = tl.load(indices + begin + offsets, mask=live, other=first_source).to(tl.int64)
            x_tile = _load_tile(x, sources, first_head, num_heads, dim, block_heads, block_dim, acc)
            if gatv2:
                z = x_tile + dst_row[None, :, :]
                scores = tl.sum(z * linear[None, :, :] + tl.abs(z) * absolute[None, :, :], axis=2)
            else:
                address = src_score + sources[:, None] * num_heads + heads[None, :]
                z = tl.load(address, mask=in_heads[None, :], other=0.0).to(acc) + dst_score[None, :]
                scores = _leaky(z, slope) * 1.4426950408889634
            weights = tl.where(live[:, None], tl.exp2(scores - base[None, :]) * reciprocal[None, :], 0.0)
            weight_grads = tl.sum(x_tile * grad_row[None, :, :], axis=2)
            if mode != 0:
                kept = _kept(
                    _edge_ids(begin + offsets, row, ids, live, mode), first_head, threshold, k0, k1, block_heads,
                    m0, m1, w0, w1, rounds,
                )  # fmt: skip
                weight_grads = tl.where(kept, weight_grads * tl.load(keep_scale), 0.0)
            products = weights * weight_grads
            delta += tl.sum(products, axis=0)
            if gatv2:
                positive = tl.where(z > 0, 1.0, 0.0).to(acc)
                active_grads += tl.sum(products[:, :, None] * positive, axis=0)
                active_weights += tl.sum(weights[:, :, None] * positive, axis=0)
            else:
                active_grads += tl.sum(tl.where(z > 0, products, 0.0), axis=0)
                active_weights += tl.sum(tl.where(z > 0, weights, 0.0), axis=0)
        if is_piece:
            at = part + unit.to(tl.int64) * part_width
            tl.store(at + heads, delta, mask=in_heads)
            if gatv2:
                tl.store(at + num_heads + columns, active_grads, mask=in_columns)
                tl.store(at + num_heads + stride + columns, active_weights, mask=in_columns)
            else:
                tl.store(at + num_heads + heads, active_grads, mask=in_heads)
                tl.store(at + 2 * num_heads + heads, active_weights, mask=in_heads)
        else:
            tl.store(stats + row * (3 * num_heads) + 2 * num_heads + heads, delta, mask=in_heads)
            if gatv2:
                result = attn_row * (1 - slope) * (active_grads - delta[:, None] * active_weights)
                tl.store(grad_dst + row * stride + columns, result.to(grad_dst.dtype.element_ty), mask=in_columns)
            else:
                result = (1 - slope) * (active_grads - delta * active_weights)
                tl.store(grad_dst + row * num_heads + heads, result.to(grad_dst.dtype.element_ty), mask=in_heads)


@triton.jit(do_not_specialize=["num_pieces", "num_units", "units_per_program", "threshold", "k0", "k1"])
def _backward_src_kernel(  # type: ignore[no-untyped-def]
    grad_src, grad_score, part_attn, part, grad, stats, x, src_score, dst_side, attn, indptr, dst, edge_rows,
    num_units, units_per_program,
    num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end,
    ids, keep_scale, threshold, k0, k1,
    gatv2: tl.constexpr, slope: tl.constexpr, mode: tl.constexpr,
    num_heads: tl.constexpr, dim: tl.constexpr,
    block_edges: tl.constexpr, block_heads: tl.constexpr, block_dim: tl.constexpr, stages: tl.constexpr,
    acc: tl.constexpr,
    m0: tl.constexpr, m1: tl.constexpr, w0: tl.constexpr, w1: tl.constexpr, rounds: tl.constexpr,
):  # fmt: skip
    """Some units of source rows: gradients of the features, of GAT's source scores, and a share of ``attn``'s.

    A piece leaves its sum of the features' gradient, and for GAT of the score's behind it.
    """
    stride: tl.constexpr = num_heads * dim
    part_width: tl.constexpr = stride if gatv2 else stride + num_heads
    first_head = tl.program_id(1) * block_heads
    heads = first_head + tl.arange(0, block_heads)
    dims = tl.arange(0, block_dim)
    in_heads = heads < num_heads
    columns = heads[:, None] * dim + dims[None, :]
    in_columns = in_heads[:, None] & (dims < dim)[None, :]
    if gatv2:
        attn_row = tl.load(attn + columns, mask=in_columns, other=0.0).to(acc)
        score_weights = attn_row * 1.4426950408889634
        linear, absolute = score_weights * ((1 + slope) / 2), score_weights * ((1 - slope) / 2)
        attn_linear = tl.zeros((block_heads, block_dim), acc)
        attn_absolute = tl.zeros((block_heads, block_dim), acc)
    first_unit = tl.program_id(0) * units_per_program
    for number in range(0, tl.minimum(units_per_program, num_units - first_unit)):
        unit = first_unit + number
        is_piece, first, last, begin_of_piece, end_of_piece = rows_of_unit(
            unit, num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end
        )
        for row in range(first, last):
            begin, end = edges_of_row(indptr, row, is_piece, begin_of_piece, end_of_piece)
            x_row = tl.load(x + row * stride + columns, mask=in_columns, other=0.0).to(acc)
            x_grad = tl.zeros((block_heads, block_dim), acc)
            score_grad = tl.zeros((block_heads,), acc)
            if gatv2:
                active_grad = tl.zeros((block_heads, block_dim), acc)
            else:
                row_score = tl.load(src_score + row * num_heads + heads, mask=in_heads, other=0.0).to(acc)
            count = (end - begin).to(tl.int32)
            first_target = _first_edge(dst, begin, count)
            for start in tl.range(0, count, block_edges, num_stages=stages):
                offsets = start + tl.arange(0, block_edges)
                live = offsets < count
                targets = tl.load(dst + begin + offsets, mask=live, other=first_target).to(tl.int64)
                grad_tile = _load_tile(grad, targets, first_head, num_heads, dim, block_heads, block_dim, acc)
                at = stats + targets[:, None] * (3 * num_heads) + heads[None, :]
                base = tl.load(at, mask=in_heads[None, :], other=0.0)
                reciprocal = tl.load(at + num_heads, mask=in_heads[None, :], other=0.0)
                delta = tl.load(at + 2 * num_heads, mask=in_heads[None, :], other=0.0)
                if gatv2:
                    z = _load_tile(dst_side, targets, first_head, num_heads, dim, block_heads, block_dim, acc)
                    z += x_row[None, :, :]
                    scores = tl.sum(z * linear[None, :, :] + tl.abs(z) * absolute[None, :, :], axis=2)
                else:
                    address = dst_side + targets[:, None] * num_heads + heads[None, :]
                    z = row_score[None, :] + tl.load(address, mask=in_heads[None, :], other=0.0).to(acc)
                    scores = _leaky(z, slope) * 1.4426950408889634
                weights = tl.where(live[:, None], tl.exp2(scores - base) * reciprocal, 0.0)
                weight_grads = tl.sum(grad_tile * x_row[None, :, :], axis=2)
                dropped_weights = weights
                if mode != 0:
                    edges = tl.load(edge_rows + begin + offsets, mask=live, other=0).to(tl.int64)
                    kept = _kept(
                        _edge_ids(edges, targets, ids, live, mode), first_head, threshold, k0, k1, block_heads,
                        m0, m1, w0, w1, rounds,
                    )  # fmt: skip
                    scale = tl.load(keep_scale)
                    weight_grads = tl.where(kept, weight_grads * scale, 0.0)
                    dropped_weights = tl.where(kept, weights * scale, 0.0)
                score_grads = weights * (weight_grads - delta)
                x_grad += tl.sum(dropped_weights[:, :, None] * grad_tile, axis=0)
                if gatv2:
                    score_grad += tl.sum(score_grads, axis=0)
                    positive = tl.where(z > 0, 1.0, 0.0).to(acc)
                    active_grad += tl.sum(score_grads[:, :, None] * positive, axis=0)
                    attn_linear += tl.sum(score_grads[:, :, None] * z, axis=0)
                    attn_absolute += tl.sum(score_grads[:, :, None] * tl.abs(z), axis=0)
                else:
                    score_grad += tl.sum(tl.where(z > 0, score_grads, score_grads * slope), axis=0)
            if gatv2:
                # the slope is slope + (1 - slope) [z > 0]
                x_grad += attn_row * (slope * score_grad[:, None] + (1 - slope) * active_grad)
            if is_piece:
                at_piece = part + unit.to(tl.int64) * part_width
                tl.store(at_piece + columns, x_grad, mask=in_columns)
                if not gatv2:
                    tl.store(at_piece + stride + heads, score_grad, mask=in_heads)
            else:
                tl.store(grad_src + row * stride + columns, x_grad.to(grad_src.dtype.element_ty), mask=in_columns)
                if not gatv2:
                    at_row = grad_score + row * num_heads + heads
                    tl.store(at_row, score_grad.to(grad_score.dtype.element_ty), mask=in_heads)
    if gatv2:
        attn_grad = attn_linear * ((1 + slope) / 2) + attn_absolute * ((1 - slope) / 2)
        tl.store(part_attn + tl.program_id(0).to(tl.int64) * stride + columns, attn_grad, mask=in_columns)


# -- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operands:
    """One attention layer's inputs, contiguous and checked.

    Args:
        x: ``(L, H, D)`` values, and for GATv2 the source's side of the score.
        src_score: ``(L, H)`` GAT's source scores; None for GATv2.
        dst_side: ``(N, H)`` GAT's destination scores, or ``(N, H, D)`` GATv2's destination rows.
        attn: ``(H, D)`` GATv2's score weights; None for GAT.
        slope: Of the leaky rectifier for negative arguments.
    """

    x: Tensor
    src_score: Tensor | None
    dst_side: Tensor
    attn: Tensor | None
    slope: float

    @property
    def gatv2(self) -> bool:
        return self.attn is not None

    @property
    def result_dtype(self) -> torch.dtype:
        """What torch promotes the operands to."""
        dtype = torch.promote_types(self.x.dtype, self.dst_side.dtype)
        for other in (self.src_score, self.attn):
            dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
        return dtype

    @property
    def wide(self) -> torch.dtype:
        """Type of sums and statistics."""
        return torch.float64 if self.result_dtype == torch.float64 else torch.float32


def attention_forward(
    structure: Structure, operands: Operands, dropout: DropoutArguments, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """``(N, H, D)`` in the operands' common dtype, and statistics ``(N, 3, H)`` for :func:`attention_backward`.

    The statistics are the largest score (in powers of two) and the reciprocal sum of each row and head, and room for
    what the first backward pass finds.
    """
    x = operands.x
    num_heads, dim = x.shape[1:]
    out = x.new_empty(structure.num_dst, num_heads, dim, dtype=operands.result_dtype)
    stats = torch.empty(structure.num_dst, 3, num_heads, dtype=operands.wide, device=x.device)
    if out.numel() == 0:
        return out, stats
    schedule = row_schedule(structure.indptr)
    tile = tile or choose_tile(num_heads, dim, operands.wide, 1)
    part_out = stats.new_empty(schedule.num_pieces, num_heads, dim)
    part_stats = stats.new_empty(schedule.num_pieces, 2, num_heads)
    keep_scale = stats.new_full((1,), dropout.scale)
    head_groups = triton.cdiv(num_heads, tile.block_heads)
    common = _constants(operands, dropout, tile)
    _forward_kernel[(num_units(schedule), head_groups)](
        out, stats, part_out, part_stats, *_pointers(operands), structure.indptr, structure.indices,
        schedule.num_pieces, *schedule_arguments(schedule), *_dropout_pointers(dropout, keep_scale), **common,
    )  # fmt: skip
    if schedule.num_split:
        _combine_forward_kernel[(schedule.num_split, head_groups)](
            out, stats, part_out, part_stats, schedule.split_rows, schedule.split_ptr, keep_scale,
            mode=dropout.mode, num_heads=num_heads, dim=dim, block_pieces=tile.block_edges,
            block_heads=tile.block_heads, block_dim=tile.block_dim, acc=common["acc"], num_warps=tile.num_warps,
        )  # fmt: skip
    return out, stats


@unseen
def attention_backward(
    structure: Structure,
    operands: Operands,
    dropout: DropoutArguments,
    stats: Tensor,
    grad_NHD: Tensor,
    tile_dst: Tile | None = None,
    tile_src: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients of ``x``, of GAT's source scores, of the destination's side and of ``attn``, in the operands' dtypes.

    ``stats`` gets its third part, which no other call reads: backward may run again.
    """
    grad_dst = backward_to_dst(structure, operands, dropout, stats, grad_NHD, tile_dst)
    grad_x, grad_score, grad_attn = backward_to_src(structure, operands, dropout, stats, grad_NHD, tile_src)
    return grad_x, grad_score, grad_dst, grad_attn


def backward_to_dst(
    structure: Structure,
    operands: Operands,
    dropout: DropoutArguments,
    stats: Tensor,
    grad_NHD: Tensor,
    tile: Tile | None = None,
) -> Tensor:
    """Gradient of the destination's side; fills ``stats[:, 2]`` with ``sum of w * dw`` over a row's edges."""
    x = operands.x
    num_heads, dim = x.shape[1:]
    grad_dst = torch.empty_like(operands.dst_side)
    if grad_NHD.numel() == 0:
        return grad_dst.zero_()
    schedule = row_schedule(structure.indptr)
    tile = tile or choose_tile(num_heads, dim, operands.wide, 1)
    width = num_heads * dim if operands.gatv2 else num_heads
    part = stats.new_empty(schedule.num_pieces, num_heads + 2 * width)
    keep_scale = stats.new_full((1,), dropout.scale)
    _backward_dst_kernel[(num_units(schedule), triton.cdiv(num_heads, tile.block_heads))](
        grad_dst, stats, part, grad_NHD, *_pointers(operands), structure.indptr, structure.indices,
        schedule.num_pieces, *schedule_arguments(schedule), *_dropout_pointers(dropout, keep_scale),
        **_constants(operands, dropout, tile),
    )  # fmt: skip
    if schedule.num_split:
        rows = schedule.split_rows.long()
        delta, grads, weights = sum_pieces(part, schedule).split([num_heads, width, width], 1)
        stats[:, 2].index_copy_(0, rows, delta)
        per_column = grads.view(len(rows), num_heads, -1) - delta[:, :, None] * weights.view(len(rows), num_heads, -1)
        result = (1 - operands.slope) * per_column
        if operands.attn is not None:
            result = operands.attn.to(operands.wide) * result
        grad_dst.index_copy_(0, rows, result.reshape(len(rows), *grad_dst.shape[1:]).to(grad_dst.dtype))
    return grad_dst


def backward_to_src(
    structure: Structure,
    operands: Operands,
    dropout: DropoutArguments,
    stats: Tensor,
    grad_NHD: Tensor,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``x``, of GAT's source scores (or None) and of ``attn`` (or None)."""
    x, attn, score = operands.x, operands.attn, operands.src_score
    num_heads, dim = x.shape[1:]
    grad_x = torch.empty_like(x)
    grad_score = None if score is None else torch.empty_like(score)
    if x.numel() == 0 or structure.num_edges == 0:
        return grad_x.zero_(), None if grad_score is None else grad_score.zero_(), _zeros_like(attn)
    transposed = structure.transposed
    schedule = row_schedule(transposed.indptr)
    tile = tile or choose_tile(num_heads, dim, operands.wide, 2)
    part = stats.new_empty(schedule.num_pieces, num_heads * dim + (0 if operands.gatv2 else num_heads))
    units = num_units(schedule)
    units_per_program = triton.cdiv(units, _MAX_PARTIAL_ROWS) if operands.gatv2 else 1
    num_programs = triton.cdiv(units, units_per_program)
    part_attn = stats.new_empty(num_programs if operands.gatv2 else 0, num_heads, dim)
    keep_scale = stats.new_full((1,), dropout.scale)
    _backward_src_kernel[(num_programs, triton.cdiv(num_heads, tile.block_heads))](
        grad_x, grad_x if grad_score is None else grad_score, part_attn, part, grad_NHD, stats, *_pointers(operands),
        transposed.indptr, transposed.dst, transposed.edges, units, units_per_program,
        schedule.num_pieces, *schedule_arguments(schedule), *_dropout_pointers(dropout, keep_scale),
        **_constants(operands, dropout, tile),
    )  # fmt: skip
    if schedule.num_split:
        rows = schedule.split_rows.long()
        sums = sum_pieces(part, schedule)
        grad_x.index_copy_(0, rows, sums[:, : num_heads * dim].reshape(len(rows), num_heads, dim).to(grad_x.dtype))
        if grad_score is not None:
            grad_score.index_copy_(0, rows, sums[:, num_heads * dim :].to(grad_score.dtype))
    grad_attn = None if attn is None else part_attn.sum(0, dtype=torch.float64).to(attn.dtype)
    return grad_x, grad_score, grad_attn


def _zeros_like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.zeros_like(x)


def _pointers(operands: Operands) -> tuple[Tensor, ...]:
    """Values, source scores, destination side, score weights; an operand that a layer lacks is never read."""
    x = operands.x
    return (
        x,
        x if operands.src_score is None else operands.src_score,
        operands.dst_side,
        x if operands.attn is None else operands.attn,
    )


def _dropout_pointers(dropout: DropoutArguments, keep_scale: Tensor) -> tuple[Any, ...]:
    return dropout.ids, keep_scale, dropout.threshold, *dropout.key


def _constants(operands: Operands, dropout: DropoutArguments, tile: Tile) -> dict[str, Any]:
    num_heads, dim = operands.x.shape[1:]
    return {
        "gatv2": operands.gatv2, "slope": operands.slope, "mode": dropout.mode, "num_heads": num_heads, "dim": dim,
        "block_edges": tile.block_edges, "block_heads": tile.block_heads, "block_dim": tile.block_dim,
        "stages": tile.num_stages,
        "acc": tl.float64 if operands.wide == torch.float64 else tl.float32,
        "m0": MULTIPLIER_0, "m1": MULTIPLIER_1, "w0": WEYL_0, "w1": WEYL_1, "rounds": ROUNDS,
        "num_warps": tile.num_warps,
    }  # fmt: skip
