"""Sparse rows times a dense matrix in numba: one thread owns each output row, so results do not depend on threads."""

from __future__ import annotations

import numba

from nugnn.kernels._jit import jit


@jit(parallel=True)
def weighted_row_sums(bounds, indptr, sources, entries, values, dense, out):  # type: ignore[no-untyped-def]
    """``out[i] = sum over k of values[entries[k]] * dense[sources[k]]`` for the slots ``k`` of row ``i``.

    ``bounds`` splits the rows into tasks of about equal work. An empty ``entries`` means ``entries[k] = k``.
    """
    num_columns = dense.shape[1]
    reordered = len(entries) > 0
    for task in numba.prange(len(bounds) - 1):
        for row in range(bounds[task], bounds[task + 1]):
            out_row = out[row]
            for c in range(num_columns):
                out_row[c] = 0
            for slot in range(indptr[row], indptr[row + 1]):
                value = values[entries[slot]] if reordered else values[slot]
                dense_row = dense[sources[slot]]
                for c in range(num_columns):
                    out_row[c] += value * dense_row[c]


@jit(parallel=True)
def value_gradients(bounds, indptr, indices, grad, weight, out):  # type: ignore[no-untyped-def]
    """``out[k] = <grad[row of k], weight[indices[k]]>``."""
    num_columns = weight.shape[1]
    for task in numba.prange(len(bounds) - 1):
        for row in range(bounds[task], bounds[task + 1]):
            grad_row = grad[row]
            for slot in range(indptr[row], indptr[row + 1]):
                weight_row = weight[indices[slot]]
                total = grad_row[0] * weight_row[0]
                for c in range(1, num_columns):
                    total += grad_row[c] * weight_row[c]
                out[slot] = total


@jit()
def transpose(indptr, indices, next_slot, rows, entries):  # type: ignore[no-untyped-def]
    """Counting sort of the entries by column, rows ascending within one; ``next_slot`` starts as column offsets."""
    for row in range(len(indptr) - 1):
        for slot in range(indptr[row], indptr[row + 1]):
            column = indices[slot]
            target = next_slot[column]
            rows[target] = row
            entries[target] = slot
            next_slot[column] = target + 1
