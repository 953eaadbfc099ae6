"""An order of the nodes inside each part in which the sources of neighbouring rows lie near each other.

Aggregation reads a row of features for every in-edge. Where a stretch of destinations reads from few stretches of
sources, most of those rows are still in the cache; in an arbitrary order nearly each of them comes from memory.

The order is nested: clusters (:mod:`nugnn.partition.clusters`) are contracted and clustered again until they are as
large as the cache or no longer join, and the nodes stand by outermost cluster, then by the next one in, and so on. So
the innermost ones serve small caches and the outer ones large caches, without a word on any cache but the largest.

Renumbering rows changes no result: within a destination the in-edges stay in the order of their global ids.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from nugnn._counted import counted
from nugnn.kernels._jit import row_tasks
from nugnn.partition.clusters import (
    Ints,
    Ints32,
    NeighbourLists,
    contract,
    grouped,
    propagate_labels,
    unweighted_lists,
)

OrderChoice: TypeAlias = Literal["auto", "none", "clusters"]
ORDER_CHOICES: tuple[OrderChoice, ...] = ("auto", "none", "clusters")

CACHE_BYTES = 32 << 20
"""Of the largest cache: between a desktop's last level and the second level of a large GPU.

A constant, not a measurement: every rank cuts its part out by itself in some runs, and all must find the same order.
"""
_FEWEST_EDGES = 1_000_000
"""Below, an epoch takes tens of milliseconds in any order, less than it takes to load the kernels that look for one."""
_NEAR_ENOUGH = 0.9
"""Of the edges: where so many already have both ends within a cache of each other there is little to gain."""
_LEAST_GAIN = 0.9
"""A found order is taken when it leaves at most this share of the far edges of the given one."""
_FEWEST_JOINED = 0.95
"""Contraction ends when it leaves more than this share of the clusters."""


@dataclass(frozen=True, kw_only=True)
class OrderReport:
    """How the rows of a set of shards are ordered, recorded with each of them.

    Args:
        method: "none": by global id; "clusters": as :func:`locality_order` found.
        num_clusters: Outermost clusters of two nodes or more; 0 for "none".
        near_before: Share of the edges inside parts whose ends lie within a cache of each other, by global id.
        near_after: The same in the order taken.
        seconds: Spent on looking for it; left out of comparisons.
        reason: Why the nodes were left in the order of their ids; empty where they were not.
    """

    method: Literal["none", "clusters"]
    num_clusters: int = 0
    near_before: float = 0.0
    near_after: float = 0.0
    seconds: float = field(default=0.0, compare=False)
    reason: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell the user unasked: the sentence where the nodes were reordered."""
        return () if self.method == "none" else (self.sentence,)

    @property
    def sentence(self) -> str:
        """One line for the user."""
        if self.method == "none":
            return f"Nodes in the order of their ids: {self.reason or 'as asked for'}."
        return (
            f"Nodes reordered into {self.num_clusters} clusters in {self.seconds:.1f} s: "
            f"{self.near_after:.0%} of the edges now stay within a cache, {self.near_before:.0%} before."
        )


BY_ID = OrderReport(method="none")
"""The order of global ids, as asked for."""


def check_order_choice(choice: str) -> None:
    """Refuse an unknown choice.

    Raises:
        ValueError: not one of ``ORDER_CHOICES``.
    """
    if choice not in ORDER_CHOICES:
        raise ValueError(f"unknown order {choice!r}; choose 'auto', 'none' or 'clusters'")


def why_not_worth_it(largest_part: int, num_edges: int, row_bytes: int) -> str:
    """Why automatic ordering leaves a graph as it is, decided by its size alone; empty where it is worth a try.

    Args:
        largest_part: Nodes of the largest part.
        num_edges: Of the whole graph.
        row_bytes: Of a node's features.
    """
    if num_edges < _FEWEST_EDGES:
        return f"{counted(num_edges, 'edge')} are too few for an order to matter"
    if largest_part * row_bytes <= CACHE_BYTES:
        return "the features of a part fit the cache"
    return ""


def rows_in_cache(row_bytes: int) -> int:
    """Rows of features that fit the cache, at least 1."""
    return max(1, CACHE_BYTES // max(1, row_bytes))


def neighbour_lists(
    indptr: Ints, indices: Ints32, src: npt.NDArray, dst: npt.NDArray, parts: npt.NDArray | None
) -> NeighbourLists:
    """Every edge listed at both of its ends: the in-lists alone where the graph is symmetric, else with the out-lists.

    Symmetry is told by comparing a 64-bit sum over the edges with that over the edges turned round. A wrong answer, of
    probability 2^-64, would cost speed and nothing else.

    Args:
        indptr: ``(N + 1,)`` int64, in-edges by destination.
        indices: ``(E,)`` int32, their sources.
        src: ``(E,)`` source of each edge in any order.
        dst: ``(E,)`` destination of each edge, in the order of ``src``.
        parts: ``(N,)`` or None for one part.
    """
    from nugnn.partition import cluster_kernels as kernels

    bounds = np.linspace(0, len(src), 4 * torch.get_num_threads() + 1).astype(np.int64)
    sums = np.zeros((len(bounds) - 1, 2), np.uint64)
    kernels.fingerprints(bounds, src, dst, sums)
    forth, back = sums.sum(axis=0)
    if forth == back:
        return unweighted_lists(indptr, indices, parts)
    in_degrees = np.diff(indptr)
    out_degrees = np.bincount(src, minlength=len(in_degrees))
    starts = np.concatenate([[0], np.cumsum(in_degrees + out_degrees)])
    both = np.empty(int(starts[-1]), np.int32)
    kernels.join_lists(indptr, indices, src, dst, starts, starts[:-1] + in_degrees, both)
    return unweighted_lists(starts, both, parts)


def locality_order(
    graph: NeighbourLists, most_rows: int, *, start: npt.NDArray | None = None, seed: int = 0
) -> tuple[Ints, int]:
    """Nodes by part, and inside a part by nested clusters of at most ``most_rows`` nodes.

    Args:
        graph: Symmetric lists; parts as they are to stay.
        most_rows: Nodes whose features fit the largest cache.
        start: ``(N,)`` innermost clusters that are known already, as integers from 0; they may cross parts. They are
            looked for when None, and also where one of these is larger than ``most_rows``.
        seed: Decides between equal neighbours.

    Returns:
        ``(N,)`` int64, the node at each position: a permutation, ascending by part. Within the innermost clusters it
        ascends by node. And how many outermost clusters have two nodes or more. Equal arguments give an equal order, on
        any number of threads.
    """
    levels: list[Ints32] = []
    capacities = np.array([most_rows], np.int64)
    labels: Ints32 | None = None
    if start is not None and np.bincount(start).max(initial=0) <= most_rows:
        labels = _inside_parts(start, graph.parts)
    level = graph
    while True:
        if labels is None:
            labels = propagate_labels(level, capacities, seed=seed)
        contracted, cluster_of = contract(level, labels)
        labels = None
        levels.append(cluster_of)
        has_settled = contracted.num_nodes > _FEWEST_JOINED * level.num_nodes
        level = contracted
        if has_settled or not len(level.indices):
            break
    num_clusters = int((level.node_weights >= 2).sum())
    if len(level.parts):
        place = np.empty(level.num_nodes, np.int64)
        place[np.argsort(level.parts, kind="stable")] = np.arange(level.num_nodes)
    else:
        place = np.arange(level.num_nodes)
    order = place
    for cluster_of in reversed(levels):
        order, _ = grouped(place[cluster_of], len(place))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
    return order.astype(np.int64), num_clusters


def _inside_parts(clusters: npt.NDArray, parts: npt.NDArray) -> Ints32:
    """Clusters cut where they cross parts, as labels below N: of each piece the node that comes first."""
    if not len(parts):
        keys = clusters
    else:
        keys = clusters.astype(np.int64) * (int(parts.max(initial=0)) + 1) + parts
    _, first, piece = np.unique(keys, return_index=True, return_inverse=True)
    return first[piece].astype(np.int32)


def near_share(graph: NeighbourLists, position: Ints, window: int) -> float:
    """Share of the arcs inside parts whose ends lie less than ``window`` positions apart; 1 if there are none."""
    from nugnn.partition import cluster_kernels as kernels

    bounds = row_tasks(graph.indptr, torch.get_num_threads())
    counts = np.zeros((len(bounds) - 1, 2), np.int64)
    kernels.near_arcs(bounds, graph.indptr, graph.indices, graph.parts, position, window, counts)
    inside, near = counts.sum(axis=0).tolist()
    return near / inside if inside else 1.0


def find_order(
    graph: NeighbourLists, given: Ints, most_rows: int, *, start: npt.NDArray | None = None, only_if_better: bool
) -> tuple[Ints, OrderReport]:
    """The order to number rows by: a found one, or ``given`` where that is as good.

    Args:
        graph: As for :func:`locality_order`.
        given: ``(N,)`` int64, the nodes by part and ascending by id within one.
        most_rows: As for :func:`locality_order`.
        start: As for :func:`locality_order`.
        only_if_better: Keep ``given`` where it is local already or the found order is hardly better.
    """
    begin = time.perf_counter()
    window = max(1, most_rows // 2)  # on either side of a destination

    def share(order: Ints) -> float:
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        return near_share(graph, position, window)

    before = share(given)
    if only_if_better and before >= _NEAR_ENOUGH:
        reason = f"{before:.0%} of the edges stay within a cache as they are"
        return given, OrderReport(
            method="none", near_before=before, near_after=before, seconds=time.perf_counter() - begin, reason=reason
        )
    found, num_clusters = locality_order(graph, most_rows, start=start)
    after = share(found)
    seconds = time.perf_counter() - begin
    if only_if_better and 1 - after > _LEAST_GAIN * (1 - before):
        reason = f"clusters would keep {after:.0%} of the edges within a cache, {before:.0%} stay there as they are"
        return given, OrderReport(method="none", near_before=before, near_after=before, seconds=seconds, reason=reason)
    return found, OrderReport(
        method="clusters", num_clusters=num_clusters, near_before=before, near_after=after, seconds=seconds
    )
