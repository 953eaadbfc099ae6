"""Values to levels and back, in Triton: what the kernels of bytes and of words both do with a row.

Multiplications and additions must not be fused (``enable_fp_fusion=False``), and the division is the rounded one, so
that levels are those of :mod:`nugnn.kernels.quantize.cpu`. Import this module only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nugnn.kernels.quantize.reference import RESCALE, SMALL_RANGE

_SMALL, _RESCALE = tl.constexpr(SMALL_RANGE), tl.constexpr(RESCALE)
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
def level_of(  # type: ignore[no-untyped-def]
    value, is_valid, low, scale, inverse, random, most: tl.constexpr, is_stochastic: tl.constexpr
):
    """Float levels of ``value (rows, ., .)``, 0 where it is not valid; ``random``: words of its shape if stochastic."""
    place = ((value - low[:, None, None]) * scale[:, None, None]) * inverse[:, None, None]
    if is_stochastic:
        place = tl.floor(place + (random >> 8).to(tl.float32) * 5.9604644775390625e-08)
    else:
        place = (place + _HALVES) - _HALVES
    return tl.where(is_valid, tl.minimum(tl.maximum(place, 0.0), most * 1.0), 0.0)


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
