"""Rows as few bits a value between their smallest and largest, in plain PyTorch: what the fast kernels must equal.

All arithmetic is float32, each operation rounded to nearest and none fused with another, so that every device makes
the same bytes and reads the same values from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

OVERFLOW = 2.0**126
"""Rows with a value of this size or more, infinite or NaN, are sent as NaN: differences of larger ones overflow."""
SMALL_RANGE, RESCALE = 2.0**-60, 2.0**64
"""Smaller ranges are multiplied by a power of 2 first: their steps would be subnormal and inverses overflow."""
DRAW_BITS = 17
"""Stochastic rounding sees places in units of ``2**-17`` of a step."""


def row_bytes(num_columns: int, bits: int) -> int:
    """Bytes of a row on the wire: smallest and largest value in float32, then ``bits`` for each value.

    >>> row_bytes(256, 4), row_bytes(5, 3)
    (136, 10)
    """
    return 8 + (num_columns * bits + 7) // 8


def levels_reference(x: Tensor, bits: int, words: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``(levels (n, D) int64, smallest (n,), largest (n,))``.

    Stochastic rounding cuts a place off to units of ``2**-17`` of a step, adds ``2 h + 1`` of them, where ``h`` are the
    value's 16 random bits, and rounds down. So a place that is ``f`` above a level is rounded up with the multiple of
    ``2**-16`` nearest to ``f`` for probability, off by at most ``2**-17``, and one that is a level stays. Integers are
    added: in float32 the sum of a place from 128 on and a draw would be rounded, now and then to the next level.

    Args:
        x: ``(n, D)``, ``D`` at least 1.
        bits: From 1 to 8.
        words: ``(n, ceil(D / 2))`` random words in ``[0, 2**32)`` for stochastic rounding, of which each serves two
            values, its lower 16 bits the first; to nearest (ties to even) when None.
    """
    x = x.float()
    low, high = x.amin(1) + 0.0, x.amax(1) + 0.0  # -0 becomes 0
    is_out = ~(x.abs() < OVERFLOW).all(1)
    low, high = (y.masked_fill(is_out, torch.nan) for y in (low, high))
    span = high - low
    scale = _scale(span)
    top = float(2**bits - 1)
    # of a number and a tensor torch makes a product with the reciprocal, rounded twice
    inverse = torch.where(span > 0, torch.full_like(span, top) / (span * scale), 0.0)
    unit = 1 if words is None else 1 << DRAW_BITS
    place = ((x - low[:, None]) * scale[:, None]) * (inverse * unit)[:, None]
    place = place.clamp(max=top * unit).masked_fill(is_out[:, None], 0)
    if words is None:
        return place.round().long(), low, high
    halves = torch.stack([words & 0xFFFF, words >> 16], 2).flatten(1)[:, : x.shape[1]]
    return (place.long() + 2 * halves + 1) >> DRAW_BITS, low, high


def values_reference(levels: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """``(n, D)`` float32 of what :func:`levels_reference` gives."""
    top = 2**bits - 1
    span = high - low
    scale = _scale(span)
    step = (span * scale) / torch.full_like(span, top)
    value = low[:, None] + (levels.float() * step[:, None]) * (1.0 / scale)[:, None]
    return torch.where(levels == top, high[:, None], value)


def _scale(span: Tensor) -> Tensor:
    return torch.where(span < SMALL_RANGE, RESCALE, 1.0).to(torch.float32)


def encode_reference(x: Tensor, bits: int, words: Tensor | None) -> Tensor:
    """``(n, row_bytes)`` uint8: value ``i`` takes bits ``i * bits`` and on of the row's bit string, lowest first."""
    levels, low, high = levels_reference(x, bits, words)
    n, num_columns = levels.shape
    string = (levels[:, :, None] >> torch.arange(bits, device=x.device)) & 1
    string = string.reshape(n, num_columns * bits)
    padded = torch.nn.functional.pad(string, (0, -string.shape[1] % 8)).view(n, -1, 8)
    payload = (padded << torch.arange(8, device=x.device)).sum(2).to(torch.uint8)
    ends = torch.stack([low, high], 1).contiguous().view(torch.uint8)
    return torch.cat([ends, payload], 1)


def ends_of(wire: Tensor) -> Tensor:
    """``(n, 2)`` float32: smallest and largest value of each row of ``wire``, wherever its bytes lie."""
    return wire[:, :8].clone(memory_format=torch.contiguous_format).view(torch.float32)


def decode_reference(wire: Tensor, num_columns: int, bits: int) -> Tensor:
    """``(n, D)`` float32 from ``(n, row_bytes)`` uint8."""
    low, high = ends_of(wire).unbind(1)
    string = (wire[:, 8:, None].long() >> torch.arange(8, device=wire.device)) & 1
    string = string.reshape(len(wire), -1)[:, : num_columns * bits].view(len(wire), num_columns, bits)
    levels = (string << torch.arange(bits, device=wire.device)).sum(2)
    return values_reference(levels, low, high, bits)
