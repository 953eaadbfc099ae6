"""Parts for unequal devices, by a model of their work: partition, count, predict, correct the targets, keep the best.

A partitioner balances one weight for each node. What a device is busy with also depends on the halo, which is known
only when the cut is. So the parts of each round are counted and handed to the work model, and the next round aims
where that says: at parts that end together, or at a faster step of all of them (`nugnn.planning.search_aims`). Between
calls of the partitioner single nodes move, which balances what no node weight can say.

Axes: N nodes, P parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import numpy as np

from nugnn._counted import counted
from nugnn.partition.balance import normalise_shares
from nugnn.partition.ids import ArrayLike, edge_arrays, ids_array
from nugnn.partition.kaminpar import check_kaminpar
from nugnn.partition.metis import SymmetricGraph, check_index_width
from nugnn.partition.repeated_cuts import RepeatedCuts
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.levels import SharePlan, capacity, level
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.partition_rounds import FittedParts
from nugnn.planning.partition_search import LoopMethod, PartitionSearch
from nugnn.planning.search_aims import Aim, EqualEnds
from nugnn.planning.share_curves import Halo, relaxed_curves
from nugnn.planning.shares import check_whole, checked_limits, plan_shares
from nugnn.planning.work_model import WorkModel


def partition_to_fit(
    num_nodes: int,
    src: ArrayLike,
    dst: ArrayLike,
    work: WorkModel,
    limits: Sequence[float],
    *,
    train_nodes: ArrayLike = (),
    method: LoopMethod = "metis",
    rounds: int = 6,
    seed: int = 0,
    halo_fraction: Halo = 0.5,
    also: Mapping[str, Sequence[float]] | None = None,
    moves: bool = True,
    beside_metis: bool = False,
    only_work: bool = False,
    symmetric: SymmetricGraph | RepeatedCuts | None = None,
    aim: Aim | None = None,
    on_round: Callable[[str], None] | None = None,
) -> FittedParts:
    """Split a graph such that an epoch, by the work model, is as short as it gets within all memories.

    At the start the partitioner runs once for each of "work" (shares as :func:`~nugnn.planning.shares.plan_shares`
    gives them, of node weights in proportion to the model's cost of a node with its in-edges), "nodes" (the same shares
    of the nodes) and "even" (equal shares of the nodes), and for what ``also`` names. Each is counted and predicted,
    so the result is never worse, by the model, than any of them. Then rounds follow: the partitioner runs again for
    targets that are corrected by what was counted, and single nodes move.

    Args:
        num_nodes: N, at least the number of parts.
        src: ``(E,)`` source of each edge.
        dst: ``(E,)`` destination of each edge.
        work: Seconds and bytes of a part on its device.
        limits: Bytes of memory of each device, infinite for no limit; there are as many parts.
        train_nodes: Distinct ids of the training nodes.
        method: The partitioner. With "clusters" these are found once and serve all rounds. "kaminpar" gives the same
            parts for a seed on a single thread only.
        rounds: Calls of the partitioner after the start, at most; with a faster step one more, if there are any.
        seed: Of the partitioner; round r uses ``seed + r``.
        halo_fraction: Halo rows expected for each node of a part, or a function of the part's fraction of the graph;
            for the first shares only.
        also: Further shares of the nodes to start from, a dictionary by name, each in any unit: baselines that the
            result shall not be worse than.
        moves: Whether single nodes move. They balance what each part takes for itself, so where a step of all parts
            decides they do so for parts that lack memory alone. If the best parts lack some in the end, nodes move for
            nothing else. They need ``4 * N * P`` bytes; above 4 GiB they are left out.
        beside_metis: With another method, let METIS make "work" and "nodes", too, as "METIS work" and "METIS nodes", so
            that the result is not worse than those either.
        only_work: Start from "work" alone and from nothing else, for a moment's plan: the result is then not held
            against the others.
        symmetric: What `nugnn.partition.metis.symmetric_graph` makes of the edges, or cuts of it, whose clusters then
            serve again, for callers that have it: of large graphs that are split several times.
        aim: What decides between splits, and when nothing is left to try: `EqualEnds`, by the slowest part, as when
            None; or `FasterStep`, by what is foreseen of a step of all parts.
        on_round: Called with the name of each round before it begins.

    Returns:
        The best split found, with all that was tried. Equal arguments give an equal one, times apart.

    Raises:
        DoesNotFitError: no split can fit, or the best one found does not; says what is lacking and what would do.
        ValueError: an argument is malformed or out of range.
    """
    memory = checked_limits(limits)
    num_parts = len(memory)
    if method not in get_args(LoopMethod):
        raise ValueError(f"unknown partition method {method!r}; choose 'metis', 'clusters' or 'kaminpar'")
    num_devices = getattr(work, "num_devices", num_parts)
    if num_devices != num_parts:
        raise ValueError(f"limits are of {counted(num_parts, 'device')}, and the work model is of {num_devices}")
    if rounds < 0:
        raise ValueError(f"rounds is {rounds}; it must be at least 0")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it must be an integer of at least 0")
    if method == "kaminpar":
        check_kaminpar()
    src_E, dst_E = edge_arrays(src, dst, num_nodes)
    train = ids_array(train_nodes, num_nodes, "train_nodes")
    whole = PartSizes(num_nodes, len(src_E), 0, 0, len(train))
    check_whole(whole, num_parts)
    check_index_width(num_nodes, len(src_E))

    cuts = RepeatedCuts(symmetric, seed) if isinstance(symmetric, SymmetricGraph) else symmetric
    if cuts is not None and cuts.graph.adjacency.shape != (num_nodes, num_nodes):
        raise ValueError(
            f"symmetric is a graph of {counted(cuts.graph.adjacency.shape[0], 'node')}; this one has {num_nodes}"
        )

    relaxed, first_shares = _first_shares(work, whole, memory, halo_fraction)
    search = PartitionSearch(
        num_nodes, src_E, dst_E, train, work, memory, method, seed, cuts, aim or EqualEnds(), on_round
    )
    weights_N = search.node_weights(first_shares)
    even_N = np.ones(num_nodes)
    search.partition("work", first_shares, weights_N, seed)
    if num_parts > 1 and not only_work:
        search.partition("nodes", first_shares, even_N, seed)
        search.partition("even", (1.0,) * num_parts, even_N, seed)
        if beside_metis and method != "metis":
            search.partition("METIS work", first_shares, weights_N, seed, "metis")
            search.partition("METIS nodes", first_shares, even_N, seed, "metis")
        for name, shares in (also or {}).items():
            if len(shares) != num_parts:
                raise ValueError(f"{name!r} has {counted(len(shares), 'share')} for {counted(num_parts, 'device')}")
            search.partition(name, shares, even_N, seed)
    if num_parts > 1:
        search.refine(rounds, weights_N, moves)
    return search.result(relaxed)


def _first_shares(
    work: WorkModel, whole: PartSizes, limits: Sequence[float], halo_fraction: Halo
) -> tuple[SharePlan | None, tuple[float, ...]]:
    """The relaxed plan; where memories hold the graph only with less halo than expected, shares in their proportion."""
    try:
        plan = plan_shares(work, whole, limits, halo_fraction=halo_fraction)
        return plan, plan.shares
    except DoesNotFitError:
        curves = relaxed_curves(work, whole, len(limits), 0.0)
        if level(curves, limits) is None:  # not even without halo
            raise
        expected = relaxed_curves(work, whole, len(limits), halo_fraction)
        caps = [max(capacity(curve, limit), 1 / whole.inner) for curve, limit in zip(expected, limits, strict=True)]
        return None, normalise_shares(caps)
