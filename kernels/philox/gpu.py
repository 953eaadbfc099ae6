"""Philox4x32-10 in Triton, the twin of the numba kernel: one program makes a tile of rows x blocks.

Integer arithmetic only, so the words are bit-equal on every device. Offsets into the output are 64-bit: 524,288 rows of
4,096 columns already pass ``2**31``. Import this module only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.philox import DerivedKey
from nugnn.kernels.philox.reference import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1

_BLOCK_ROWS = 32
_BLOCK_BLOCKS = 16


@triton.jit
def philox_tile(  # type: ignore[no-untyped-def]
    row_ids, blocks, k0, k1,
    m0: tl.constexpr, m1: tl.constexpr, w0: tl.constexpr, w1: tl.constexpr, rounds: tl.constexpr,
):  # fmt: skip
    """Four uint32 tensors: the words of each (row id, block); ``row_ids`` int64 and ``blocks`` broadcast."""
    c0 = (row_ids & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((row_ids >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = blocks.to(tl.uint32)
    c0, c2 = tl.broadcast(c0, c2)
    c1, _ = tl.broadcast(c1, c2)
    c3 = tl.zeros_like(c2)
    for _ in tl.static_range(rounds):
        product_0 = c0.to(tl.uint64) * m0
        product_1 = c2.to(tl.uint64) * m1
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product_1.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
        k0 = (k0 + w0).to(tl.uint32)
        k1 = (k1 + w1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def key_word(word):  # type: ignore[no-untyped-def]
    """A word of a derived key as uint32, of an argument that is the word (int32 or int64) or says where it lies."""
    if word.dtype.is_ptr():
        return tl.load(word).to(tl.uint32)
    else:
        return word.to(tl.uint32)


# A key word of 1 would otherwise become a compile-time constant, which has no type to convert.
@triton.jit(do_not_specialize=["k0", "k1"])
def _random_words_kernel(  # type: ignore[no-untyped-def]
    out, row_ids, num_rows, num_columns, k0, k1,
    m0: tl.constexpr, m1: tl.constexpr, w0: tl.constexpr, w1: tl.constexpr, rounds: tl.constexpr,
    block_rows: tl.constexpr, block_blocks: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    blocks = tl.program_id(1).to(tl.int64) * block_blocks + tl.arange(0, block_blocks)
    ids = tl.load(row_ids + rows, mask=rows < num_rows, other=0)
    c0, c1, c2, c3 = philox_tile(ids[:, None], blocks[None, :], key_word(k0), key_word(k1), m0, m1, w0, w1, rounds)
    start = element_offset(rows[:, None], 4 * blocks[None, :], num_columns)
    in_rows = rows[:, None] < num_rows
    column = 4 * blocks[None, :]
    tl.store(out + start, c0.to(tl.int64), mask=in_rows & (column < num_columns))
    tl.store(out + start + 1, c1.to(tl.int64), mask=in_rows & (column + 1 < num_columns))
    tl.store(out + start + 2, c2.to(tl.int64), mask=in_rows & (column + 2 < num_columns))
    tl.store(out + start + 3, c3.to(tl.int64), mask=in_rows & (column + 3 < num_columns))


@triton.jit
def element_offset(row, column, num_columns):  # type: ignore[no-untyped-def]
    """Position of an element in a contiguous matrix, in 64 bits whatever the types of the arguments."""
    return row.to(tl.int64) * num_columns + column


@triton.jit(do_not_specialize=["row", "column", "num_columns"])
def _probe_offset_kernel(out, row, column, num_columns):  # type: ignore[no-untyped-def]
    tl.store(out, element_offset(row, column, num_columns))


def random_words_triton(key: DerivedKey, row_ids: Tensor, num_columns: int) -> Tensor:
    """As :func:`nugnn.kernels.philox.reference.random_words_reference`, on the device of ``row_ids``.

    Args:
        key: Derived key.
        row_ids: ``(n,)`` int64, CUDA (or CPU in Triton's interpreter).
        num_columns: C.

    Returns:
        ``(n, C)`` int64 with values in ``[0, 2**32)``.
    """
    num_rows = len(row_ids)
    out = torch.empty(num_rows, num_columns, dtype=torch.int64, device=row_ids.device)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(num_rows, _BLOCK_ROWS), triton.cdiv(triton.cdiv(num_columns, 4), _BLOCK_BLOCKS))
    _random_words_kernel[grid](
        out, row_ids.contiguous(), num_rows, num_columns, key[0], key[1],
        MULTIPLIER_0, MULTIPLIER_1, WEYL_0, WEYL_1, ROUNDS, _BLOCK_ROWS, _BLOCK_BLOCKS,
    )  # fmt: skip
    return out


def probe_offset(row: int, column: int, num_columns: int, device: str) -> int:
    """What :func:`element_offset` gives on the device: lets a test check 64-bit offsets without the memory."""
    out = torch.zeros(1, dtype=torch.int64, device=device)
    _probe_offset_kernel[(1,)](out, row, column, num_columns)
    return int(out.item())
