"""Single nodes moved between parts, which balances what no weight of a node can say: halo rows, and memory.

Axes: N nodes, P parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from nugnn.kernels._jit import row_tasks
from nugnn.partition.arc_lists import distinct_sources
from nugnn.partition.balance import Floats, Ints
from nugnn.planning.part_sizes import GRAPH_COUNTS, PartSizes
from nugnn.planning.work_model import WorkModel, sizes_of

Cost = Callable[[int, PartSizes], float]

WORTH_WHILE = 1e-3
"""Of the slowest part's time: what brings less ends a search."""
_POWERS = (3.0, 10.0, 40.0, 160.0)
"""Of seconds in what moves lower: first a small cut counts as well, in the end the slowest part decides alone."""
_GIVERS = 0.8
"""Parts give nodes away that take at least so much of the slowest part's time."""
_MEMORY_WEIGHT = 1e6
_SWEEPS = 4
"""For each power, at most."""
_READERS_LIMIT = 2**32
"""Bytes of the table that moves need, N times P times 4; larger graphs go without moves."""


class SingleMoves:
    """Moves of single nodes of a graph.

    Args:
        src: ``(E,)`` source of each edge.
        dst: ``(E,)`` destination.
        train: Distinct ids of the training nodes.
        degrees: ``(N,)`` edges into each node.
        work: What a part costs on each device.
        limits: Bytes of memory of each of P devices.
    """

    def __init__(
        self,
        src: npt.NDArray,
        dst: npt.NDArray,
        train: npt.NDArray,
        degrees: Ints,
        work: WorkModel,
        limits: Sequence[float],
    ) -> None:
        self._src, self._dst, self._train, self._degrees = src, dst, train, degrees
        self._work, self._limits = work, limits
        self._sources: tuple[Ints, npt.NDArray[np.int32]] | None = None

    @property
    def has_room(self) -> bool:
        """Whether the table that moves need is small enough."""
        return 4 * len(self._degrees) * len(self._limits) <= _READERS_LIMIT

    def balance(self, part_N: Ints, sizes_before: Sequence[PartSizes]) -> None:
        """Moves in place so that the slowest part takes less and, before all, less memory is lacking.

        Args:
            part_N: ``(N,)`` int64 part of each node.
            sizes_before: Of the parts.
        """
        self._move(part_N, sizes_before, for_memory=False)

    def relieve(self, part_N: Ints, sizes_before: Sequence[PartSizes]) -> None:
        """Moves in place out of parts that lack memory until none lacks any, and for nothing else: what must not become
        slower meanwhile can be in the way of what must fit.

        Args:
            part_N: ``(N,)`` int64 part of each node.
            sizes_before: Of the parts.
        """
        self._move(part_N, sizes_before, for_memory=True)

    def _move(self, part_N: Ints, sizes_before: Sequence[PartSizes], *, for_memory: bool) -> None:
        """Moves that gain most for the work they move first, in sweep after sweep."""
        from nugnn.partition import move_kernels as kernels

        indptr, sources = self._distinct_sources()
        is_train = np.zeros(len(self._degrees), np.int64)
        is_train[self._train] = 1
        graph = indptr, sources, self._degrees, is_train
        readers = np.zeros((len(self._degrees), len(self._limits)), np.int32)
        present = np.zeros((len(self._degrees), (len(self._limits) + 63) // 64), np.uint64)
        kernels.count_readers(indptr, sources, part_N, readers, present)
        sizes = np.array([part.of_graph for part in sizes_before], np.float64)
        limits = np.minimum(np.array(self._limits), 1e300)
        for power in _POWERS:
            for _ in range(_SWEEPS):
                table = sizes_of(np.rint(sizes).astype(np.int64))
                seconds = np.array([self._work.seconds(part, size) for part, size in enumerate(table)])
                held = np.array([self._work.bytes(part, size) for part, size in enumerate(table)])
                slowest, lacks = float(seconds.max()), held > limits
                if for_memory and not lacks.any():
                    return
                is_giver = lacks if for_memory else (seconds > _GIVERS * slowest) | lacks
                nodes = np.flatnonzero(is_giver[part_N])
                costs = (*self._linear(self._work.seconds, table), *self._linear(self._work.bytes, table), limits)
                now = graph, part_N, readers, present, sizes, costs, (1 / max(slowest, 1e-300), power, _MEMORY_WEIGHT)
                gains = np.zeros(len(nodes))
                degrees = np.concatenate([[0], np.cumsum(self._degrees[nodes])])
                kernels.weigh_moves(row_tasks(degrees, torch.get_num_threads()), nodes, *now, gains)
                order = np.argsort(-gains, kind="stable")
                chosen = nodes[order[: int(np.count_nonzero(gains))]]
                if not kernels.make_moves(chosen, *now, for_memory):
                    break
                after = sizes_of(np.rint(sizes).astype(np.int64))
                reached = max(self._work.seconds(part, size) for part, size in enumerate(after))
                if reached > (1 - WORTH_WHILE) * slowest and not lacks.any():
                    break

    def _distinct_sources(self) -> tuple[Ints, npt.NDArray[np.int32]]:
        if self._sources is None:
            lists = distinct_sources(len(self._degrees), self._src, self._dst)
            self._sources = lists.indptr.astype(np.int64, copy=False), lists.indices
        return self._sources

    def _linear(self, cost: Cost, table: Sequence[PartSizes]) -> tuple[Floats, Floats]:
        pairs = [marginal_cost(cost, part, sizes) for part, sizes in enumerate(table)]
        return np.stack([per_size for per_size, _ in pairs]), np.array([constant for _, constant in pairs])


def marginal_cost(cost: Cost, part: int, sizes: PartSizes) -> tuple[Floats, float]:
    """Cost of one more of each size, near ``sizes``, and of a part without any, were the cost linear."""
    here = float(cost(part, sizes))
    values = sizes.of_graph
    per_size = np.zeros(len(values))
    for column, name in enumerate(GRAPH_COUNTS):
        step = max(1, values[column] // 100)
        more = dataclasses.replace(sizes, **{name: values[column] + step})
        per_size[column] = (float(cost(part, more)) - here) / step
    return per_size, here - float(per_size @ np.array(values, np.float64))
