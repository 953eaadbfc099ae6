"""METIS with unequal target shares: the graph it is given, the call, and the checks on what comes back."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from scipy.sparse.csgraph import reverse_cuthill_mckee

from nugnn._counted import counted
from nugnn.partition.arc_lists import neighbours_both_ways
from nugnn.partition.balance import Balance, Ints, fill_empty_parts, normalise_shares, repair, settle, split_in_order

_LOG = logging.getLogger(__name__)
_INT32_LIMIT = 2**31 - 1
_MANY_ARCS = 500_000  # fewer are not worth numba's start
_MIN_NODES_PER_PART = 4  # below in the mean, METIS often leaves parts empty and prints complaints
_MIN_NODES = 2  # parts of fewer are not METIS': it complains of them, and any node will do
_NO_NODES = (
    b"***Cannot bisect a graph with 0 vertices!",
    b"***You are trying to partition a graph into too many parts!",
)
"""What METIS prints where parts that it still has to divide have got no node; answers are checked for empty parts."""


def index_dtype(num_nodes: int, num_edges: int) -> torch.dtype:
    """Width of an index into a graph that is stored with both directions of every edge.

    int64 as soon as ``num_nodes`` or ``2 * num_edges`` exceeds 2**31 - 1: offsets count edges, not nodes.
    """
    return torch.int64 if max(num_nodes, 2 * num_edges) > _INT32_LIMIT else torch.int32


@dataclass(frozen=True, eq=False)
class SymmetricGraph:
    """The graph as a partitioner sees it: both directions, no self-loops, parallel arcs merged into one weight.

    Args:
        adjacency: ``(N, N)``, rows ascending; the weight of ``(u, v)`` is the sum of all arcs' between u and v.
        num_merged: Parallel arcs that were merged into another one.
    """

    adjacency: sparse.csr_array
    num_merged: int


def symmetric_graph(num_nodes: int, src: Ints, dst: Ints, edge_weights: npt.NDArray | None) -> SymmetricGraph:
    """Make the partitioner's view of a directed multigraph; ``src``, ``dst`` ``(E,)``, positive weights ``(E,)``."""
    if edge_weights is None and len(src) >= _MANY_ARCS and num_nodes <= _INT32_LIMIT:
        lists = neighbours_both_ways(num_nodes, src, dst)
        entries = (lists.weights, lists.indices, lists.indptr)
        return SymmetricGraph(sparse.csr_array(entries, shape=(num_nodes, num_nodes)), lists.num_merged)
    between = src != dst
    if not between.all():
        src, dst = src[between], dst[between]
        edge_weights = None if edge_weights is None else edge_weights[between]
    weights = np.ones(len(src), np.int64) if edge_weights is None else edge_weights
    arcs = sparse.csr_array((weights, (src, dst)), shape=(num_nodes, num_nodes))  # sums parallel arcs
    num_merged = len(src) - arcs.nnz
    both = sparse.csr_array(arcs + arcs.T)
    return SymmetricGraph(both, num_merged)


def integer_weights(weights: npt.NDArray, limit: int) -> Ints:
    """Weights as the integers METIS wants, with a sum that cannot overflow its arithmetic.

    Integers whose sum is at most ``limit`` stay as they are. All others are multiplied by one factor, such that they
    sum to ``limit - len(weights)``, and rounded to the nearest integer, positive ones to at least 1: tiny floats keep
    their proportions instead of becoming 0, and the sum stays within ``limit`` (at least ``len(weights)``).
    """
    total = float(weights.sum(dtype=np.float64))
    if weights.dtype.kind in "iu" and total <= limit:
        return weights.astype(np.int64)
    # Divided first: limit / total overflows for subnormal totals.
    scaled = np.rint(weights.astype(np.float64) / total * (limit - len(weights)))
    return np.where(weights > 0, np.maximum(scaled, 1), 0).astype(np.int64)


def call_metis(
    adjacency: sparse.csr_array,
    node_weights: Ints | None,
    edge_weights: Ints | None,
    shares: tuple[float, ...],
    *,
    recursive: bool,
    seed: int,
    tolerance: float,
) -> npt.NDArray:
    """The native call, objective edge cut; returns whatever METIS wrote, unchecked."""
    import pymetis

    if len(shares) == 1:
        return np.zeros(adjacency.shape[0], np.int64)
    width = pymetis.zero_copy_dtype()
    options = pymetis.Options(seed=seed & 0x7FFFFFFF)
    if not recursive:
        # k-way aims at the edge of its tolerance (3 % by default); unit: 1/1000. Recursive bisection keeps its 0.1 %.
        options.ufactor = max(1, int(1000 * tolerance / 2))
    csr = pymetis.CSRAdjacency(adjacency.indptr.astype(width, copy=False), adjacency.indices.astype(width, copy=False))
    with _native_stdout_to_stderr():
        result = pymetis.part_graph(
            len(shares),
            csr,
            vweights=None if node_weights is None else node_weights.astype(width, copy=False),
            eweights=None if edge_weights is None else edge_weights.astype(width, copy=False),
            tpwgts=list(shares),
            recursive=recursive,
            options=options,
        )
    return np.array(result.vertex_part)


_redirecting = threading.Lock()
"""Standard output is the process's: of two threads that sent it elsewhere at once, the last would not give it back."""


@contextlib.contextmanager
def _native_stdout_to_stderr() -> Iterator[None]:
    """METIS prints complaints with C's printf; standard output belongs to results, so they go to standard error.

    All but that of parts without nodes: where a node weighs more than two parts together METIS cannot but leave them
    empty, which is repaired afterwards.
    """
    libc = ctypes.CDLL(None)
    with _redirecting, contextlib.ExitStack() as stack:
        try:
            said = stack.enter_context(tempfile.TemporaryFile())
            kept = os.dup(1)
            os.dup2(said.fileno(), 1)
        except OSError:  # no standard output in this process, which needs no protection, or no folder for files
            yield
            return
        try:
            yield
        finally:
            libc.fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
            said.seek(0)
            lines = [line for line in said if line.strip() not in _NO_NODES]
            with contextlib.suppress(OSError):  # no standard error in this process
                if any(line.strip() for line in lines):
                    os.write(2, b"".join(lines))


def least_pair(shares: Sequence[float]) -> float:
    """The smallest share of parts that METIS divides among them, halving the parts in their order again and again.

    >>> least_pair((1, 2, 3, 4)), least_pair((1, 7, 2))
    (3, 9)
    """
    if len(shares) < 2:
        return math.inf
    half = len(shares) // 2
    return min(sum(shares), least_pair(shares[:half]), least_pair(shares[half:]))


def starves_in_k_way(num_nodes: int, shares: Sequence[float]) -> bool:
    """Whether k-way may leave two parts empty, and say so, because both together are smaller than what it moves.

    It divides a graph of about 30 nodes for each part (more of large ones), by halving, before it looks at single
    nodes. There a node weighs up to 1.5 times the mean, and two parts that together weigh little more may get none: in
    188 of 387 cuts with such parts, by hand, where both had less than 2.75 times that weight, and in none of 393 above.
    Recursive bisection looks at single nodes in each halving. Two parts of equal shares are never so small; of unequal
    ones those that have less than a sixth of the mean together, or some hundred nodes.
    """
    most = 1.5 / max(num_nodes // (20 * max(1, int(math.log2(len(shares))))), 30 * len(shares))
    return least_pair(shares) < 3 * most


def check_index_width(num_nodes: int, num_edges: int) -> None:
    """Refuse a graph that this METIS build cannot index, before anything is copied.

    Raises:
        ValueError: METIS was built with 32-bit indices and the graph needs 64.
    """
    if index_dtype(num_nodes, num_edges) == torch.int64 and _metis_index_bytes() < 8:
        raise ValueError(
            f"{counted(num_nodes, 'node')} and {counted(num_edges, 'edge')} need 64-bit indices, but the "
            f"installed METIS has 32-bit ones; "
            "install a 64-bit build of pymetis, or use method='random' or 'given'"
        )


def metis_parts(graph: SymmetricGraph, balance: Balance, seed: int, notes: list[str]) -> Ints:
    """A checked assignment near ``balance``: METIS, repaired or retried if need be, else a split of a BFS order.

    Recursive bisection comes first for up to 8 parts: with unequal targets it met them best and cut least in our
    measurements; k-way comes first above, where its time grows less with the number of parts. Parts so small that k-way
    leaves them empty are for recursive bisection alone.

    Args:
        graph: At least one edge.
        balance: Targets of at least 2 parts, at most N.
        seed: Seed of METIS' random choices; a retry uses the next one.
        notes: What had to be done is appended here, one sentence each.

    Returns:
        ``(N,)`` int64. Every part is used; may lie outside the tolerance of ``balance`` if nothing reaches it.
    """
    num_nodes, num_parts = len(balance.node_weights), balance.num_parts
    adjacency = graph.adjacency
    if num_nodes < _MIN_NODES_PER_PART * num_parts:
        _note(
            notes,
            f"{counted(num_nodes, 'node')} are too few for METIS to fill {counted(num_parts, 'part')}; cut a "
            f"breadth-first order.",
        )
        return breadth_first_parts(adjacency, balance, notes)
    limit = 2**40 if _metis_index_bytes() == 8 else 2**30  # leaves METIS room to add and compare sums
    edge_weights: Ints | None = None
    if (adjacency.data != adjacency.data[0]).any():
        edge_weights = integer_weights(adjacency.data, max(limit, adjacency.nnz))
    node_weights: Ints | None = None
    if (balance.node_weights != balance.node_weights[0]).any():
        node_weights = integer_weights(balance.combined_N, limit)

    large = [rank for rank, share in enumerate(balance.shares) if share * num_nodes >= _MIN_NODES]
    shares = balance.shares
    if len(large) < num_parts:
        shares = normalise_shares([balance.shares[rank] for rank in large])
    recursive_first = num_parts <= 8
    attempts = [(recursive_first, seed), (not recursive_first, seed), (recursive_first, seed + 1)]
    if starves_in_k_way(num_nodes, shares):
        attempts = [(True, seed), (True, seed + 1), (True, seed + 2)]
    for recursive, attempt_seed in attempts:
        name = f"METIS {'recursive bisection' if recursive else 'k-way'} with seed {attempt_seed}"
        try:
            raw = call_metis(
                adjacency,
                node_weights,
                edge_weights,
                shares,
                recursive=recursive,
                seed=attempt_seed,
                tolerance=balance.tolerance,
            )
        except RuntimeError as error:
            _note(notes, f"{name} failed ({error}); retried.")
            continue
        problem = malformed(raw, num_nodes, len(large))
        if problem:
            _note(notes, f"{name} returned {problem}; discarded and retried.")
            continue
        part_N = np.array(large)[raw]
        if len(large) < num_parts:
            fill_empty_parts(part_N, balance, adjacency)
        violations = balance.violations(part_N)
        if not violations:
            return part_N
        part_N, num_moved = repair(part_N, balance, adjacency)
        if not balance.violations(part_N):
            _note(
                notes, f"{name} missed its targets ({violations[0]}); repaired by moving {counted(num_moved, 'node')}."
            )
            return part_N
        _note(notes, f"{name} missed its targets ({violations[0]}) and could not be repaired; retried.")
    _note(notes, "No METIS attempt was usable; fell back to cutting a breadth-first order into runs.")
    return breadth_first_parts(adjacency, balance, notes)


def breadth_first_parts(adjacency: sparse.csr_array, balance: Balance, notes: list[str]) -> Ints:
    """The deterministic fallback: runs of a reverse Cuthill-McKee order, which is breadth-first in each component."""
    order_N = reverse_cuthill_mckee(sparse.csr_matrix(adjacency), symmetric_mode=True).astype(np.int64)
    return settle(split_in_order(order_N, balance), balance, adjacency, notes)


def _metis_index_bytes() -> int:
    import pymetis

    return pymetis.zero_copy_dtype().itemsize


def malformed(raw: npt.NDArray, num_nodes: int, num_parts: int) -> str | None:
    """What makes a native answer unusable, or None. Empty parts and missed shares are left to repair."""
    if raw.shape != (num_nodes,):
        return f"{counted(raw.size, 'entry', 'entries')} for {counted(num_nodes, 'node')}"
    if raw.dtype.kind not in "iu":
        return f"parts of type {raw.dtype}"
    bad = np.flatnonzero((raw < 0) | (raw >= num_parts))
    if len(bad):
        return (
            f"part {raw[bad[0]]} for node {bad[0]} ({counted(len(bad), 'entry', 'entries')} outside 0..{num_parts - 1})"
        )
    return None


def _note(notes: list[str], sentence: str) -> None:
    _LOG.info(sentence)
    notes.append(sentence)
