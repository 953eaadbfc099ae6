"""Chunks: every value in one of them, borders where buckets begin, sizes that differ by a bucket."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.comm.compression.layout import Layout
from nugnn.comm.compression.wire import Wire
from nugnn.kernels.philox import RandomKey

_TENSORS = st.lists(st.tuples(st.integers(0, 700), st.sampled_from(["fp32", "bf16", "fp16", "8bit", "3bit", "1bit"])))


@given(_TENSORS, st.integers(1, 6))
def test_chunks_are_whole_buckets_of_about_equal_bytes(tensors: list[tuple[int, str]], num_ranks: int) -> None:
    sizes, wires = [n for n, _ in tensors], [Wire(name, bucket=64) for _, name in tensors]
    layout = Layout(sizes, wires, range(len(sizes)), num_ranks)
    borders, start = {0}, 0
    for n in sizes:
        borders |= {start + first for first in range(0, n, 64)} | {start + n}
        start += n
    assert layout.size == start and len(layout.spans) == num_ranks
    assert [span.start for span in layout.spans] == [0, *(span.stop for span in layout.spans[:-1])]
    assert layout.spans[-1].stop == start and all(span.stop in borders for span in layout.spans)
    total = sum(wire.num_bytes(n) for n, wire in zip(sizes, wires, strict=True))
    assert sum(layout.chunk_bytes) == total
    for chunk, size in enumerate(layout.chunk_bytes):  # a border is off by less than a bucket, of 256 bytes at most
        assert abs(sum(layout.chunk_bytes[: chunk + 1]) - (chunk + 1) * total / num_ranks) < 256
        assert size < total / num_ranks + 256


@given(_TENSORS, st.integers(1, 3), st.integers(1, 3))
def test_pieces_are_the_same_chunks(tensors: list[tuple[int, str]], num_pieces: int, num_chunks: int) -> None:
    """Each of a vector that begins at 0, with the bytes that the chunk has in the whole."""
    sizes, wires = [n for n, _ in tensors], [Wire(name, bucket=64) for _, name in tensors]
    x, key = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0)), RandomKey(1, 2, 3)
    layout = Layout(sizes, wires, range(len(sizes)), num_pieces * num_chunks)
    pieces = layout.pieces(num_pieces)
    assert sum(piece.size for piece in pieces) == layout.size
    for number, (piece, values) in enumerate(zip(pieces, x.split([piece.size for piece in pieces]), strict=True)):
        for chunk in range(num_chunks):
            in_whole, own = number * num_chunks + chunk, values[piece.spans[chunk]]
            assert torch.equal(own, x[layout.spans[in_whole]])
            sent, out = piece.encode(chunk, own, key), torch.full_like(own, 9)
            assert torch.equal(sent, layout.encode(in_whole, own, key)) and len(sent) == piece.chunk_bytes[chunk]
            piece.decode(chunk, sent, out)
            assert torch.equal(piece.encode(chunk, out, None), layout.encode(in_whole, out, None))


@given(_TENSORS, st.integers(1, 4), st.booleans())
def test_a_tensor_travels_as_it_would_alone(tensors: list[tuple[int, str]], num_ranks: int, stochastic: bool) -> None:
    sizes, wires = [n for n, _ in tensors], [Wire(name, bucket=64) for _, name in tensors]
    x = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0))
    key = RandomKey(1, 2, 3) if stochastic else None
    layout, out = Layout(sizes, wires, range(len(sizes)), num_ranks), torch.full_like(x, 9)
    for chunk, span in enumerate(layout.spans):
        sent = layout.encode(chunk, x[span], key)
        assert len(sent) == layout.chunk_bytes[chunk]
        layout.decode(chunk, sent, out[span])
    for number, (part, back) in enumerate(zip(x.split(sizes), out.split(sizes), strict=True)):
        alone, expected = Layout(sizes[number : number + 1], wires[number : number + 1], [number], 1), part.clone()
        alone.decode(0, alone.encode(0, part, key), expected)
        assert torch.equal(back, expected)
