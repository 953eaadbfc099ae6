"""The structure as a graph index of DGL, whose CPU kernels then do the sums."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from nugnn.kernels.structure import Structure

_indices: WeakKeyDictionary[Structure, Any] = WeakKeyDictionary()


def index_dtype(structure: Structure) -> torch.dtype:
    """int32 while all row numbers and offsets fit, else int64: DGL wants one type for offsets and indices."""
    return torch.int32 if max(structure.num_src, structure.num_dst, structure.num_edges) < 2**31 else torch.int64


def graph_index(structure: Structure) -> Any:
    """Bipartite unit graph: L sources, N destinations, edge id = CSC position. Built once per structure.

    ``indices`` that already have :func:`index_dtype` are shared, not copied.
    """
    if structure not in _indices:
        from dgl.heterograph_index import create_unitgraph_from_csr

        dtype = index_dtype(structure)
        # Edge id = position could be left implicit, but DGL's blocked AVX-512 kernels fail a check without the array.
        edge_ids = torch.arange(structure.num_edges, dtype=dtype)
        _indices[structure] = create_unitgraph_from_csr(
            2,
            structure.num_src,
            structure.num_dst,
            structure.indptr.to(dtype).contiguous(),
            structure.indices.to(dtype).contiguous(),
            edge_ids,
            ["coo", "csr", "csc"],
            transpose=True,
        )
    return _indices[structure]
