"""A partition of the graph of clusters, carried over to the nodes and refined: METIS sees thousands of nodes instead.

The steps of a multilevel partitioner with one of each kind: clusters by label propagation (:mod:`~nugnn.partition.
clusters`) instead of matchings, METIS for the contracted graph, label propagation over the parts for the refinement.
Clusters are the larger part of the work, and one finding of them serves any targets.

Source: Meyerhenke, Sanders and Schulz, "Partitioning complex networks via size-constrained clustering", SEA 2014.
Differs from it: parts have unequal targets, and METIS takes the place of their initial partitioner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from nugnn.partition.balance import Balance, Ints, fill_empty_parts, normalise_shares, settle
from nugnn.partition.clusters import Ints32, NeighbourLists, contract, propagate_labels
from nugnn.partition.metis import SymmetricGraph, integer_weights, metis_parts

_CLUSTERS_PER_PART = 12
"""Of the smallest part: fewer are too coarse to meet targets by moving whole clusters, more tear communities apart."""
_FEWEST_CLUSTERS = 4_000
"""METIS takes hundredths of a second for so many."""
_FEWEST_JOINED = 0.95
_REFINING_PASSES = 3
_WEIGHT_LIMIT = 2**30
_SMALLER = 2.0
"""The smallest target may be so much smaller than the one that clusters were found for."""
_FEWEST_NODES = 2 * _CLUSTERS_PER_PART
"""Of a target that clusters are made for. For a smaller one each would be a single node, and METIS get the whole graph:
such parts get their nodes in the end."""


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """Clusters of a graph, clusters of these, and so on.

    Args:
        graph: At least one edge.
        levels: The graph and each contracted one but the last, and the cluster of each of its nodes, int32.
        coarsest: The last one; the graph itself where there are no levels.
        smallest_share: That the sizes of clusters are bounded for.
    """

    graph: SymmetricGraph
    levels: tuple[tuple[NeighbourLists, Ints32], ...]
    coarsest: NeighbourLists
    smallest_share: float

    @property
    def clusters(self) -> Ints32:
        """``(N,)`` cluster of each node that was found first."""
        return self.levels[0][1] if self.levels else np.arange(self.coarsest.num_nodes, dtype=np.int32)

    def serves(self, balance: Balance) -> bool:
        """Whether clusters are small enough for the targets."""
        return self.smallest_share <= _SMALLER * min(balance.shares[part] for part in _of_clusters(balance))

    def parts(self, balance: Balance, seed: int, notes: list[str]) -> Ints:
        """A checked assignment near ``balance``, whose node weights need not be those that clusters were found by.

        Args:
            balance: Targets of at least 2 parts, at most N.
            seed: Of METIS, and of the refinement.
            notes: What had to be done is appended here, one sentence each.

        Returns:
            ``(N,)`` int64 parts, as ``metis_parts`` gives them.
        """
        if not self.levels:
            return metis_parts(self.graph, balance, seed, notes)
        chosen = _of_clusters(balance)
        if len(chosen) == balance.num_parts:
            part_N = self._refined(balance, seed)
        else:
            part_N = np.full(len(balance.node_weights), chosen[0], np.int64)
            if len(chosen) > 1:
                targets = replace(balance, shares=normalise_shares([balance.shares[part] for part in chosen]))
                part_N = np.array(chosen)[self._refined(targets, seed)]
            fill_empty_parts(part_N, balance, self.graph.adjacency)
        return settle(part_N, balance, self.graph.adjacency, notes)

    def _refined(self, balance: Balance, seed: int) -> Ints:
        """METIS' parts of the coarsest graph, refined on each finer one."""
        level = self.coarsest
        coarse = sparse.csr_array((level.weights, level.indices, level.indptr), shape=(level.num_nodes,) * 2)
        *_, loads_K = self._summed(balance.node_weights)
        part_C = metis_parts(SymmetricGraph(coarse, 0), Balance(loads_K, balance.shares, balance.tolerance), seed, [])
        weights_N = _whole_weights(balance)
        room = np.ceil(np.asarray(balance.shares) * int(weights_N.sum()) * (1 + balance.tolerance / 2)).astype(np.int64)
        weights = list(self._summed(weights_N[:, None]))
        for (finer, cluster_of), weights_K in zip(reversed(self.levels), reversed(weights[:-1]), strict=True):
            part_C = propagate_labels(
                replace(finer, node_weights=weights_K[:, 0].astype(np.int64)),
                room,
                labels=part_C.astype(np.int32)[cluster_of],
                most_passes=_REFINING_PASSES,
                seed=seed,
            ).astype(np.int64)
        return part_C

    def _summed(self, weights_K: np.ndarray) -> Iterator[np.ndarray]:
        """Node weights of each level, the coarsest one last."""
        yield weights_K
        for _, cluster_of in self.levels:
            weights_K = np.stack([np.bincount(cluster_of, weights=column) for column in weights_K.T], axis=1)
            yield weights_K


def find_clusters(graph: SymmetricGraph, balance: Balance, seed: int) -> Hierarchy:
    """Clusters of nodes with many arcs between them, small enough for the targets of ``balance``.

    Args:
        graph: At least one edge.
        balance: Node weights that bound the size of clusters, and targets.
        seed: Of label propagation.
    """
    adjacency = graph.adjacency
    node_weights = _whole_weights(balance)
    is_weighted = bool((adjacency.data != adjacency.data[0]).any())
    level = NeighbourLists(
        adjacency.indptr.astype(np.int64, copy=False),
        adjacency.indices.astype(np.int32, copy=False),
        integer_weights(adjacency.data, 2**40) if is_weighted else np.zeros(0, np.int64),
        node_weights,
        np.zeros(0, np.int32),
    )
    smallest_share = min(balance.shares[part] for part in _of_clusters(balance))
    largest_cluster = max(1, int(smallest_share * int(node_weights.sum()) / _CLUSTERS_PER_PART))
    levels: list[tuple[NeighbourLists, Ints32]] = []
    while level.num_nodes > max(_FEWEST_CLUSTERS, 40 * balance.num_parts):
        contracted, cluster_of = contract(level, propagate_labels(level, np.array([largest_cluster]), seed=seed))
        if contracted.num_nodes > _FEWEST_JOINED * level.num_nodes or not len(contracted.indices):
            break
        levels.append((level, cluster_of))
        level = contracted
    return Hierarchy(graph, tuple(levels), level, smallest_share)


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
    found = find_clusters(graph, balance, seed)
    return found.parts(balance, seed, notes), found.clusters


def _of_clusters(balance: Balance) -> list[int]:
    """Parts whose targets are more than a few nodes; all of them where none is."""
    num_nodes = len(balance.node_weights)
    large = [part for part, share in enumerate(balance.shares) if share * num_nodes >= _FEWEST_NODES]
    return large or list(range(balance.num_parts))


def _whole_weights(balance: Balance) -> Ints:
    return np.maximum(integer_weights(balance.combined_N, _WEIGHT_LIMIT), 0)
