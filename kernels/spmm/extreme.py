"""Autograd around the maximum and minimum kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nugnn.kernels._jit import row_tasks
from nugnn.kernels.arrays import as_array
from nugnn.kernels.operator import Operator
from nugnn.kernels.structure import Structure

_COLUMNS_PER_TASK = 16
"""One cache line of float32: narrower column blocks would make threads share lines."""


def spmm_extreme(structure: Structure, op: str, reduce: str, u: Tensor | None, e: Tensor | None) -> Tensor:
    """Max or min of ``copy_lhs``, ``copy_rhs``, ``add`` or ``mul`` messages, float32 or float64, nothing empty.

    Operands of ``add`` and ``mul`` are aligned (same number of dimensions) and broadcast.
    """
    sign = 1 if reduce == "max" else -1
    result: Tensor = _Extreme.apply(structure, op, sign, u, e)
    return result


class _Extreme(Operator):
    @staticmethod
    def forward(ctx: Any, structure: Structure, op: str, sign: int, u: Tensor | None, e: Tensor | None) -> Tensor:
        from nugnn.kernels.spmm import cpu

        given = [x for x in (u, e) if x is not None]
        features = torch.broadcast_shapes(*(x.shape[1:] for x in given))
        code = {"copy_lhs": cpu.COPY_LHS, "copy_rhs": cpu.COPY_RHS, "add": cpu.ADD, "mul": cpu.MUL}[op]
        dtype = given[0].dtype
        shape = (structure.num_dst, math.prod(features))
        out = torch.empty(shape, dtype=dtype)
        winners = torch.empty(shape, dtype=torch.int32 if structure.num_edges < 2**31 else torch.int64)
        u_rows, u_column = _rows_and_columns(u, features, dtype)
        e_rows, e_column = _rows_and_columns(e, features, dtype)
        indptr = structure.indptr.numpy()
        cpu.extreme(
            row_tasks(indptr, torch.get_num_threads()),
            indptr,
            structure.indices.numpy(),
            u_rows,
            e_rows,
            u_column,
            e_column,
            code,
            as_array(out).dtype.type(sign),
            as_array(out),
            winners.numpy(),
        )
        ctx.structure, ctx.code, ctx.features = structure, code, features
        ctx.u_shape, ctx.e_shape = (None if x is None else x.shape for x in (u, e))
        ctx.save_for_backward(winners, *((u, e) if op == "mul" else (None, None)))
        return out.view(structure.num_dst, *features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor | None, Tensor | None]:
        winners, u, e = ctx.saved_tensors
        grad_u = (
            _operand_grad(ctx, grad, winners, ctx.u_shape, e, ctx.e_shape, True) if ctx.needs_input_grad[3] else None
        )
        grad_e = (
            _operand_grad(ctx, grad, winners, ctx.e_shape, u, ctx.u_shape, False) if ctx.needs_input_grad[4] else None
        )
        return None, None, None, grad_u, grad_e


def _operand_grad(
    ctx: Any,
    grad: Tensor,
    winners: Tensor,
    own_shape: torch.Size,
    other: Tensor | None,
    other_shape: torch.Size | None,
    to_u: bool,
) -> Tensor:
    from nugnn.kernels.spmm import cpu

    num_columns = winners.shape[1]
    own_column = _columns(own_shape[1:], ctx.features)
    other_column = own_column if other_shape is None else _columns(other_shape[1:], ctx.features)
    rows = grad.reshape(winners.shape).contiguous()
    out = torch.zeros(own_shape, dtype=grad.dtype)
    flat = out.view(own_shape[0], -1)
    num_tasks = max(1, min(torch.get_num_threads(), num_columns // _COLUMNS_PER_TASK))
    if flat.shape[1] != num_columns:  # broadcast: several output columns end in one column of the operand
        num_tasks = 1
    met = flat[:0] if other is None else other.detach().reshape(len(other), -1).contiguous()
    cpu.extreme_grad(
        np.linspace(0, num_columns, num_tasks + 1).astype(np.int64),
        winners.numpy(),
        ctx.structure.indices.numpy(),
        as_array(rows),
        as_array(met),
        own_column,
        other_column,
        to_u,
        ctx.code,
        as_array(flat),
    )
    return out


def _rows_and_columns(x: Tensor | None, features: torch.Size, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Operand as ``(rows, columns)`` and, for each output column, the column it reads."""
    if x is None:
        return torch.empty(0, 0, dtype=dtype).numpy(), np.empty(0, np.int64)
    return as_array(x.detach().reshape(len(x), -1).contiguous()), _columns(x.shape[1:], features)


def _columns(own: torch.Size, features: torch.Size) -> np.ndarray:
    numbers = np.arange(math.prod(own)).reshape(own)
    return np.ascontiguousarray(np.broadcast_to(numbers, features).reshape(-1))
