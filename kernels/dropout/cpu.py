"""Dropout in numba: the mask is made and applied batch by batch in cache, and never stored.

Thresholds of dense rows are below ``2**32``: where no word is kept there is nothing to compute.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from nugnn.kernels._jit import jit
from nugnn.kernels.philox.cpu import BATCH, ROWS_PER_TASK, fill_counters, fill_words

MOST_SERIAL_VALUES = 1 << 14
"""Up to so many values a launch of threads takes longer than the work."""


@jit()
def _scale_or_zero_rows(x, row_ids, first_row, last_row, threshold, scale, k0, k1, out):  # type: ignore[no-untyped-def]
    # slices and a threshold of the words' own type: the choice is made in vectors, where branches would be mispredicted
    num_columns = x.shape[1]
    num_blocks = (num_columns + 3) // 4
    zero, least = scale - scale, np.uint32(threshold)
    rows, blocks = np.empty(BATCH, np.int64), np.empty(BATCH, np.uint32)
    words = np.empty(4 * BATCH, np.uint32)
    row, block = first_row, 0
    while row < last_row:
        count = fill_counters(row_ids, row, block, num_blocks, last_row, rows, blocks)
        fill_words(rows, blocks, count, k0, k1, words)
        done = 0
        while done < count:
            take = min(num_blocks - block, count - done)
            first, last = 4 * block, min(4 * (block + take), num_columns)
            values, chosen, into = x[row, first:last], words[4 * done :], out[row, first:last]
            for i in range(len(values)):
                value = values[i] * scale
                into[i] = value if chosen[i] >= least else zero
            done += take
            block += take
            if block == num_blocks:
                row, block = row + 1, 0


@jit()
def _zero_dropped_rows(bits, row_ids, first_row, last_row, threshold, k0, k1):  # type: ignore[no-untyped-def]
    num_columns = bits.shape[1]
    num_blocks = (num_columns + 3) // 4
    least = np.uint32(threshold)
    rows, blocks = np.empty(BATCH, np.int64), np.empty(BATCH, np.uint32)
    words = np.empty(4 * BATCH, np.uint32)
    row, block = first_row, 0
    while row < last_row:
        count = fill_counters(row_ids, row, block, num_blocks, last_row, rows, blocks)
        fill_words(rows, blocks, count, k0, k1, words)
        done = 0
        while done < count:
            take = min(num_blocks - block, count - done)
            first, last = 4 * block, min(4 * (block + take), num_columns)
            values, chosen = bits[row, first:last], words[4 * done :]
            for i in range(len(values)):
                values[i] = values[i] if chosen[i] >= least else np.int16(0)
            done += take
            block += take
            if block == num_blocks:
                row, block = row + 1, 0


@jit(parallel=True)
def scale_or_zero(x, row_ids, threshold, scale, k0, k1, out):  # type: ignore[no-untyped-def]
    """``out (n, C) = x * scale`` where the word reaches ``threshold``, else 0; ``out`` may be ``x``."""
    num_rows = x.shape[0]
    for task in numba.prange((num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        first = task * ROWS_PER_TASK
        last = min(first + ROWS_PER_TASK, num_rows)
        _scale_or_zero_rows(x, row_ids, first, last, threshold, scale, k0, k1, out)


@jit(parallel=True)
def zero_dropped(bits, row_ids, threshold, k0, k1):  # type: ignore[no-untyped-def]
    """Clear the entries of ``bits (n, C)`` int16 whose word is below ``threshold``: half types, which numba lacks."""
    num_rows = bits.shape[0]
    for task in numba.prange((num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        first = task * ROWS_PER_TASK
        last = min(first + ROWS_PER_TASK, num_rows)
        _zero_dropped_rows(bits, row_ids, first, last, threshold, k0, k1)


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    """An address as a pointer for `numba.carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@jit()
def drop_serially(  # type: ignore[no-untyped-def]
    itemsize, x, row_ids, out, num_rows, num_columns, threshold, scale, seed, step, stream
):  # fmt: skip
    """On this thread, `scale_or_zero` of 8 or 4 bytes a value, or `zero_dropped` of 2, by the addresses of arrays.

    All of them contiguous; ``out`` may be ``x``, and is for 2 bytes. Plain numbers alone: to hand over an array takes
    longer than the work on a small one. ``seed`` is int64 of the same bits; the key is derived here.
    """
    rows, blocks, words = np.empty(1, np.int64), np.zeros(1, np.uint32), np.empty(4, np.uint32)
    rows[0] = step + (stream << 32)  # as a row, the counter is that of the derived key
    whole = np.uint64(seed)
    fill_words(rows, blocks, 1, whole & np.uint64(0xFFFFFFFF), whole >> np.uint64(32), words)
    k0, k1, least = np.uint64(words[0]), np.uint64(words[1]), np.uint64(threshold)
    ids = numba.carray(_pointer(row_ids), num_rows, np.int64)
    shape = (num_rows, num_columns)
    if itemsize == 4:
        x_32, out_32 = numba.carray(_pointer(x), shape, np.float32), numba.carray(_pointer(out), shape, np.float32)
        _scale_or_zero_rows(x_32, ids, 0, num_rows, least, np.float32(scale), k0, k1, out_32)
    elif itemsize == 8:
        x_64, out_64 = numba.carray(_pointer(x), shape, np.float64), numba.carray(_pointer(out), shape, np.float64)
        _scale_or_zero_rows(x_64, ids, 0, num_rows, least, scale, k0, k1, out_64)
    else:
        _zero_dropped_rows(numba.carray(_pointer(out), shape, np.int16), ids, 0, num_rows, least, k0, k1)


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
