"""Which values of several tensors each rank sums, and how they travel there: the same answer on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nugnn.comm.compression.wire import Wire
from nugnn.kernels.philox import RandomKey

_ROW_BITS = 32


@dataclass(frozen=True)
class _Segment:
    """Consecutive values that travel in one way, from the start of a bucket on.

    Args:
        start: In the flat vector of all tensors.
        size: Number of values.
        wire: How they travel.
        buckets: ``(first, last + 1)`` buckets of each tensor they belong to, with the tensor's number.
    """

    start: int
    size: int
    wire: Wire
    buckets: tuple[tuple[int, int, int], ...]


class Layout:
    """A flat vector of several tensors, in as many chunks as there are ranks.

    Chunks have about equal numbers of bytes on the wire, begin and end where a bucket does, and may be empty. They
    follow from sizes and wires alone.

    Args:
        sizes: Values of each tensor.
        wires: How each travels; buckets never cross from one tensor to the next.
        numbers: Of each tensor, for random words: the same whatever it travels with.
        num_ranks: P.

    Raises:
        ValueError: As many wires or numbers as sizes are needed.
    """

    def __init__(self, sizes: Sequence[int], wires: Sequence[Wire], numbers: Sequence[int], num_ranks: int) -> None:
        if not len(sizes) == len(wires) == len(numbers):
            raise ValueError(f"there are {len(sizes)} sizes, {len(wires)} wires and {len(numbers)} numbers of tensors")
        self.size = sum(sizes)
        self.num_ranks = num_ranks
        total = sum(wire.num_bytes(size) for size, wire in zip(sizes, wires, strict=True))
        self._chunks: list[list[_Segment]] = [[] for _ in range(num_ranks)]
        self._pieces: dict[int, list[Layout]] = {}
        start = done_bytes = chunk = 0
        for size, wire, number in zip(sizes, wires, numbers, strict=True):
            num_buckets, row_bytes, bucket = -(-size // wire.bucket), wire.num_bytes(wire.bucket), 0
            while bucket < num_buckets:
                is_last = chunk == num_ranks - 1
                room = (chunk + 1) * total - num_ranks * done_bytes  # in P-ths of bytes, until the chunk's end
                fit = num_buckets if is_last else bucket + -(-room // (num_ranks * row_bytes))
                until = min(num_buckets, fit)
                if until > bucket:
                    first, last = bucket * wire.bucket, min(until * wire.bucket, size)
                    self._add(chunk, _Segment(start + first, last - first, wire, ((number, bucket, until),)))
                    done_bytes += wire.num_bytes(last - first)
                bucket = until
                while chunk < num_ranks - 1 and num_ranks * done_bytes >= (chunk + 1) * total:
                    chunk += 1
            start += size

    @classmethod
    def plain(cls, size: int, num_ranks: int) -> Layout:
        """Of one vector that travels as it is."""
        return cls([size], [Wire("fp32")], [0], num_ranks)

    def pieces(self, num_pieces: int) -> list[Layout]:
        """As many pieces of the vector, each a vector of its own with the same number of chunks of this one.

        Args:
            num_pieces: Divides ``num_ranks``.
        """
        if num_pieces not in self._pieces:
            count, rest = divmod(self.num_ranks, num_pieces)
            assert rest == 0, (self.num_ranks, num_pieces)
            firsts = range(0, self.num_ranks, count)
            self._pieces[num_pieces] = [self._piece(slice(first, first + count)) for first in firsts]
        return self._pieces[num_pieces]

    def _piece(self, chunks: slice) -> Layout:
        spans = self.spans[chunks]
        start, piece = spans[0].start, Layout.plain(0, len(spans))
        piece.size = spans[-1].stop - start
        piece._chunks = [[replace(s, start=s.start - start) for s in segments] for segments in self._chunks[chunks]]
        return piece

    def _add(self, chunk: int, segment: _Segment) -> None:
        """To the last one, where both can be encoded in one call."""
        if self._chunks[chunk]:
            last = self._chunks[chunk][-1]
            if last.wire == segment.wire and (last.size % last.wire.bucket == 0 or last.wire.name in ("fp32", "bf16")):
                buckets = last.buckets + segment.buckets
                self._chunks[chunk][-1] = _Segment(last.start, last.size + segment.size, last.wire, buckets)
                return
        self._chunks[chunk].append(segment)

    @cached_property
    def spans(self) -> list[slice]:
        """Of each chunk, in the flat vector."""
        spans, end = [], 0
        for segments in self._chunks:
            start, end = end, end + sum(segment.size for segment in segments)
            spans.append(slice(start, end))
        return spans

    @cached_property
    def chunk_bytes(self) -> list[int]:
        """Of each chunk, on the wire."""
        return [sum(s.wire.num_bytes(s.size) for s in segments) for segments in self._chunks]

    def encode(self, chunk: int, values: Tensor, key: RandomKey | None = None) -> Tensor:
        """``(chunk_bytes,)`` uint8 of a chunk.

        Args:
            chunk: Its number.
            values: Of this chunk, float32.
            key: Of stochastic rounding; to nearest when None.
        """
        start, parts = self.spans[chunk].start, []
        for s in self._chunks[chunk]:
            ids = self._row_ids(s, values.device) if key is not None and s.wire.is_quantized else None
            parts.append(s.wire.encode(values[s.start - start : s.start - start + s.size], key, ids))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=values.device)

    def decode(self, chunk: int, wire: Tensor, out: Tensor) -> None:
        """Fill ``out``, the values of a chunk, with what `encode` made of them."""
        start, at = self.spans[chunk].start, 0
        for s in self._chunks[chunk]:
            end = at + s.wire.num_bytes(s.size)
            s.wire.decode(wire[at:end], out[s.start - start : s.start - start + s.size])
            at = end

    @staticmethod
    def _row_ids(segment: _Segment, device: torch.device) -> Tensor:
        """Numbers of buckets that depend on the tensor alone, not on what travels beside it."""
        return torch.cat(
            [torch.arange(a, b, device=device) + (number << _ROW_BITS) for number, a, b in segment.buckets]
        )
