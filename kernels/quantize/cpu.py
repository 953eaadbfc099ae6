"""Quantized rows in numba: a row is read twice from cache, and goes through a few levels' worth of bytes in between.

Every loop over values is one that runs in vector registers: nothing in it branches or waits for the value before. Each
operation on floating numbers is the definition's own, so that the bytes are.
"""

from __future__ import annotations

import numba
import numpy as np

from nugnn.kernels._jit import jit
from nugnn.kernels.philox.cpu import BATCH, ROWS_PER_TASK, fill_words
from nugnn.kernels.quantize.reference import DRAW_BITS, OVERFLOW, RESCALE, SMALL_RANGE

_SMALL, _RESCALE = np.float32(SMALL_RANGE), np.float32(RESCALE)
_ONE, _ZERO, _NAN, _UNITS = np.float32(1), np.float32(0), np.float32(np.nan), np.float32(2.0**DRAW_BITS)
_DRAW_BITS = np.int32(DRAW_BITS)
_HALVES = np.float32(1.5 * 2.0**23)
"""Added and taken away again, it rounds to an integer, ties to even."""
_SIGN = np.int32(31)
_REST = np.int32(0x7FFFFFFF)
"""All bits but the sign."""
_OVERFLOWS = int(np.float32(OVERFLOW).view(np.int32))
"""Places of both overflows in the order of floating numbers, see `_ends`: this one, and the bitwise complement."""
_8, _16, _32 = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0x00000000FFFFFFFF)
"""Every second 8, 16 and 32 bits of a word."""
_BYTE, _4, _2 = np.uint64(255), np.uint8(4), np.uint8(2)
_PACKED = np.array(
    [[sum((1 << width * bits) - 1 << 16 * width * i for i in range(4 // width)) for width in (1, 2, 4)]
     for bits in range(8)],
    dtype=np.uint64,
)  # fmt: skip
"""By bits: where the first 1, 2 and 4 levels lie in each 16, 32 and 64 bits of a word."""
_HELD = 1 << 10
"""Levels of a row that are held at a time: a multiple of 8, and no more than there are words for."""


@jit()
def _ends(bits_of_x, pair):  # type: ignore[no-untyped-def]
    """Smallest and largest of a row into ``pair``, all of them as int32; whether all are below the overflow.

    With the other bits of negative numbers turned over, integers have the order of the floating numbers, -0 just below
    0 and NaN beyond the infinities; and unlike those their smallest and largest are found many at a time.
    """
    low, high = _REST, ~_REST
    for c in range(len(bits_of_x)):
        bits = bits_of_x[c]
        place = np.int32(bits ^ ((bits >> _SIGN) & _REST))
        low, high = min(low, place), max(high, place)
    pair[0], pair[1] = low ^ ((low >> _SIGN) & _REST), high ^ ((high >> _SIGN) & _REST)
    return high < _OVERFLOWS and low > ~_OVERFLOWS


@jit()
def _nearest(x, low, scale, inverse, top, levels):  # type: ignore[no-untyped-def]
    for c in range(len(x)):
        place = ((x[c] - low) * scale) * inverse
        level = (place + _HALVES) - _HALVES
        level = level if level > _ZERO else _ZERO
        levels[c] = np.int32(level if level < top else top)


@jit()
def _drawn(x, low, scale, inverse, top, halves, levels):  # type: ignore[no-untyped-def]
    units, last = inverse * _UNITS, top * _UNITS
    for c in range(len(x)):
        place = ((x[c] - low) * scale) * units
        place = np.int32(place if place < last else last)
        levels[c] = np.int32(place + 2 * np.int32(halves[c]) + 1) >> _DRAW_BITS


@jit()
def _pack(levels, count, bits, payload):  # type: ignore[no-untyped-def]
    """The first ``count`` of ``levels``, uint8 with zeros from there to a multiple of 8, into ``payload``."""
    num_bytes = (count * bits + 7) // 8
    if bits == 8:
        for i in range(num_bytes):
            payload[i] = levels[i]
    elif bits == 4:
        for i in range(num_bytes):
            payload[i] = levels[2 * i] | (levels[2 * i + 1] << _4)
    elif bits == 2:
        for i in range(num_bytes):
            low, high = levels[4 * i] | (levels[4 * i + 1] << _2), levels[4 * i + 2] | (levels[4 * i + 3] << _2)
            payload[i] = low | (high << _4)
    else:
        _pack_words(levels.view(np.uint64), bits, payload[:num_bytes])


@jit()
def _pack_words(eights, bits, payload):  # type: ignore[no-untyped-def]
    """Any number of bits below 8: those of two neighbours come together, then of four, then of eight."""
    b, at = np.uint64(bits), 0
    by_8, by_16, by_32 = np.uint64(8) - b, np.uint64(16) - np.uint64(2) * b, np.uint64(32) - np.uint64(4) * b
    for eight in range((len(payload) + bits - 1) // bits):
        word = eights[eight]
        word = (word & _8) | ((word & ~_8) >> by_8)
        word = (word & _16) | ((word & ~_16) >> by_16)
        word = (word & _32) | ((word & ~_32) >> by_32)
        for _ in range(min(bits, len(payload) - at)):
            payload[at] = np.uint8(word & _BYTE)
            word >>= np.uint64(8)
            at += 1


@jit()
def _unpack(payload, count, bits, levels):  # type: ignore[no-untyped-def]
    """What `_pack` was given, up to a multiple of 8."""
    num_bytes = (count * bits + 7) // 8
    if bits == 8:
        for i in range(num_bytes):
            levels[i] = payload[i]
    elif bits == 4:
        pairs = levels.view(np.uint16)
        for i in range(num_bytes):
            two = np.uint16(payload[i])
            pairs[i] = (two | (two << np.uint16(4))) & np.uint16(0x0F0F)
    elif bits == 2:
        fours = levels.view(np.uint32)
        for i in range(num_bytes):
            four = np.uint32(payload[i])
            spread = four | (four << np.uint32(12))
            fours[i] = (spread | (spread << np.uint32(6))) & np.uint32(0x03030303)
    else:
        _unpack_words(payload[:num_bytes], bits, levels.view(np.uint64))


@jit()
def _unpack_words(payload, bits, eights):  # type: ignore[no-untyped-def]
    b, at = np.uint64(bits), 0
    by_8, by_16, by_32 = np.uint64(8) - b, np.uint64(16) - np.uint64(2) * b, np.uint64(32) - np.uint64(4) * b
    one, two, four = _PACKED[bits, 0], _PACKED[bits, 1], _PACKED[bits, 2]
    for eight in range((len(payload) + bits - 1) // bits):
        word, shift = np.uint64(0), np.uint64(0)
        for _ in range(min(bits, len(payload) - at)):
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
        halves = words.view(np.uint16)
        pair = np.empty(2, np.int32)
        low_and_high = pair.view(np.float32)
        levels = np.empty(_HELD, np.uint8)
        for row in range(task * ROWS_PER_TASK, min((task + 1) * ROWS_PER_TASK, num_rows)):
            if not _ends(x[row].view(np.int32), pair):
                ends[row, 0], ends[row, 1] = _NAN, _NAN
                payload[row, :] = 0
                continue
            low, high = low_and_high[0] + _ZERO, low_and_high[1] + _ZERO  # -0 becomes 0
            ends[row, 0], ends[row, 1] = low, high
            span = high - low
            scale = _RESCALE if span < _SMALL else _ONE
            inverse = top / (span * scale) if span > _ZERO else _ZERO
            for start in range(0, num_columns, _HELD):
                count = min(_HELD, num_columns - start)
                part = x[row, start : start + count]
                if is_stochastic:
                    num_blocks = (count + 7) // 8
                    for i in range(num_blocks):
                        rows[i] = row_ids[row]
                        blocks[i] = start // 8 + i
                    fill_words(rows, blocks, num_blocks, k0, k1, words)
                    _drawn(part, low, scale, inverse, top, halves, levels)
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
