"""Derived keys of a step where a CUDA graph finds them. Import this module only where Triton is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nugnn.kernels.philox import RandomKey, derived_key, keys_found_by
from nugnn.kernels.philox.gpu import random_words_triton


class KeyTable:
    """Derived keys of a step in a GPU's memory, for kernels that are launched again in later steps as they are.

    A CUDA graph repeats its launches with the same arguments. While a table is in use, kernels get the places of key
    words as arguments, and read there what the table was last filled with.

    Args:
        device: Where the kernels run.
        num_keys: Most keys of a step.
    """

    def __init__(self, device: torch.device, num_keys: int = 1024) -> None:
        self._num_keys = num_keys
        # launches differ by how arguments are aligned: every word begins 16 bytes
        self._places = torch.zeros(2, num_keys, 4, dtype=torch.int32, device=device)
        self._streams = torch.zeros(num_keys, dtype=torch.int64, device=device)
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._seed, self._step = 0, -1
        self._is_fixed = False

    @contextmanager
    def of_step(self, step: int, *, is_fixed: bool = False) -> Iterator[None]:
        """Keys are those of ``step``, and kernels that are launched meanwhile find them in memory.

        Args:
            step: In ``[0, 2**32)``.
            is_fixed: Whether a key that is not yet known is an error.
        """
        self.fill(step)
        self._is_fixed = is_fixed
        with keys_found_by(self.words):
            yield

    def fill(self, step: int) -> None:
        """Put the keys of ``step`` into memory; the host does not wait."""
        self._step = step
        if not self._known:
            return
        num = len(self._known)
        # the word of row `r` under a seed is made of counter (r mod 2**32, r div 2**32, 0, 0)
        words_n2 = random_words_triton((self._seed & 0xFFFFFFFF, self._seed >> 32), self._streams[:num] + step, 2)
        self._places[:, :num, 0] = words_n2.t()  # int32 keeps the lower 32 bits

    def words(self, key: RandomKey) -> tuple[Tensor, Tensor]:
        """Where the two words of ``key`` lie, int32.

        Raises:
            RuntimeError: The key is of another step than the table, has another seed than those before, or there is no
                more room; it is new while the table is fixed.
        """
        if key.step != self._step or (self._known and key.seed != self._seed):
            raise RuntimeError(f"{key} while keys of step {self._step} and seed {self._seed} are in memory")
        known = self._known.get((key.seed, key.stream))
        if known is not None:
            return known
        place = len(self._known)
        if self._is_fixed or place == self._num_keys:
            why = "is new in a step that is being recorded" if self._is_fixed else f"is the {place + 1}th of a step"
            raise RuntimeError(f"{key} {why}: there is no place for it; train with cuda_graphs off")
        self._seed = key.seed
        stream = key.stream - (1 << 32) if key.stream >= 1 << 31 else key.stream  # as int64 has it
        self._streams[place] = stream << 32
        for plane, word in enumerate(derived_key(key)):
            self._places[plane, place, 0] = word - (1 << 32) if word >= 1 << 31 else word
        self._known[key.seed, key.stream] = found = (self._places[0, place, :1], self._places[1, place, :1])
        return found
