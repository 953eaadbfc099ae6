"""Quantized rows in Triton: several rows a program, groups of eight values that become ``bits`` whole bytes.

Rows that `nugnn.kernels.quantize.gpu_words` takes are its own.

Multiplications and additions are not fused, and the division is the rounded one, so that the bytes are those of
:mod:`nugnn.kernels.quantize.cpu`. Import this module only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.philox import DerivedKey
from nugnn.kernels.quantize import gpu_words
from nugnn.kernels.quantize.gpu_levels import draws_of, level_of, scale_and_inverse, step_and_back, value_of
from nugnn.kernels.quantize.reference import OVERFLOW, ends_of, row_bytes

_OVERFLOW = tl.constexpr(OVERFLOW)
_MOST_GROUPS = 128
_TILE = 1024
"""Values in a program's tile."""


@triton.jit
def _ends_of(x, row, in_row, num_columns: tl.constexpr, block_rows: tl.constexpr, block_groups: tl.constexpr):  # type: ignore[no-untyped-def]
    """Smallest and largest value of each row, NaN where one is out of range; both are numbers at first."""
    low = tl.full([block_rows], float("inf"), tl.float32)
    high = tl.full([block_rows], float("-inf"), tl.float32)
    num_out = tl.zeros([block_rows], tl.int32)
    for first in range(0, num_columns, block_groups * 8):
        column = first + tl.arange(0, block_groups * 8)
        inside = in_row[:, None] & (column < num_columns)[None, :]
        value = tl.load(x + row[:, None] * num_columns + column[None, :], mask=inside, other=0).to(tl.float32)
        is_in = tl.abs(value) < _OVERFLOW
        num_out += tl.sum((inside & (is_in == 0)).to(tl.int32), 1)
        low = tl.minimum(low, tl.min(tl.where(inside & is_in, value, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(inside & is_in, value, float("-inf")), 1))
    low = tl.where(num_out == 0, low + 0.0, float("nan"))
    high = tl.where(num_out == 0, high + 0.0, float("nan"))
    return low, high


@triton.jit(do_not_specialize=["num_rows", "k0", "k1"])
def _encode_kernel(  # type: ignore[no-untyped-def]
    ends, wire, x, row_ids, num_rows, k0, k1, num_columns: tl.constexpr, bytes_of_row: tl.constexpr,
    bits: tl.constexpr, is_stochastic: tl.constexpr, block_rows: tl.constexpr, block_groups: tl.constexpr,
):  # fmt: skip
    most: tl.constexpr = (1 << bits) - 1
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    in_row = row < num_rows
    low, high = _ends_of(x, row, in_row, num_columns, block_rows, block_groups)
    is_number = low == low  # noqa: PLR0124
    tl.store(ends + 2 * row, low, mask=in_row)
    tl.store(ends + 2 * row + 1, high, mask=in_row)
    scale, inverse = scale_and_inverse(low, high, most)
    lane = tl.arange(0, 8)
    if is_stochastic:
        ids = tl.load(row_ids + row, mask=in_row, other=0)
    for first in range(0, num_columns, block_groups * 8):
        group = first // 8 + tl.arange(0, block_groups)
        column = group[:, None] * 8 + lane[None, :]
        inside = in_row[:, None, None] & (column < num_columns)[None, :, :]
        at = row[:, None, None] * num_columns + column[None, :, :]
        value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        draws = group
        if is_stochastic:
            draws = tl.reshape(draws_of(ids, first // 8, block_groups, k0, k1), value.shape)
        is_valid = inside & is_number[:, None, None]
        level = level_of(value, low, scale, inverse, draws, most, is_stochastic)
        level = tl.where(is_valid, level, 0).to(tl.int64)
        string = tl.sum(level << (lane * bits).to(tl.int64)[None, None, :], 2)
        for byte in tl.static_range(bits):
            place_of_byte = group * bits + byte
            kept = in_row[:, None] & (place_of_byte < bytes_of_row - 8)[None, :]
            to = wire + (row * bytes_of_row)[:, None] + 8 + place_of_byte[None, :]
            tl.store(to, ((string >> (8 * byte)) & 255).to(tl.uint8), mask=kept)


@triton.jit(do_not_specialize=["num_rows", "first_column"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    out, ends, wire, num_rows, first_column, num_columns: tl.constexpr, bytes_of_row: tl.constexpr, bits: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    most: tl.constexpr = (1 << bits) - 1
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    in_row = row < num_rows
    # Not known to be 0: of columns that fit 16 bits the LLVM of Triton 3.6 makes pairs, and bits of a neighbour that
    # nothing has set become a part of an address (`tests/kernels/machine_code.py`).
    column_0 = first_column + tl.arange(0, block_columns)
    low = tl.load(ends + 2 * row, mask=in_row, other=0)
    high = tl.load(ends + 2 * row + 1, mask=in_row, other=0)
    step, back = step_and_back(low, high, most)
    for first in range(0, num_columns, block_columns):
        column = first + column_0
        inside = in_row[:, None] & (column < num_columns)[None, :]
        bit = column * bits
        at = wire + (row * bytes_of_row)[:, None] + 8 + (bit // 8)[None, :]
        word = tl.load(at, mask=inside, other=0).to(tl.int32)
        reaches = inside & (bit % 8 + bits > 8)[None, :]
        word += tl.load(at + 1, mask=reaches, other=0).to(tl.int32) << 8
        level = (word >> (bit % 8)[None, :]) & most
        value = value_of(level, low[:, None], high[:, None], step[:, None], back[:, None], most)
        tl.store(out + row[:, None] * num_columns + column[None, :], value.to(out.dtype.element_ty), mask=inside)


def encode(x: Tensor, bits: int, key: DerivedKey | None, row_ids: Tensor | None) -> Tensor:
    """:func:`nugnn.kernels.quantize.encode_rows` of contiguous ``x``, nothing empty; ``key`` is the derived one."""
    num_rows, num_columns = x.shape
    wire = torch.empty(num_rows, row_bytes(num_columns, bits), dtype=torch.uint8, device=x.device)
    if gpu_words.takes(wire, bits):
        gpu_words.encode(wire, x, bits, key, row_ids)
        return wire
    ends = torch.empty(num_rows, 2, device=x.device)
    groups = min(_MOST_GROUPS, triton.next_power_of_2(triton.cdiv(num_columns, 8)))
    rows = max(1, _TILE // (8 * groups))
    k0, k1 = key or (0, 0)
    _encode_kernel[(triton.cdiv(num_rows, rows),)](
        ends, wire, x, row_ids, num_rows, k0, k1, num_columns=num_columns, bytes_of_row=wire.shape[1], bits=bits,
        is_stochastic=key is not None, block_rows=rows, block_groups=groups, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    wire[:, :8] = ends.view(torch.uint8)
    return wire


def decode(out: Tensor, wire: Tensor, num_columns: int, bits: int) -> None:
    """Fill contiguous ``out`` with :func:`nugnn.kernels.quantize.decode_rows` of contiguous ``wire``, nothing empty."""
    if gpu_words.takes(wire, bits):
        gpu_words.decode(out, wire, num_columns, bits)
        return
    num_rows, bytes_of_row = wire.shape
    columns = min(_TILE, triton.next_power_of_2(num_columns))
    rows = _TILE // columns
    _decode_kernel[(triton.cdiv(num_rows, rows),)](
        out, ends_of(wire), wire, num_rows, 0, num_columns=num_columns, bytes_of_row=bytes_of_row, bits=bits,
        block_rows=rows, block_columns=columns, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
