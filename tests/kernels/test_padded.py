"""Padded rows: where the zeros are, who knows of them, and that the tensor is an ordinary one otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nugnn.kernels.padded import (
    carve,
    empty_like_rows,
    is_padded,
    padded_copy,
    padded_width,
    pays,
    whole_rows,
    with_padding,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_row_is_whole_sectors_or_a_part_of_one(dtype: torch.dtype) -> None:
    for width in range(1, 150):
        size = padded_width(width, dtype.itemsize) * dtype.itemsize
        assert size % 32 == 0 or 32 % size == 0
        assert width * dtype.itemsize <= size < 2 * width * dtype.itemsize or size <= 32 * (width // 16 + 2)
        assert padded_width(size // dtype.itemsize, dtype.itemsize) == size // dtype.itemsize


def test_a_copy_has_the_values_and_zeros_behind() -> None:
    x = torch.randn(5, 47)
    y = padded_copy(x, torch.bfloat16)
    assert y.shape == (5, 47) and y.stride() == (48, 1) and not y._is_view() and torch.equal(y, x.bfloat16())
    assert is_padded(y) and with_padding(y).shape == (5, 48) and (with_padding(y)[:, 47:] == 0).all()
    assert torch.equal(with_padding(y[2:4]), with_padding(y)[2:4])
    assert padded_copy(x[:, :16]).is_contiguous() and not is_padded(padded_copy(x[:, :16]))


def test_nothing_is_known_of_other_views_and_copies() -> None:
    y = padded_copy(torch.randn(6, 10))
    for other in (y[:, :9], y[:, 1:], y[::2], y.t(), y.clone(), y.contiguous(), y[:, :, None], y + 0):
        assert not is_padded(other) and with_padding(other) is other
    wide = torch.randn(6, 16)[:, :10]  # the same strides, and no zeros
    assert wide.stride() == y.stride() and with_padding(wide) is wide


def test_pieces_of_a_buffer_lie_side_by_side() -> None:
    buffer = torch.arange(4.0 * 24).view(4, 24)
    a, b = carve(buffer, [5, 12], [8, 16])
    assert torch.equal(with_padding(a), buffer[:, :8]) and torch.equal(with_padding(b), buffer[:, 8:])
    assert carve(buffer, [24], [24])[0] is buffer


def test_rows_that_are_whole_are_not_copied() -> None:
    x = torch.randn(4, 12)
    for given, is_whole in ((x, True), (x[:, 3:9], True), (x.t(), False), (x[:1].expand(4, 12), False)):
        rows = whole_rows(given)
        assert torch.equal(rows, given) and (rows is given) is is_whole and rows.stride(1) == 1
    assert is_padded(empty_like_rows(padded_copy(x[:, :5]))) and not is_padded(empty_like_rows(x[:, :5]))


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return padded_copy(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return padded_copy(grad)


def test_a_padded_result_may_be_changed_in_place() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    y = _Padded.apply(x)
    y += 1
    y.relu_()
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, (x + 1 > 0).float()) and (with_padding(y)[:, 5:] == 0).all()


def test_padding_pays_where_products_run_on_tensor_cores() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert [pays(d) for d in (torch.float32, torch.bfloat16, torch.float64)] == [False, True, False]
        torch.set_float32_matmul_precision("high")
        assert pays(torch.float32) and not pays(torch.float64)
    finally:
        torch.set_float32_matmul_precision(before)
