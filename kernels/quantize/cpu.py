"""Quantized rows in numba: a row is read twice from cache, and its bits leave byte by byte."""

from __future__ import annotations

import numba
import numpy as np

from nugnn.kernels._jit import jit
from nugnn.kernels.philox.cpu import BATCH, ROWS_PER_TASK, fill_words
from nugnn.kernels.quantize.reference import OVERFLOW, RESCALE, SMALL_RANGE

_OVERFLOW, _SMALL, _RESCALE = np.float32(OVERFLOW), np.float32(SMALL_RANGE), np.float32(RESCALE)
_ONE, _ZERO, _NAN, _UNIT = np.float32(1), np.float32(0), np.float32(np.nan), np.float32(2.0**-24)
_HALVES = np.float32(1.5 * 2.0**23)
"""Added and taken away again, it rounds to an integer, ties to even."""


@jit(parallel=True)
def encode(x, bits, is_stochastic, row_ids, k0, k1, ends, payload):  # type: ignore[no-untyped-def]
    """``ends (n, 2)`` float32 and ``payload (n, bytes)`` uint8 of ``x (n, D)`` float32."""
    num_rows, num_columns = x.shape
    top = np.float32((1 << bits) - 1)
    for task in numba.prange((num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        rows, blocks = np.empty(BATCH, np.int64), np.empty(BATCH, np.uint32)
        words = np.empty(4 * BATCH, np.uint32)
        for row in range(task * ROWS_PER_TASK, min((task + 1) * ROWS_PER_TASK, num_rows)):
            low, high, is_in = x[row, 0], x[row, 0], True
            for c in range(num_columns):
                value = x[row, c]
                is_in = is_in and abs(value) < _OVERFLOW
                low = value if value < low else low
                high = value if value > high else high
            low, high = (low + _ZERO, high + _ZERO) if is_in else (_NAN, _NAN)
            ends[row, 0], ends[row, 1] = low, high
            span = high - low
            scale = _RESCALE if span < _SMALL else _ONE
            inverse = top / (span * scale) if span > _ZERO else _ZERO
            held, num_held, at = np.uint32(0), 0, 0
            for c in range(num_columns):
                level = _ZERO
                if is_in:
                    place = ((x[row, c] - low) * scale) * inverse
                    if is_stochastic:
                        within = c % (4 * BATCH)
                        if within == 0:
                            count = min(BATCH, (num_columns - c + 3) // 4)
                            for i in range(count):
                                rows[i] = row_ids[row]
                                blocks[i] = c // 4 + i
                            fill_words(rows, blocks, count, k0, k1, words)
                        level = np.floor(place + np.float32(words[within] >> np.uint32(8)) * _UNIT)
                    else:
                        level = (place + _HALVES) - _HALVES
                    level = min(max(level, _ZERO), top)
                held |= np.uint32(level) << np.uint32(num_held)
                num_held += bits
                if num_held >= 8:
                    payload[row, at] = held & np.uint32(255)
                    held, num_held, at = held >> np.uint32(8), num_held - 8, at + 1
            if num_held:
                payload[row, at] = held & np.uint32(255)


@jit(parallel=True)
def decode(ends, payload, bits, out):  # type: ignore[no-untyped-def]
    """``out (n, D)`` float32 from what `encode` made."""
    num_rows, num_columns = out.shape
    most = (1 << bits) - 1
    top = np.float32(most)
    for task in numba.prange((num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        for row in range(task * ROWS_PER_TASK, min((task + 1) * ROWS_PER_TASK, num_rows)):
            low, high = ends[row, 0], ends[row, 1]
            span = high - low
            scale = _RESCALE if span < _SMALL else _ONE
            step, back = (span * scale) / top, _ONE / scale
            held, num_held, at = np.uint32(0), 0, 0
            for c in range(num_columns):
                if num_held < bits:
                    held |= np.uint32(payload[row, at]) << np.uint32(num_held)
                    num_held, at = num_held + 8, at + 1
                level = held & np.uint32(most)
                held, num_held = held >> np.uint32(bits), num_held - bits
                out[row, c] = high if level == most else low + (np.float32(level) * step) * back
