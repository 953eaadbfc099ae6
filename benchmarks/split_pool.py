"""Processes that split a large graph in several ways side by side, while others measure."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for_any
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from stages import ask_for_stacks, show_stacks_when_asked

from nugnn.partition.assign import split_graph
from nugnn.partition.balance import Balance, normalise_shares
from nugnn.partition.metis import SymmetricGraph
from nugnn.planning.cluster import Cluster
from nugnn.planning.draft_cut import draft_with_cut
from nugnn.planning.expected_halo import ExpectedHalo
from nugnn.planning.forecast import StepModel
from nugnn.planning.loop_method import loop_method
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.work_model import sizes_of, sizes_table

_PATIENCE_SECONDS = 60.0
"""Then the processes are asked for their stacks."""
_GIVE_UP_SECONDS = 600.0
_WARM_NODES = 600_000
"""So many that a sort of keys is numba's, as in large graphs."""


@dataclass(frozen=True)
class Split:
    """Parts in a file, and what they hold.

    Args:
        path: ``(N,)`` int8, for ``numpy.load``.
        sizes: Of each part.
        seconds: Predicted of each part; empty for shares that are no prediction's.
        took_seconds: To find it.
    """

    path: Path
    sizes: tuple[PartSizes, ...]
    seconds: tuple[float, ...]
    took_seconds: float


class SplitPool:
    """Splits graphs whose neighbour lists lie in a folder.

    Args:
        folder: Where `keep_graph` put them, and where parts go.
        processes: Side by side.
        threads: Of each.
    """

    def __init__(self, folder: Path, processes: int, threads: int) -> None:
        self._folder = folder
        self._pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(folder, threads)
        )
        self._starting = [self._pool.submit(os.getpid) for _ in range(processes)]  # each submission starts a process

    def by_shares(self, name: str, shares: Sequence[float]) -> Future[Split]:
        """Parts with these shares of the nodes: what static schemes do."""
        return self._pool.submit(_by_shares, self._folder, name, tuple(shares))

    def planned(self, name: str, model: StepModel, cluster: Cluster, precision: str, row_bytes: float) -> Future[Split]:
        """The parts that `nugnn.planned.plan_with_cut` gives ``auto`` shares of all nodes, which train."""
        packed = pickle.dumps((model, cluster))  # by whoever knows what it is made of, once for all
        return self._pool.submit(_planned, self._folder, name, packed, precision, row_bytes)

    def given(self, name: str, part: npt.NDArray, seconds: Sequence[float]) -> Future[Split]:
        """Parts that were found elsewhere, ``(N,)``, and what is predicted of each."""
        return self._pool.submit(_kept, self._folder, name, part, tuple(seconds), 0.0)

    def result(self, split: Future[Split]) -> Split:
        """What was asked for; after a minute without it, stacks of all processes go to stderr.

        Raises:
            TimeoutError: It took ten minutes.
        """
        begin = time.monotonic()
        while not wait_for_any([split], _PATIENCE_SECONDS).done:
            seconds = time.monotonic() - begin
            print(f"no split in {seconds:.0f} s", file=sys.stderr, flush=True)
            ids = [int(path.name.rpartition("-")[2]) for path in self._folder.glob("process-*")]
            ask_for_stacks(("a process that splits", number) for number in ids)
            if seconds > _GIVE_UP_SECONDS:
                raise TimeoutError(f"no split in {seconds:.0f} s")
        return split.result()

    def close(self) -> None:
        """End the processes, also those at work."""
        for process in list((self._pool._processes or {}).values()):
            process.terminate()
        self._pool.shutdown(cancel_futures=True)


def warm_kernels() -> None:
    """Compile what ordering and splitting need, once and into the cache on disk, before other processes ask for it."""
    from nugnn.partition.clusters import unweighted_lists
    from nugnn.partition.order import locality_order, rows_in_cache

    nodes = np.arange(_WARM_NODES)
    indices = np.stack([nodes + step for step in (-2, -1, 1, 2)], axis=1) % _WARM_NODES
    indptr = np.arange(0, 4 * _WARM_NODES + 1, 4)
    lists = unweighted_lists(indptr, np.ascontiguousarray(indices.reshape(-1), np.int32))
    locality_order(lists, rows_in_cache(400))
    with tempfile.TemporaryDirectory() as folder:
        keep_graph(Path(folder), "ring", lists.indptr, lists.indices)
        _by_shares(Path(folder), "ring", (0.7, 0.3))
        _graph.cache_clear()


def keep_graph(folder: Path, name: str, indptr: npt.NDArray, indices: npt.NDArray) -> None:
    """Put a symmetric graph's neighbour lists where the pool finds them, ``indices`` without loops or repeats."""
    np.save(folder / f"{name}-indptr.npy", indptr)
    np.save(folder / f"{name}-indices.npy", indices)


def _begin(folder: Path, threads: int) -> None:
    show_stacks_when_asked()
    (folder / f"process-{os.getpid()}").touch()
    torch.set_num_threads(threads)


@functools.lru_cache(2)
def _graph(folder: Path, name: str) -> tuple[SymmetricGraph, npt.NDArray, npt.NDArray]:
    """The graph as partitioners see it, and the source and destination of each edge."""
    indptr, indices = (np.load(folder / f"{name}-{what}.npy") for what in ("indptr", "indices"))
    adjacency = sparse.csr_array((np.ones(len(indices), np.int64), indices, indptr), shape=(len(indptr) - 1,) * 2)
    return (
        SymmetricGraph(adjacency, 0),
        indices,
        np.repeat(np.arange(len(indptr) - 1, dtype=np.int32), np.diff(indptr)),
    )


def _by_shares(folder: Path, name: str, shares: tuple[float, ...]) -> Split:
    begin = time.perf_counter()
    graph, _, _ = _graph(folder, name)
    balance = Balance(np.ones((graph.adjacency.shape[0], 1)), normalise_shares(shares), 0.02)
    part, _ = split_graph("clusters", graph, balance, 0, [])
    return _kept(folder, name, part, (), time.perf_counter() - begin)


def _planned(folder: Path, name: str, packed: bytes, precision: str, row_bytes: float) -> Split:
    begin = time.perf_counter()
    model, cluster = pickle.loads(packed)
    graph, src, dst = _graph(folder, name)
    num_nodes = graph.adjacency.shape[0]
    draft = draft_with_cut(
        model, num_nodes, src, dst, np.arange(num_nodes), cluster, partitioner=loop_method("auto", len(src), "auto"),
        precision=precision, halo=ExpectedHalo(), row_bytes=row_bytes, symmetric=graph,
    )  # fmt: skip
    seconds = tuple(model.work.seconds(rank, size) for rank, size in enumerate(draft.sizes))
    return _kept(folder, name, draft.part, seconds, time.perf_counter() - begin)


def _kept(folder: Path, name: str, part: Any, seconds: tuple[float, ...], took: float) -> Split:
    _, src, dst = _graph(folder, name)
    small = np.ascontiguousarray(part, np.int8)
    path = folder / f"{name}-{hashlib.blake2b(small.tobytes(), digest_size=8).hexdigest()}.npy"
    np.save(path, small)
    num_parts = int(small.max()) + 1
    table = sizes_table(src, dst, small.astype(np.int32), num_parts, np.arange(len(small)))
    return Split(path, sizes_of(table), seconds, took)
