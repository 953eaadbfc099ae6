"""Dropout in numba: the mask is made and applied batch by batch in cache, and never stored."""

from __future__ import annotations

import numba
import numpy as np

from nugnn.kernels._jit import jit
from nugnn.kernels.philox.cpu import BATCH, ROWS_PER_TASK, fill_counters, fill_words


@jit(parallel=True)
def scale_or_zero(x, row_ids, threshold, scale, k0, k1, out):  # type: ignore[no-untyped-def]
    """``out (n, C) = x * scale`` where the word reaches ``threshold``, else 0; ``out`` may be ``x``."""
    num_rows, num_columns = x.shape
    num_blocks = (num_columns + 3) // 4
    zero = scale - scale
    for task in numba.prange((num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        rows, blocks = np.empty(BATCH, np.int64), np.empty(BATCH, np.uint32)
        words = np.empty(4 * BATCH, np.uint32)
        row, block = task * ROWS_PER_TASK, 0
        last_row = min(row + ROWS_PER_TASK, num_rows)
        while row < last_row:
            count = fill_counters(row_ids, row, block, num_blocks, last_row, rows, blocks)
            fill_words(rows, blocks, count, k0, k1, words)
            done = 0
            while done < count:
                take = min(num_blocks - block, count - done)
                first, start = 4 * block, 4 * done
                for i in range(min(4 * take, num_columns - first)):
                    value = x[row, first + i] * scale
                    out[row, first + i] = value if words[start + i] >= threshold else zero
                done += take
                block += take
                if block == num_blocks:
                    row, block = row + 1, 0


@jit(parallel=True)
def zero_dropped(bits, row_ids, threshold, k0, k1):  # type: ignore[no-untyped-def]
    """Clear the entries of ``bits (n, C)`` int16 whose word is below ``threshold``: half types, which numba lacks."""
    num_rows, num_columns = bits.shape
    num_blocks = (num_columns + 3) // 4
    for task in numba.prange((num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        rows, blocks = np.empty(BATCH, np.int64), np.empty(BATCH, np.uint32)
        words = np.empty(4 * BATCH, np.uint32)
        row, block = task * ROWS_PER_TASK, 0
        last_row = min(row + ROWS_PER_TASK, num_rows)
        while row < last_row:
            count = fill_counters(row_ids, row, block, num_blocks, last_row, rows, blocks)
            fill_words(rows, blocks, count, k0, k1, words)
            done = 0
            while done < count:
                take = min(num_blocks - block, count - done)
                first, start = 4 * block, 4 * done
                for i in range(min(4 * take, num_columns - first)):
                    bits[row, first + i] = bits[row, first + i] if words[start + i] >= threshold else np.int16(0)
                done += take
                block += take
                if block == num_blocks:
                    row, block = row + 1, 0


@jit(parallel=True)
def scale_or_zero_csr(values, indptr, indices, row_ids, threshold, scale, k0, k1, out):  # type: ignore[no-untyped-def]
    """The same for the stored entries of a CSR matrix, each with the word of its row and column."""
    num_rows = len(indptr) - 1
    zero = scale - scale
    for task in numba.prange((num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        rows, blocks = np.empty(BATCH, np.int64), np.empty(BATCH, np.uint32)
        words = np.empty(4 * BATCH, np.uint32)
        row = task * ROWS_PER_TASK
        last_row = min(row + ROWS_PER_TASK, num_rows)
        entry, last_entry = indptr[row], indptr[last_row]
        while entry < last_entry:
            count = min(BATCH, last_entry - entry)
            for i in range(count):
                while indptr[row + 1] <= entry + i:
                    row += 1
                rows[i] = row_ids[row]
                blocks[i] = indices[entry + i] // 4
            fill_words(rows, blocks, count, k0, k1, words)
            for i in range(count):
                value = values[entry + i] * scale
                lane = indices[entry + i] % 4
                out[entry + i] = value if words[4 * i + lane] >= threshold else zero
            entry += count
