"""Philox4x32-10 in numba: blocks are made in batches, so that a vector lane holds one block whatever the row width.

All arithmetic is on 64-bit lanes whose upper half is zero: the 32 x 32 -> 64 bit product is then one instruction, and
its upper half is the "mulhi" that the rounds need.
"""

from __future__ import annotations

import numba
import numpy as np

from nugnn.kernels._jit import jit
from nugnn.kernels.philox.reference import MULTIPLIER_0, MULTIPLIER_1, WEYL_0, WEYL_1

BATCH = 512
"""Blocks made at a time: 8 KiB of words and 6 KiB of counters, within a first-level cache."""
ROWS_PER_TASK = 256

_M0, _M1 = np.uint64(MULTIPLIER_0), np.uint64(MULTIPLIER_1)
_W0, _W1 = np.uint64(WEYL_0), np.uint64(WEYL_1)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


@jit(inline=True)
def _round(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    product_0 = _M0 * c0
    product_1 = _M1 * c2
    return (product_1 >> _32) ^ c1 ^ k0, product_1 & _LOW, (product_0 >> _32) ^ c3 ^ k1, product_0 & _LOW


@jit()
def fill_words(rows, blocks, count, k0, k1, words):  # type: ignore[no-untyped-def]
    """``words[4 i : 4 i + 4]`` = block ``blocks[i]`` of row ``rows[i]``, ``i < count``; keys are uint64 below 2**32."""
    for i in range(count):
        row = np.uint64(rows[i])
        c0, c1, c2, c3 = row & _LOW, row >> _32, np.uint64(blocks[i]), np.uint64(0)
        a, b = k0, k1
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a, b)
        a, b = (a + _W0) & _LOW, (b + _W1) & _LOW
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a, b)
        a, b = (a + _W0) & _LOW, (b + _W1) & _LOW
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a, b)
        a, b = (a + _W0) & _LOW, (b + _W1) & _LOW
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a, b)
        a, b = (a + _W0) & _LOW, (b + _W1) & _LOW
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a, b)
        a, b = (a + _W0) & _LOW, (b + _W1) & _LOW
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a, b)
        a, b = (a + _W0) & _LOW, (b + _W1) & _LOW
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a, b)
        a, b = (a + _W0) & _LOW, (b + _W1) & _LOW
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a, b)
        a, b = (a + _W0) & _LOW, (b + _W1) & _LOW
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a, b)
        a, b = (a + _W0) & _LOW, (b + _W1) & _LOW
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a, b)
        words[4 * i] = np.uint32(c0)
        words[4 * i + 1] = np.uint32(c1)
        words[4 * i + 2] = np.uint32(c2)
        words[4 * i + 3] = np.uint32(c3)


@jit()
def fill_counters(row_ids, row, block, num_blocks, last_row, rows, blocks):  # type: ignore[no-untyped-def]
    """Counters of the next blocks from (``row``, ``block``) on, in row order; returns how many (at most ``BATCH``)."""
    count = 0
    while row < last_row and count < BATCH:
        take = min(num_blocks - block, BATCH - count)
        for i in range(take):
            rows[count + i] = row_ids[row]
            blocks[count + i] = block + i
        count += take
        block += take
        if block == num_blocks:
            row, block = row + 1, 0
    return count


@jit(parallel=True)
def random_words(row_ids, num_columns, k0, k1, out):  # type: ignore[no-untyped-def]
    """``out (n, C)`` int64 = the words of each row."""
    num_rows, num_blocks = len(row_ids), (num_columns + 3) // 4
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
                column = 4 * block
                for i in range(min(4 * take, num_columns - column)):
                    out[row, column + i] = words[4 * done + i]
                done += take
                block += take
                if block == num_blocks:
                    row, block = row + 1, 0
