"""Rows that a codec meets: usual ones, and those at the ends of what float32 holds."""

from __future__ import annotations

import torch
from torch import Tensor

from nugnn.kernels.philox import RandomKey

KEY = RandomKey(5, 3, 7)
NOT_FINITE = (3, 4, 10)
"""Rows of :func:`special_rows` that come back as NaN."""


def special_rows(width: int) -> Tensor:
    """``(12, width)`` float32."""
    x = torch.randn(12, width, generator=torch.Generator().manual_seed(width))
    x[0], x[1], x[2] = 3.25, x[1] * 1e-40, x[2] * 1e37
    x[3, 0], x[4, -1], x[10, width // 2] = torch.nan, -torch.inf, 2.0**126
    x[5], x[6], x[7] = 0.0, -0.0, torch.linspace(-1e-42, 1e-42, width)
    x[8] = 1 + torch.arange(width) * 2.0**-23
    return x
