"""Edge softmax in numba: the edges of a destination lie together, so three passes over them stay in cache."""

from __future__ import annotations

import numba
import numpy as np

from nugnn.kernels._jit import jit


@jit(parallel=True)
def softmax(bounds, indptr, scores, out):  # type: ignore[no-untyped-def]
    """``out (E, D)`` = softmax of ``scores`` over the rows of each destination; zeros where all are ``-inf``."""
    num_columns = scores.shape[1]
    zero = scores.dtype.type(0)
    lowest = scores.dtype.type(-np.inf)
    for task in numba.prange(len(bounds) - 1):
        largest = np.empty(num_columns, scores.dtype)
        total = np.empty(num_columns, scores.dtype)
        for row in range(bounds[task], bounds[task + 1]):
            for c in range(num_columns):
                largest[c] = lowest
                total[c] = zero
            for edge in range(indptr[row], indptr[row + 1]):
                for c in range(num_columns):
                    value = scores[edge, c]
                    # a NaN must come out as NaN: it compares false with everything
                    largest[c] = value if value > largest[c] or value != value else largest[c]  # noqa: PLR0124
            for c in range(num_columns):
                largest[c] = zero if largest[c] == lowest else largest[c]
            for edge in range(indptr[row], indptr[row + 1]):
                for c in range(num_columns):
                    value = np.exp(scores[edge, c] - largest[c])
                    out[edge, c] = value
                    total[c] += value
            for c in range(num_columns):
                total[c] = total[c] if total[c] != zero else scores.dtype.type(1)
            for edge in range(indptr[row], indptr[row + 1]):
                for c in range(num_columns):
                    out[edge, c] /= total[c]


@jit(parallel=True)
def softmax_backward(bounds, indptr, weights, grad, out):  # type: ignore[no-untyped-def]
    """``out = weights * (grad - sum over the destination's edges of weights * grad)``."""
    num_columns = weights.shape[1]
    for task in numba.prange(len(bounds) - 1):
        total = np.empty(num_columns, weights.dtype)
        for row in range(bounds[task], bounds[task + 1]):
            for c in range(num_columns):
                total[c] = 0
            for edge in range(indptr[row], indptr[row + 1]):
                for c in range(num_columns):
                    total[c] += weights[edge, c] * grad[edge, c]
            for edge in range(indptr[row], indptr[row + 1]):
                for c in range(num_columns):
                    out[edge, c] = weights[edge, c] * (grad[edge, c] - total[c])
