"""Rows of few bits a value for the wire and for what backward keeps: max-min quantization, the same bytes everywhere.

A row is sent as its smallest and largest value in float32 and, for each value, its place between them in ``2**bits``
levels. The largest and smallest come back as they were, and so does a row of equal values; only rounded at random to 8
bits may a largest one, where its place is not quite the last level, come a step lower, once in ``2**16`` draws. The
scheme is that of CGX's buckets (Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep
Learning", Middleware 2022).
Unlike there, the ends are always float32, rounding is to nearest or stochastic under the project's own random words
(`nugnn.kernels.philox`), small ranges are not collapsed, and a row with a value that is infinite, NaN or at least
2**126 comes back as NaN throughout, so that nobody misses an overflow.

Shape suffixes: n rows, D columns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nugnn.kernels.operator import unseen
from nugnn.kernels.philox import RandomKey, derived_key, gpu_key, random_words
from nugnn.kernels.quantize.reference import OVERFLOW, decode_reference, encode_reference, ends_of, row_bytes

__all__ = ["OVERFLOW", "decode_buckets", "decode_rows", "encode_buckets", "encode_rows", "row_bytes"]

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@unseen
def encode_rows(x: Tensor, bits: int, key: RandomKey | None = None, row_ids: Tensor | None = None) -> Tensor:
    """Rows of ``x`` for the wire.

    Args:
        x: ``(n, D)`` float32, bfloat16 or float16; computed in float32.
        bits: For each value, from 1 to 8.
        key: Of stochastic rounding, whose expectation is the value within ``2**-17`` of a step and the rounding of
            float32; rounding is to nearest (ties to even) when None.
        row_ids: ``(n,)`` int64: who each row is to ``key``, such as a global id; the row's number when None.

    Returns:
        ``(n, row_bytes(D, bits))`` uint8, the same bytes on every device.

    Raises:
        ValueError: A shape, type or number of bits that is not allowed.
    """
    _check_bits(bits)
    if x.dim() != 2 or x.dtype not in _TYPES:
        raise ValueError(f"encode_rows: {x.dtype} of shape {tuple(x.shape)}, must be a matrix of float32 or 16 bits")
    if row_ids is not None and (row_ids.shape != x.shape[:1] or row_ids.dtype != torch.int64):
        raise ValueError(
            f"encode_rows: row_ids are {row_ids.dtype} of shape {tuple(row_ids.shape)}, must be int64 of {(len(x),)}"
        )
    if x.numel() == 0:
        return torch.zeros(len(x), row_bytes(x.shape[1], bits), dtype=torch.uint8, device=x.device)
    x = x.detach()
    if key is not None:
        row_ids = torch.arange(len(x), device=x.device) if row_ids is None else row_ids.contiguous()
    if _runs_in_triton(x):
        from nugnn.kernels.quantize import gpu

        return gpu.encode(x.contiguous(), bits, None if key is None else gpu_key(key), row_ids)
    if x.device.type != "cpu":
        words = None if key is None else random_words(key, row_ids, (x.shape[1] + 1) // 2)  # type: ignore[arg-type]
        return encode_reference(x, bits, words)
    from nugnn.kernels.quantize import cpu

    ends = torch.empty(len(x), 2)
    payload = torch.empty(len(x), row_bytes(x.shape[1], bits) - 8, dtype=torch.uint8)
    ids = np.empty(0, np.int64) if row_ids is None or key is None else row_ids.numpy()
    k0, k1 = (0, 0) if key is None else derived_key(key)
    rows = x.float().contiguous().numpy()
    cpu.encode(rows, bits, key is not None, ids, np.uint64(k0), np.uint64(k1), ends.numpy(), payload.numpy())
    return torch.cat([ends.view(torch.uint8), payload], 1)


@unseen
def decode_rows(
    wire: Tensor, num_columns: int, bits: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """``(n, D)`` in ``dtype`` of ``wire (n, row_bytes(D, bits))`` uint8, as `encode_rows` made it anywhere.

    ``out``, contiguous float32, is filled and returned when it is given.

    Raises:
        ValueError: Sizes that do not fit each other.
    """
    _check_bits(bits)
    if wire.dim() != 2 or wire.dtype != torch.uint8 or wire.shape[1] != row_bytes(num_columns, bits):
        raise ValueError(
            f"decode_rows: {wire.dtype} of shape {tuple(wire.shape)}, must be uint8 of (n, "
            f"{row_bytes(num_columns, bits)}) for {num_columns} values of {bits} bits"
        )
    if len(wire) == 0 or num_columns == 0:
        return torch.empty(len(wire), num_columns, dtype=dtype, device=wire.device) if out is None else out
    if _runs_in_triton(wire):
        from nugnn.kernels.quantize import gpu

        out = torch.empty(len(wire), num_columns, dtype=dtype, device=wire.device) if out is None else out
        gpu.decode(out, wire.contiguous(), num_columns, bits)
        return out
    if wire.device.type != "cpu":
        values = decode_reference(wire, num_columns, bits)
        return values.to(dtype) if out is None else out.copy_(values)
    from nugnn.kernels.quantize import cpu

    out = torch.empty(len(wire), num_columns) if out is None else out
    cpu.decode(ends_of(wire).numpy(), wire[:, 8:].contiguous().numpy(), bits, out.numpy())
    return out.to(dtype)


def encode_buckets(x: Tensor, bits: int, bucket: int, key: RandomKey | None = None) -> Tensor:
    """A vector in rows of ``bucket`` consecutive values, the last one shorter; random words go by the bucket's number.

    Args:
        x: ``(N,)`` as in `encode_rows`.
        bits: See there.
        bucket: Values that share a smallest and a largest one.
        key: See there.

    Returns:
        ``(bucket_bytes,)`` uint8.
    """
    if x.dim() != 1 or bucket < 1:
        raise ValueError(f"encode_buckets: a vector and a positive bucket, not {tuple(x.shape)} and {bucket}")
    whole = len(x) // bucket * bucket
    wire = encode_rows(x[:whole].view(whole // bucket, bucket), bits, key).flatten()
    if whole == len(x):
        return wire
    number = torch.full((1,), whole // bucket, dtype=torch.int64, device=x.device)
    return torch.cat([wire, encode_rows(x[None, whole:], bits, key, number).flatten()])


def decode_buckets(wire: Tensor, size: int, bits: int, bucket: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """``(size,)`` in ``dtype`` of what `encode_buckets` made."""
    if wire.dim() != 1 or len(wire) != bucket_bytes(size, bits, bucket):
        raise ValueError(
            f"decode_buckets: {tuple(wire.shape)} bytes, must be ({bucket_bytes(size, bits, bucket)},) for {size} "
            f"values of {bits} bits in buckets of {bucket}"
        )
    whole = size // bucket
    cut = whole * row_bytes(bucket, bits)
    values = torch.empty(size, dtype=dtype, device=wire.device)
    rows = values[: whole * bucket].view(whole, bucket)
    _decode_into(rows, wire[:cut].view(whole, row_bytes(bucket, bits)), bits)
    if size > whole * bucket:
        _decode_into(values[None, whole * bucket :], wire[None, cut:], bits)
    return values


def _decode_into(out: Tensor, wire: Tensor, bits: int) -> None:
    if out.dtype is torch.float32:
        decode_rows(wire, out.shape[1], bits, out=out)
    else:
        out.copy_(decode_rows(wire, out.shape[1], bits, out.dtype))


def bucket_bytes(size: int, bits: int, bucket: int) -> int:
    """Bytes of ``size`` values on the wire.

    >>> bucket_bytes(1000, 4, 512)
    516
    """
    rest = size % bucket
    return size // bucket * row_bytes(bucket, bits) + (row_bytes(rest, bits) if rest else 0)


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits}, must lie in 1 to 8")


def _runs_in_triton(x: Tensor) -> bool:
    from nugnn.kernels.epilogue import runs_in_triton

    return runs_in_triton(x)
