"""Maximum and minimum over in-edges in numba, remembering the edge that won.

DGL's own kernels let the last of equal messages win, or whichever its cache blocking meets last, and count a
destination without in-edges as won by row 0; here the first edge in CSC order wins, whatever the width or number of
threads.
"""

from __future__ import annotations

import numba
import numpy as np

from nugnn.kernels._jit import jit

COPY_LHS, COPY_RHS, ADD, MUL = 0, 1, 2, 3


@jit(inline=True)
def _take(best, winner, c, message, edge):  # type: ignore[no-untyped-def]
    # Loads before the choice and no short-circuit: with branches the loop over columns is not vectorised.
    old, old_winner = best[c], winner[c]
    better = (message > old) | ((message != message) & (old == old))  # noqa: PLR0124 (the first NaN wins and stays)
    best[c] = message if better else old
    winner[c] = edge if better else old_winner


@jit(parallel=True)
def extreme(bounds, indptr, indices, u, e, u_column, e_column, op, sign, out, winners):  # type: ignore[no-untyped-def]
    """``out (N, D)`` = largest of ``sign *`` message, times ``sign``; ``winners (N, D)`` its edge, -1 without in-edges.

    ``u_column (D,)`` and ``e_column (D,)`` say which column of an operand meets each output column.
    """
    num_columns = out.shape[1]
    lowest = out.dtype.type(-np.inf)
    for task in numba.prange(len(bounds) - 1):
        # Local rows: LLVM knows that they overlap with nothing, which is worth a factor of two.
        best, winner = np.empty(num_columns, out.dtype), np.empty(num_columns, winners.dtype)
        for row in range(bounds[task], bounds[task + 1]):
            first, end = indptr[row], indptr[row + 1]
            start = winners.dtype.type(first if first < end else -1)  # also where all messages are -inf
            for c in range(num_columns):
                best[c] = lowest
                winner[c] = start
            for edge in range(first, end):
                position = winners.dtype.type(edge)
                if op == COPY_LHS:
                    u_row = u[indices[edge]]
                    for c in range(num_columns):
                        _take(best, winner, c, sign * u_row[c], position)
                elif op == COPY_RHS:
                    e_row = e[edge]
                    for c in range(num_columns):
                        _take(best, winner, c, sign * e_row[c], position)
                elif op == ADD:
                    u_row, e_row = u[indices[edge]], e[edge]
                    for c in range(num_columns):
                        _take(best, winner, c, sign * (u_row[u_column[c]] + e_row[e_column[c]]), position)
                else:
                    u_row, e_row = u[indices[edge]], e[edge]
                    for c in range(num_columns):
                        _take(best, winner, c, sign * (u_row[u_column[c]] * e_row[e_column[c]]), position)
            for c in range(num_columns):
                out[row, c] = sign * best[c]
                winners[row, c] = winner[c]


@jit(parallel=True)
def extreme_grad(  # type: ignore[no-untyped-def]
    column_bounds, winners, indices, grad, other, own_column, other_column, to_u, op, out
):
    """Add ``grad`` (times the ``other`` operand for a product) to the row of ``out`` whose message won.

    Each task owns columns, so nothing is added by two threads. ``to_u``: ``out`` has source rows and ``other`` edge
    rows, else the reverse.
    """
    num_rows = len(winners)
    for task in numba.prange(len(column_bounds) - 1):
        for row in range(num_rows):
            for c in range(column_bounds[task], column_bounds[task + 1]):
                edge = winners[row, c]
                if edge < 0:
                    continue
                own, met = (indices[edge], edge) if to_u else (edge, indices[edge])
                value = grad[row, c]
                if op == MUL:
                    value = value * other[met, other_column[c]]
                out[own, own_column[c]] += value
