"""Quantized rows in numba: a row is read twice from cache, eight levels are packed at a time.

Loops over values have no branches and keep a lane's values apart, so that they run in vector registers; sums of
floating numbers are not reordered, and every operation is the one of the definition.
"""

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
_LANES = 64
"""Smallest and largest values that are kept side by side, some vector registers of each."""
_8, _16, _32 = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0x00000000FFFFFFFF)
"""Every second 8, 16 and 32 bits of a word."""
_PACKED = np.array(
    [[sum((1 << width * bits) - 1 << 16 * width * i for i in range(4 // width)) for width in (1, 2, 4)]
     for bits in range(8)],
    dtype=np.uint64,
)  # fmt: skip
"""By bits: where the first 1, 2 and 4 levels lie in each 16, 32 and 64 bits of a word."""
_HELD = 1 << 10
"""Levels of a row that are held at a time: a multiple of 8, and no more than there are words for."""


@jit()
def _ends(x, lows, highs, bad):  # type: ignore[no-untyped-def]
    """``(smallest, largest, whether all are below the overflow)`` of ``x``; the others are room for lanes."""
    low, high, out = x[0], x[0], _ZERO
    whole = len(x) // _LANES * _LANES
    if whole:
        for lane in range(_LANES):
            lows[lane], highs[lane], bad[lane] = x[lane], x[lane], _ZERO
        for start in range(0, whole, _LANES):
            part = x[start : start + _LANES]
            for lane in range(_LANES):
                value = part[lane]
                lows[lane] = value if value < lows[lane] else lows[lane]
                highs[lane] = value if value > highs[lane] else highs[lane]
                bad[lane] = bad[lane] if abs(value) < _OVERFLOW else _ONE
        for lane in range(_LANES):
            low = lows[lane] if lows[lane] < low else low
            high = highs[lane] if highs[lane] > high else high
            out = max(out, bad[lane])
    for c in range(whole, len(x)):
        value = x[c]
        low = value if value < low else low
        high = value if value > high else high
        out = out if abs(value) < _OVERFLOW else _ONE
    return low, high, out == _ZERO


@jit()
def _nearest(x, low, scale, inverse, top, levels):  # type: ignore[no-untyped-def]
    for c in range(len(x)):
        place = ((x[c] - low) * scale) * inverse
        level = (place + _HALVES) - _HALVES
        level = level if level > _ZERO else _ZERO
        levels[c] = np.int32(level if level < top else top)


@jit()
def _drawn(x, low, scale, inverse, top, words, levels):  # type: ignore[no-untyped-def]
    for c in range(len(x)):
        place = ((x[c] - low) * scale) * inverse
        level = np.floor(place + np.float32(np.int32(words[c] >> np.uint32(8))) * _UNIT)
        level = level if level > _ZERO else _ZERO
        levels[c] = np.int32(level if level < top else top)


@jit()
def _pack(levels, count, bits, payload):  # type: ignore[no-untyped-def]
    """The first ``count`` of ``levels``, uint8 with zeros from there to a multiple of 8, into ``payload``."""
    if bits == 8:
        for c in range(count):
            payload[c] = levels[c]
        return
    eights, at, num_bytes = levels.view(np.uint64), 0, (count * bits + 7) // 8
    b = np.uint64(bits)
    by_8, by_16, by_32 = np.uint64(8) - b, np.uint64(16) - np.uint64(2) * b, np.uint64(32) - np.uint64(4) * b
    for eight in range((count + 7) // 8):
        word = eights[eight]
        word = (word & _8) | ((word & ~_8) >> by_8)
        word = (word & _16) | ((word & ~_16) >> by_16)
        word = (word & _32) | ((word & ~_32) >> by_32)
        for _ in range(min(bits, num_bytes - at)):
            payload[at] = np.uint8(word & np.uint64(255))
            word >>= np.uint64(8)
            at += 1


@jit()
def _unpack(payload, count, bits, levels):  # type: ignore[no-untyped-def]
    """What `_pack` was given, up to a multiple of 8."""
    if bits == 8:
        for c in range(count):
            levels[c] = payload[c]
        return
    eights, at, num_bytes = levels.view(np.uint64), 0, (count * bits + 7) // 8
    b = np.uint64(bits)
    by_8, by_16, by_32 = np.uint64(8) - b, np.uint64(16) - np.uint64(2) * b, np.uint64(32) - np.uint64(4) * b
    one, two, four = _PACKED[bits, 0], _PACKED[bits, 1], _PACKED[bits, 2]
    for eight in range((count + 7) // 8):
        word, shift = np.uint64(0), np.uint64(0)
        for _ in range(min(bits, num_bytes - at)):
            word |= np.uint64(payload[at]) << shift
            shift += np.uint64(8)
            at += 1
        word = (word & four) | ((word & ~four) << by_32)
        word = (word & two) | ((word & ~two) << by_16)
        word = (word & one) | ((word & ~one) << by_8)
        eights[eight] = word


@jit()
def _values(levels, low, high, bits, out):  # type: ignore[no-untyped-def]
    most = np.uint8((1 << bits) - 1)
    span = high - low
    scale = _RESCALE if span < _SMALL else _ONE
    step, back = (span * scale) / np.float32(most), _ONE / scale
    for c in range(len(out)):
        level = levels[c]
        value = low + (np.float32(level) * step) * back
        out[c] = high if level == most else value


@jit(parallel=True)
def encode(x, bits, is_stochastic, row_ids, k0, k1, ends, payload):  # type: ignore[no-untyped-def]
    """``ends (n, 2)`` float32 and ``payload (n, bytes)`` uint8 of ``x (n, D)`` float32."""
    num_rows, num_columns = x.shape
    top = np.float32((1 << bits) - 1)
    for task in numba.prange((num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        rows, blocks = np.empty(BATCH, np.int64), np.empty(BATCH, np.uint32)
        words = np.empty(4 * BATCH, np.uint32)
        lows, highs, bad = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
        levels = np.empty(_HELD, np.uint8)
        for row in range(task * ROWS_PER_TASK, min((task + 1) * ROWS_PER_TASK, num_rows)):
            low, high, is_in = _ends(x[row], lows, highs, bad)
            if not is_in:
                ends[row, 0], ends[row, 1] = _NAN, _NAN
                payload[row, :] = 0
                continue
            low, high = low + _ZERO, high + _ZERO
            ends[row, 0], ends[row, 1] = low, high
            span = high - low
            scale = _RESCALE if span < _SMALL else _ONE
            inverse = top / (span * scale) if span > _ZERO else _ZERO
            for start in range(0, num_columns, _HELD):
                count = min(_HELD, num_columns - start)
                part = x[row, start : start + count]
                if is_stochastic:
                    num_blocks = (count + 3) // 4
                    for i in range(num_blocks):
                        rows[i] = row_ids[row]
                        blocks[i] = start // 4 + i
                    fill_words(rows, blocks, num_blocks, k0, k1, words)
                    _drawn(part, low, scale, inverse, top, words, levels)
                else:
                    _nearest(part, low, scale, inverse, top, levels)
                levels[count : (count + 7) // 8 * 8] = 0
                _pack(levels, count, bits, payload[row, start // 8 * bits :])


@jit(parallel=True)
def decode(ends, payload, bits, out):  # type: ignore[no-untyped-def]
    """``out (n, D)`` float32 from what `encode` made."""
    num_rows, num_columns = out.shape
    for task in numba.prange((num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        levels = np.empty(_HELD, np.uint8)
        for row in range(task * ROWS_PER_TASK, min((task + 1) * ROWS_PER_TASK, num_rows)):
            for start in range(0, num_columns, _HELD):
                count = min(_HELD, num_columns - start)
                _unpack(payload[row, start // 8 * bits :], count, bits, levels)
                _values(levels, ends[row, 0], ends[row, 1], bits, out[row, start : start + count])
