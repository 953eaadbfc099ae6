"""Dropout whose mask is a function of (seed, step, stream, global row id, column): the same over any number of parts.

Column ``c`` of a row is position ``c`` of its flattened trailing dimensions. An entry is kept iff its 32-bit word
(see :mod:`nugnn.kernels.philox`) is at least ``round(p * 2**32)``, and is then multiplied by ``1 / (1 - p)``,
computed in float64 and rounded to the dtype of the tensor (to float32 for bfloat16 and float16, whose product is
rounded once). A dropped entry becomes 0 even where it was infinite or NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nugnn.kernels.arrays import as_array
from nugnn.kernels.dropout.reference import (
    dropout_csr_values_reference,
    dropout_rows_reference,
    keep_scale,
    keep_threshold,
)
from nugnn.kernels.philox import RandomKey, check_row_ids, derived_key

__all__ = ["dropout_csr_values", "dropout_rows", "relu_dropout_rows"]

_WIDE = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)


def dropout_rows(x: Tensor, p: float, key: RandomKey, row_ids: Tensor) -> Tensor:
    """Drop entries of ``x`` by the identity of their row.

    The backward pass makes the mask again from ``key`` and ``row_ids``: nothing of the size of ``x`` is saved.

    Args:
        x: ``(n, ...)`` float32, float64, bfloat16 or float16, any strides. Not modified.
        p: Probability of dropping, in ``[0, 1]``. 0 returns ``x`` itself, 1 zeros.
        key: Seed, step and stream.
        row_ids: ``(n,)`` int64 global ids of the rows, on the device of ``x``; not to be modified before the backward
            pass.

    Returns:
        A tensor of the shape and dtype of ``x``, contiguous.

    Raises:
        ValueError: ``p`` is outside ``[0, 1]``, the dtype is not a floating one above, or ``row_ids`` does not fit
            ``x``.
    """
    _check("dropout_rows", x, p)
    check_row_ids(row_ids)
    if x.dim() == 0 or len(x) != len(row_ids):
        raise ValueError(f"dropout_rows: x of shape {tuple(x.shape)} needs one id per row, got {len(row_ids)} row_ids")
    if p == 0:
        return x
    result: Tensor = _DropoutRows.apply(x, p, key, row_ids)
    return result


def relu_dropout_rows(x: Tensor, p: float, key: RandomKey, row_ids: Tensor) -> Tensor:
    """``dropout_rows(relu(x), ...)`` in one pass that keeps its result alone for the backward pass.

    A positive result was active and kept; anything else lets no gradient through, so neither the input, the output of
    the relu nor a mask is needed. The bits of result and gradient are those of the two steps.

    Args:
        x: ``(n, ...)`` float32 or float64. Not modified.
        p: Probability of dropping, in ``[0, 1)``.
        key: Seed, step and stream.
        row_ids: ``(n,)`` int64 global ids of the rows.

    Raises:
        ValueError: As for :func:`dropout_rows`.
    """
    _check("relu_dropout_rows", x, p)
    check_row_ids(row_ids)
    if x.dtype not in _WIDE or x.dim() == 0 or len(x) != len(row_ids):
        raise ValueError(
            f"relu_dropout_rows: needs float32 or float64 with one id per row, got {x.dtype} of shape {tuple(x.shape)} "
            f"and {len(row_ids)} row_ids"
        )
    result: Tensor = _ReluDropoutRows.apply(x, p, key, row_ids)
    return result


def dropout_csr_values(
    values: Tensor, indptr: Tensor, indices: Tensor, p: float, key: RandomKey, row_ids: Tensor
) -> Tensor:
    """Drop stored entries of a sparse matrix exactly where :func:`dropout_rows` would drop them in the dense one.

    Entries that are not stored are zero and stay zero, so both give the same matrix.

    Args:
        values: ``(nnz,)`` float32, float64, bfloat16 or float16.
        indptr: ``(n + 1,)`` int32 or int64.
        indices: ``(nnz,)`` int32 or int64, column of each entry.
        p: Probability of dropping, in ``[0, 1]``.
        key: Seed, step and stream.
        row_ids: ``(n,)`` int64 global ids of the rows.

    Returns:
        ``(nnz,)`` in the dtype of ``values``; differentiable in ``values``.

    Raises:
        ValueError: As for :func:`dropout_rows`, or lengths do not match.
    """
    _check("dropout_csr_values", values, p)
    check_row_ids(row_ids)
    if len(indptr) != len(row_ids) + 1 or values.shape != indices.shape or values.dim() != 1:
        raise ValueError(
            f"dropout_csr_values: {len(row_ids)} row_ids need indptr of {len(row_ids) + 1} entries and one value per "
            f"index, got {len(indptr)}, values {tuple(values.shape)}, indices {tuple(indices.shape)}"
        )
    if p == 0:
        return values
    result: Tensor = _DropoutCsrValues.apply(values, indptr, indices, p, key, row_ids)
    return result


class _DropoutRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: RandomKey, row_ids: Tensor) -> Tensor:
        ctx.p, ctx.key = p, key
        ctx.save_for_backward(row_ids)
        return _apply_mask(x, p, key, row_ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (row_ids,) = ctx.saved_tensors
        return _apply_mask(grad, ctx.p, ctx.key, row_ids), None, None, None


class _ReluDropoutRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: RandomKey, row_ids: Tensor) -> Tensor:
        y = torch.relu(x).contiguous()
        y = _apply_mask(y, p, key, row_ids, in_place=True)
        ctx.scale = torch.tensor(keep_scale(p), dtype=x.dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (y,) = ctx.saved_tensors
        passed: Tensor = torch.ops.aten.threshold_backward(grad, y, 0)
        return passed.mul_(ctx.scale), None, None, None


class _DropoutCsrValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, indptr: Tensor, indices: Tensor, p: float, key: RandomKey, row_ids: Tensor
    ) -> Tensor:
        ctx.p, ctx.key = p, key
        ctx.save_for_backward(indptr, indices, row_ids)
        return _apply_csr_mask(values, indptr, indices, p, key, row_ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        indptr, indices, row_ids = ctx.saved_tensors
        return _apply_csr_mask(grad, indptr, indices, ctx.p, ctx.key, row_ids), None, None, None, None, None


def _apply_mask(x: Tensor, p: float, key: RandomKey, row_ids: Tensor, *, in_place: bool = False) -> Tensor:
    if x.numel() == 0 or p == 1:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if x.device.type != "cpu":
        return dropout_rows_reference(x, p, key, row_ids)
    from nugnn.kernels.dropout import cpu

    flat = x.reshape(len(x), -1).contiguous()
    ids, threshold, k0, k1 = _kernel_arguments(p, key, row_ids)
    if x.dtype in _WIDE:
        out = flat if in_place else torch.empty_like(flat)
        scale = np.asarray(keep_scale(p), dtype=as_array(flat).dtype)[()]
        cpu.scale_or_zero(as_array(flat), ids, threshold, scale, k0, k1, as_array(out))
    else:
        out = _scaled_half(flat, p)
        cpu.zero_dropped(as_array(out.view(torch.int16)), ids, threshold, k0, k1)
    return out.view(x.shape)


def _apply_csr_mask(
    values: Tensor, indptr: Tensor, indices: Tensor, p: float, key: RandomKey, row_ids: Tensor
) -> Tensor:
    if values.numel() == 0 or p == 1:
        return torch.zeros_like(values, memory_format=torch.contiguous_format)
    if values.device.type != "cpu":
        return dropout_csr_values_reference(values, indptr, indices, p, key, row_ids)
    if values.dtype in _HALF:
        return _apply_csr_mask(values.float(), indptr, indices, p, key, row_ids).to(values.dtype)
    from nugnn.kernels.dropout import cpu

    ids, threshold, k0, k1 = _kernel_arguments(p, key, row_ids)
    entries = values.contiguous().numpy()
    out = torch.empty(len(values), dtype=values.dtype)
    scale = np.asarray(keep_scale(p), dtype=entries.dtype)[()]
    columns, offsets = indices.contiguous().numpy(), indptr.to(torch.int64).contiguous().numpy()
    cpu.scale_or_zero_csr(entries, offsets, columns, ids, threshold, scale, k0, k1, as_array(out))
    return out


def _scaled_half(x: Tensor, p: float) -> Tensor:
    """``x * keep_scale(p)`` through float32, in row blocks so that the float32 copy stays in cache."""
    out = torch.empty_like(x)
    rows = max(1, (1 << 18) // max(1, x.shape[1]))
    for source, target in zip(x.split(rows), out.split(rows), strict=True):
        target.copy_(source.float().mul_(torch.tensor(keep_scale(p), dtype=torch.float32)))
    return out


def _kernel_arguments(p: float, key: RandomKey, row_ids: Tensor) -> tuple[np.ndarray, np.uint64, np.uint64, np.uint64]:
    k0, k1 = derived_key(key)
    return row_ids.contiguous().numpy(), np.uint64(keep_threshold(p)), np.uint64(k0), np.uint64(k1)


def _check(name: str, x: Tensor, p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: p is {p}, must lie in [0, 1]")
    if x.dtype not in _WIDE + _HALF:
        raise ValueError(f"{name}: dtype {x.dtype} cannot be scaled; use float32, float64, bfloat16 or float16")
