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
    if x_N.dim() == 2 and x_N.is_floating_point() and runs_in_triton(x_N) and whole_rows(x_N) is x_N:
        from nugnn.kernels.add_rows.gpu import add_rows_triton

        return add_rows_triton(x_N, rows_S, whole_rows(values_S))
    return x_N.index_add_(0, rows_S, values_S)
