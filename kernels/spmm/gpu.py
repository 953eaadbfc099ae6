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

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nugnn.kernels.operator import Operator
from nugnn.kernels.padded import whole_rows
from nugnn.kernels.spmm.gpu_aggregate import aggregate_rows, in_edges, out_edges
from nugnn.kernels.spmm.gpu_extreme import takes, wide_extreme, wide_extreme_gradient
from nugnn.kernels.spmm.gpu_gradients import edge_gradient
from nugnn.kernels.structure import Structure


def aggregate(
    structure: Structure,
    op: str,
    reduce: str,
    u: Tensor | None,
    e: Tensor | None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """:func:`nugnn.kernels.spmm.spmm` of checked, aligned operands on the device of ``structure``, nothing empty.

    float16, bfloat16, float32 or float64. ``src_scale (L,)`` and ``dst_scale (N,)`` multiply sums of ``copy_lhs`` and
    ``mul`` before their one rounding; no gradient goes to them. ``add_to (N, F)`` is added to in place before it, and
    gets the gradient of the result.
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
    x = whole_rows(x if x.dim() == 2 else x.reshape(len(x), -1))
    w = e if u is not None else None
    if reduce == "sum":
        out: Tensor = _Sum.apply(structure, op, num_heads, x, w, src_scale, dst_scale, add_to)
    elif op == "copy_lhs" and takes(x):
        out = _WideExtreme.apply(structure, reduce == "min", x)
    else:
        out = _Extreme.apply(structure, op, 1 if reduce == "max" else -1, num_heads, dtype, x, w)
    return out if len(features) == 1 else out.view(structure.num_dst, *features)


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


class _Sum(Operator):
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
        add_to: Tensor | None,
    ) -> Tensor:
        if ctx.needs_input_grad[3] and op != "copy_rhs":
            _ = structure.transposed  # sorted now: in backward, more is alive
        out, _ = aggregate_rows(
            in_edges(structure), x, num_heads, op=op, w=w, by_edge=op == "copy_rhs", src_scale=src_scale,
            dst_scale=dst_scale, add_to=add_to, out=add_to,
        )  # fmt: skip
        if add_to is not None:
            ctx.mark_dirty(add_to)
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
        given, grad = grad, whole_rows(grad)
        grad_x = grad_w = None
        if ctx.needs_input_grad[3]:
            if ctx.op == "copy_rhs":
                grad_x = grad.index_select(0, structure.dst)
            else:
                grad_x, _ = aggregate_rows(
                    out_edges(structure, has_edge_rows=w is not None), grad, ctx.num_heads,
                    op=ctx.op if w is not None else "copy_lhs", w=w, src_scale=dst_scale, dst_scale=src_scale,
                )  # fmt: skip
        if ctx.needs_input_grad[4]:
            grad_w = _weight_gradient(ctx, grad, x, w, src_scale, dst_scale)
        return None, None, None, grad_x, grad_w, None, None, given if ctx.needs_input_grad[7] else None


def _weight_gradient(
    ctx: Any, grad: Tensor, x: Tensor | None, w: Tensor | None, src_scale: Tensor | None, dst_scale: Tensor | None
) -> Tensor:
    structure: Structure = ctx.structure
    num_heads, is_full = ctx.num_heads, ctx.w_shape[1] != ctx.num_heads
    if ctx.op in ("add", "sub"):
        rows = grad if is_full else grad.reshape(len(grad), num_heads, -1).sum(-1)
        return (rows if ctx.op == "add" else -rows).to(ctx.w_dtype).index_select(0, structure.dst)
    assert w is not None
    if ctx.op == "mul":
        return edge_gradient(
            structure, grad, x, num_heads, is_full, ctx.w_dtype, src_scale=src_scale, dst_scale=dst_scale
        )
    wide = torch.float64 if ctx.dtype == torch.float64 else torch.float32
    products = edge_gradient(structure, grad, x, num_heads, is_full, wide)
    return (-products / (w.to(wide) ** 2)).to(ctx.w_dtype)


class _WideExtreme(Operator):
    @staticmethod
    def forward(ctx: Any, structure: Structure, is_min: bool, x: Tensor) -> Tensor:
        if ctx.needs_input_grad[2]:
            _ = structure.out_places  # found now: in backward, more is alive
        out, winner = wide_extreme(structure, x, is_min=is_min)
        ctx.structure = structure
        ctx.save_for_backward(winner)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        (winner,) = ctx.saved_tensors
        return None, None, wide_extreme_gradient(ctx.structure, grad.contiguous(), winner)


class _Extreme(Operator):
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
        out, winner = aggregate_rows(
            in_edges(structure), x, num_heads, op=op, w=w, by_edge=op == "copy_rhs", sign=sign, out_dtype=dtype
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
                grad_x = edge_gradient(structure, grad, None, 1, True, grad.dtype, winner=winner)
            else:
                grad_x, _ = aggregate_rows(
                    out_edges(structure, has_edge_rows=True), grad, ctx.num_heads,
                    op="copy_lhs" if w is None else "mul", w=w, winner=winner,
                )  # fmt: skip
        if ctx.needs_input_grad[6]:
            is_full = ctx.w_shape[1] != ctx.num_heads
            grad_w = edge_gradient(structure, grad, x, ctx.num_heads, is_full, ctx.w_dtype, winner=winner)
        return None, None, None, None, None, grad_x, grad_w
