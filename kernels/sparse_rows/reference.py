"""Sparse features times a weight in plain PyTorch: what the fast kernels must equal up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def csr_matmul_reference(crow: Tensor, col: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """``y[i] = sum over stored k of row i of values[k] * weight[col[k]]``, differentiable in values and weight."""
    row = torch.repeat_interleave(crow.diff().to(torch.int64))
    products = values[:, None] * weight[col.to(torch.int64)]
    return products.new_zeros(len(crow) - 1, weight.shape[1]).index_add(0, row, products)
