"""A graph cut among fewer devices than there are, where that is faster: sets weighed by counts, the likely ones cut.

Devices outside of a set hold a node each, as in shares by counts: a run has all of its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nugnn.partition.repeated_cuts import RepeatedCuts
from nugnn.planning.counted_cut import CountedCut, GraphOnCluster, Parts
from nugnn.planning.counted_shares import CountedShares
from nugnn.planning.draft import usable_bytes
from nugnn.planning.host_subsets import HostSubsets
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.likely_sets import LikelySets
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.partition_loop import partition_to_fit
from nugnn.planning.partition_search import LoopMethod
from nugnn.planning.search_aims import FasterStep
from nugnn.planning.share_curves import Halo, relaxed_sizes

_HOPE = 1.1
"""Times the seconds of the best cut so far that a set may take by counts to be cut: these are off by about so much."""


def best_among_sets(
    graph: GraphOnCluster,
    over_all: CountedCut,
    subsets: HostSubsets,
    cuts: RepeatedCuts,
    *,
    halo: Halo,
    partitioner: LoopMethod,
    precision: str,
    seed: int,
    on_stage: Callable[[str], None],
) -> CountedCut:
    """The fastest by the forecast of a cut over all devices and cuts among sets of them.

    Args:
        graph: To be cut.
        over_all: Its cut over all devices; how much halo it has tells how much fewer parts will have.
        subsets: Of the devices.
        cuts: Of the graph.
        halo: As it was expected.
        partitioner: What cuts.
        precision: For shares by FLOP/s.
        seed: Of the partitioner.
        on_stage: Called with what is done next.
    """
    if len(subsets.all) == 1:
        return over_all
    on_stage("weighing sets of devices")
    cluster, count = graph.cluster, len(graph.cluster.devices)
    whole = PartSizes(len(over_all.part), len(graph.src), 0, 0, len(graph.train_nodes))
    counted = _as_counted(halo, whole, over_all.sizes)
    every = CountedShares(graph.model, whole, cluster, counted, range(count), subsets.group_of)
    sets = LikelySets(every, subsets, precision)
    likely = [(sets.among_all(search, found.shares), search.ranks) for search, found in sets.best()]
    best = over_all
    for expected, ranks in sorted(likely, key=lambda each: each[0].step_seconds):
        if not expected.fits or expected.step_seconds >= _HOPE * best.step_seconds:
            continue
        on_stage(f"cutting the graph: among {cluster.described(ranks)}")
        try:
            part, notes = _cut_among(graph, ranks, cuts, counted, partitioner, seed)
        except DoesNotFitError:
            continue
        made = graph.counted(part, notes)
        if made.fits and made.step_seconds < best.step_seconds:
            best = made
    return best


def _as_counted(halo: Halo, whole: PartSizes, sizes: Sequence[PartSizes]) -> Halo:
    """``halo`` with another factor, so that it comes to the halo rows of ``sizes``."""
    rows = sum(size.halo for size in sizes)
    expected = sum(relaxed_sizes(whole, size.inner / whole.inner, halo, len(sizes)).halo for size in sizes)
    if not expected:
        return rows / whole.inner
    factor = rows / expected
    return (lambda fraction: factor * halo(fraction)) if callable(halo) else factor * halo


def _cut_among(
    graph: GraphOnCluster,
    ranks: Sequence[int],
    cuts: RepeatedCuts,
    halo: Halo,
    partitioner: LoopMethod,
    seed: int,
) -> tuple[Parts, tuple[str, ...]]:
    """Parts for ``ranks``, with a node for each other device.

    Raises:
        DoesNotFitError: Their memories do not hold the graph.
    """
    num_nodes, count = cuts.graph.adjacency.shape[0], len(graph.cluster.devices)
    part, notes = np.zeros(num_nodes, np.int32), tuple[str, ...]()
    if len(ranks) > 1:
        model, usable = graph.model.among(ranks), usable_bytes(graph.cluster)
        fitted = partition_to_fit(
            num_nodes,
            graph.src,
            graph.dst,
            model.work,
            [usable[rank] for rank in ranks],
            train_nodes=graph.train_nodes,
            method=partitioner,
            rounds=0 if len({graph.cluster.kinds[rank] for rank in ranks}) == 1 else 1,
            seed=seed,
            halo_fraction=halo,
            only_work=True,
            symmetric=cuts,
            aim=FasterStep(
                lambda sizes: model.forecast(sizes).step_seconds, [graph.cluster.kinds[rank] for rank in ranks]
            ),
        )
        part, notes = fitted.assignment.part.numpy(), fitted.assignment.notes
    degrees = np.bincount(graph.src, minlength=num_nodes) + np.bincount(graph.dst, minlength=num_nodes)
    return with_a_node_for_each(np.asarray(ranks, np.int32)[part], count, degrees), notes


def with_a_node_for_each(part: Parts, count: int, degrees: Sequence[int] | np.ndarray) -> Parts:
    """``(N,)`` parts with a node for each of ``count`` that has none: one of few edges, of a part that keeps others.

    Args:
        part: ``(N,)`` of each node, in ``[0, count)``; N is at least ``count``.
        count: P.
        degrees: ``(N,)`` edges of each node.

    >>> with_a_node_for_each(np.array([2, 2, 0, 0], np.int32), 3, [5, 1, 0, 3]).tolist()
    [2, 2, 1, 0]
    """
    part, held = part.copy(), np.bincount(part, minlength=count)
    few = np.argpartition(degrees, count - 1)[:count]  # of P nodes at most one for each part in use has to stay
    nodes = iter(few[np.argsort(np.asarray(degrees)[few], kind="stable")].tolist())
    for rank in np.flatnonzero(held == 0).tolist():
        node = next(node for node in nodes if held[part[node]] > 1)
        held[part[node]] -= 1
        part[node] = rank
    return part
