"""KaMinPar, an optional partitioner on many threads: the graph it is given, the call, and the repair of what it leaves.

KaMinPar bounds the parts from above only, so that small parts stay below their targets; :mod:`nugnn.partition.balance`
moves the missing nodes. On one thread a seed gives one answer, on several it does not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse

from nugnn._counted import counted
from nugnn.partition.balance import Balance, Ints, settle
from nugnn.partition.metis import SymmetricGraph, breadth_first_parts, integer_weights, malformed

_CONTEXT = "fast"
"""Of KaMinPar's settings: half the time of "default" for a cut that is up to 2 % larger."""
_MIN_NODES_PER_PART = 4
_WEIGHT_LIMIT = 2**40
_NO_EDGE_WEIGHTS, _NO_NODE_WEIGHTS, _INT32_NODE_IDS = 1, 2, 8
"""Bits of the file's version; those for 32-bit offsets (4) and weights (16, 32) stay 0."""


def check_kaminpar() -> None:
    """Refuse to go on without KaMinPar, before anything is computed.

    Raises:
        ValueError: it is not installed, or is a build with 32-bit numbers.
    """
    if importlib.util.find_spec("kaminpar") is None:
        raise ValueError(
            "the KaMinPar partitioner is not installed; `pip install kaminpar` adds it, or choose 'metis', which needs "
            "no more than is there"
        )
    import kaminpar

    if not vars(kaminpar)["__64bit__"]:
        raise ValueError("the installed KaMinPar counts in 32 bits; install the wheel from PyPI, or choose 'metis'")


def kaminpar_parts(graph: SymmetricGraph, balance: Balance, seed: int, notes: list[str]) -> Ints:
    """A checked assignment near ``balance``.

    Args:
        graph: At least one edge.
        balance: Targets of at least 2 parts, at most N.
        seed: Of its random choices; the answer also depends on the moment if torch runs on more than one thread.
        notes: What had to be done is appended here, one sentence each.

    Returns:
        ``(N,)`` int64. Every part is used; may lie outside the tolerance of ``balance`` if nothing reaches it.
    """
    num_nodes, num_parts = len(balance.node_weights), balance.num_parts
    adjacency = graph.adjacency
    if num_nodes < _MIN_NODES_PER_PART * num_parts:
        notes.append(
            f"{counted(num_nodes, 'node')} are too few for KaMinPar to fill {counted(num_parts, 'part')}; cut a "
            f"breadth-first order."
        )
        return breadth_first_parts(adjacency, balance, notes)
    node_weights: Ints | None = None
    if (balance.node_weights != balance.node_weights[0]).any():
        # a node without weight would be free to go anywhere; KaMinPar asks for positive weights
        node_weights = np.maximum(integer_weights(balance.combined_N, _WEIGHT_LIMIT), 1)
    edge_weights: Ints | None = None
    if (adjacency.data != adjacency.data[0]).any():
        edge_weights = integer_weights(adjacency.data, max(_WEIGHT_LIMIT, adjacency.nnz))
    total = num_nodes if node_weights is None else int(node_weights.sum())
    heaviest = 1 if node_weights is None else int(node_weights.max())
    # half the tolerance: the rest is left to the repair of small parts, which fills them from those above their target
    room = np.asarray(balance.shares) * total
    most = np.ceil(room + np.maximum(balance.tolerance / 2 * room, heaviest)).astype(np.int64)
    raw = call_kaminpar(adjacency, node_weights, edge_weights, most.tolist(), seed=seed)
    problem = malformed(raw, num_nodes, num_parts)
    if problem:
        notes.append(f"KaMinPar returned {problem}; discarded, cut a breadth-first order.")
        return breadth_first_parts(adjacency, balance, notes)
    return settle(raw.astype(np.int64), balance, adjacency, notes)


def call_kaminpar(
    adjacency: sparse.csr_array,
    node_weights: Ints | None,
    edge_weights: Ints | None,
    most_weight: list[int],
    *,
    seed: int,
) -> npt.NDArray:
    """The native call, objective edge cut, on torch's number of threads; returns what it answers, unchecked."""
    import kaminpar

    write = functools.partial(_write_graph, adjacency, node_weights, edge_weights)
    with _as_file(write) as path:
        graph = kaminpar.load_graph(path, kaminpar.GraphFileFormat.PARHIP)
    kaminpar.reseed(seed & 0x7FFFFFFF)
    partitioner = kaminpar.KaMinPar(torch.get_num_threads(), kaminpar.context_by_name(_CONTEXT))
    return np.asarray(partitioner.compute_partition(graph, most_weight))


def _write_graph(
    adjacency: sparse.csr_array, node_weights: Ints | None, edge_weights: Ints | None, descriptor: int
) -> None:
    """The binary format of ParHIP, as KaMinPar reads it.

    Version, N and E in 64 bits; N + 1 places of the neighbour lists in bytes from the start of the file; the neighbour
    lists in 32 bits; node weights and edge weights in 64 bits, unless the version's lowest bits say there are none.
    """
    num_nodes = adjacency.shape[0]
    version = _INT32_NODE_IDS
    version |= _NO_NODE_WEIGHTS if node_weights is None else 0
    version |= _NO_EDGE_WEIGHTS if edge_weights is None else 0
    lists_begin = 8 * (3 + num_nodes + 1)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        np.array([version, num_nodes, adjacency.nnz], np.uint64).tofile(file)
        (lists_begin + 4 * adjacency.indptr.astype(np.uint64)).tofile(file)
        adjacency.indices.astype(np.uint32).tofile(file)
        for weights in (node_weights, edge_weights):
            if weights is not None:
                weights.astype(np.int64).tofile(file)


@contextlib.contextmanager
def _as_file(write: functools.partial[None]) -> Iterator[str]:
    """A path under which what ``write`` wrote can be read: in memory where the system can, else a temporary file."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        descriptor = os.memfd_create("graph")
        try:
            write(descriptor)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile() as file:
        write(file.fileno())
        yield file.name
