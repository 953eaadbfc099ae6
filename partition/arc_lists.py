"""Distinct neighbours of each node, ascending, from arcs in any order.

Arcs grouped by one end, in any order, are a structure by rows whose transpose has ascending rows: two counting sorts,
and no comparison. The transpose of that lists the other ends in order, too.

Axes: N nodes, E arcs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nugnn.kernels._jit import row_tasks

Ints = npt.NDArray[np.int64]

_MOST_RUNS = 8
"""Of arcs that are placed at once: each has N counters of 8 bytes."""
_INT32_LIMIT = 2**31 - 1


@dataclass(frozen=True, eq=False)
class ArcLists:
    """Rows of neighbours.

    Args:
        indptr: ``(N + 1,)`` offsets; int32, as ``indices``, where all numbers fit, else int64.
        indices: Distinct neighbours of each node but itself, ascending.
        weights: How many arcs stand behind each entry, int32; empty where they were not counted.
        num_merged: Arcs that were not the first from their source to their destination.
    """

    indptr: npt.NDArray
    indices: npt.NDArray
    weights: npt.NDArray[np.int32]
    num_merged: int


def neighbours_both_ways(num_nodes: int, src: npt.NDArray, dst: npt.NDArray) -> ArcLists:
    """Neighbours along arcs of either direction, with weights; self-loops are left out.

    Args:
        num_nodes: N, below 2**31.
        src: ``(E,)`` int32 or int64 source of each arc, in ``[0, N)``.
        dst: ``(E,)`` destination.

    Returns:
        The same lists on any number of threads.
    """
    from nugnn.partition import arc_kernels as kernels

    if _ascends(src):
        sources = _grouped(num_nodes, dst, src)
        targets = _transposed(sources)
    else:
        targets = _grouped(num_nodes, src, dst)
        sources = _transposed(targets)
        if not _ascends(dst):
            targets = _transposed(sources)
    bounds = row_tasks(sources.indptr + targets.indptr, torch.get_num_threads())
    starts = np.zeros(num_nodes + 1, np.int64)
    num_distinct = np.zeros(len(bounds) - 1, np.int64)
    rows = (bounds, sources.indptr, sources.entries, targets.indptr, targets.entries)
    kernels.count_union(*rows, starts[1:], num_distinct)
    np.cumsum(starts, out=starts)
    indices, weights = _empty(starts), np.empty(starts[-1], np.int32)
    kernels.copy_union(*rows, starts, indices, weights)
    merged = len(sources.entries) - int(num_distinct.sum())
    return ArcLists(starts.astype(indices.dtype, copy=False), indices, weights, merged)


def distinct_sources(num_nodes: int, src: npt.NDArray, dst: npt.NDArray) -> ArcLists:
    """Sources of the arcs into each node, without weights; arguments are those of :func:`neighbours_both_ways`."""
    from nugnn.partition import arc_kernels as kernels

    sources = _grouped(num_nodes, dst, src) if _ascends(src) else _transposed(_grouped(num_nodes, src, dst))
    bounds = row_tasks(sources.indptr, torch.get_num_threads())
    starts = np.zeros(num_nodes + 1, np.int64)
    kernels.count_distinct(bounds, sources.indptr, sources.entries, starts[1:])
    np.cumsum(starts, out=starts)
    merged = len(sources.entries) - int(starts[-1])
    indices = sources.entries
    if merged:
        indices = _empty(starts)
        kernels.copy_distinct(bounds, sources.indptr, sources.entries, starts, indices)
    return ArcLists(starts.astype(indices.dtype, copy=False), indices, np.zeros(0, np.int32), merged)


@dataclass(frozen=True, eq=False)
class _Rows:
    indptr: Ints
    entries: npt.NDArray[np.int32]


def _ascends(ids: npt.NDArray) -> bool:
    """Whether arcs come in the order of this end, as they often do: grouped by the other one, rows then ascend."""
    return bool((ids[1:] >= ids[:-1]).all())


def _grouped(num_nodes: int, keys: npt.NDArray, others: npt.NDArray) -> _Rows:
    """For each key the other ends of its arcs, in their order."""
    from nugnn.partition import arc_kernels as kernels

    runs = _num_runs(num_nodes, len(keys))
    bounds = np.linspace(0, len(keys), runs + 1).astype(np.int64)
    slots = np.zeros((runs, num_nodes), np.int64)
    kernels.count_arcs(bounds, keys, others, slots)
    indptr = np.empty(num_nodes + 1, np.int64)
    kernels.begin_rows(slots, indptr)
    entries = np.empty(indptr[-1], np.int32)
    kernels.place_arcs(bounds, keys, others, slots, entries)
    return _Rows(indptr, entries)


def _transposed(rows: _Rows) -> _Rows:
    from nugnn.partition import arc_kernels as kernels

    num_nodes = len(rows.indptr) - 1
    runs = _num_runs(num_nodes, len(rows.entries))
    bounds = np.searchsorted(rows.indptr, np.linspace(0, len(rows.entries), runs + 1)).astype(np.int64)
    bounds[0], bounds[-1] = 0, num_nodes
    slots = np.zeros((runs, num_nodes), np.int64)
    kernels.count_entries(bounds, rows.indptr, rows.entries, slots)
    indptr = np.empty(num_nodes + 1, np.int64)
    kernels.begin_rows(slots, indptr)
    entries = np.empty(len(rows.entries), np.int32)
    kernels.place_rows(bounds, rows.indptr, rows.entries, slots, entries)
    return _Rows(indptr, entries)


def _num_runs(num_nodes: int, num_arcs: int) -> int:
    """As many as there are threads, but counters of all runs at most as many as arcs."""
    return max(1, min(torch.get_num_threads(), _MOST_RUNS, num_arcs // num_nodes))


def _empty(starts: Ints) -> npt.NDArray:
    """For as many entries as there are; int32 where that holds the offsets too."""
    return np.empty(starts[-1], np.int32 if starts[-1] <= _INT32_LIMIT else np.int64)
