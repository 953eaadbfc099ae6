"""The sparse structure that graph operators run on.

Shape suffixes: N inner (destination) nodes, L local (source) nodes = inner + halo, E edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

MOST_SHORT_PLACES = 1 << 15
"""Rows with more edges need places of 32 bits."""
_EDGES_PER_PASS = 1 << 24
"""Edges sorted at once on a GPU: torch's sort needs some 32 bytes of scratch for each."""


def integer_dtype(largest: int) -> torch.dtype:
    """int32 where numbers up to ``largest`` fit, else int64."""
    return torch.int32 if largest < 2**31 else torch.int64


@dataclass(frozen=True, eq=False)
class Structure:
    """In-edges grouped by destination (CSC), in global edge-id order within each destination.

    Edge row ``e`` of every edge tensor is position ``e`` of ``indices``: edges are numbered in CSC order, so no
    permutation stands between edge data and the kernels. Frozen: re-balancing or adding self-loops makes a new one.

    Args:
        num_src: L, number of rows of a source operand (inner rows first, then halo rows).
        indptr: ``(N + 1,)`` int64, offsets into ``indices``.
        indices: ``(E,)`` int32 or int64, source row of each edge, in ``[0, L)``; on the device of ``indptr``.
    """

    num_src: int
    indptr: Tensor
    indices: Tensor
    _copies: dict[torch.device, Structure] = field(default_factory=dict, init=False, repr=False)
    _splits: dict[tuple[int, int], SplitStructure] = field(default_factory=dict, init=False, repr=False)
    _rows_with: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _reversed_splits: dict[int, tuple[Structure, Structure]] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_dst(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @property
    def device(self) -> torch.device:
        return self.indptr.device

    def to(self, device: torch.device | str) -> Structure:
        """The same structure on ``device``, with 32-bit ``indices`` where they fit; copied once, on first use."""
        if device == self.device:
            return self
        device = torch.empty(0, device=device).device  # "cuda" names a device only together with its number
        if device == self.device:
            return self
        if device not in self._copies:
            indices = self.indices.to(device, integer_dtype(self.num_src))
            self._copies[device] = Structure(self.num_src, self.indptr.to(device), indices)
        return self._copies[device]

    @cached_property
    def in_degrees(self) -> Tensor:
        """``(N,)`` int64."""
        return self.indptr.diff()

    @cached_property
    def dst(self) -> Tensor:
        """``(E,)`` destination row of each edge, in the integer type of ``indices``."""
        rows = torch.arange(self.num_dst, dtype=self.indices.dtype, device=self.device)
        return torch.repeat_interleave(rows, self.in_degrees, output_size=self.num_edges)

    def split(self, num_first: int, num_dst: int | None = None) -> SplitStructure:
        """The edges from the first ``num_first`` source rows, and the others; made once, on first use.

        Args:
            num_first: How many source rows are the first ones.
            num_dst: Of so many destination rows, the first ones; of all when None.
        """
        key = num_first, self.num_dst if num_dst is None else num_dst
        if key not in self._splits:
            self._splits[key] = _split(self, *key)
        return self._splits[key]

    def rows_with(self, num_edges: int) -> int:
        """How many destination rows, from the first one on, have ``num_edges`` in-edges together; all if all have less.

        Found once for each number: the first call waits for the device.
        """
        if num_edges >= self.num_edges:
            return self.num_dst
        if num_edges not in self._rows_with:
            wanted = torch.tensor(num_edges, device=self.device)
            self._rows_with[num_edges] = int(torch.searchsorted(self.indptr, wanted))
        return self._rows_with[num_edges]

    @cached_property
    def transposed(self) -> TransposedStructure:
        """Out-edges grouped by source, by edge within a source; made once, on first use."""
        return self._transpose()

    @cached_property
    def out_places(self) -> Tensor:
        """``(E,)`` for each out-edge in the order of `transposed`: which of its destination's in-edges it is, from 0.

        int16 where no row has more than `MOST_SHORT_PLACES` edges, else int32; made once, on first use.
        """
        transposed = self.transposed
        edges_E = transposed.make_edges()
        most = int(self.in_degrees.max()) if self.num_edges else 0
        dtype = torch.int16 if most <= MOST_SHORT_PLACES else torch.int32
        places_E = torch.empty(self.num_edges, dtype=dtype, device=self.device)
        for begin in range(0, self.num_edges, _EDGES_PER_PASS):
            part = slice(begin, begin + _EDGES_PER_PASS)
            places_E[part] = edges_E[part] - self.indptr[transposed.dst[part]]
        return places_E

    def reversed(self) -> Structure:
        """The same edges from destinations to sources, grouped by source, without a way back to edge rows; not kept."""
        t = self._transpose()
        return Structure(self.num_dst, t.indptr, t.dst)

    def reversed_split(self, num_first: int) -> tuple[Structure, Structure]:
        """`reversed` in two, by rows: the first ``num_first`` source rows, and the others; made once, on first use."""
        if num_first not in self._reversed_splits:
            whole = self.reversed()
            begin = int(whole.indptr[num_first])
            self._reversed_splits[num_first] = (
                Structure(self.num_dst, whole.indptr[: num_first + 1], whole.indices[:begin]),
                Structure(self.num_dst, whole.indptr[num_first:] - begin, whole.indices[begin:]),
            )
        return self._reversed_splits[num_first]

    def _transpose(self) -> TransposedStructure:
        counts = torch.bincount(self.indices, minlength=self.num_src)
        indptr = torch.zeros(self.num_src + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        if self.device.type == "cpu":
            order = torch.argsort(self.indices, stable=True)
            return TransposedStructure(indptr, self.dst[order], lambda: order)

        def edges() -> Tensor:
            return edges_by_source(self.indices, indptr, _EDGES_PER_PASS)

        # the destination of an edge is the row whose range holds it: no E-sized int64 tensor, and `dst` stays unmade
        return TransposedStructure(indptr, _rows_of_edges(self.indptr, edges()), edges)


@dataclass(frozen=True, eq=False)
class TransposedStructure:
    """Out-edges grouped by source row.

    Args:
        indptr: ``(L + 1,)`` int64 offsets.
        dst: ``(E,)`` destination of each.
        make_edges: Finds `edges`.
    """

    indptr: Tensor
    dst: Tensor
    make_edges: Callable[[], Tensor] = field(repr=False)

    @cached_property
    def edges(self) -> Tensor:
        """``(E,)`` edge row of each; made again on first use on a GPU, since aggregation without weights never asks."""
        return self.make_edges()


@dataclass(frozen=True, eq=False)
class SplitStructure:
    """The edges of a structure in two, by source row, for sums that begin before all source rows are there.

    Args:
        first: Edges from the first source rows to the destinations that were asked for.
        rest: Edges from the other source rows, numbered from 0, to the same destinations.
    """

    first: Structure
    rest: Structure


def _split(structure: Structure, num_first: int, num_dst: int) -> SplitStructure:
    of_all = structure.indptr[: num_dst + 1]
    indices = structure.indices[: int(of_all[-1])]
    is_first_E = indices < num_first
    before_E = torch.zeros(len(indices) + 1, dtype=integer_dtype(len(indices)), device=structure.device)
    torch.cumsum(is_first_E, 0, out=before_E[1:])
    indptr = before_E[of_all].long()
    return SplitStructure(
        Structure(num_first, indptr, indices[is_first_E]),
        Structure(structure.num_src - num_first, of_all - indptr, indices[~is_first_E] - num_first),
    )


def edges_by_source(indices_E: Tensor, source_indptr: Tensor, edges_per_pass: int) -> Tensor:
    """``argsort(indices, stable=True)`` with scratch for ``edges_per_pass`` edges, by ranges of sources.

    Args:
        indices_E: Source row of each edge.
        source_indptr: ``(L + 1,)`` int64, how many edges have a smaller source.
        edges_per_pass: Edges sorted at once; more where one source alone has more.

    Returns:
        ``(E,)`` int32 where it fits, else int64.
    """
    num_edges, num_src = len(indices_E), len(source_indptr) - 1
    edges_E = torch.empty(num_edges, dtype=integer_dtype(num_edges), device=indices_E.device)
    targets = torch.arange(1, max(1, -(-num_edges // edges_per_pass)), device=indices_E.device) * edges_per_pass
    # each range ends at the last source that still fits, or holds one source
    cuts = (torch.searchsorted(source_indptr, targets, right=True) - 1).tolist()
    bounds = sorted({0, num_src, *cuts, *(min(cut + 1, num_src) for cut in cuts)})
    offsets = source_indptr[torch.tensor(bounds, device=indices_E.device)].tolist()
    ranges = zip(pairwise(bounds), pairwise(offsets), strict=True)
    for (first, end), (begin, stop) in ranges:
        if begin == stop:
            continue
        if stop - begin == num_edges:
            edges_E.copy_(torch.argsort(indices_E, stable=True))
            continue
        chosen = ((indices_E >= first) & (indices_E < end)).nonzero().flatten()
        edges_E[begin:stop] = chosen[torch.argsort(indices_E[chosen], stable=True)]
    return edges_E


def _rows_of_edges(indptr: Tensor, edges_E: Tensor) -> Tensor:
    rows_E = torch.empty(len(edges_E), dtype=integer_dtype(len(indptr)), device=edges_E.device)
    for begin in range(0, len(edges_E), _EDGES_PER_PASS):
        part = edges_E[begin : begin + _EDGES_PER_PASS]
        rows_E[begin : begin + _EDGES_PER_PASS] = torch.searchsorted(indptr, part.long(), right=True) - 1
    return rows_E
