"""Cross-entropy of chosen rows in Triton: nothing of the size of the logits is made but their gradient.

Forward reads a row once, column block by column block, with a running maximum and sum (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018), and keeps the logarithm of the sum, one number per row. Backward makes the
probabilities again and writes the gradient in the dtype of the logits. Arithmetic is in float32 (float64 for float64).
Rows that are padded (:mod:`nugnn.kernels.padded`) are loaded and stored with their padding, 16 bytes a thread.
Import this module only where Triton is installed.

Shape suffixes: N rows of the logits, R rows that count, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.operator import unseen
from nugnn.kernels.padded import empty_like_rows, with_padding

_TILE_VALUES = 2048
_SCALARS = ("num_slots",)


@triton.jit
def _rows_of(slots, rows, in_slots, has_rows: tl.constexpr):  # type: ignore[no-untyped-def]
    if has_rows:
        return tl.load(rows + slots, mask=in_slots, other=0)
    return slots


@triton.jit(do_not_specialize=_SCALARS)
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    loss, log_sum, logits, labels, rows, class_weights, num_slots,
    num_columns: tl.constexpr, x_stride: tl.constexpr, x_columns: tl.constexpr,
    has_rows: tl.constexpr, has_weights: tl.constexpr, acc: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    slots = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    in_slots = slots < num_slots
    starts = _rows_of(slots, rows, in_slots, has_rows) * x_stride
    largest = tl.full((block_rows,), float("-inf"), acc)
    total = tl.zeros((block_rows,), acc)
    for first in range(0, num_columns, block_columns):
        columns = first + tl.arange(0, block_columns)
        inside = in_slots[:, None] & (columns < x_columns)[None, :]
        tile = tl.load(logits + starts[:, None] + columns[None, :], mask=inside, other=float("-inf")).to(acc)
        if x_columns > num_columns:
            tile = tl.where((columns < num_columns)[None, :], tile, float("-inf"))
        now = tl.maximum(largest, tl.max(tile, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(tile - base[:, None]), axis=1)
        largest = now
    log_of_sum = largest + tl.log(total)
    label = tl.load(labels + slots, mask=in_slots, other=0).to(tl.int64)
    is_class = in_slots & (label >= 0) & (label < num_columns)
    value = log_of_sum - tl.load(logits + starts + label, mask=is_class, other=0.0).to(acc)
    if has_weights:
        value = value * tl.load(class_weights + label, mask=is_class, other=0.0).to(acc)
    value = tl.where(is_class, value, float("nan"))  # a label that is no class is seen at once
    tl.store(loss + slots, value, mask=in_slots)
    tl.store(log_sum + slots, log_of_sum, mask=in_slots)


@triton.jit(do_not_specialize=_SCALARS)
def _cross_entropy_backward_kernel(  # type: ignore[no-untyped-def]
    grad_logits, grad, log_sum, logits, labels, rows, class_weights, num_slots,
    num_columns: tl.constexpr, x_stride: tl.constexpr, x_columns: tl.constexpr,
    grad_stride: tl.constexpr, grad_columns: tl.constexpr,
    has_rows: tl.constexpr, has_weights: tl.constexpr, acc: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    slots = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    in_slots = slots < num_slots
    row = _rows_of(slots, rows, in_slots, has_rows)[:, None]
    in_x = in_slots[:, None] & (columns < x_columns)[None, :]
    written = in_slots[:, None] & (columns < grad_columns)[None, :]
    label = tl.load(labels + slots, mask=in_slots, other=0).to(tl.int64)
    factor = tl.load(grad + slots, mask=in_slots, other=0.0).to(acc)
    if has_weights:
        is_class = in_slots & (label >= 0) & (label < num_columns)
        factor = factor * tl.load(class_weights + label, mask=is_class, other=0.0).to(acc)
    tile = tl.load(logits + row * x_stride + columns[None, :], mask=in_x, other=0.0).to(acc)
    tile = tl.exp(tile - tl.load(log_sum + slots, mask=in_slots, other=0.0)[:, None])
    tile = tl.where(columns[None, :] == label[:, None], tile - 1.0, tile) * factor[:, None]
    if grad_columns > num_columns:
        tile = tl.where((columns < num_columns)[None, :], tile, 0.0)
    tl.store(grad_logits + row * grad_stride + columns[None, :], tile.to(grad_logits.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=_SCALARS)
def _binary_kernel(  # type: ignore[no-untyped-def]
    loss, logits, targets, rows, num_slots,
    num_columns: tl.constexpr, x_stride: tl.constexpr, x_columns: tl.constexpr,
    has_rows: tl.constexpr, acc: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    slots = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    in_slots = slots < num_slots
    starts = _rows_of(slots, rows, in_slots, has_rows) * x_stride
    total = tl.zeros((block_rows,), acc)
    for first in range(0, num_columns, block_columns):
        columns = first + tl.arange(0, block_columns)
        inside = in_slots[:, None] & (columns < x_columns)[None, :]
        z = tl.load(logits + starts[:, None] + columns[None, :], mask=inside, other=0.0).to(acc)
        inside = in_slots[:, None] & (columns < num_columns)[None, :]
        y = tl.load(targets + (slots * num_columns)[:, None] + columns[None, :], mask=inside, other=0).to(acc)
        value = tl.where(z < 0, 0.0, z) - z * y + tl.log(1.0 + tl.exp(-tl.abs(z)))
        total += tl.sum(tl.where(inside, value, 0.0), axis=1)
    tl.store(loss + slots, total / num_columns, mask=in_slots)


@triton.jit(do_not_specialize=_SCALARS)
def _binary_backward_kernel(  # type: ignore[no-untyped-def]
    grad_logits, grad, logits, targets, rows, num_slots,
    num_columns: tl.constexpr, x_stride: tl.constexpr, x_columns: tl.constexpr,
    grad_stride: tl.constexpr, grad_columns: tl.constexpr,
    has_rows: tl.constexpr, acc: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    slots = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    in_slots = slots < num_slots
    row = _rows_of(slots, rows, in_slots, has_rows)[:, None]
    in_x = in_slots[:, None] & (columns < x_columns)[None, :]
    written = in_slots[:, None] & (columns < grad_columns)[None, :]
    z = tl.load(logits + row * x_stride + columns[None, :], mask=in_x, other=0.0).to(acc)
    inside = in_slots[:, None] & (columns < num_columns)[None, :]
    y = tl.load(targets + (slots * num_columns)[:, None] + columns[None, :], mask=inside, other=0).to(acc)
    factor = tl.load(grad + slots, mask=in_slots, other=0.0).to(acc) / num_columns
    tile = (1.0 / (1.0 + tl.exp(-z)) - y) * factor[:, None]
    if grad_columns > num_columns:
        tile = tl.where((columns < num_columns)[None, :], tile, 0.0)
    tl.store(grad_logits + row * grad_stride + columns[None, :], tile.to(grad_logits.dtype.element_ty), mask=written)


# -- launches ------------------------------------------------------------------------------------------------------


def cross_entropy(
    logits: Tensor, labels: Tensor, rows: Tensor | None, class_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(R,)`` loss and ``(R,)`` logarithm of the sum of exponentials, float32 or float64.

    Args:
        logits: ``(N, C)``, each row contiguous, ``C`` at least 1.
        labels: ``(R,)`` integers.
        rows: ``(R,)`` int64, or None for ``R = N`` in order.
        class_weights: ``(C,)`` or None.
    """
    loss = torch.empty(len(labels), dtype=_wide(logits), device=logits.device)
    log_sum = torch.empty_like(loss)
    if len(labels):
        block_rows, block_columns = _tile(logits)
        _cross_entropy_kernel[(triton.cdiv(len(labels), block_rows),)](
            loss, log_sum, logits, labels, _or(rows, labels), _or(class_weights, loss), len(labels),
            *_columns(logits), rows is not None, class_weights is not None, _accumulator(logits),
            block_rows, block_columns,
        )  # fmt: skip
    return loss, log_sum


@unseen
def cross_entropy_backward(
    grad_R: Tensor,
    log_sum_R: Tensor,
    logits: Tensor,
    labels: Tensor,
    rows: Tensor | None,
    class_weights: Tensor | None,
) -> Tensor:
    """``(N, C)`` gradient in the dtype of the logits, padded if they are; rows that do not count get zeros."""
    grad_logits = _empty_gradient(logits, rows)
    if len(labels):
        _cross_entropy_backward_kernel[_backward_grid(logits, labels)](
            grad_logits, grad_R, log_sum_R, logits, labels, _or(rows, labels), _or(class_weights, grad_R), len(labels),
            *_columns(logits), *_columns(grad_logits)[1:], rows is not None, class_weights is not None,
            _accumulator(logits), *_tile(logits),
        )  # fmt: skip
    return grad_logits


def binary_cross_entropy(logits: Tensor, targets: Tensor, rows: Tensor | None) -> Tensor:
    """``(R,)`` mean over classes; ``targets (R, C)`` contiguous, of a type that Triton loads."""
    loss = torch.empty(len(targets), dtype=_wide(logits), device=logits.device)
    if len(targets):
        block_rows, block_columns = _tile(logits)
        _binary_kernel[(triton.cdiv(len(targets), block_rows),)](
            loss, logits, targets, _or(rows, targets), len(targets),
            *_columns(logits), rows is not None, _accumulator(logits), block_rows, block_columns,
        )  # fmt: skip
    return loss


@unseen
def binary_cross_entropy_backward(grad_R: Tensor, logits: Tensor, targets: Tensor, rows: Tensor | None) -> Tensor:
    """``(N, C)`` gradient in the dtype of the logits."""
    grad_logits = _empty_gradient(logits, rows)
    if len(targets):
        _binary_backward_kernel[_backward_grid(logits, targets)](
            grad_logits, grad_R, logits, targets, _or(rows, targets), len(targets),
            *_columns(logits), *_columns(grad_logits)[1:], rows is not None, _accumulator(logits), *_tile(logits),
        )  # fmt: skip
    return grad_logits


def _empty_gradient(logits: Tensor, rows: Tensor | None) -> Tensor:
    grad_logits = empty_like_rows(logits)
    if rows is not None:
        with_padding(grad_logits).zero_()
    return grad_logits


def _columns(x: Tensor) -> tuple[int, int, int]:
    """Columns, what lies between rows, columns that may be read: with the zeros behind."""
    return x.shape[1], x.stride(0), with_padding(x).shape[1]


def _tile(logits: Tensor) -> tuple[int, int]:
    block_columns = min(triton.next_power_of_2(with_padding(logits).shape[1]), _TILE_VALUES)
    return _TILE_VALUES // block_columns, block_columns


def _backward_grid(logits: Tensor, per_slot: Tensor) -> tuple[int, int]:
    block_rows, block_columns = _tile(logits)
    return triton.cdiv(len(per_slot), block_rows), triton.cdiv(with_padding(logits).shape[1], block_columns)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _accumulator(logits: Tensor) -> Any:
    return tl.float64 if logits.dtype == torch.float64 else tl.float32


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Something to point at where an operand is missing; never read."""
    return other if tensor is None else tensor
