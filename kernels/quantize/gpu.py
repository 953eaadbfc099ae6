"""Quantized rows in Triton: rows that fit a tile are read once, and a thread makes or reads whole words.

What is done for each value is kept short, since that bounds the speed: values are not searched for NaN, which smallest
and largest pass on, and masked only where rows need it.

Multiplications and additions are not fused, and the division is the rounded one, so that the bytes are those of
:mod:`nugnn.kernels.quantize.cpu`. Import this module only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.philox import DerivedKey
from nugnn.kernels.quantize.gpu_levels import draws_of, level_of, scale_and_inverse, step_and_back, value_of
from nugnn.kernels.quantize.gpu_words import (
    load_strings,
    load_word,
    store_strings,
    store_words,
    strings_of_group,
    values_of_string,
)
from nugnn.kernels.quantize.reference import OVERFLOW, row_bytes

_OVERFLOW = tl.constexpr(OVERFLOW)
_TILE, _WARPS = 1024, 1
"""Values in a program's tile, and its warps. Of 512 to 4,096 values and 1 to 8 warps nearly the fastest for 8, 4 and 2
bits in rows of 1,024 float32 (H200)."""
_RANDOM_TILE, _RANDOM_WARPS = 2048, 2
"""The same for stochastic rounding, which is bound by the instructions of its random words."""
_UNITS = {4: torch.uint32, 2: torch.uint16, 1: torch.uint8}


@triton.jit
def _load_values(x, row, in_row, string, lane, num_columns: tl.constexpr, is_whole: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(rows, strings, lanes)`` float32; a row's first value behind its last one, unless rows are whole tiles."""
    lanes: tl.constexpr = lane.shape[0]
    column = string[:, None] * lanes + lane[None, :]
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
def _strings_of(  # type: ignore[no-untyped-def]
    value, first, lane, ids, low, high, k0, k1,
    num_columns: tl.constexpr, bits: tl.constexpr, is_stochastic: tl.constexpr,
):  # fmt: skip
    """Levels of ``value (rows, strings, lanes)``, the first of which is in the row's string ``first``, as strings."""
    lanes: tl.constexpr = lane.shape[0]
    most: tl.constexpr = (1 << bits) - 1
    is_number = low == low  # noqa: PLR0124
    scale, inverse = scale_and_inverse(low, high, most)
    string = first + tl.arange(0, value.shape[1])
    draws = string
    if is_stochastic:
        draws = draws_of(ids, first * lanes // 8, value.shape[1] * lanes // 8, k0, k1)
        draws = tl.reshape(draws, value.shape)
    level = level_of(value, low, scale, inverse, draws, most, is_stochastic)
    if num_columns * bits % 8 != 0:  # the last byte of a row ends in zeros
        column = string[:, None] * lanes + lane[None, :]
        level = tl.where((column < num_columns)[None, :, :], level, 0)
    return tl.where(is_number[:, None], tl.sum(level << (lane * bits)[None, None, :], 2), 0)


@triton.jit(do_not_specialize=["num_rows", "k0", "k1"])
def _encode_kernel(  # type: ignore[no-untyped-def]
    wire, x, row_ids, num_rows, k0, k1, num_columns: tl.constexpr, units_of_row: tl.constexpr, parts: tl.constexpr,
    bits: tl.constexpr, lanes: tl.constexpr, in_group: tl.constexpr, is_stochastic: tl.constexpr,
    block_rows: tl.constexpr, block_strings: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    in_row = row < num_rows
    num_strings: tl.constexpr = (num_columns + lanes - 1) // lanes
    is_whole: tl.constexpr = num_columns % (block_strings * lanes) == 0
    lane = tl.arange(0, lanes)
    string = tl.arange(0, block_strings)
    ids = row
    if is_stochastic:
        ids = tl.load(row_ids + row, mask=in_row, other=0)
    value = _load_values(x, row, in_row, string, lane, num_columns, is_whole)
    low = _smallest(value)
    high = _largest(value)
    if num_strings > block_strings:
        for first in range(block_strings, num_strings, block_strings):
            more = _load_values(x, row, in_row, first + string, lane, num_columns, is_whole)
            low = _smaller(low, _smallest(more))
            high = _larger(high, _largest(more))
    is_number = (low > -_OVERFLOW) & (high < _OVERFLOW)
    low = tl.where(is_number, low + 0.0, float("nan"))  # -0 becomes 0
    high = tl.where(is_number, high + 0.0, float("nan"))
    ends = tl.join(low, high)
    store_words(wire, row[:, None], in_row[:, None], tl.arange(0, 2)[None, :], ends, units_of_row, parts)
    strings = _strings_of(value, 0, lane, ids, low, high, k0, k1, num_columns, bits, is_stochastic)
    store_strings(wire, row, in_row, 0, strings, bits, lanes, in_group, units_of_row, parts)
    if num_strings > block_strings:
        for first in range(block_strings, num_strings, block_strings):
            more = _load_values(x, row, in_row, first + string, lane, num_columns, is_whole)
            strings = _strings_of(more, first, lane, ids, low, high, k0, k1, num_columns, bits, is_stochastic)
            store_strings(wire, row, in_row, first, strings, bits, lanes, in_group, units_of_row, parts)


@triton.jit(do_not_specialize=["num_rows"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    out, wire, num_rows, num_columns: tl.constexpr, units_of_row: tl.constexpr, parts: tl.constexpr,
    bits: tl.constexpr, lanes: tl.constexpr, block_rows: tl.constexpr, block_strings: tl.constexpr,
):  # fmt: skip
    most: tl.constexpr = (1 << bits) - 1
    num_strings: tl.constexpr = (num_columns + lanes - 1) // lanes
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    in_row = row < num_rows
    lane = tl.arange(0, lanes)
    low = load_word(wire, row, in_row, 0, units_of_row, parts).to(tl.float32, bitcast=True)
    high = load_word(wire, row, in_row, 1, units_of_row, parts).to(tl.float32, bitcast=True)
    step, back = step_and_back(low, high, most)
    for first in range(0, num_strings, block_strings):
        string = first + tl.arange(0, block_strings)
        strings = load_strings(wire, row, in_row, string, num_strings, lanes * bits, units_of_row, parts)
        level = (strings[:, :, None] >> (lane * bits)[None, None, :]) & most
        value = value_of(level, low[:, None, None], high[:, None, None], step[:, None, None], back[:, None, None], most)
        column = string[:, None] * lanes + lane[None, :]
        inside = in_row[:, None, None] & (column < num_columns)[None, :, :]
        to = out + (row[:, None, None] * num_columns + column[None, :, :])
        tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def encode(x: Tensor, bits: int, key: DerivedKey | None, row_ids: Tensor | None) -> Tensor:
    """:func:`nugnn.kernels.quantize.encode_rows` of contiguous ``x``, nothing empty; ``key`` is the derived one."""
    num_rows, num_columns = x.shape
    wire = torch.empty(num_rows, row_bytes(num_columns, bits), dtype=torch.uint8, device=x.device)
    rows, how = _launch(wire, num_columns, bits, is_random=key is not None)
    k0, k1 = key or (0, 0)
    _encode_kernel[(triton.cdiv(num_rows, rows),)](
        _in_units(wire), x, row_ids, num_rows, k0, k1, in_group=strings_of_group(bits),
        is_stochastic=key is not None, **how,
    )  # fmt: skip
    return wire


def decode(out: Tensor, wire: Tensor, num_columns: int, bits: int) -> None:
    """Fill contiguous ``out`` with :func:`nugnn.kernels.quantize.decode_rows` of contiguous ``wire``, nothing empty."""
    rows, how = _launch(wire, num_columns, bits)
    _decode_kernel[(triton.cdiv(len(wire), rows),)](out, _in_units(wire), len(wire), **how)


def bytes_of_unit(wire: Tensor) -> int:
    """Of the largest unit, 4, 2 or 1, in which rows of contiguous ``wire`` are read and written."""
    places = wire.shape[1], wire.data_ptr(), wire.storage_offset()
    return next(size for size in _UNITS if all(place % size == 0 for place in places))


def _in_units(wire: Tensor) -> Tensor:
    return wire.view(-1).view(_UNITS[bytes_of_unit(wire)])


def _launch(wire: Tensor, num_columns: int, bits: int, *, is_random: bool = False) -> tuple[int, dict[str, int]]:
    """Rows of a program's tile, and what every kernel is told."""
    assert wire.shape[1] == row_bytes(num_columns, bits)
    tile, warps = (_RANDOM_TILE, _RANDOM_WARPS) if is_random else (_TILE, _WARPS)
    lanes, unit = values_of_string(bits), bytes_of_unit(wire)
    strings = min(tile // lanes, triton.next_power_of_2(triton.cdiv(num_columns, lanes)))
    strings = max(strings, strings_of_group(bits), 8 // lanes)  # eight values, a block of random words
    rows = max(1, tile // (strings * lanes))
    how = {"num_columns": num_columns, "units_of_row": wire.shape[1] // unit, "parts": 4 // unit, "bits": bits}
    how |= {"lanes": lanes, "block_rows": rows, "block_strings": strings, "num_warps": warps}
    return rows, how | {"enable_fp_fusion": False}
