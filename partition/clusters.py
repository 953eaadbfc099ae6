"""Clusters of nodes with many arcs between them, found by label propagation under a bound on their size.

Source: Raghavan, Albert and Kumara, "Near linear time algorithm to detect community structures in large-scale
networks", Physical Review E 76 (2007); the bound on the size and the contraction of clusters: Meyerhenke, Sanders and
Schulz, "Partitioning complex networks via size-constrained clustering", SEA 2014. Differs from both: nodes move in
interleaved subsets whose moves are settled in order of ids, so the result does not depend on the number of threads.

Axes: N nodes, E arcs, C clusters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nugnn._counted import counted
from nugnn.kernels._jit import row_tasks

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

_SUBSETS = 8
"""Two nodes that look at each other seldom move at once. 4 needed a pass more, which costs more than it saves."""
_SETTLED = 0.02
"""Passes end when fewer of the nodes than this moved: the next pass would move a few nodes in a hundred of those."""
_MOST_NEIGHBOURS = 1 << 14
"""That a node looks at, evenly spaced among all it has."""
_MOST_NODES = 2**31 - 1
_FEW_KEYS = 500_000


@dataclass(frozen=True, eq=False)
class NeighbourLists:
    """A graph as label propagation sees it.

    Args:
        indptr: ``(N + 1,)`` int64 offsets into ``indices``.
        indices: ``(E,)`` int32 neighbours; each arc should be listed at both of its ends.
        weights: ``(E,)`` int64 or float64, positive; empty for 1 each.
        node_weights: ``(N,)`` int64, what counts towards the size of a cluster.
        parts: ``(N,)`` integer part of each node: no cluster crosses parts. Empty for a single part.
    """

    indptr: Ints
    indices: Ints32
    weights: npt.NDArray
    node_weights: Ints
    parts: npt.NDArray

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1


def unweighted_lists(indptr: Ints, indices: Ints32, parts: npt.NDArray | None = None) -> NeighbourLists:
    """Lists whose arcs and nodes weigh 1 each.

    Raises:
        ValueError: 2**31 nodes or more.
    """
    num_nodes = len(indptr) - 1
    if num_nodes > _MOST_NODES:
        raise ValueError(f"{counted(num_nodes, 'node')}; clusters are found of at most {_MOST_NODES}")
    no_parts: npt.NDArray = np.zeros(0, np.int32)
    return NeighbourLists(
        indptr, indices, np.zeros(0, np.int64), np.ones(num_nodes, np.int64), no_parts if parts is None else parts
    )


def propagate_labels(
    graph: NeighbourLists,
    capacities: Ints,
    *,
    labels: Ints32 | None = None,
    most_passes: int = 6,
    seed: int = 0,
) -> Ints32:
    """Give each node the label that most of its neighbours bear, again and again, while its cluster has room.

    Args:
        graph: Symmetric lists.
        capacities: Largest node weight of a cluster: ``(1,)`` for every cluster, or one for each label.
        labels: ``(N,)`` int32 to start from, not modified; each node its own cluster when None.
        most_passes: Passes over all nodes, at most.
        seed: Decides between labels that are borne equally often.

    Returns:
        ``(N,)`` int32, labels among those it started with; equal arguments give equal labels, on any number of
        threads. A node that outweighs the capacity keeps the label it had.
    """
    from nugnn.partition import cluster_kernels as kernels

    num_nodes = graph.num_nodes
    labels = np.arange(num_nodes, dtype=np.int32) if labels is None else labels.copy()
    num_labels = max(num_nodes, len(capacities), int(labels.max(initial=-1)) + 1)
    loads = np.bincount(labels, weights=graph.node_weights, minlength=num_labels).astype(np.int64)
    bounds = row_tasks(graph.indptr, torch.get_num_threads())
    longest = int(min(np.diff(graph.indptr).max(initial=1), _MOST_NEIGHBOURS)) + 1
    slots = 4 << (longest - 1).bit_length()
    keys = np.full((len(bounds) - 1, slots), -1, np.int32)
    sums = np.zeros((len(bounds) - 1, slots), np.int64)
    used = np.empty((len(bounds) - 1, longest + 1), np.int32)
    chosen = np.empty(num_nodes, np.int32)
    tie_breaker = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    for _ in range(most_passes):
        num_moved = 0
        for subset in range(_SUBSETS):
            kernels.choose_labels(
                bounds, subset, _SUBSETS, graph.indptr, graph.indices, graph.weights, graph.parts, graph.node_weights,
                labels, loads, capacities, tie_breaker, _MOST_NEIGHBOURS, keys, sums, used, chosen,
            )  # fmt: skip
            num_moved += kernels.move_nodes(subset, _SUBSETS, chosen, graph.node_weights, capacities, labels, loads)
        if num_moved <= _SETTLED * num_nodes:
            break
    return labels


def contract(graph: NeighbourLists, labels: Ints32) -> tuple[NeighbourLists, Ints32]:
    """Each cluster becomes a node with the weight of its members; arcs between two clusters are added up.

    Arcs inside a cluster and between parts are left out.

    Args:
        graph: N nodes.
        labels: ``(N,)`` in ``[0, N)``; no cluster crosses parts.

    Returns:
        The contracted graph, its nodes in ascending order of labels, and ``(N,)`` int32 the new node of each old one.
    """
    from nugnn.partition import cluster_kernels as kernels

    used = np.zeros(graph.num_nodes, np.bool_)
    used[labels] = True
    num_clusters = int(used.sum())
    cluster_of: Ints32 = (np.cumsum(used) - 1).astype(np.int32)[labels]
    members, offsets = grouped(cluster_of, num_clusters)
    work = np.concatenate([[0], np.cumsum(np.diff(graph.indptr)[members])])[offsets]
    bounds = row_tasks(work, 1 + torch.get_num_threads() // 4)  # as few as keep all busy: each has a row of `places`
    # A cluster has as many merged arcs as arcs at most, and as many as there are clusters.
    starts = np.zeros(num_clusters + 1, np.int64)
    np.cumsum(np.minimum(np.diff(work), num_clusters), out=starts[1:])
    loose_indices = np.empty(starts[-1], np.int32)
    loose_weights = np.empty(starts[-1], graph.weights.dtype)
    places = np.full((len(bounds) - 1, num_clusters), -1, np.int64)
    counts = np.empty(num_clusters, np.int64)
    kernels.merge_arcs(
        bounds, members, offsets, graph.indptr, graph.indices, graph.weights, graph.parts, cluster_of, starts, places,
        loose_indices, loose_weights, counts,
    )  # fmt: skip
    indptr = np.concatenate([[0], np.cumsum(counts)])
    kept = np.repeat(starts[:-1] - indptr[:-1], counts) + np.arange(indptr[-1])
    contracted = NeighbourLists(
        indptr,
        loose_indices[kept],
        loose_weights[kept],
        np.bincount(cluster_of, weights=graph.node_weights, minlength=num_clusters).astype(np.int64),
        graph.parts[members[offsets[:-1]]] if len(graph.parts) else graph.parts,
    )
    return contracted, cluster_of


def grouped(keys: npt.NDArray, num_keys: int) -> tuple[npt.NDArray, Ints]:
    """Order that groups equal keys, earliest first within a group, and the ``(num_keys + 1,)`` offsets of the groups.

    A counting sort, in time linear in the number of keys; where they are few, NumPy's sort spares numba's start.
    """
    offsets = np.zeros(num_keys + 1, np.int64)
    if len(keys) < _FEW_KEYS:
        np.cumsum(np.bincount(keys, minlength=num_keys), out=offsets[1:])
        return np.argsort(keys, kind="stable"), offsets
    from nugnn.partition import cluster_kernels as kernels

    kernels.count_keys(keys, offsets[1:])
    np.cumsum(offsets, out=offsets)
    order = np.empty(len(keys), np.int32 if len(keys) <= _MOST_NODES else np.int64)
    kernels.counting_sort(keys, offsets[:-1].copy(), order)
    return order, offsets


def rows_in_order(entries: npt.NDArray, indptr: Ints, order: Ints) -> tuple[npt.NDArray, Ints]:
    """Rows of a CSR structure that holds ``entries``, in another order, and their offsets."""
    starts = np.zeros_like(indptr)
    np.cumsum(np.diff(indptr)[order], out=starts[1:])
    if np.array_equal(order, np.arange(len(order))):
        return entries, starts
    if len(entries) < _FEW_KEYS:
        places = np.arange(len(entries)) + np.repeat(indptr[:-1][order] - starts[:-1], np.diff(starts))
        return entries[places], starts
    from nugnn.partition import cluster_kernels as kernels

    out = np.empty_like(entries)
    kernels.gather_rows(row_tasks(starts, torch.get_num_threads()), order, indptr, starts, entries, out)
    return out, starts
