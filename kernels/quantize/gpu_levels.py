"""Values to levels and back, in Triton: what the kernels of bytes and of words both do with a row.

Multiplications and additions must not be fused (``enable_fp_fusion=False``), and the division is the rounded one, so
that levels are those of :mod:`nugnn.kernels.quantize.cpu`. Import this module only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nugnn.kernels.philox.gpu import key_word, philox_tile
from nugnn.kernels.philox.reference import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1
from nugnn.kernels.quantize.reference import DRAW_BITS, RESCALE, SMALL_RANGE

_SMALL, _RESCALE = tl.constexpr(SMALL_RANGE), tl.constexpr(RESCALE)
_M0, _M1, _W0, _W1 = (tl.constexpr(word) for word in (MULTIPLIER_0, MULTIPLIER_1, WEYL_0, WEYL_1))
_ROUNDS = tl.constexpr(ROUNDS)
_DRAW_BITS, _UNITS = tl.constexpr(DRAW_BITS), tl.constexpr(2.0**DRAW_BITS)
_HALVES = tl.constexpr(1.5 * 2.0**23)
"""Added and taken away again, it rounds to an integer, ties to even."""


@triton.jit
def scale_and_inverse(low, high, most: tl.constexpr):  # type: ignore[no-untyped-def]
    """Factors ``(rows,)`` that make a value less ``low`` its place among ``most`` steps, one after the other."""
    span = high - low
    scale = tl.where(span < _SMALL, _RESCALE, 1.0)
    divisor = tl.where(span > 0, span * scale, 1.0)
    return scale, tl.where(span > 0, tl.math.div_rn(tl.full(span.shape, most, tl.float32), divisor), 0.0)


@triton.jit
def draws_of(ids, first_block, num_blocks: tl.constexpr, k0, k1):  # type: ignore[no-untyped-def]
    """``(rows, 8 num_blocks)`` odd integers below ``2**17``, of the random bits of eight values a Philox block."""
    block = first_block + tl.arange(0, num_blocks)
    c0, c1, c2, c3 = philox_tile(ids[:, None], block[None, :], key_word(k0), key_word(k1), _M0, _M1, _W0, _W1, _ROUNDS)
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    draws = tl.join((words << 1) & 0x1FFFF | 1, words >> 15 | 1)
    return tl.reshape(draws.to(tl.int32), [ids.shape[0], 8 * num_blocks])


@triton.jit
def level_of(  # type: ignore[no-untyped-def]
    value, low, scale, inverse, draws, most: tl.constexpr, is_stochastic: tl.constexpr
):
    """Levels, int32, of ``value (rows, ., .)``, anything where the row has no such value or is NaN; ``draws`` alike."""
    distance = (value - low[:, None, None]) * scale[:, None, None]
    if is_stochastic:
        place = tl.minimum(distance * (inverse * _UNITS)[:, None, None], most * _UNITS)
        return (place.to(tl.int32) + draws) >> _DRAW_BITS
    else:
        place = tl.minimum(distance * inverse[:, None, None], most * 1.0)
        return ((place + _HALVES) - _HALVES).to(tl.int32)


@triton.jit
def step_and_back(low, high, most: tl.constexpr):  # type: ignore[no-untyped-def]
    """Factors ``(rows,)`` that make a level its distance from ``low``, one after the other."""
    span = high - low
    is_small = span < _SMALL
    step = tl.math.div_rn(span * tl.where(is_small, _RESCALE, 1.0), tl.full(span.shape, most, tl.float32))
    return step, tl.where(is_small, 1.0 / _RESCALE, 1.0)


@triton.jit
def value_of(level, low, high, step, back, most: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of integer levels; the others are of their number of axes."""
    value = low + (level.to(tl.float32) * step) * back
    return tl.where(level == most, high, value)
