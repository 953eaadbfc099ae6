"""Rows added to some rows of a tensor, each of them at most once."""

from __future__ import annotations

from torch import Tensor

from nugnn.kernels.padded import whole_rows
from nugnn.kernels.spmm import runs_in_triton

__all__ = ["add_rows_"]


def add_rows_(x_N: Tensor, rows_S: Tensor, values_S: Tensor) -> Tensor:
    """``x[rows[s]] += values[s]`` for all s, in place; one rounding for each value, as `Tensor.index_add_` has.

    Args:
        x_N: ``(N, ...)``, floating.
        rows_S: ``(S,)`` int64, **distinct**. torch's kernel, which does not know that, adds 16-bit values in atomic
            steps and takes several times as long as reading and writing the rows does.
        values_S: ``(S, ...)``, dtype of ``x_N``.

    Returns:
        ``x_N``.
    """
    if len(rows_S) == 0:
        return x_N
    is_matrix = x_N.dim() == 2 and whole_rows(x_N) is x_N
    if (is_matrix or _is_contiguous_beyond(x_N)) and x_N.is_floating_point() and runs_in_triton(x_N):
        from nugnn.kernels.add_rows.gpu import add_rows_triton

        matrix, values = (x_N, values_S) if is_matrix else (x_N.view(len(x_N), -1), values_S.flatten(1))
        add_rows_triton(matrix, rows_S, whole_rows(values))
        return x_N
    return x_N.index_add_(0, rows_S, values_S)


def _is_contiguous_beyond(x_N: Tensor) -> bool:
    """Whether rows of more than one axis lie one after the other, and hold something."""
    return x_N.dim() > 2 and x_N.is_contiguous() and x_N.numel() > 0
