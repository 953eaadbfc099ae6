"""Edge lists made symmetric and simple, in CSR order, as most published undirected graphs are counted."""

from __future__ import annotations

import numpy as np


def simple_undirected(src: np.ndarray, dst: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Both directions of every edge once, without self-loops, ordered by source and then by destination.

    Args:
        src: ``(E,)`` integers in ``[0, num_nodes)``.
        dst: The same.
        num_nodes: N, less than 2**31.

    Returns:
        Two int64 arrays, sources and destinations of the arcs.

    >>> src, dst = simple_undirected(np.array([0, 1, 2, 0]), np.array([1, 0, 2, 2]), 3)
    >>> list(zip(src.tolist(), dst.tolist()))
    [(0, 1), (0, 2), (1, 0), (2, 0)]
    """
    kept = src != dst
    src, dst = src[kept].astype(np.int64), dst[kept].astype(np.int64)
    arcs = np.unique(np.concatenate([src * num_nodes + dst, dst * num_nodes + src]))
    return arcs // num_nodes, arcs % num_nodes
