"""Philox4x32-10 in plain PyTorch: what "the random word of a row and column" means.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Written from the paper; checked against
the known answers its authors publish.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10
MASK_32 = 0xFFFFFFFF


def philox_block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four output words of one counter, on Python integers.

    >>> [hex(word) for word in philox_block((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0 = MULTIPLIER_0 * c0
        product_1 = MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & MASK_32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & MASK_32,
        )
        k0, k1 = (k0 + WEYL_0) & MASK_32, (k1 + WEYL_1) & MASK_32
    return c0, c1, c2, c3


def block_words_reference(key: tuple[int, int], row_ids: Tensor, blocks: Tensor) -> Tensor:
    """The four words of each (row, block); any device.

    Args:
        key: Derived key, two 32-bit words.
        row_ids: int64 of any shape.
        blocks: int64 of a shape that broadcasts with ``row_ids``, in ``[0, 2**32)``.

    Returns:
        int64 of the broadcast shape with a trailing dimension of 4, values in ``[0, 2**32)``.
    """
    c0, c1, c2 = torch.broadcast_tensors(row_ids & MASK_32, (row_ids >> 32) & MASK_32, blocks)
    c3 = torch.zeros_like(c2)
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 products wrap, but their low 64 bits are those of the unsigned product; the mask undoes the sign of >>.
        product_0 = c0 * MULTIPLIER_0
        product_1 = c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & MASK_32) ^ c1 ^ k0,
            product_1 & MASK_32,
            ((product_0 >> 32) & MASK_32) ^ c3 ^ k1,
            product_0 & MASK_32,
        )
        k0, k1 = (k0 + WEYL_0) & MASK_32, (k1 + WEYL_1) & MASK_32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def random_words_reference(key: tuple[int, int], row_ids: Tensor, num_columns: int) -> Tensor:
    """Words of rows ``row_ids`` under a derived key; any device.

    Args:
        key: Derived key, two 32-bit words.
        row_ids: ``(n,)`` int64.
        num_columns: C.

    Returns:
        ``(n, C)`` int64 with values in ``[0, 2**32)``.
    """
    blocks = torch.arange(-(-num_columns // 4), device=row_ids.device)
    words = block_words_reference(key, row_ids[:, None], blocks)
    return words.reshape(len(row_ids), 4 * len(blocks))[:, :num_columns].contiguous()
