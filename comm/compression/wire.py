"""How a gradient's values travel: as they are, in 16 bits, or in 1 to 8 bits between the ends of their bucket.

A **bucket** here is a row of consecutive values of one tensor that share what is said about them all: their smallest
and largest value (`nugnn.kernels.quantize`), or a power of two (``fp16``). The last bucket of a tensor may be shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nugnn.kernels.philox import RandomKey
from nugnn.kernels.quantize import OVERFLOW, bucket_bytes, decode_rows, encode_rows, row_bytes

WIRES = ("fp32", "bf16", "fp16", *(f"{bits}bit" for bits in range(8, 0, -1)))
BUCKET = 512
"""Values of a bucket: 64 bits beside them add an eighth of a bit to each."""

_TOP_EXPONENT = 15
"""``fp16``: the largest value of a bucket is scaled to below 2**15, half of what the type holds."""


@dataclass(frozen=True, slots=True)
class Wire:
    """One way for values to travel.

    Args:
        name: One of `WIRES`.
        bucket: Values that share their ends, from 1 up.

    Raises:
        ValueError: There is no such way.
    """

    name: str
    bucket: int = BUCKET

    def __post_init__(self) -> None:
        if self.name not in WIRES:
            raise ValueError(f"gradients cannot travel as {self.name!r}; choose one of {', '.join(WIRES)}")
        if self.bucket < 1:
            raise ValueError(f"bucket is {self.bucket}, must be 1 or more")

    @property
    def bits(self) -> int:
        """Of a value, without what a bucket adds."""
        return 32 if self.name == "fp32" else int(self.name.removesuffix("bit")) if self.is_quantized else 16

    @property
    def is_quantized(self) -> bool:
        """Whether values are levels between the ends of a bucket."""
        return self.name.endswith("bit")

    def num_bytes(self, size: int) -> int:
        """Bytes of ``size`` values that begin at a bucket.

        >>> [Wire(name, 512).num_bytes(1000) for name in ("fp32", "bf16", "fp16", "4bit")]
        [4000, 2000, 2008, 516]
        """
        if self.is_quantized:
            return bucket_bytes(size, self.bits, self.bucket)
        return size * self.bits // 8 + (4 * -(-size // self.bucket) if self.name == "fp16" else 0)

    def encode(self, x: Tensor, key: RandomKey | None = None, row_ids: Tensor | None = None) -> Tensor:
        """``(num_bytes,)`` uint8 of ``x (n,)`` float32, which begins at a bucket.

        Args:
            x: Not modified.
            key: Of stochastic rounding to levels; to nearest when None.
            row_ids: Who each bucket is to ``key``, ``(ceil(n / bucket),)`` int64.
        """
        if self.name == "fp32":
            return x.contiguous().view(torch.uint8)
        if self.name == "bf16":
            return x.to(torch.bfloat16).view(torch.uint8)
        if self.name == "fp16":
            return _scaled_half(x, self.bucket)
        whole = len(x) // self.bucket
        parts = []
        for first, last in ((0, whole), (whole, -(-len(x) // self.bucket))):
            if first < last:
                rows = x[first * self.bucket : last * self.bucket].view(last - first, -1)
                if self.bits == 1 and key is None:
                    rows = _two_means(rows)
                ids = None if row_ids is None else row_ids[first:last]
                parts.append(encode_rows(rows, self.bits, key, ids).flatten())
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.uint8)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Fill ``out (n,)``, contiguous float32, with what `encode` made."""
        if self.name == "fp32":
            out.copy_(_as(wire, torch.float32))
        elif self.name == "bf16":
            out.copy_(_as(wire, torch.bfloat16))
        elif self.name == "fp16":
            _unscale_half(wire, out, self.bucket)
        else:
            whole, start = len(out) // self.bucket * self.bucket, 0
            for values in (out[:whole].view(-1, self.bucket), out[None, whole:]):
                if values.numel():
                    width = row_bytes(values.shape[1], self.bits)
                    end = start + len(values) * width
                    decode_rows(wire[start:end].view(-1, width), values.shape[1], self.bits, out=values)
                    start = end


def _as(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """``wire`` as values; copied where it does not begin where such a value may."""
    is_aligned = wire.storage_offset() % dtype.itemsize == 0
    return (wire if is_aligned else wire.clone()).view(dtype)


def _two_means(rows: Tensor) -> Tensor:
    """Each row as two values, the means of what lies above its mean and of the rest.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014, for columns of a matrix. With the ends
    as the two values, what one step leaves out would be larger than what it sends, and error feedback would diverge.
    """
    x = rows.double()
    is_high = x > x.mean(1, keepdim=True)
    num_high = is_high.sum(1, keepdim=True)
    sum_high = torch.where(is_high, x, 0.0).sum(1, keepdim=True)
    high = sum_high / num_high.clamp(min=1)
    low = (x.sum(1, keepdim=True) - sum_high) / (x.shape[1] - num_high)  # the smallest is never above the mean
    means = torch.where(is_high, high, low).float()
    is_constant = (rows == rows[:, :1]).all(1, keepdim=True)  # a mean may be off by a rounding
    is_in = (rows.abs() < OVERFLOW).all(1, keepdim=True)  # others come back as NaN, which the codec sees to
    return torch.where(is_in & ~is_constant, means, rows)


def _scaled_half(x: Tensor, bucket: int) -> Tensor:
    """A power of two for each bucket in float32, then values in float16: no overflow, and small values keep digits."""
    size = len(x)
    rows = _padded(x, bucket)
    largest = rows.abs().amax(1)
    _, exponent = torch.frexp(largest)
    scale = torch.ldexp(torch.ones_like(largest), (_TOP_EXPONENT - exponent).clamp(-126, 126))
    halves = (rows * scale[:, None]).half().view(-1)[:size]
    back = torch.where(torch.isfinite(largest), 1 / scale, torch.nan)
    return torch.cat([back.view(torch.uint8), halves.view(torch.uint8)])


def _unscale_half(wire: Tensor, out: Tensor, bucket: int) -> None:
    cut = 4 * -(-len(out) // bucket)
    rows = _padded(_as(wire[cut:], torch.float16).float(), bucket) * _as(wire[:cut], torch.float32)[:, None]
    out.copy_(rows.view(-1)[: len(out)])


def _padded(x: Tensor, bucket: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % bucket)).view(-1, bucket)
