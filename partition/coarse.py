"""A partition of the graph of clusters, carried over to the nodes and refined: METIS sees thousands of nodes instead.

The steps of a multilevel partitioner with one of each kind: clusters by label propagation (:mod:`~nugnn.partition.
clusters`) instead of matchings, METIS for the contracted graph, label propagation over the parts for the refinement.

Source: Meyerhenke, Sanders and Schulz, "Partitioning complex networks via size-constrained clustering", SEA 2014.
Differs from it: parts have unequal targets, and METIS takes the place of their initial partitioner.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from nugnn.partition.balance import Balance, Ints, settle
from nugnn.partition.clusters import Ints32, NeighbourLists, contract, propagate_labels
from nugnn.partition.metis import SymmetricGraph, integer_weights, metis_parts

_CLUSTERS_PER_PART = 12
"""Of the smallest part: fewer are too coarse to meet targets by moving whole clusters, more tear communities apart."""
_FEWEST_CLUSTERS = 4_000
"""METIS takes hundredths of a second for so many."""
_FEWEST_JOINED = 0.95
_REFINING_PASSES = 3
_WEIGHT_LIMIT = 2**30


def cluster_parts(graph: SymmetricGraph, balance: Balance, seed: int, notes: list[str]) -> tuple[Ints, Ints32]:
    """A checked assignment near ``balance``, by METIS on clusters.

    Args:
        graph: At least one edge.
        balance: Targets of at least 2 parts, at most N.
        seed: Of label propagation and METIS.
        notes: What had to be done is appended here, one sentence each.

    Returns:
        ``(N,)`` int64 parts, as ``metis_parts`` gives them, and ``(N,)`` int32 the cluster of each node that was found
        first; its nodes can lie in several parts.
    """
    adjacency = graph.adjacency
    num_nodes = len(balance.node_weights)
    node_weights = np.maximum(integer_weights(balance.combined_N, _WEIGHT_LIMIT), 0)
    is_weighted = bool((adjacency.data != adjacency.data[0]).any())
    level = NeighbourLists(
        adjacency.indptr.astype(np.int64, copy=False),
        adjacency.indices.astype(np.int32, copy=False),
        integer_weights(adjacency.data, 2**40) if is_weighted else np.zeros(0, np.int64),
        node_weights,
        np.zeros(0, np.int32),
    )
    total = int(node_weights.sum())
    largest_cluster = max(1, int(min(balance.shares) * total / _CLUSTERS_PER_PART))
    levels: list[tuple[NeighbourLists, Ints32]] = []
    while level.num_nodes > max(_FEWEST_CLUSTERS, 40 * balance.num_parts):
        contracted, cluster_of = contract(level, propagate_labels(level, np.array([largest_cluster]), seed=seed))
        if contracted.num_nodes > _FEWEST_JOINED * level.num_nodes or not len(contracted.indices):
            break
        levels.append((level, cluster_of))
        level = contracted
    if not levels:
        return metis_parts(graph, balance, seed, notes), np.arange(num_nodes, dtype=np.int32)
    coarse = sparse.csr_array((level.weights, level.indices, level.indptr), shape=(level.num_nodes,) * 2)
    loads_K = np.stack([_summed(levels, column) for column in balance.node_weights.T], axis=1)
    part_C = metis_parts(SymmetricGraph(coarse, 0), Balance(loads_K, balance.shares, balance.tolerance), seed, [])
    room = np.ceil(np.asarray(balance.shares) * total * (1 + balance.tolerance / 2)).astype(np.int64)
    for finer, cluster_of in reversed(levels):
        part_C = propagate_labels(
            finer, room, labels=part_C.astype(np.int32)[cluster_of], most_passes=_REFINING_PASSES, seed=seed
        ).astype(np.int64)
    return settle(part_C, balance, adjacency, notes), levels[0][1]


def _summed(levels: list[tuple[NeighbourLists, Ints32]], column: np.ndarray) -> np.ndarray:
    for _, cluster_of in levels:
        column = np.bincount(cluster_of, weights=column)
    return column
