"""What follows a layer's product or aggregation, step by step in plain PyTorch: what one pass must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.dropout.reference import dropout_rows_reference
from nugnn.kernels.philox import RandomKey


def activate(x: Tensor, activation: str, alpha: float) -> Tensor:
    """``activation`` of each value; ``alpha`` is the slope of ``leaky_relu`` and the scale of ``elu``."""
    if activation == "relu":
        return torch.relu(x)
    if activation == "leaky_relu":
        return F.leaky_relu(x, alpha)
    return F.elu(x, alpha) if activation == "elu" else x


def before_dropout(
    x: Tensor,
    row_scale: Tensor | None,
    bias: Tensor | None,
    norm: tuple[Tensor | None, Tensor | None, float] | None,
    activation: str,
    alpha: float,
) -> Tensor:
    """``activation(layer_norm(x * row_scale + bias))`` for ``x (n, C)``, each step in the dtype of ``x``."""
    if row_scale is not None:
        x = x * row_scale.to(x.dtype)[:, None]
    if bias is not None:
        x = x + bias.to(x.dtype)
    if norm is not None:
        weight, shift, eps = norm
        x = F.layer_norm(
            x,
            x.shape[1:],
            None if weight is None else weight.to(x.dtype),
            None if shift is None else shift.to(x.dtype),
            eps,
        )
    return activate(x, activation, alpha)


def epilogue_rows_reference(
    x: Tensor,
    row_scale: Tensor | None,
    bias: Tensor | None,
    norm: tuple[Tensor | None, Tensor | None, float] | None,
    activation: str,
    alpha: float,
    p: float,
    key: RandomKey | None,
    row_ids: Tensor | None,
) -> Tensor:
    """All steps; a rounding to the dtype of ``x`` after each."""
    out = before_dropout(x, row_scale, bias, norm, activation, alpha)
    if p == 0:
        return out
    assert key is not None
    assert row_ids is not None
    return dropout_rows_reference(out, p, key, row_ids)
