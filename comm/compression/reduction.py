"""Sums over ranks of values that travel encoded: scatter, reduce, gather, so that every rank ends with the same bits.

Each rank owns a chunk. It sends the chunks of others to them, adds what comes for its own in the order of ranks, in
float32, and encodes the sum once more. All ranks decode the same bytes, the owner too. Whatever the number of ranks, a
value is rounded twice. Source: Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep
Learning", Middleware 2022, which calls the scheme SRA.

Where a link knows groups by host (`nugnn.comm.hosts`), each of the L ranks of a host adds a piece of the vector over
its host in float32, sums this piece encoded with the ranks of its place in other hosts, and the host's ranks gather the
pieces in float32. A value is still rounded twice, and an L-th of the vector leaves a host through each of its ranks.

A long vector is summed in slices: while bytes of one travel, the next one is encoded and the one before is added.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from nugnn.comm.compression.layout import Layout
from nugnn.comm.compression.link import HostLinks, Link
from nugnn.kernels.philox import RandomKey

_SLICE_VALUES, _MOST_SLICES = 1 << 20, 4
"""Slices of fewer values would wait for answers rather than for bytes; with more there is little left to overlap."""
_STREAM = 0x67_00_00_00
"""Of gradient rounding; two numbers from here on for each rank, one for each of its two roundings."""


@dataclass(frozen=True)
class Rounding:
    """How values are rounded to levels.

    Args:
        seed: Of stochastic rounding; to nearest when None.
        step: Training step.
    """

    seed: int | None = None
    step: int = 0

    def key(self, rank: int, *, is_sum: bool) -> RandomKey | None:
        """Of one of a rank's two roundings in this step."""
        if self.seed is None:
            return None
        return RandomKey(self.seed, self.step, _STREAM + 2 * rank + is_sum)


def num_slices(num_values: int) -> int:
    """In how many slices a vector is summed: of how many chunks for each rank its `Layout` has to be.

    >>> [num_slices(1 << n) for n in (0, 20, 21, 30)]
    [1, 1, 2, 4]
    """
    return min(max(num_values // _SLICE_VALUES, 1), _MOST_SLICES)


def sum_encoded(
    values: Tensor,
    layout: Layout,
    link: Link,
    rounding: Rounding,
    *,
    rest: Tensor | None = None,
    look: Callable[[Tensor], object] = lambda _: None,
) -> None:
    """Sum ``values`` over ranks, in place; a collective call.

    Args:
        values: ``(layout.size,)`` float32, this rank's summand. Becomes the sum, the same bits on every rank.
        layout: The same on every rank, with as many chunks for each rank as there shall be slices.
        link: To the other ranks.
        rounding: To levels.
        rest: ``(layout.size,)``, becomes what this rank has not sent: sum and rests of all ranks add up to the summands
            of all ranks. Of its own chunk that is what the rounding of the sum left out.
        look: Called with ``values`` before anything is rounded: this rank's summand, or where ``link`` goes by host
            what it has to send to other hosts, the sum of its host in its own piece and zeros elsewhere.
    """
    if link.by_host is not None:
        _sum_by_host(values, layout, link.by_host, rounding, rest, look)
        return
    look(values)
    slices, start = [], 0
    for piece in layout.pieces(layout.num_ranks // link.world_size):
        part = slice(start, start + piece.size)
        slices.append(_slice_sum(values[part], piece, link, rounding, None if rest is None else rest[part]))
        start += piece.size
    for turn in range(len(slices) + 2):  # a slice begins to travel while the one before it is added
        for each in reversed(slices[max(turn - 2, 0) : turn + 1]):
            with suppress(StopIteration):
                next(each)


def _slice_sum(values: Tensor, layout: Layout, link: Link, rounding: Rounding, rest: Tensor | None) -> Generator[None]:
    """Fill ``values`` with the sum and ``rest`` with what was not sent; pauses twice, while bytes travel."""
    rank, spans, own_bytes = link.rank, layout.spans, layout.chunk_bytes[link.rank]
    key = rounding.key(rank, is_sum=False)
    others = [chunk for chunk in range(link.world_size) if chunk != rank]
    encoded = {chunk: layout.encode(chunk, values[spans[chunk]], key) for chunk in others}
    sizes = [0 if chunk == rank else layout.chunk_bytes[chunk] for chunk in range(link.world_size)]
    own_sizes = [0 if sender == rank else own_bytes for sender in range(link.world_size)]
    rows = torch.cat([encoded[chunk] for chunk in others]) if others else values.new_empty(0, dtype=torch.uint8)
    exchanged = link.begin_exchange(rows, sizes, own_sizes)
    yield
    total = torch.empty_like(values[spans[rank]]) if rest is None else rest[spans[rank]]
    _sum_in_order(values[spans[rank]], list(exchanged().split(own_sizes)), layout, rank, total)
    row = values.new_zeros(max(layout.chunk_bytes), dtype=torch.uint8)  # chunks differ by a bucket or so
    row[:own_bytes] = layout.encode(rank, total, rounding.key(rank, is_sum=True))
    gathered = link.begin_gathering(row)
    if rest is not None:
        for chunk in others:
            sent = rest[spans[chunk]]
            layout.decode(chunk, encoded[chunk], sent)
            torch.sub(values[spans[chunk]], sent, out=sent)
    yield
    found = gathered()
    for chunk, span in enumerate(spans):
        layout.decode(chunk, found[chunk, : layout.chunk_bytes[chunk]], values[span])
    if rest is not None:
        total.sub_(values[spans[rank]])


def _sum_by_host(
    values: Tensor,
    layout: Layout,
    links: HostLinks,
    rounding: Rounding,
    rest: Tensor | None,
    look: Callable[[Tensor], object],
) -> None:
    inside, across = links.inside, links.across
    pieces = layout.pieces(inside.world_size)
    sizes = [piece.size for piece in pieces]
    own_size, start = sizes[inside.rank], sum(sizes[: inside.rank])
    own_bytes = [4 * own_size] * inside.world_size
    received = inside.exchange(values.view(torch.uint8), [4 * size for size in sizes], own_bytes)
    total = values.zero_()[start : start + own_size]
    for host_rank, summand in enumerate(received.view(torch.float32).view(inside.world_size, own_size)):
        if host_rank == 0:
            total.copy_(summand)
        else:
            total.add_(summand)
    look(values)
    piece_rest = None if rest is None else rest.zero_()[start : start + own_size]
    sum_encoded(total, pieces[inside.rank], across, rounding, rest=piece_rest)
    row = values.new_zeros(max(sizes))  # pieces differ in size, since their bytes on the wire are alike
    row[:own_size] = total
    gathered = inside.gather(row.view(torch.uint8)).flatten().view(torch.float32).view(inside.world_size, len(row))
    torch.cat([found[:size] for found, size in zip(gathered, sizes, strict=True)], out=values)


def _sum_in_order(own: Tensor, received: list[Tensor], layout: Layout, rank: int, total: Tensor) -> None:
    """Fill ``total`` with the sum of what came of all ranks, ``own`` in its place, which is given up."""
    free = own if rank == 0 else None
    for sender, wire in enumerate(received):
        if sender == rank:
            total.copy_(own) if sender == 0 else total.add_(own)
            free = own
        elif sender == 0:
            layout.decode(rank, wire, total)
        else:
            free = torch.empty_like(own) if free is None else free
            layout.decode(rank, wire, free)
            total.add_(free)
