"""Arcs grouped by their ends in order, without a comparison, in numba: the same result on any number of threads.

Arcs, and rows of a structure, come in as many runs as there are threads. A run knows how many entries of each row the
earlier ones have, so all write at once, and a row holds its entries in the order in which they came.
"""

from __future__ import annotations

import numba

from nugnn.kernels._jit import jit


@jit(parallel=True)
def count_arcs(bounds, keys, others, counts):  # type: ignore[no-untyped-def]
    """``counts[r, v]``, zero before: arcs of run ``r`` whose key is ``v``; self-loops are left out.

    ``bounds`` splits the arcs into runs.
    """
    for run in numba.prange(len(bounds) - 1):
        count = counts[run]
        for arc in range(bounds[run], bounds[run + 1]):
            if keys[arc] != others[arc]:
                count[keys[arc]] += 1


@jit(parallel=True)
def place_arcs(bounds, keys, others, next_slot, out):  # type: ignore[no-untyped-def]
    """Row ``v`` gets the other end of each arc whose key is ``v``."""
    for run in numba.prange(len(bounds) - 1):
        slots = next_slot[run]
        for arc in range(bounds[run], bounds[run + 1]):
            key = keys[arc]
            if key != others[arc]:
                out[slots[key]] = others[arc]
                slots[key] += 1


@jit(parallel=True)
def count_entries(bounds, indptr, entries, counts):  # type: ignore[no-untyped-def]
    """``counts[r, v]``, zero before: entries ``v`` in the rows of run ``r``; ``bounds`` splits the rows into runs."""
    for run in numba.prange(len(bounds) - 1):
        count = counts[run]
        for k in range(indptr[bounds[run]], indptr[bounds[run + 1]]):
            count[entries[k]] += 1


@jit(parallel=True)
def place_rows(bounds, indptr, entries, next_slot, out):  # type: ignore[no-untyped-def]
    """Row ``v`` gets the number of each row that has an entry ``v``, ascending."""
    for run in numba.prange(len(bounds) - 1):
        slots = next_slot[run]
        for row in range(bounds[run], bounds[run + 1]):
            for k in range(indptr[row], indptr[row + 1]):
                entry = entries[k]
                out[slots[entry]] = row
                slots[entry] += 1


@jit()
def begin_rows(counts, indptr):  # type: ignore[no-untyped-def]
    """Where rows begin; ``counts[r, v]`` becomes where the first entry of run ``r`` in row ``v`` goes."""
    total = 0
    for row in range(len(indptr) - 1):
        indptr[row] = total
        for run in range(len(counts)):
            here = counts[run, row]
            counts[run, row] = total
            total += here
    indptr[len(indptr) - 1] = total


@jit(parallel=True)
def count_distinct(bounds, indptr, entries, num_distinct):  # type: ignore[no-untyped-def]
    """``num_distinct`` of each row, which ascends; ``bounds`` splits the rows into tasks."""
    for task in numba.prange(len(bounds) - 1):
        for row in range(bounds[task], bounds[task + 1]):
            found = 0
            for k in range(indptr[row], indptr[row + 1]):
                found += k == indptr[row] or entries[k] != entries[k - 1]
            num_distinct[row] = found


@jit(parallel=True)
def copy_distinct(bounds, indptr, entries, starts, out):  # type: ignore[no-untyped-def]
    """Row ``v`` of ``out``, from ``starts[v]``, is what is distinct of row ``v``, which ascends."""
    for task in numba.prange(len(bounds) - 1):
        for row in range(bounds[task], bounds[task + 1]):
            slot = starts[row]
            for k in range(indptr[row], indptr[row + 1]):
                if k == indptr[row] or entries[k] != entries[k - 1]:
                    out[slot] = entries[k]
                    slot += 1


@jit(parallel=True)
def count_union(bounds, indptr, entries, other_indptr, others, num_found, num_distinct):  # type: ignore[no-untyped-def]
    """``num_found``: distinct entries of two ascending rows together; for each task, those of ``entries`` alone."""
    for task in numba.prange(len(bounds) - 1):
        distinct = 0
        for row in range(bounds[task], bounds[task + 1]):
            i, end, j, other_end = indptr[row], indptr[row + 1], other_indptr[row], other_indptr[row + 1]
            found = 0
            while i < end or j < other_end:
                if j == other_end or (i < end and entries[i] <= others[j]):
                    value = entries[i]
                    distinct += 1
                else:
                    value = others[j]
                while i < end and entries[i] == value:
                    i += 1
                while j < other_end and others[j] == value:
                    j += 1
                found += 1
            num_found[row] = found
        num_distinct[task] = distinct


@jit(parallel=True)
def copy_union(bounds, indptr, entries, other_indptr, others, starts, out, weights):  # type: ignore[no-untyped-def]
    """Row ``v`` of ``out`` gets what :func:`count_union` counted, ascending; ``weights`` how often each was there."""
    for task in numba.prange(len(bounds) - 1):
        for row in range(bounds[task], bounds[task + 1]):
            i, end, j, other_end = indptr[row], indptr[row + 1], other_indptr[row], other_indptr[row + 1]
            slot = starts[row]
            while i < end or j < other_end:
                before = i + j
                value = entries[i] if j == other_end or (i < end and entries[i] <= others[j]) else others[j]
                while i < end and entries[i] == value:
                    i += 1
                while j < other_end and others[j] == value:
                    j += 1
                out[slot] = value
                weights[slot] = i + j - before
                slot += 1
