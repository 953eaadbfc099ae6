"""Quantized rows in Triton whose bytes come in whole words: 1, 2, 4 or 8 bits a value, 4 bytes the unit of a row.

A thread makes or reads a word of 32 bits at once, where :mod:`nugnn.kernels.quantize.gpu` does so byte by byte; the
bytes are the same. Rows that fit a tile are read once. What is done for each value is kept short, since that bounds the
speed: values are not searched for NaN, which smallest and largest pass on, and masked only where rows need it. Import
this module only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.philox import DerivedKey
from nugnn.kernels.quantize.gpu_levels import draws_of, level_of, scale_and_inverse, step_and_back, value_of
from nugnn.kernels.quantize.reference import OVERFLOW, row_bytes

_OVERFLOW = tl.constexpr(OVERFLOW)
_TILE, _WARPS = 1024, 1
"""Values in a program's tile, and its warps. Of 512 to 4,096 values and 1 to 8 warps nearly the fastest for 8, 4 and 2
bits in rows of 1,024 float32 (H200)."""
_RANDOM_TILE, _RANDOM_WARPS = 2048, 2
"""The same for stochastic rounding, which is bound by the instructions of its random words."""


def takes(wire: Tensor, bits: int) -> bool:
    """Whether ``wire (n, row_bytes)`` is one that this module makes and reads."""
    return 8 % bits == 0 and wire.shape[1] % 4 == 0 and wire.data_ptr() % 4 == 0 and wire.storage_offset() % 4 == 0


@triton.jit
def _load_values(x, row, in_row, word, lane, num_columns: tl.constexpr, is_whole: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(rows, words, lanes)`` float32; a row's first value behind its last one, unless rows are whole tiles."""
    lanes: tl.constexpr = lane.shape[0]
    column = word[:, None] * lanes + lane[None, :]
    at = x + (row[:, None, None] * num_columns + column[None, :, :])
    if is_whole:
        value = tl.load(at, mask=in_row[:, None, None], other=0)
    else:
        first = tl.load(x + row * num_columns, mask=in_row, other=0)
        inside = in_row[:, None, None] & (column < num_columns)[None, :, :]
        value = tl.where(inside, tl.load(at, mask=inside, other=0), first[:, None, None])
    return value.to(tl.float32)


@triton.jit
def _smaller(a, b):  # type: ignore[no-untyped-def]
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smallest(value):  # type: ignore[no-untyped-def]
    return tl.reduce(tl.reduce(value, 2, _smaller), 1, _smaller)


@triton.jit
def _largest(value):  # type: ignore[no-untyped-def]
    return tl.reduce(tl.reduce(value, 2, _larger), 1, _larger)


@triton.jit
def _store_words(  # type: ignore[no-untyped-def]
    words, value, row, in_row, first, lane, ids, low, high, k0, k1,
    num_columns: tl.constexpr, words_of_row: tl.constexpr, bits: tl.constexpr, is_stochastic: tl.constexpr,
):  # fmt: skip
    lanes: tl.constexpr = 32 // bits
    most: tl.constexpr = (1 << bits) - 1
    is_number = low == low  # noqa: PLR0124
    scale, inverse = scale_and_inverse(low, high, most)
    word = first + tl.arange(0, value.shape[1])
    draws = word
    if is_stochastic:
        draws = draws_of(ids, first * lanes // 8, value.shape[1] * lanes // 8, k0, k1)
        draws = tl.reshape(draws, value.shape)
    level = level_of(value, low, scale, inverse, draws, most, is_stochastic)
    if num_columns % lanes != 0:
        column = word[:, None] * lanes + lane[None, :]
        level = tl.where((column < num_columns)[None, :, :], level, 0)
    string = tl.where(is_number[:, None], tl.sum(level << (lane * bits)[None, None, :], 2), 0)
    kept = in_row[:, None] & (word < words_of_row - 2)[None, :]
    tl.store(words + (row[:, None] * words_of_row + 2 + word[None, :]), string, mask=kept)


@triton.jit(do_not_specialize=["num_rows", "k0", "k1"])
def _encode_words_kernel(  # type: ignore[no-untyped-def]
    words, x, row_ids, num_rows, k0, k1, num_columns: tl.constexpr, words_of_row: tl.constexpr, bits: tl.constexpr,
    is_stochastic: tl.constexpr, block_rows: tl.constexpr, block_words: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    in_row = row < num_rows
    lanes: tl.constexpr = 32 // bits
    is_whole: tl.constexpr = num_columns % (block_words * lanes) == 0
    lane = tl.arange(0, lanes)
    word = tl.arange(0, block_words)
    ids = row
    if is_stochastic:
        ids = tl.load(row_ids + row, mask=in_row, other=0)
    value = _load_values(x, row, in_row, word, lane, num_columns, is_whole)
    low = _smallest(value)
    high = _largest(value)
    if words_of_row - 2 > block_words:
        for first in range(block_words, words_of_row - 2, block_words):
            more = _load_values(x, row, in_row, first + word, lane, num_columns, is_whole)
            low = _smaller(low, _smallest(more))
            high = _larger(high, _largest(more))
    is_number = (low > -_OVERFLOW) & (high < _OVERFLOW)
    low = tl.where(is_number, low + 0.0, float("nan"))  # -0 becomes 0
    high = tl.where(is_number, high + 0.0, float("nan"))
    tl.store(words + row * words_of_row, low.to(tl.int32, bitcast=True), mask=in_row)
    tl.store(words + row * words_of_row + 1, high.to(tl.int32, bitcast=True), mask=in_row)
    _store_words(
        words, value, row, in_row, 0, lane, ids, low, high, k0, k1, num_columns, words_of_row, bits, is_stochastic
    )
    if words_of_row - 2 > block_words:
        for first in range(block_words, words_of_row - 2, block_words):
            more = _load_values(x, row, in_row, first + word, lane, num_columns, is_whole)
            _store_words(
                words, more, row, in_row, first, lane, ids, low, high, k0, k1, num_columns, words_of_row, bits,
                is_stochastic,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _decode_words_kernel(  # type: ignore[no-untyped-def]
    out, words, num_rows, num_columns: tl.constexpr, words_of_row: tl.constexpr, bits: tl.constexpr,
    block_rows: tl.constexpr, block_words: tl.constexpr,
):  # fmt: skip
    most: tl.constexpr = (1 << bits) - 1
    lanes: tl.constexpr = 32 // bits
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    in_row = row < num_rows
    lane = tl.arange(0, lanes)
    low = tl.load(words + row * words_of_row, mask=in_row, other=0).to(tl.float32, bitcast=True)
    high = tl.load(words + row * words_of_row + 1, mask=in_row, other=0).to(tl.float32, bitcast=True)
    step, back = step_and_back(low, high, most)
    for first in range(0, words_of_row - 2, block_words):
        word = first + tl.arange(0, block_words)
        there = in_row[:, None] & (word < words_of_row - 2)[None, :]
        string = tl.load(words + (row[:, None] * words_of_row + 2 + word[None, :]), mask=there, other=0)
        level = (string[:, :, None] >> (lane * bits)[None, None, :]) & most
        value = value_of(level, low[:, None, None], high[:, None, None], step[:, None, None], back[:, None, None], most)
        column = word[:, None] * lanes + lane[None, :]
        inside = in_row[:, None, None] & (column < num_columns)[None, :, :]
        to = out + (row[:, None, None] * num_columns + column[None, :, :])
        tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def encode(wire: Tensor, x: Tensor, bits: int, key: DerivedKey | None, row_ids: Tensor | None) -> None:
    """Fill ``wire``, which `takes` takes, with :func:`nugnn.kernels.quantize.encode_rows` of contiguous ``x``."""
    rows, words, how = _launch(wire, x.shape[1], bits, is_random=key is not None)
    k0, k1 = key or (0, 0)
    _encode_words_kernel[(triton.cdiv(len(x), rows),)](
        wire.view(torch.int32), x, row_ids, len(x), k0, k1, is_stochastic=key is not None, block_rows=rows,
        block_words=words, **how,
    )  # fmt: skip


def decode(out: Tensor, wire: Tensor, num_columns: int, bits: int) -> None:
    """Fill ``out`` with :func:`nugnn.kernels.quantize.decode_rows` of contiguous ``wire`` that `takes` takes."""
    rows, words, how = _launch(wire, num_columns, bits)
    _decode_words_kernel[(triton.cdiv(len(wire), rows),)](
        out, wire.view(torch.int32), len(wire), block_rows=rows, block_words=words, **how
    )


def _launch(wire: Tensor, num_columns: int, bits: int, *, is_random: bool = False) -> tuple[int, int, dict[str, int]]:
    """Rows and words of a program's tile, and what every kernel is told."""
    assert wire.shape[1] == row_bytes(num_columns, bits)
    words_of_row = wire.shape[1] // 4
    tile, warps = (_RANDOM_TILE, _RANDOM_WARPS) if is_random else (_TILE, _WARPS)
    words = min(tile * bits // 32, triton.next_power_of_2(words_of_row - 2))
    words = max(words, bits // 4)  # eight values, a block of random words
    rows = max(1, tile // (words * (32 // bits)))
    how = {"num_columns": num_columns, "words_of_row": words_of_row, "bits": bits, "num_warps": warps}
    return rows, words, how | {"enable_fp_fusion": False}
