"""Random changes of training samples that belong to the sample and the epoch, so that a split does not change them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nugnn.kernels.handlers import DropoutHandler, RandomDrawHandler
from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.philox import RandomKey, random_words

_DRAW_BY_KEY = (
    "Draw with key.uniform(ids, num, purpose) in augment(x, ids, key): numbers in [0, 1) that belong to the sample and "
    "the epoch, on any number of workers."
)


@dataclass(frozen=True)
class AugmentationKey:
    """What random changes are keyed by beside the sample.

    Args:
        seed: Of the training.
        epoch: From 0.
    """

    seed: int
    epoch: int

    def uniform(self, ids: Tensor, num: int, purpose: str) -> Tensor:
        """``(n, num)`` float64 in [0, 1): the same for a sample on any rank, others in each epoch.

        Args:
            ids: ``(n,)`` int64 numbers of the samples.
            num: Numbers for each.
            purpose: Draws for other purposes are independent.
        """
        key = RandomKey(self.seed, self.epoch, zlib.crc32(f"augmentation/{purpose}".encode()))
        return random_words(key, ids, num).double() / 2**32


Augmentation = Callable[[Any, Tensor, AugmentationKey], Any]
"""``augment(x, ids, key)``: the ``x`` of a batch, samples on axis 0, changed; randomness from ``key.uniform`` alone."""


def is_own(augment: Augmentation | None) -> bool:
    """Whether it is one of this module, of which it is known that it changes each sample by itself."""
    return type(augment).__module__ == __name__


def augmented(augment: Augmentation, x: Any, ids: Tensor, key: AugmentationKey, *, is_split: bool) -> Any:
    """``augment(x, ids, key)``; with ``is_split``, whatever draws from a generator of torch inside is refused.

    Raises:
        NotImplementedError, ValueError: It draws: ranks would draw other numbers than one process, each of its own.
    """
    if not is_split or is_own(augment):
        return augment(x, ids, key)
    dropout = DropoutHandler(is_split=True, instead=_DRAW_BY_KEY)
    draws = RandomDrawHandler(is_split=True, refuses_all=True, instead=_DRAW_BY_KEY)
    interceptor = Interceptor((dropout, draws))
    with interceptor.step(key.epoch), interceptor.scope("augment"):
        return augment(x, ids, key)


@dataclass(frozen=True)
class ShiftAndFlip:
    """Images moved by whole pixels, zeros coming in, and mirrored left to right half of the time.

    Args:
        shift: Pixels at most, up, down, left and right; each number of them is as likely as any other.
        flip: Whether to mirror; not for digits and letters.

    Raises:
        ValueError: ``shift`` is negative, or there is nothing to do.
    """

    shift: int = 2
    flip: bool = False

    def __post_init__(self) -> None:
        if self.shift < 0 or (self.shift == 0 and not self.flip):
            raise ValueError(f"a shift of {self.shift} pixels{'' if self.flip else ' and no flip'}: give 1 or more")

    def __call__(self, x: Tensor, ids: Tensor, key: AugmentationKey) -> Tensor:
        """``(n, channels, height, width)`` like ``x``, which is not modified.

        Raises:
            ValueError: ``x`` holds no images.
        """
        if x.dim() != 4:
            raise ValueError(f"shift and flip change images (n, channels, height, width), not {tuple(x.shape)}")
        n, _, height, width = x.shape
        draws = key.uniform(ids, 3, "shift and flip")
        moved = (draws[:, :2] * (2 * self.shift + 1)).long()  # rows and columns, 0 for most to the right and down
        down, across = (torch.arange(size, device=x.device) for size in (height, width))
        rows = moved[:, :1] + down
        columns = moved[:, 1:2] + across
        if self.flip:
            columns = torch.where(draws[:, 2:] < 0.5, columns, moved[:, 1:2] + (width - 1 - across))
        padded = torch.nn.functional.pad(x, [self.shift] * 4)
        samples = torch.arange(n, device=x.device)[:, None, None]
        return padded[samples, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
