"""Row scale, bias, layer norm, activation and dropout of a tile of rows in registers, in Triton.

One pass forward and one backward, so the time is that of reading and writing the values once. Arithmetic is in float32
(float64 for float64), rounded once at the end. Backward needs of a rectifier and of dropout one bit per value, packed
by eight; of layer norm and elu the input. Column sums (gradients of bias, norm weight and norm bias) are made in two
stages over a number of partial sums that depends on the shape alone, so they are equal bit for bit from run to run.
Multiply and add stay two roundings (``enable_fp_fusion=False``): without layer norm and elu, float32 results then have
the bits of the separate steps. Import this module only where Triton is installed.

Dropout alone is the same kernel with everything else left out; its mask is made again in backward.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.operator import unseen
from nugnn.kernels.padded import empty_like_rows, empty_rows, with_padding
from nugnn.kernels.philox import DerivedKey, Word
from nugnn.kernels.philox.gpu import key_word, philox_tile
from nugnn.kernels.philox.reference import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1

_M0, _M1 = tl.constexpr(MULTIPLIER_0), tl.constexpr(MULTIPLIER_1)
_W0, _W1 = tl.constexpr(WEYL_0), tl.constexpr(WEYL_1)
_ROUNDS = tl.constexpr(ROUNDS)

_TILE_VALUES = 2048
_MAX_PARTIAL_SUMS = 2048
MAX_NORM_COLUMNS = 8192
"""Widest row that a program normalises: it holds all of it."""
_SCALARS = ("first_id", "num_rows", "rows_per_program", "threshold", "scale_bits", "k0", "k1")
# Their values change from call to call: a kernel of its own for each would be compiled in the middle of training.


@dataclass(frozen=True, slots=True)
class Mask:
    """Dropout as the kernels take it.

    Args:
        threshold: A value is kept iff its word is at least this; below ``2**32``.
        scale: Factor of kept values.
        key: Derived key.
        row_ids: ``(n,)`` int64, or the range of ids of rows in order.
    """

    threshold: int
    scale: float
    key: DerivedKey
    row_ids: Tensor | range


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer norm over a row: ``(C,)`` weight and bias, each may be None."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class Kept:
    """What backward needs: planes of bits, ``(planes, n, ceil(C / 8))`` uint8, and ``(n, 2)`` mean and 1 / sigma."""

    bits: Tensor | None
    stats: Tensor | None


# -- pieces of the kernels -----------------------------------------------------------------------------------------


@triton.jit
def kept_tile(  # type: ignore[no-untyped-def]
    ids, first_column, threshold, k0, k1, block_rows: tl.constexpr, block_columns: tl.constexpr
):
    """``(block_rows, block_columns)`` whether dropout keeps a value; ``first_column`` is a multiple of 4."""
    blocks = first_column // 4 + tl.arange(0, block_columns // 4)
    c0, c1, c2, c3 = philox_tile(ids[:, None], blocks[None, :], key_word(k0), key_word(k1), _M0, _M1, _W0, _W1, _ROUNDS)
    least = threshold.to(tl.uint32)
    # four bits of one word each, then spread over columns: nothing wider than a bit changes threads
    nibbles = (c0 >= least).to(tl.int32) | ((c1 >= least).to(tl.int32) << 1)
    nibbles = nibbles | ((c2 >= least).to(tl.int32) << 2) | ((c3 >= least).to(tl.int32) << 3)
    bits = (nibbles[:, :, None] >> tl.arange(0, 4)[None, None, :]) & 1
    return tl.reshape(bits, (block_rows, block_columns)) != 0


@triton.jit
def _store_bits(  # type: ignore[no-untyped-def]
    bits, flags, rows, first_column, in_rows,
    num_columns: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Eight flags to a byte, column 0 lowest."""
    grouped = tl.reshape(flags.to(tl.int32), (block_rows, block_columns // 8, 8))
    packed = tl.sum(grouped << tl.arange(0, 8)[None, None, :], axis=2)
    row_bytes: tl.constexpr = (num_columns + 7) // 8
    places = first_column // 8 + tl.arange(0, block_columns // 8)
    tl.store(
        bits + rows[:, None] * row_bytes + places[None, :],
        packed.to(tl.uint8),
        mask=in_rows[:, None] & (places < row_bytes)[None, :],
    )


@triton.jit
def _load_bits(  # type: ignore[no-untyped-def]
    bits, rows, first_column, in_rows,
    num_columns: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    row_bytes: tl.constexpr = (num_columns + 7) // 8
    places = first_column // 8 + tl.arange(0, block_columns // 8)
    inside = in_rows[:, None] & (places < row_bytes)[None, :]
    packed = tl.load(bits + rows[:, None] * row_bytes + places[None, :], mask=inside, other=0).to(tl.int32)
    flags = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(flags, (block_rows, block_columns)) != 0


@triton.jit
def _ids_of(rows, row_ids, first_id, in_rows, has_ids: tl.constexpr):  # type: ignore[no-untyped-def]
    if has_ids:
        return tl.load(row_ids + rows, mask=in_rows, other=0)
    return rows + first_id


@triton.jit
def _shifted(  # type: ignore[no-untyped-def]
    tile, row_scale, bias, rows, columns, in_rows, in_columns,
    has_row_scale: tl.constexpr, has_bias: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """``x * row_scale + bias``."""
    z = tile.to(acc)
    if has_row_scale:
        z = z * tl.load(row_scale + rows, mask=in_rows, other=0.0).to(acc)[:, None]
    if has_bias:
        z = z + tl.load(bias + columns, mask=in_columns, other=0.0).to(acc)[None, :]
    return z


@triton.jit(do_not_specialize=_SCALARS)
def _forward_kernel(  # type: ignore[no-untyped-def]
    out, bits, stats, x, row_scale, bias, norm_weight, norm_bias, row_ids,
    first_id, num_rows, threshold, scale_bits, k0, k1,
    num_columns: tl.constexpr, x_stride: tl.constexpr, out_stride: tl.constexpr, zero_columns: tl.constexpr,
    has_row_scale: tl.constexpr, has_bias: tl.constexpr,
    normalises: tl.constexpr, has_norm_weight: tl.constexpr, has_norm_bias: tl.constexpr, eps: tl.constexpr,
    activation: tl.constexpr, alpha: tl.constexpr, drops: tl.constexpr, has_ids: tl.constexpr,
    num_planes: tl.constexpr, acc: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    first_column = tl.program_id(1) * block_columns
    columns = first_column + tl.arange(0, block_columns)
    in_rows = rows < num_rows
    in_columns = columns < num_columns
    inside = in_rows[:, None]
    if num_columns % block_columns != 0:
        inside = inside & in_columns[None, :]
    tile = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0)
    z = _shifted(tile, row_scale, bias, rows, columns, in_rows, in_columns, has_row_scale, has_bias, acc)
    if normalises:
        mean = tl.sum(tl.where(in_columns[None, :], z, 0.0), axis=1) / num_columns
        centred = tl.where(in_columns[None, :], z - mean[:, None], 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / num_columns + eps)
        tl.store(stats + 2 * rows, mean, mask=in_rows)
        tl.store(stats + 2 * rows + 1, inverse, mask=in_rows)
        z = centred * inverse[:, None]
        if has_norm_weight:
            z = z * tl.load(norm_weight + columns, mask=in_columns, other=0.0).to(acc)[None, :]
        if has_norm_bias:
            z = z + tl.load(norm_bias + columns, mask=in_columns, other=0.0).to(acc)[None, :]
    blocked = z <= 0  # so that NaN passes, as in the separate steps
    y = z
    if activation == "relu":
        y = tl.where(blocked, 0.0, z)
    elif activation == "leaky_relu":
        y = tl.where(blocked, z * alpha, z)
    elif activation == "elu":
        y = tl.where(blocked, (tl.exp(z) - 1.0) * alpha, z)
    passes = blocked == 0
    if drops:
        ids = _ids_of(rows, row_ids, first_id, in_rows, has_ids)
        kept = kept_tile(ids, first_column, threshold, k0, k1, block_rows, block_columns)
        y = tl.where(kept, y * scale_bits.to(acc, bitcast=True), 0.0)
        if activation == "relu":
            passes = passes & kept
        else:
            passes = kept
    if zero_columns > 0:
        y = tl.where(in_columns[None, :], y, 0.0)
        inside = in_rows[:, None] & (columns < num_columns + zero_columns)[None, :]
    tl.store(out + rows[:, None] * out_stride + columns[None, :], y.to(out.dtype.element_ty), mask=inside)
    if num_planes > 0:
        _store_bits(bits, passes, rows, first_column, in_rows, num_columns, block_rows, block_columns)
    if num_planes > 1:
        plane = bits + num_rows.to(tl.int64) * ((num_columns + 7) // 8)
        _store_bits(plane, blocked == 0, rows, first_column, in_rows, num_columns, block_rows, block_columns)


@triton.jit(do_not_specialize=_SCALARS)
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_x, partial, grad, bits, stats, x, row_scale, bias, norm_weight, norm_bias, row_ids,
    first_id, num_rows, rows_per_program, threshold, scale_bits, k0, k1,
    num_columns: tl.constexpr, x_stride: tl.constexpr, grad_stride: tl.constexpr, grad_x_stride: tl.constexpr,
    zero_columns: tl.constexpr, has_row_scale: tl.constexpr, has_bias: tl.constexpr,
    normalises: tl.constexpr, has_norm_weight: tl.constexpr, has_norm_bias: tl.constexpr,
    activation: tl.constexpr, alpha: tl.constexpr, drops: tl.constexpr, has_ids: tl.constexpr,
    num_planes: tl.constexpr, num_sums: tl.constexpr, acc: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """``num_sums``: 1 for the gradient of bias, 3 with those of norm weight and norm bias behind it."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    last = tl.minimum(first + rows_per_program, num_rows.to(tl.int64))
    first_column = tl.program_id(1) * block_columns
    columns = first_column + tl.arange(0, block_columns)
    in_columns = columns < num_columns
    sum_z = tl.zeros((block_rows, block_columns), acc)
    sum_weight = tl.zeros((block_rows, block_columns), acc)
    sum_shift = tl.zeros((block_rows, block_columns), acc)
    for start in range(first, last, block_rows):
        rows = (start + tl.arange(0, block_rows)).to(tl.int64)  # the interpreter's loops count in 32 bits
        in_rows = rows < last
        inside = in_rows[:, None]
        if num_columns % block_columns != 0:
            inside = inside & in_columns[None, :]
        g = tl.load(grad + rows[:, None] * grad_stride + columns[None, :], mask=inside, other=0.0).to(acc)
        if drops:
            g = g * scale_bits.to(acc, bitcast=True)
        if num_planes > 0 and (activation == "relu" or drops):
            passes = _load_bits(bits, rows, first_column, in_rows, num_columns, block_rows, block_columns)
            g = tl.where(passes, g, 0.0)
        elif drops:
            ids = _ids_of(rows, row_ids, first_id, in_rows, has_ids)
            kept = kept_tile(ids, first_column, threshold, k0, k1, block_rows, block_columns)
            g = tl.where(kept, g, 0.0)
        if normalises or activation == "elu":
            tile = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0)
            z = _shifted(tile, row_scale, bias, rows, columns, in_rows, in_columns, has_row_scale, has_bias, acc)
        if normalises:
            mean = tl.load(stats + 2 * rows, mask=in_rows, other=0.0)
            inverse = tl.load(stats + 2 * rows + 1, mask=in_rows, other=0.0)
            normal = tl.where(inside, (z - mean[:, None]) * inverse[:, None], 0.0)
            z = normal
            weight = tl.full((1, block_columns), 1.0, acc)
            if has_norm_weight:
                weight = tl.load(norm_weight + columns, mask=in_columns, other=0.0).to(acc)[None, :]
                z = z * weight
            if has_norm_bias:
                z = z + tl.load(norm_bias + columns, mask=in_columns, other=0.0).to(acc)[None, :]
        if activation == "leaky_relu":
            plane = bits + num_rows.to(tl.int64) * ((num_columns + 7) // 8) * (num_planes - 1)
            positive = _load_bits(plane, rows, first_column, in_rows, num_columns, block_rows, block_columns)
            g = tl.where(positive, g, g * alpha)
        elif activation == "elu":
            g = tl.where(z <= 0, g * tl.exp(z) * alpha, g)
        if normalises:
            sum_weight += g * normal
            sum_shift += g
            g = g * weight
            mean_g = tl.sum(tl.where(in_columns[None, :], g, 0.0), axis=1) / num_columns
            mean_gx = tl.sum(g * normal, axis=1) / num_columns
            g = (g - mean_g[:, None] - normal * mean_gx[:, None]) * inverse[:, None]
        if num_sums > 0:
            sum_z += tl.where(inside, g, 0.0)
        if has_row_scale:
            g = g * tl.load(row_scale + rows, mask=in_rows, other=0.0).to(acc)[:, None]
        written = inside
        if zero_columns > 0:
            g = tl.where(in_columns[None, :], g, 0.0)
            written = in_rows[:, None] & (columns < num_columns + zero_columns)[None, :]
        tl.store(grad_x + rows[:, None] * grad_x_stride + columns[None, :], g.to(grad_x.dtype.element_ty), mask=written)
    if num_sums > 0:
        at = partial + tl.program_id(0).to(tl.int64) * (num_sums * num_columns) + columns
        tl.store(at, tl.sum(sum_z, axis=0), mask=in_columns)
        if num_sums > 1:
            tl.store(at + num_columns, tl.sum(sum_weight, axis=0), mask=in_columns)
            tl.store(at + 2 * num_columns, tl.sum(sum_shift, axis=0), mask=in_columns)


# -- launches ------------------------------------------------------------------------------------------------------


def num_planes(activation: str, drops: bool, *, remake: bool) -> int:
    """Planes of bits for backward: what passes (``relu``: active and kept; else kept), then ``leaky_relu``'s sign."""
    if activation == "leaky_relu":
        return 2 if drops else 1
    return int(activation == "relu" or (drops and not remake))


def forward(
    x: Tensor,
    row_scale: Tensor | None,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str,
    alpha: float,
    mask: Mask | None,
    *,
    remake: bool,
) -> tuple[Tensor, Kept]:
    """All steps on ``x (n, C)``, each row contiguous, ``n`` and ``C`` at least 1; the result is padded if ``x`` is.

    Args:
        x: float32, float64, bfloat16 or float16.
        row_scale: ``(n,)`` or None.
        bias: ``(C,)`` or None.
        norm: At most `MAX_NORM_COLUMNS` columns.
        activation: ``none``, ``relu``, ``leaky_relu`` or ``elu``.
        alpha: Slope of ``leaky_relu``, scale of ``elu``.
        mask: Dropout; None for none.
        remake: Make the mask again in backward where its bits alone would have to be kept for it.
    """
    num_rows, num_columns = x.shape
    acc = _accumulator(x.dtype)
    planes = num_planes(activation, mask is not None, remake=remake)
    out = empty_like_rows(x)
    bits = x.new_empty(planes, num_rows, -(-num_columns // 8), dtype=torch.uint8) if planes else None
    stats = None if norm is None else x.new_empty(num_rows, 2, dtype=_DTYPES[acc])
    block_rows, block_columns, num_warps = _tile(num_columns, norm is not None)
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(num_columns, block_columns))
    ids, first_id, *scalars = _mask_arguments(mask, acc, x)
    weight, shift = (None, None) if norm is None else (norm.weight, norm.bias)
    _forward_kernel[grid](
        out, _or(bits, x), _or(stats, x), x, _or(row_scale, x), _or(bias, x), _or(weight, x), _or(shift, x), ids,
        first_id, num_rows, *scalars,
        num_columns, x.stride(0), out.stride(0), with_padding(out).shape[1] - num_columns,
        row_scale is not None, bias is not None,
        norm is not None, weight is not None, shift is not None, 0.0 if norm is None else norm.eps,
        activation, alpha, mask is not None, mask is not None and isinstance(mask.row_ids, Tensor),
        planes, acc, block_rows, block_columns, num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out, Kept(bits, stats)


@unseen
def backward(
    grad: Tensor,
    kept: Kept,
    x: Tensor | None,
    row_scale: Tensor | None,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str,
    alpha: float,
    mask: Mask | None,
    *,
    needs_sums: bool,
    pads: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gradient of ``x``, and ``(1 or 3, C)`` sums over rows: of bias, norm weight and norm bias.

    Args:
        grad: ``(n, C)``, each row contiguous.
        kept: What `forward` gave.
        x: Input of `forward`; needed for ``norm`` and ``elu``.
        row_scale: As in `forward`.
        bias: As in `forward`; read for ``norm`` and ``elu`` alone.
        norm: As in `forward`.
        activation: As in `forward`.
        alpha: As in `forward`.
        mask: As in `forward`.
        needs_sums: Whether any of the sums is wanted.
        pads: Whether the gradient's rows are padded.
    """
    num_rows, num_columns = grad.shape
    acc = _accumulator(grad.dtype)
    empty = empty_rows if pads else _contiguous_rows
    grad_x = empty(num_rows, num_columns, grad.dtype, grad.device)
    block_rows, block_columns, num_warps = _tile(num_columns, norm is not None)
    num_sums = 0 if not needs_sums else 1 if norm is None else 3
    rows_per_program = block_rows
    if num_sums:
        rows_per_program *= triton.cdiv(triton.cdiv(num_rows, block_rows), _MAX_PARTIAL_SUMS)
    num_programs = triton.cdiv(num_rows, rows_per_program)
    partial = grad.new_empty(num_programs, num_sums, num_columns, dtype=_DTYPES[acc]) if num_sums else grad
    ids, first_id, *scalars = _mask_arguments(mask, acc, grad)
    weight, shift = (None, None) if norm is None else (norm.weight, norm.bias)
    _backward_kernel[num_programs, triton.cdiv(num_columns, block_columns)](
        grad_x, partial, grad, _or(kept.bits, grad), _or(kept.stats, grad), _or(x, grad), _or(row_scale, grad),
        _or(bias, grad), _or(weight, grad), _or(shift, grad), ids,
        first_id, num_rows, rows_per_program, *scalars,
        num_columns, 0 if x is None else x.stride(0), grad.stride(0), grad_x.stride(0),
        with_padding(grad_x).shape[1] - num_columns, row_scale is not None, bias is not None,
        norm is not None, weight is not None, shift is not None,
        activation, alpha, mask is not None, mask is not None and isinstance(mask.row_ids, Tensor),
        0 if kept.bits is None else len(kept.bits), num_sums, acc, block_rows, block_columns,
        num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return grad_x, partial.sum(0) if num_sums else None


_DTYPES = {tl.float32: torch.float32, tl.float64: torch.float64}


def _accumulator(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _contiguous_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(num_rows, width, dtype=dtype, device=device)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Something to point at where an operand is missing; never read."""
    return other if tensor is None else tensor


def _tile(num_columns: int, whole_row: bool) -> tuple[int, int, int]:
    """``(block_rows, block_columns, num_warps)``: the column block that wastes least, wider ones first."""
    block_columns = max(8, triton.next_power_of_2(num_columns))
    if not whole_row and block_columns > 64:
        block_columns = min((256, 128, 64), key=lambda block: triton.cdiv(num_columns, block) * block)
    num_warps = 4 if block_columns <= _TILE_VALUES else 8
    return max(1, _TILE_VALUES // block_columns), block_columns, num_warps


def signed(word: Word) -> Word:
    """The int32 with the bits of a 32-bit word: an argument of one type whatever its value."""
    return word - (1 << 32) if isinstance(word, int) and word >= 1 << 31 else word


def scale_bits(scale: float, dtype: torch.dtype) -> int:
    """Bits of ``scale`` in ``dtype``, float32 or float64: Triton takes a Python float as float32 alone."""
    kind, integer = ("<d", "<q") if dtype == torch.float64 else ("<f", "<i")
    bits: int = struct.unpack(integer, struct.pack(kind, scale))[0]
    return bits


def _mask_arguments(mask: Mask | None, acc: tl.dtype, like: Tensor) -> tuple[Tensor, int, Word, int, Word, Word]:
    if mask is None:
        return like, 0, 0, scale_bits(1.0, _DTYPES[acc]), 0, 0
    ids, first_id = (like, mask.row_ids.start) if isinstance(mask.row_ids, range) else (mask.row_ids, 0)
    k0, k1 = mask.key
    return ids, first_id, signed(mask.threshold), scale_bits(mask.scale, _DTYPES[acc]), signed(k0), signed(k1)
