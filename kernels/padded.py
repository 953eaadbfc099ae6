"""Rows that end in zeros at a multiple of 32 bytes, so that products and gathers of odd widths take the fast kernels.

cuBLAS chooses its kernels by how operands are aligned: with 16-bit or TF32 operands whose width is no multiple of 16
bytes it takes slow ones, and a gather of such rows touches sectors of 32 bytes that hold little of them. So rows of 100
bfloat16 values are stored 112 apart. The tensor still has the shape ``(n, 100)``; what lies behind is noted on its
storage, which all of its views share, and `with_padding` gives the ``(n, 112)`` matrix whose last columns are zero.

Such a tensor is not contiguous. It is no view either (autograd forbids to change a view that an operator returned), and
what is calculated from it has the usual layout, unless a kernel here says that its result is padded as its operand is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SECTOR_BYTES = 32
_MARK = "_nugnn_padding"


def padded_width(width: int, itemsize: int) -> int:
    """Columns of a row whose size is a multiple of 32 bytes, or a power of two below that."""
    per_sector = _SECTOR_BYTES // itemsize
    if width < per_sector:
        return 1 << max(0, width - 1).bit_length()
    return -(-width // per_sector) * per_sector


def pays(dtype: torch.dtype) -> bool:
    """Whether products of ``dtype`` run where alignment decides: 16-bit types, and float32 in TF32."""
    is_tf32 = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return is_tf32 or dtype in (torch.bfloat16, torch.float16)


def carve(buffer: Tensor, widths: Sequence[int], padded_widths: Sequence[int]) -> list[Tensor]:
    """Tensors side by side in one buffer, which they keep alive.

    Args:
        buffer: ``(n, sum of padded_widths)``, contiguous, a storage of its own; the padding holds zeros, or will before
            anybody asks `with_padding`.
        widths: Columns of each tensor.
        padded_widths: Columns of each with its padding.

    Returns:
        ``(n, width)`` each; ``buffer`` itself where it is all of one tensor.
    """
    num_rows, stride = buffer.shape
    assert buffer.is_contiguous() and sum(padded_widths) == stride, (buffer.shape, buffer.stride(), padded_widths)
    if list(widths) == [stride]:
        return [buffer]
    pieces, runs, first = [], [], 0
    for width, padded in zip(widths, padded_widths, strict=True):
        piece = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        pieces.append(piece.set_(buffer, first, (num_rows, width), (stride, 1)))  # type: ignore[call-overload]
        runs.append((first, width, padded))
        first += padded
    setattr(buffer.untyped_storage(), _MARK, (stride, tuple(runs)))
    return pieces


def empty_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``(n, width)``, not initialised; who fills it writes zeros behind, too (`with_padding` shows where)."""
    padded = padded_width(width, dtype.itemsize)
    return carve(torch.empty(num_rows, padded, dtype=dtype, device=device), [width], [padded])[0]


def padded_copy(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``x (n, width)`` in padded rows."""
    return from_buffer(_copied(x, dtype or x.dtype), x.shape[1])


def from_buffer(buffer: Tensor, width: int) -> Tensor:
    """``(n, width)``: padded rows on a contiguous ``buffer (n, padded width)`` that has a storage of its own."""
    return carve(buffer, [width], [buffer.shape[1]])[0]


def as_buffer(x: Tensor) -> Tensor:
    """``(n, padded width)`` of any ``x (n, width)``, each row contiguous; a copy where no zeros are known behind."""
    padded = padded_width(x.shape[1], x.element_size())
    whole = with_padding(x)
    return whole_rows(whole) if whole.shape[1] == padded else _copied(x, x.dtype)


def _copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    width = x.shape[1]
    buffer = torch.empty(len(x), padded_width(width, dtype.itemsize), dtype=dtype, device=x.device)
    buffer[:, :width] = x
    buffer[:, width:] = 0
    return buffer


def with_padding(x: Tensor) -> Tensor:
    """``(n, padded width)``: ``x (n, width)`` and the zeros behind it; ``x`` itself where nothing is known of them.

    A view, outside of autograd: for operands of kernels.
    """
    padded = _padded_columns(x)
    return x if padded == x.shape[-1] else x.detach().as_strided((len(x), padded), x.stride())


def is_padded(x: Tensor) -> bool:
    """Whether zeros follow each row of ``x`` to a padded width."""
    return x.dim() == 2 and _padded_columns(x) > x.shape[1]


def empty_like_rows(x: Tensor, width: int | None = None) -> Tensor:
    """``(n, width)`` for a result, with rows padded if those of ``x (n, ...)`` are, else contiguous."""
    width = x.shape[1] if width is None else width
    if is_padded(x):
        return empty_rows(len(x), width, x.dtype, x.device)
    return torch.empty(len(x), width, dtype=x.dtype, device=x.device)


def whole_rows(x: Tensor) -> Tensor:
    """``x (n, width)`` if each of its rows is contiguous and none overlap, else a contiguous copy."""
    return x if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _padded_columns(x: Tensor) -> int:
    if x.dim() != 2 or x.stride(1) != 1 or x.is_contiguous():
        return x.shape[-1]
    stride, runs = getattr(x.untyped_storage(), _MARK, (0, ()))
    if x.stride(0) == stride:
        first = x.storage_offset() % stride
        for begin, width, padded in runs:
            if (begin, width) == (first, x.shape[1]):
                return int(padded)
    return x.shape[1]
