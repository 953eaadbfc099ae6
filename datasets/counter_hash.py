"""Stateless random bits: a 64-bit integer mix of (seed, stream, counter), the same bits on every machine and device.

The layout, in unsigned 64-bit arithmetic that wraps, the same in numpy and on torch tensors of any device::

    mix(z):  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
             z = (z ^ (z >> 27)) * 0x94D049BB133111EB
             z ^ (z >> 31)
    key  = mix(mix(seed + G) + stream)          stream: see below
    bits = mix(key + (counter + 1) * G)         G = 0x9E3779B97F4A7C15

So counter 0, 1, 2, ... gives the SplitMix64 sequence that starts at ``key``. A stream is named by a short text; its
number is the first 8 bytes of the text's SHA-256, little-endian. A number below ``n < 2^32`` is
``((bits >> 32) * n) >> 32``.

Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; constants of mix13 by
David Stafford.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1


def stream_key(seed: int, stream: str) -> int:
    """The 64-bit key of a named stream of ``seed`` (any Python integer; taken modulo 2^64)."""
    number = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")
    return _mix_int((_mix_int((seed + _GOLDEN) & _MASK) + number) & _MASK)


def counter_hash(seed: int, stream: str, counters: np.ndarray) -> np.ndarray:
    """64 random bits per counter.

    Args:
        seed: Any integer.
        stream: Name of the use; different names give independent bits.
        counters: Integers from 0, any shape.

    Returns:
        uint64 of the same shape.
    """
    return splitmix(stream_key(seed, stream), counters)


def splitmix(key: int, counters: np.ndarray) -> np.ndarray:
    """Entries ``counters`` of the SplitMix64 sequence whose state starts at ``key``; uint64 of the same shape."""
    bits = counters.astype(np.uint64)
    bits += np.uint64(1)
    bits *= np.uint64(_GOLDEN)
    bits += np.uint64(key)
    for shift, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(multiplier)
    bits ^= bits >> np.uint64(31)
    return bits


def below(bits: np.ndarray, limits: np.ndarray | int) -> np.ndarray:
    """Integers in ``[0, limits)`` from 64 random bits each, ``1 <= limits < 2^32``; int64."""
    high = bits >> np.uint64(32)
    return ((high * np.asarray(limits).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def counter_hash_tensor(seed: int, stream: str, counters: Tensor) -> Tensor:
    """As :func:`counter_hash` on torch tensors, on the device of ``counters``.

    Args:
        seed: Any integer.
        stream: Name of the use.
        counters: int64 from 0, any shape. Not modified.

    Returns:
        int64 of the same shape, the same 64 bits in two's complement: torch has few operators for uint64.
    """
    key = torch.tensor(_signed(stream_key(seed, stream)), device=counters.device)
    bits = counters + 1
    bits *= _signed(_GOLDEN)
    bits += key
    for shift, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2)):
        bits ^= _shifted(bits, shift)
        bits *= _signed(multiplier)
    bits ^= _shifted(bits, 31)
    return bits


def below_tensor(bits: Tensor, limits: Tensor | int) -> Tensor:
    """As :func:`below` on torch tensors: int64 from int64 bits, ``1 <= limits < 2^32``."""
    return _shifted(_shifted(bits, 32) * limits, 32)


def high_word(bits: Tensor) -> Tensor:
    """The upper 32 of the 64 bits, as int64 in ``[0, 2^32)``."""
    return _shifted(bits, 32)


def unsigned_order(bits: Tensor) -> Tensor:
    """int64 that compare as the bits do without a sign."""
    return bits ^ -(2**63)


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Shift to the right that fills with zeros; torch's repeats the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & _MASK
    return z ^ (z >> 31)
