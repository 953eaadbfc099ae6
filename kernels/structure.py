"""The sparse structure that graph operators run on.

Shape suffixes: N inner (destination) nodes, L local (source) nodes = inner + halo, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Structure:
    """In-edges grouped by destination (CSC), in global edge-id order within each destination.

    Edge row ``e`` of every edge tensor is position ``e`` of ``indices``: edges are numbered in CSC order, so no
    permutation stands between edge data and the kernels. Frozen: re-balancing or adding self-loops makes a new one.

    Args:
        num_src: L, number of rows of a source operand (inner rows first, then halo rows).
        indptr: ``(N + 1,)`` int64, offsets into ``indices``.
        indices: ``(E,)`` int32 or int64, source row of each edge, in ``[0, L)``.
    """

    num_src: int
    indptr: Tensor
    indices: Tensor

    @property
    def num_dst(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @cached_property
    def in_degrees(self) -> Tensor:
        """``(N,)`` int64."""
        return self.indptr.diff()

    @cached_property
    def dst(self) -> Tensor:
        """``(E,)`` destination row of each edge, in the integer type of ``indices``."""
        rows = torch.arange(self.num_dst, dtype=self.indices.dtype)
        return torch.repeat_interleave(rows, self.in_degrees)

    @cached_property
    def transposed(self) -> TransposedStructure:
        """Out-edges grouped by source; made once, on first use."""
        order = torch.argsort(self.indices, stable=True)
        counts = torch.bincount(self.indices, minlength=self.num_src)
        indptr = torch.zeros(self.num_src + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=indptr[1:])
        return TransposedStructure(indptr, self.dst[order], order)


@dataclass(frozen=True, eq=False)
class TransposedStructure:
    """Out-edges grouped by source row: ``indptr (L + 1,)``, ``dst (E,)`` and ``edges (E,)``, the edge row of each."""

    indptr: Tensor
    dst: Tensor
    edges: Tensor
