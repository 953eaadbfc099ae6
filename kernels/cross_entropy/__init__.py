"""Losses of the rows that count, one value per row: cross-entropy, and binary cross-entropy for several labels.

On a GPU a loss reads the logits of those rows once in their own dtype, keeps one number per row, and writes the
gradient of all rows once; no row is copied, and nothing is made in float32 but values per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nugnn.kernels.cross_entropy.reference import binary_cross_entropy_rows_reference, cross_entropy_rows_reference
from nugnn.kernels.epilogue import runs_in_triton
from nugnn.kernels.operator import Operator
from nugnn.kernels.padded import whole_rows

__all__ = ["binary_cross_entropy_rows", "cross_entropy_rows"]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def cross_entropy_rows(
    logits: Tensor, labels: Tensor, rows: Tensor | None = None, class_weights: Tensor | None = None
) -> Tensor:
    """Cross-entropy of each row that counts.

    Args:
        logits: ``(N, C)`` float32, float64, bfloat16 or float16.
        labels: ``(R,)`` integers in ``[0, C)``. On a GPU any other gives NaN, since looking would make the host wait.
        rows: ``(R,)`` int64, the rows of ``logits`` that the labels belong to, all different (a row given twice would
            get the gradient of one of the two); None for all rows in order.
        class_weights: ``(C,)`` factor of the loss of each class, a constant.

    Returns:
        ``(R,)`` float32 (float64 for float64), calculated in that dtype; differentiable in ``logits``, whose gradient
        has their dtype and is exactly 0 in other rows.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    num_slots = _check("cross_entropy_rows", logits, labels, rows)
    if labels.dim() != 1 or labels.dtype not in _INTEGERS or len(labels) != num_slots:
        raise ValueError(
            f"cross_entropy_rows: labels must be ({num_slots},) integers, got {labels.dtype} of {tuple(labels.shape)}"
        )
    if class_weights is not None and (
        class_weights.shape != logits.shape[1:] or class_weights.device != logits.device or class_weights.requires_grad
    ):
        raise ValueError(
            f"cross_entropy_rows: class_weights must be {tuple(logits.shape[1:])} constants on {logits.device}, got "
            f"{tuple(class_weights.shape)} on {class_weights.device}, requires_grad={class_weights.requires_grad}"
        )
    if not runs_in_triton(logits) or logits.numel() == 0:
        return cross_entropy_rows_reference(logits, labels, rows, class_weights)
    result: Tensor = _CrossEntropy.apply(logits, labels, rows, class_weights)
    return result


def binary_cross_entropy_rows(logits: Tensor, targets: Tensor, rows: Tensor | None = None) -> Tensor:
    """Binary cross-entropy with logits of each row that counts, the mean over its classes.

    Args:
        logits: ``(N, C)`` float32, float64, bfloat16 or float16.
        targets: ``(R, C)`` bool, integer or floating, in ``[0, 1]``, constants.
        rows: As for :func:`cross_entropy_rows`.

    Returns:
        ``(R,)`` float32 (float64 for float64). A mean over rows of this is the mean over rows and classes.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    num_slots = _check("binary_cross_entropy_rows", logits, targets, rows)
    if targets.shape != (num_slots, logits.shape[1]) or targets.requires_grad:
        raise ValueError(
            f"binary_cross_entropy_rows: targets must be ({num_slots}, {logits.shape[1]}) constants, got "
            f"{tuple(targets.shape)}, requires_grad={targets.requires_grad}"
        )
    if not runs_in_triton(logits) or logits.numel() == 0:
        return binary_cross_entropy_rows_reference(logits, targets, rows)
    result: Tensor = _BinaryCrossEntropy.apply(logits, targets, rows)
    return result


class _CrossEntropy(Operator):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: Tensor | None, class_weights: Tensor | None) -> Tensor:
        from nugnn.kernels.cross_entropy import gpu

        others = (None if t is None else t.contiguous() for t in (labels, rows, class_weights))
        operands = [whole_rows(logits), *others]
        loss, log_sum = gpu.cross_entropy(*operands)  # type: ignore[arg-type]
        ctx.save_for_backward(log_sum, *operands)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        from nugnn.kernels.cross_entropy import gpu

        return gpu.cross_entropy_backward(grad.contiguous(), *ctx.saved_tensors), None, None, None


class _BinaryCrossEntropy(Operator):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, rows: Tensor | None) -> Tensor:
        from nugnn.kernels.cross_entropy import gpu

        logits, targets = whole_rows(logits), targets.contiguous()
        targets = targets.view(torch.uint8) if targets.dtype == torch.bool else targets
        rows = None if rows is None else rows.contiguous()
        ctx.save_for_backward(logits, targets, rows)
        return gpu.binary_cross_entropy(logits, targets, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        from nugnn.kernels.cross_entropy import gpu

        return gpu.binary_cross_entropy_backward(grad.contiguous(), *ctx.saved_tensors), None, None


def _check(name: str, logits: Tensor, per_row: Tensor, rows: Tensor | None) -> int:
    """Number of rows that count."""
    if logits.dim() != 2 or logits.dtype not in _FLOATS:
        raise ValueError(f"{name}: logits must be (N, C) floating, got {logits.dtype} of {tuple(logits.shape)}")
    for what, tensor in (("labels", per_row), ("rows", rows)):
        if tensor is not None and tensor.device != logits.device:
            raise ValueError(f"{name}: {what} are on {tensor.device}, logits on {logits.device}")
    if rows is None:
        return len(logits)
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise ValueError(f"{name}: rows must be (R,) int64, got {rows.dtype} of {tuple(rows.shape)}")
    return len(rows)
