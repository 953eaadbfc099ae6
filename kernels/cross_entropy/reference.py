"""Losses of the rows that count, in plain PyTorch: what the fused kernels must equal up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def _picked(logits: Tensor, rows: Tensor | None) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if rows is None else wide.index_select(0, rows)


def cross_entropy_rows_reference(
    logits: Tensor, labels: Tensor, rows: Tensor | None, class_weights: Tensor | None
) -> Tensor:
    """``w[label] * (log sum_c exp(z_c) - z_label)`` of each row, in float32 or float64."""
    picked = _picked(logits, rows)
    weights = None if class_weights is None else class_weights.to(picked.dtype)
    return F.cross_entropy(picked, labels.long(), weight=weights, reduction="none")


def binary_cross_entropy_rows_reference(logits: Tensor, targets: Tensor, rows: Tensor | None) -> Tensor:
    """Mean over classes of the binary cross-entropy of each row, in float32 or float64."""
    picked = _picked(logits, rows)
    return F.binary_cross_entropy_with_logits(picked, targets.to(picked.dtype), reduction="none").mean(1)
