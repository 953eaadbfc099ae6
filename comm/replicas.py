"""Whether replicated tensors are the same bits on all ranks, by one number for each: cheap enough to stay on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

STEPS_BETWEEN_CHECKS = 100

_BLOCK = 1 << 20
_ODD = 0x1E3779B97F4A7C15


def fingerprint(x: Tensor) -> Tensor:
    """An int64 scalar on the device of ``x``: the same on every device for the same bits, another one for others.

    A sum, modulo 2**64, of all 32-bit words by odd weights that differ from place to place. So one word that differs
    is always seen, and several are missed with a chance of about 2**-64 of them making up for each other.
    """
    flat = x.detach().contiguous().view(-1)
    if flat.dtype is torch.bool:
        flat = flat.view(torch.uint8)
    words = flat.view(torch.int32) if flat.element_size() % 4 == 0 else flat.view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    weights = _weights(_BLOCK, x.device)
    for block in words.split(_BLOCK):
        total = total * (_ODD - 2) + _dot(block.long(), weights[: len(block)])
    return total


@functools.lru_cache(maxsize=8)
def _weights(num: int, device: torch.device) -> Tensor:
    """``(num,)`` odd int64 numbers that differ: made once, for that takes longer than the sum."""
    return (2 * torch.arange(num, device=device) + 1) * _ODD


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Modulo 2**64. CUDA has no dot product of integers; on a CPU it spares a tensor, whose memory is new each time."""
    return (x * y).sum() if x.is_cuda else torch.dot(x, y)


def first_difference(named: Mapping[str, Tensor], largest: Callable[[Tensor], Tensor]) -> str | None:
    """Name of the first tensor that is not the same on all ranks, the same answer everywhere; a collective call.

    Args:
        named: In the same order on every rank.
        largest: Replaces an int64 tensor on the CPU by its maximum over ranks and returns it.
    """
    if not named:
        return None
    own = torch.stack([fingerprint(x).cpu() for x in named.values()]) >> 1  # its negative is an int64 too
    most, least = largest(torch.stack([own, -own]))
    for name, high, low in zip(named, most.tolist(), least.tolist(), strict=True):
        if high != -low:
            return name
    return None
