"""Relu and dropout in one pass have the bits of the two steps, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.kernels.dropout import dropout_rows, relu_dropout_rows
from nugnn.kernels.philox import RandomKey


@given(
    n=st.integers(0, 40),
    columns=st.integers(0, 37),
    p=st.floats(0.01, 0.99),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_one_pass_equals_two(n: int, columns: int, p: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n * 100 + columns)
    x = torch.randn(n, columns, generator=generator, dtype=torch.float64).to(dtype)
    key, ids = RandomKey(3, 5, 7), torch.randperm(1000, generator=generator)[:n]
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    fused, stepwise = relu_dropout_rows(one, p, key, ids), dropout_rows(two.relu(), p, key, ids)
    assert torch.equal(fused, stepwise)
    grad = torch.randn(n, columns, generator=generator, dtype=torch.float64).to(dtype)
    fused.backward(grad)
    stepwise.backward(grad)
    assert one.grad is not None
    assert two.grad is not None
    assert torch.equal(one.grad, two.grad)


def test_refuses_types_it_has_no_kernel_for() -> None:
    with pytest.raises(ValueError, match="cannot be scaled"):
        relu_dropout_rows(torch.ones(2, 3, dtype=torch.int64), 0.5, RandomKey(0, 0, 0), torch.arange(2))
