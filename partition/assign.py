"""A part for every node: the front door of the partitioners, which checks what goes in and what comes out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nugnn._counted import counted
from nugnn.partition.balance import Balance, Ints, normalise_shares, reachable_shares, settle, split_in_order
from nugnn.partition.coarse import cluster_parts
from nugnn.partition.ids import ArrayLike, as_array, edge_arrays, ids_array
from nugnn.partition.kaminpar import check_kaminpar, kaminpar_parts
from nugnn.partition.metis import SymmetricGraph, check_index_width, metis_parts, symmetric_graph

Method: TypeAlias = Literal["metis", "kaminpar", "clusters", "random", "given"]
NodeWeights: TypeAlias = Any  # "unit", "degree" or an ArrayLike


class NoAssignmentError(ValueError):
    """A partitioner kept to no assignment within tolerance: says by how much it is missed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Assignment:
    """Which part each node belongs to, and what that costs.

    Args:
        part: ``(N,)`` int32, part of each node.
        method: How it was made: see :func:`partition_nodes`.
        seed: Seed it was made with.
        shares_asked: Target share of each part, summing to 1.
        node_counts: Nodes per part.
        edge_counts: In-edges of the nodes of each part: the edges whose messages that part computes.
        edge_cut: Distinct arcs ``(u, v)`` whose ends lie in different parts; parallel arcs count once.
        cut_weight: Sum over all arcs across parts, parallel ones included, of the edge weights (of 1 where none were
            given); an exact int for integer weights.
        halo_rows: Per part, nodes of other parts that are the source of an edge into this one.
        seconds: Wall-clock time to make it.
        notes: What had to be done on the way, one sentence each.
        clusters: ``(N,)`` int32, a cluster of each node where the partitioner found some; they may cross parts.
    """

    part: Tensor
    method: Method
    seed: int
    shares_asked: tuple[float, ...]
    node_counts: tuple[int, ...]
    edge_counts: tuple[int, ...]
    edge_cut: int
    cut_weight: int | float
    halo_rows: tuple[int, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    clusters: Tensor | None = None

    @property
    def num_parts(self) -> int:
        return len(self.shares_asked)

    @property
    def num_nodes(self) -> int:
        return len(self.part)


def degree_weights(num_nodes: int, dst: ArrayLike, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """``(N,)`` float64 node weights ``alpha + beta * in_degree``: work per node plus work per in-edge."""
    dst_E = ids_array(dst, num_nodes, "dst")
    return alpha + beta * torch.from_numpy(np.bincount(dst_E, minlength=num_nodes)).double()


def partition_nodes(
    num_nodes: int,
    src: ArrayLike,
    dst: ArrayLike,
    shares: Sequence[float],
    *,
    method: Method = "metis",
    seed: int = 0,
    parts: ArrayLike | None = None,
    edge_weights: ArrayLike | None = None,
    node_weights: NodeWeights = "unit",
    tolerance: float = 0.02,
    symmetric: SymmetricGraph | None = None,
) -> Assignment:
    """Give each node of a directed multigraph to one part, such that part p weighs ``shares[p]`` of the whole.

    Parallel arcs are merged and self-loops left out for partitioning only; training still sees all of them. The
    outcome is checked, whatever made it: every node has a part, every part a node, and for each column of the node
    weights ``|load - target| <= max(tolerance * target, heaviest node)``. The target of a part that is asked for less
    than an average node is one average node.

    Args:
        num_nodes: N, at least the number of parts.
        src: ``(E,)`` integer source of each arc, in ``[0, N)``.
        dst: ``(E,)`` integer destination of each arc.
        shares: One positive number per part; only their ratio matters.
        method: "metis" (few arcs across parts); "clusters" (METIS on the graph of clusters: less time and memory,
            a smaller cut where nodes form communities, a larger one where they hardly do); "kaminpar" (an optional
            package); "random"; or "given" (``parts`` is taken as it is, and only noted where it misses ``shares``).
        seed: Seed of the random choices, at least 0.
        parts: ``(N,)`` integers in ``[0, P)``, for "given" only.
        edge_weights: ``(E,)`` positive integers or floats: what an arc costs when it is cut. None: 1 each.
        node_weights: What is balanced: "unit" (nodes), "degree" (``1 + in-degree``), an ``(N,)`` array such as
            ``degree_weights`` makes, or ``(N, K)`` for K quantities at once. METIS takes one weight per node here, so
            K columns are added up, each scaled to sum to 1, and each column is then checked and repaired by itself.
        tolerance: Allowed deviation from a target, relative to it.
        symmetric: What `nugnn.partition.metis.symmetric_graph` makes of these edges and their weights, for callers that
            have it; not modified.

    Returns:
        The assignment; equal arguments give an equal one, apart from ``seconds``, but for "kaminpar" on more than one
        thread.

    Raises:
        ValueError: an argument is malformed or out of range, or there are more parts than nodes.
        NoAssignmentError: no assignment within tolerance was found.
    """
    started = time.perf_counter()
    if num_nodes < 1:
        raise ValueError(f"num_nodes is {num_nodes}: an empty graph cannot be partitioned; it needs at least one node")
    asked = normalise_shares(shares)
    if len(asked) > num_nodes:
        raise ValueError(
            f"more parts than nodes: {counted(len(asked), 'part')} for {counted(num_nodes, 'node')}; every part "
            f"needs a node of its own, "
            f"so ask for at most {counted(num_nodes, 'part')}"
        )
    if method not in get_args(Method):
        raise ValueError(
            f"unknown partition method {method!r}; choose 'metis', 'clusters', 'kaminpar', 'random' or 'given'"
        )
    if method == "kaminpar":
        check_kaminpar()
    if (parts is None) == (method == "given"):
        raise ValueError("method='given' needs `parts`, and only 'given' takes them")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it must be an integer of at least 0")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance is {tolerance}; it must be a number of at least 0")
    if method in ("metis", "clusters"):
        check_index_width(num_nodes, len(src))
    if symmetric is not None and symmetric.adjacency.shape != (num_nodes, num_nodes):
        raise ValueError(
            f"symmetric is a graph of {counted(symmetric.adjacency.shape[0], 'node')}; this one has {num_nodes}"
        )
    src_E, dst_E = (ids.astype(np.int64, copy=False) for ids in edge_arrays(src, dst, num_nodes))
    weights_E = _checked_edge_weights(edge_weights, len(src_E))

    targets = reachable_shares(asked, num_nodes)
    balance = Balance(_checked_node_weights(node_weights, num_nodes, dst_E), targets, float(tolerance))
    notes: list[str] = []
    clusters_N: npt.NDArray | None = None
    if max(abs(t - a) for t, a in zip(targets, asked, strict=True)) > 1e-12:  # 1e-12: rounding of the normalisation
        notes.append("Shares below one node were raised to one node, the others reduced to make room.")
    if method == "given":
        part_N = _checked_parts(parts, num_nodes, len(asked))
        notes += [f"Given parts: {sentence}." for sentence in balance.violations(part_N)]
    else:
        part_N, clusters_N = _make_parts(method, src_E, dst_E, weights_E, balance, seed, notes, symmetric)
        violations = balance.violations(part_N)
        if violations:
            raise NoAssignmentError(
                f"no assignment within tolerance {tolerance:g} was found: {violations[0]} "
                f"({len(violations)} violations in all); "
                "raise `tolerance`, change `shares`, or balance fewer node weights"
            )

    part_N32 = part_N.astype(np.int32)
    edge_counts, edge_cut, cut_weight, halo_rows = _measure(part_N32, src_E, dst_E, weights_E, len(asked))
    return Assignment(
        part=torch.from_numpy(part_N32),
        method=method,
        seed=seed,
        shares_asked=asked,
        node_counts=tuple(np.bincount(part_N32, minlength=len(asked)).tolist()),
        edge_counts=edge_counts,
        edge_cut=edge_cut,
        cut_weight=cut_weight,
        halo_rows=halo_rows,
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
        clusters=None if clusters_N is None else torch.from_numpy(clusters_N),
    )


def _make_parts(
    method: Method,
    src: Ints,
    dst: Ints,
    weights: npt.NDArray | None,
    balance: Balance,
    seed: int,
    notes: list[str],
    symmetric: SymmetricGraph | None,
) -> tuple[Ints, npt.NDArray | None]:
    """Parts, and clusters where the method finds some."""
    num_nodes = len(balance.node_weights)
    if balance.num_parts == 1:
        return np.zeros(num_nodes, np.int64), None
    if method == "random":
        order = np.random.default_rng(seed).permutation(num_nodes)
        return settle(split_in_order(order, balance), balance, None, notes), None
    graph = symmetric_graph(num_nodes, src, dst, weights) if symmetric is None else symmetric
    if graph.num_merged:
        notes.append(f"Merged {counted(graph.num_merged, 'parallel edge')} into weights for partitioning only.")
    return split_graph(method, graph, balance, seed, notes)


def split_graph(
    method: Method, graph: SymmetricGraph, balance: Balance, seed: int, notes: list[str]
) -> tuple[Ints, npt.NDArray | None]:
    """Parts of a graph that was made symmetric before, for callers that split it more than once.

    Args:
        method: "metis", "clusters" or "kaminpar".
        graph: Of as many nodes as ``balance`` has weights.
        balance: The targets, each at least an average node: see :func:`~nugnn.partition.balance.reachable_shares`.
        seed: Of random choices.
        notes: What had to be done is appended here, one sentence each.

    Returns:
        ``(N,)`` int64 parts, all of them used, repaired towards ``balance`` but not checked; and clusters, where the
        method finds some.
    """
    num_nodes = len(balance.node_weights)
    if balance.num_parts == 1:
        return np.zeros(num_nodes, np.int64), None
    if graph.adjacency.nnz == 0:
        notes.append("There is no edge between two nodes; split in order of node ids by share alone.")
        return settle(split_in_order(np.arange(num_nodes), balance), balance, None, notes), None
    if method == "clusters":
        return cluster_parts(graph, balance, seed, notes)
    if method == "kaminpar":
        return kaminpar_parts(graph, balance, seed, notes), None
    return metis_parts(graph, balance, seed, notes), None


def _measure(
    part: npt.NDArray[np.int32], src: Ints, dst: Ints, weights: npt.NDArray | None, num_parts: int
) -> tuple[tuple[int, ...], int, int | float, tuple[int, ...]]:
    """Edge counts, distinct arcs cut, their weight, and halo rows per part, all recounted in 64 bits."""
    num_nodes = len(part)
    dst_part = part[dst]
    edge_counts = tuple(np.bincount(dst_part, minlength=num_parts).tolist())
    crossing = np.flatnonzero(part[src] != dst_part)
    cut_src, cut_dst = src[crossing], dst[crossing]
    keys = np.sort(cut_src * np.int64(num_nodes) + cut_dst)
    edge_cut = int(np.count_nonzero(np.diff(keys))) + (len(keys) > 0)
    cut_weight = len(crossing) if weights is None else weights[crossing].sum().item()
    needed = np.zeros((num_parts, num_nodes), np.bool_)
    needed[dst_part[crossing], cut_src] = True
    return edge_counts, edge_cut, cut_weight, tuple(needed.sum(axis=1).tolist())


def _checked_edge_weights(values: ArrayLike | None, num_edges: int) -> npt.NDArray | None:
    """``(E,)`` int64 or float64, positive and finite, with a sum that both symmetrising and recounting can hold."""
    if values is None:
        return None
    weights = as_array(values)
    if weights.shape != (num_edges,) or (num_edges and weights.dtype.kind not in "iuf"):
        raise ValueError(
            f"edge_weights must be {num_edges} integers or floats, one per edge, "
            f"got shape {weights.shape} of {weights.dtype}"
        )
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights > 0)))
    if len(bad):
        raise ValueError(f"edge weight {bad[0]} is {weights[bad[0]]}; edge weights must be positive and finite")
    with np.errstate(over="ignore"):  # an overflow is reported below
        total = float(weights.sum(dtype=np.float64))
    if weights.dtype.kind == "f" and not math.isfinite(2 * total):
        raise ValueError("the sum of edge_weights overflows float64; divide them by a constant")
    if weights.dtype.kind in "iu" and total >= 2.0**61:
        raise ValueError(f"the edge_weights sum to {total:.3g}, above 2**61; divide them by a constant")
    return weights.astype(np.int64 if weights.dtype.kind in "iu" else np.float64, copy=False)


def _checked_node_weights(values: NodeWeights, num_nodes: int, dst: Ints) -> npt.NDArray[np.float64]:
    """``(N, K)`` float64, non-negative and finite, every column with a positive sum."""
    if isinstance(values, str):
        if values == "unit":
            return np.ones((num_nodes, 1))
        if values == "degree":
            return 1.0 + np.bincount(dst, minlength=num_nodes)[:, None].astype(np.float64)
        raise ValueError(f"unknown node_weights {values!r}; give 'unit', 'degree' or an array")
    weights = as_array(values)
    if weights.dtype.kind not in "iuf" or weights.ndim not in (1, 2) or len(weights) != num_nodes:
        raise ValueError(
            f"node_weights must be numbers of shape ({num_nodes},) or ({num_nodes}, K), "
            f"got shape {weights.shape} of {weights.dtype}"
        )
    weights = weights.astype(np.float64).reshape(num_nodes, -1)
    bad = np.argwhere(~(np.isfinite(weights) & (weights >= 0)))
    if len(bad):
        raise ValueError(f"the weight of node {bad[0, 0]} is {weights[*bad[0]]}; it must be finite and not negative")
    with np.errstate(over="ignore"):  # an overflow is reported below
        totals = weights.sum(axis=0)
    if not len(totals) or not (np.isfinite(totals) & (totals > 0)).all():
        raise ValueError(f"each column of node_weights must have a positive finite sum, got {totals.tolist()}")
    return weights


def _checked_parts(values: ArrayLike, num_nodes: int, num_parts: int) -> Ints:
    parts = as_array(values)
    if parts.shape != (num_nodes,) or parts.dtype.kind not in "iu":
        raise ValueError(
            f"parts must be {num_nodes} integers, one per node, got shape {parts.shape} of type {parts.dtype}"
        )
    bad = np.flatnonzero((parts < 0) | (parts >= num_parts))
    if len(bad):
        raise ValueError(f"node {bad[0]} is given to part {parts[bad[0]]}; parts are 0 to {num_parts - 1}")
    empty = np.flatnonzero(np.bincount(parts, minlength=num_parts) == 0)
    if len(empty):
        raise ValueError(f"part {empty[0]} has no node; number the parts without gaps and give one share per used part")
    return parts.astype(np.int64)
