"""Some rows of a tensor, copied one after the other."""

from __future__ import annotations

from torch import Tensor

from nugnn.kernels.padded import whole_rows
from nugnn.kernels.spmm import runs_in_triton

__all__ = ["take_rows"]


def take_rows(x_N: Tensor, rows_S: Tensor) -> Tensor:
    """``x[rows]``, without autograd.

    Args:
        x_N: ``(N, ...)``.
        rows_S: ``(S,)`` int64. torch's kernel for 16-bit rows takes three to four times as long as reading and
            writing the rows does.

    Returns:
        ``(S, ...)``, contiguous.
    """
    if not (len(rows_S) and x_N.dim() > 1 and x_N[0].numel() and x_N.is_floating_point() and runs_in_triton(x_N)):
        return x_N[rows_S]
    from nugnn.kernels.take_rows.gpu import take_rows_triton

    rows = take_rows_triton(whole_rows(x_N if x_N.dim() == 2 else x_N.flatten(1)), rows_S)
    return rows if x_N.dim() == 2 else rows.view(len(rows), *x_N.shape[1:])
