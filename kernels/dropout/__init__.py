"""Dropout whose mask is a function of (seed, step, stream, global row id, column): the same over any number of parts.

Column ``c`` of a row is position ``c`` of its flattened trailing dimensions. An entry is kept iff its 32-bit word
(see :mod:`nugnn.kernels.philox`) is at least ``round(p * 2**32)``, and is then multiplied by ``1 / (1 - p)``,
computed in float64 and rounded to the dtype of the tensor (to float32 for bfloat16 and float16, whose product is
rounded once). A dropped entry becomes 0 even where it was infinite or NaN.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

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
from nugnn.kernels.operator import Operator, unseen
from nugnn.kernels.padded import whole_rows
from nugnn.kernels.philox import RandomKey, check_row_ids, derived_key, gpu_key

if TYPE_CHECKING:
    from nugnn.kernels.epilogue.gpu import Mask

__all__ = ["dropout_csr_values", "dropout_rows", "relu_dropout_rows"]

_WIDE = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)
_FLOATING = (*_WIDE, *_HALF)


def dropout_rows(x: Tensor, p: float, key: RandomKey, row_ids: Tensor | range) -> Tensor:
    """Drop entries of ``x`` by the identity of their row.

    The backward pass makes the mask again from ``key`` and ``row_ids``: nothing of the size of ``x`` is saved.

    Args:
        x: ``(n, ...)`` float32, float64, bfloat16 or float16, any strides. Not modified.
        p: Probability of dropping, in ``[0, 1]``. 0 returns ``x`` itself, 1 zeros.
        key: Seed, step and stream.
        row_ids: ``(n,)`` int64 global ids of the rows, on the device of ``x``, not to be modified before the backward
            pass; or a range of ``n`` ids with step 1.

    Returns:
        A tensor of the shape and dtype of ``x``, contiguous.

    Raises:
        ValueError: ``p`` is outside ``[0, 1]``, the dtype is not a floating one above, or ``row_ids`` does not fit
            ``x``.
    """
    check_dropout("dropout_rows", x, p, row_ids)
    if p == 0:
        return x
    ids, given = (row_ids, None) if type(row_ids) is range else (None, row_ids)
    result: Tensor = _DropoutRows.apply(x, p, key, ids, given)
    return result


def relu_dropout_rows(x: Tensor, p: float, key: RandomKey, row_ids: Tensor | range) -> Tensor:
    """``dropout_rows(relu(x), ...)`` in one pass.

    A value passes a gradient iff it was active and kept. On a GPU that is one bit per value; on a CPU the result alone
    tells it, being positive. Neither the input nor the output of the relu is saved. The bits of result and gradient
    are those of the two steps.

    Args:
        x: ``(n, ...)`` float32, float64, bfloat16 or float16. Not modified.
        p: Probability of dropping, in ``[0, 1)``.
        key: Seed, step and stream.
        row_ids: As for :func:`dropout_rows`.

    Raises:
        ValueError: As for :func:`dropout_rows`.
    """
    check_dropout("relu_dropout_rows", x, p, row_ids)
    from nugnn.kernels.epilogue import epilogue_rows, runs_in_triton

    if runs_in_triton(x) and x.numel() and p < 1 and mask_arguments(p, key, row_ids) is not None:
        rows = x if x.dim() == 2 else x.reshape(len(x), -1)
        out = epilogue_rows(rows, activation="relu", p=p, key=key, row_ids=row_ids)
        return out if x.dim() == 2 else out.view(x.shape)
    result: Tensor = _ReluDropoutRows.apply(x, p, key, id_tensor(row_ids, x.device))
    return result


def dropout_csr_values(
    values: Tensor, indptr: Tensor, indices: Tensor, p: float, key: RandomKey, row_ids: Tensor | range
) -> Tensor:
    """Drop stored entries of a sparse matrix exactly where :func:`dropout_rows` would drop them in the dense one.

    Entries that are not stored are zero and stay zero, so both give the same matrix.

    Args:
        values: ``(nnz,)`` float32, float64, bfloat16 or float16.
        indptr: ``(n + 1,)`` int32 or int64.
        indices: ``(nnz,)`` int32 or int64, column of each entry.
        p: Probability of dropping, in ``[0, 1]``.
        key: Seed, step and stream.
        row_ids: As for :func:`dropout_rows`.

    Returns:
        ``(nnz,)`` in the dtype of ``values``; differentiable in ``values``.

    Raises:
        ValueError: As for :func:`dropout_rows`, or lengths do not match.
    """
    _check("dropout_csr_values", values, p)
    _check_row_ids(row_ids)
    if len(indptr) != len(row_ids) + 1 or values.shape != indices.shape or values.dim() != 1:
        raise ValueError(
            f"dropout_csr_values: {len(row_ids)} row_ids need indptr of {len(row_ids) + 1} entries and one value per "
            f"index, got {len(indptr)}, values {tuple(values.shape)}, indices {tuple(indices.shape)}"
        )
    if p == 0:
        return values
    result: Tensor = _DropoutCsrValues.apply(values, indptr, indices, p, key, id_tensor(row_ids, values.device))
    return result


def id_tensor(row_ids: Tensor | range, device: torch.device) -> Tensor:
    """``(n,)`` int64 on ``device``."""
    return row_ids if isinstance(row_ids, Tensor) else torch.arange(row_ids.start, row_ids.stop, device=device)


def mask_arguments(p: float, key: RandomKey | None, row_ids: Tensor | range | None) -> Mask | None:
    """Dropout as Triton kernels take it; None where ``p`` is so near 1 that no 32-bit word is kept."""
    from nugnn.kernels.epilogue.gpu import Mask

    assert key is not None
    assert row_ids is not None
    threshold = keep_threshold(p)
    ids = row_ids if isinstance(row_ids, range) else row_ids.contiguous()
    return None if threshold >> 32 else Mask(threshold, keep_scale(p), gpu_key(key), ids)


class _DropoutRows(Operator):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: RandomKey, id_range: range | None, ids: Tensor | None) -> Tensor:
        ctx.p, ctx.key, ctx.id_range = p, key, id_range
        ctx.save_for_backward(ids)
        return _apply_mask(x, p, key, _one_of(ids, id_range))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (ids,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates the gradient, which is linear
            return _DropoutRows.apply(grad, ctx.p, ctx.key, ctx.id_range, ids), None, None, None, None
        return _apply_mask(grad, ctx.p, ctx.key, _one_of(ids, ctx.id_range)), None, None, None, None


def _one_of(ids: Tensor | None, id_range: range | None) -> Tensor | range:
    given = id_range if ids is None else ids
    assert given is not None
    return given


class _ReluDropoutRows(Operator):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: RandomKey, row_ids: Tensor) -> Tensor:
        y = torch.relu(x).contiguous()
        y = _apply_mask(y, p, key, row_ids, in_place=True)
        ctx.p = p
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (y,) = ctx.saved_tensors
        passed: Tensor = torch.ops.aten.threshold_backward(grad, y, 0)
        if y.dtype in _WIDE:
            return passed.mul_(torch.tensor(keep_scale(ctx.p), dtype=y.dtype)), None, None, None
        return _scaled_half(passed.contiguous(), ctx.p), None, None, None


class _DropoutCsrValues(Operator):
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


@unseen
def _apply_mask(x: Tensor, p: float, key: RandomKey, row_ids: Tensor | range, *, in_place: bool = False) -> Tensor:
    if p == 1 or x.numel() == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if _epilogue().runs_in_triton(x):  # of CPU tensors, too: in Triton's interpreter
        from nugnn.kernels.epilogue import gpu

        mask = mask_arguments(p, key, row_ids)
        if mask is None:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        rows = whole_rows(x if x.dim() == 2 else x.reshape(len(x), -1))
        out = gpu.forward(rows, None, None, None, "none", 1.0, mask, remake=True)[0]
        return out if x.dim() == 2 else out.view(x.shape)
    if x.is_cpu:
        return _apply_mask_on_cpu(x, p, key, row_ids, in_place=in_place)
    return dropout_rows_reference(x, p, key, id_tensor(row_ids, x.device))


def _apply_mask_on_cpu(x: Tensor, p: float, key: RandomKey, row_ids: Tensor | range, *, in_place: bool) -> Tensor:
    threshold = keep_threshold(p)
    if threshold >> 32:  # so near 1 that no word is kept
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    cpu, x = _cpu(), x.contiguous()
    ids = (row_ids if isinstance(row_ids, Tensor) else id_tensor(row_ids, x.device)).contiguous()
    num_rows, num_values, is_wide = x.shape[0], x.numel(), x.dtype in _WIDE
    if not is_wide:
        out = _scaled_half(x, p)
    else:
        out = x if in_place else torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_values <= cpu.MOST_SERIAL_VALUES or num_rows <= cpu.ROWS_PER_TASK or torch.get_num_threads() == 1:
        seed = key.seed - (key.seed >> 63 << 64)  # as int64 has it
        cpu.drop_serially(
            x.element_size(), x.data_ptr(), ids.data_ptr(), out.data_ptr(), num_rows, num_values // num_rows,
            threshold, keep_scale(p), seed, key.step, key.stream,
        )  # fmt: skip
        return out
    array, least, k0, k1 = _kernel_arguments(p, key, ids)
    flat = out.view(num_rows, -1)
    if is_wide:
        scale = (np.float32 if x.dtype is torch.float32 else np.float64)(keep_scale(p))
        cpu.scale_or_zero(as_array(x.view(num_rows, -1)), array, least, scale, k0, k1, as_array(flat))
    else:
        cpu.zero_dropped(as_array(flat.view(torch.int16)), array, least, k0, k1)
    return out


# import statements in each call would be a quarter of a small one
@functools.cache
def _cpu() -> ModuleType:
    from nugnn.kernels.dropout import cpu

    return cpu


@functools.cache
def _epilogue() -> ModuleType:
    from nugnn.kernels import epilogue

    return epilogue


@unseen
def _apply_csr_mask(
    values: Tensor, indptr: Tensor, indices: Tensor, p: float, key: RandomKey, row_ids: Tensor
) -> Tensor:
    if values.numel() == 0 or p == 1:
        return torch.zeros_like(values, memory_format=torch.contiguous_format)
    from nugnn.kernels.epilogue import runs_in_triton

    if runs_in_triton(values):
        from nugnn.kernels.dropout import gpu

        mask = mask_arguments(p, key, row_ids)
        return torch.zeros_like(values) if mask is None else gpu.drop_csr_values(values, indptr, indices, mask)
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
    """``x * keep_scale(p)``, contiguous, through float32 in blocks, so that the float32 copy stays in cache."""
    out = torch.empty_like(x)
    for source, target in zip(x.view(-1).split(1 << 18), out.view(-1).split(1 << 18), strict=True):
        target.copy_(source.float().mul_(torch.tensor(keep_scale(p), dtype=torch.float32)))
    return out


def _kernel_arguments(p: float, key: RandomKey, row_ids: Tensor) -> tuple[np.ndarray, np.uint64, np.uint64, np.uint64]:
    k0, k1 = derived_key(key)
    return row_ids.contiguous().numpy(), np.uint64(keep_threshold(p)), np.uint64(k0), np.uint64(k1)


def check_dropout(name: str, x: Tensor, p: float, row_ids: Tensor | range | None) -> None:
    """Raises ValueError unless ``x`` is of a floating dtype with one id per row and ``p`` a probability."""
    _check(name, x, p)
    _check_row_ids(row_ids)
    count = row_ids.shape[0] if isinstance(row_ids, Tensor) else len(row_ids)  # type: ignore[arg-type]
    if x.dim() == 0 or x.shape[0] != count:
        raise ValueError(f"{name}: x of shape {tuple(x.shape)} needs one id per row, got {count} row_ids")


def _check_row_ids(row_ids: Tensor | range | None) -> None:
    if row_ids is None:
        raise ValueError("row_ids are missing: dropout needs the global id of each row")
    if isinstance(row_ids, Tensor):
        check_row_ids(row_ids)
    elif row_ids.step != 1:
        raise ValueError(f"row_ids: a range has to have step 1, got {row_ids}")


def _check(name: str, x: Tensor, p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: p is {p}, must lie in [0, 1]")
    if x.dtype not in _FLOATING:
        raise ValueError(f"{name}: dtype {x.dtype} cannot be scaled; use float32, float64, bfloat16 or float16")
