"""Random words that depend on who a row is, not on which rank, device or call order computes them.

One layout serves dropout, halo rounding and gradient rounding. The 64-bit seed is the Philox key of a first block with
counter ``(step, stream, 0, 0)``; its first two output words are the **derived key**. The words of row ``r`` (a global
id) in columns ``4 b .. 4 b + 3`` are the four outputs of counter ``(r mod 2**32, r div 2**32, b, 0)`` under the
derived key.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from nugnn.kernels.philox.reference import philox_block, random_words_reference

__all__ = ["DerivedKey", "RandomKey", "Word", "derived_key", "gpu_key", "keys_found_by", "random_words"]

Word = int | Tensor
"""32 bits: a number, or where kernels find it, int32 in a GPU's memory."""
DerivedKey = tuple[Word, Word]


@dataclass(frozen=True, slots=True)
class RandomKey:
    """What selects a family of random words; equal on every rank.

    Args:
        seed: In ``[0, 2**64)``.
        step: Training step, in ``[0, 2**32)``.
        stream: Number of the operator or purpose, in ``[0, 2**32)``.

    Raises:
        ValueError: A value is outside its range.
    """

    seed: int
    step: int
    stream: int

    def __post_init__(self) -> None:
        for name, bits in (("seed", 64), ("step", 32), ("stream", 32)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"RandomKey: {name} is {value}, must lie in [0, 2**{bits})")


@lru_cache(maxsize=4096)
def derived_key(key: RandomKey) -> tuple[int, int]:
    """Two 32-bit words under which the words of rows are made."""
    word_0, word_1, _, _ = philox_block((key.step, key.stream, 0, 0), (key.seed & 0xFFFFFFFF, key.seed >> 32))
    return word_0, word_1


def gpu_key(key: RandomKey) -> DerivedKey:
    """`derived_key` as kernels in Triton take it: its words, or their places while a table of them is in use."""
    return derived_key(key) if _find is None else _find(key)


_find: Callable[[RandomKey], DerivedKey] | None = None
"""Of this process, not of a thread: backward runs in another one."""


@contextmanager
def keys_found_by(find: Callable[[RandomKey], DerivedKey]) -> Iterator[None]:
    """While open, `gpu_key` is what ``find`` says."""
    global _find  # noqa: PLW0603
    _find, before = find, _find
    try:
        yield
    finally:
        _find = before


def random_words(key: RandomKey, row_ids: Tensor, num_columns: int) -> Tensor:
    """Uniform 32-bit words, one per row and column.

    Args:
        key: Seed, step and stream.
        row_ids: ``(n,)`` int64 global ids; equal ids get equal rows. CPU or CUDA.
        num_columns: C, at most ``2**34``.

    Returns:
        ``(n, C)`` int64 with values in ``[0, 2**32)``, on the device of ``row_ids``.

    Raises:
        ValueError: ``row_ids`` is not a one-dimensional int64 tensor, or ``num_columns`` is out of range.
    """
    check_row_ids(row_ids)
    if not 0 <= num_columns <= 1 << 34:
        raise ValueError(f"random_words: num_columns is {num_columns}, must lie in [0, 2**34]")
    if row_ids.device.type == "cuda" and importlib.util.find_spec("triton"):
        from nugnn.kernels.philox.gpu import random_words_triton

        return random_words_triton(gpu_key(key), row_ids, num_columns)
    words = derived_key(key)
    if row_ids.device.type != "cpu" or row_ids.numel() * num_columns == 0:
        return random_words_reference(words, row_ids, num_columns)
    from nugnn.kernels.philox import cpu

    out = torch.empty(len(row_ids), num_columns, dtype=torch.int64)
    cpu.random_words(row_ids.contiguous().numpy(), num_columns, np.uint64(words[0]), np.uint64(words[1]), out.numpy())
    return out


def check_row_ids(row_ids: Tensor) -> None:
    """Raises ValueError unless ``row_ids`` is ``(n,)`` int64."""
    if row_ids.dim() != 1 or row_ids.dtype != torch.int64:
        raise ValueError(
            f"row_ids must be a one-dimensional int64 tensor of global ids, got {row_ids.dtype} of shape "
            f"{tuple(row_ids.shape)}"
        )
