"""Edges of some rows marked, or copied to other rows with another numbering of their sources; in numba."""

from __future__ import annotations

from numba import prange

from nugnn.kernels._jit import jit


@jit(parallel=True)
def mark_sources(starts, rows, sources, is_read):  # type: ignore[no-untyped-def]
    """Sets ``is_read`` at the sources of the edges of ``rows``, whose edges begin at ``starts``."""
    for i in prange(len(rows)):
        for k in range(starts[rows[i]], starts[rows[i] + 1]):
            is_read[sources[k]] = True


@jit(parallel=True)
def copy_runs(starts, rows, sources, new_number, new_starts, new_rows, out):  # type: ignore[no-untyped-def]
    """Writes ``new_number[source]`` of the edges of ``rows`` to where the edges of ``new_rows`` begin in ``out``.

    ``starts`` and ``new_starts`` say where the edges of each row begin; both rows of a pair have as many.
    """
    for i in prange(len(rows)):
        place = new_starts[new_rows[i]]
        for k in range(starts[rows[i]], starts[rows[i] + 1]):
            out[place] = new_number[sources[k]]
            place += 1
