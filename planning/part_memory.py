"""Bytes of a device's memory that a step needs at once, for any part: the trace's peak, and what lies beside the trace.

The peak is the largest of sums that are linear in the counts, one or more for each operator; they are added up once,
and a part's is one product of a matrix and its counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nugnn.comm.early_rows import EDGES_PER_ROW
from nugnn.kernels.row_schedule import GROUP_COST, ROW_COST
from nugnn.kernels.spmm.sums import FEWEST_BYTES
from nugnn.planning.operator_costs import item_bytes, number
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.step_program import Passes
from nugnn.planning.trace import StepTrace, made_and_freed
from nugnn.planning.trace_records import Dim, OperatorRecord, Storage, TraceError, parsed, value_of

Floats = npt.NDArray[np.float64]

_FIELDS = ("inner", "edges", "halo", "sent", "train", "batch")
_SYMBOLS = {"N": (0,), "E": (1,), "H": (2,), "L": (0, 2), "S": (3,), "T": (4,), "B": (5,)}
_CONSTANT = len(_FIELDS)
_INDEX_BYTES, _OFFSET_BYTES = 4, 8
_NODE_BYTES = 3 * 8
"""A node's number in the whole graph, where its edges begin there, and its out-degree."""


class PeakTable:
    """`StepTrace.peak_bytes`, quickly and exactly.

    Args:
        trace: Its dimensions are formulas.

    Raises:
        TraceError: Of a dimension it is not known what it counts, or memory inside an operator has two axes.
    """

    def __init__(self, trace: StepTrace) -> None:
        trace.check_told()
        self._rows = _without_smaller(np.stack([np.zeros(_CONSTANT + 1), *_alive(trace)]))

    def bytes(self, sizes: PartSizes) -> int:
        """The most that is alive at once."""
        return int((self._rows @ _vector(sizes)).max())


def _vector(sizes: PartSizes) -> Floats:
    return np.array([*(getattr(sizes, field) for field in _FIELDS), 1], np.float64)


def _coefficients(dim: Dim, times: int) -> Floats:
    row = np.zeros(_CONSTANT + 1)
    factor, symbol, offset = (0, "", dim) if isinstance(dim, int) else parsed(dim)
    row[_CONSTANT] = times * offset
    for place in _SYMBOLS.get(symbol, ()):
        row[place] = times * factor
    return row


def _alive(trace: StepTrace) -> Iterable[Floats]:
    """While and after each operator runs, as `StepTrace.live_bytes` counts."""
    made, freed = made_and_freed(trace.storages)
    held = _sum(made.get(-1, ())) - _sum(freed.get(-1, ()))
    for place, record in enumerate(trace.operators):
        for inside in _workspace(record):
            yield held + inside
        held = held + _sum(made.get(place, ()))
        yield held
        held = held - _sum(freed.get(place, ()))


def _sum(storages: Iterable[Storage]) -> Floats:
    return sum((_coefficients(s.values, item_bytes(s.dtype)) for s in storages), np.zeros(_CONSTANT + 1))


def _workspace(record: OperatorRecord) -> list[Floats]:
    """What is alive inside after each piece that is taken; see `nugnn.planning.operator_costs.workspace_bytes`."""
    pieces = []
    for x in record.workspace:
        formulas = [dim for dim in x.shape if isinstance(dim, str)]
        if len(formulas) > 1:
            raise TraceError(f"{record.name} ({record.op}) takes memory of shape {x.shape}, whose sizes are no formula")
        numbers = int(np.prod([dim for dim in x.shape if isinstance(dim, int)], dtype=np.int64))
        pieces.append(_coefficients(formulas[0] if formulas else 1, numbers * item_bytes(x.dtype)))
    alive = []
    for taken in range(1, len(pieces) + 1):
        is_alive = [x.freed is None or x.freed >= taken for x in record.workspace[:taken]]
        alive.append(np.asarray(is_alive, np.float64) @ np.stack(pieces[:taken]))
    return alive


def _without_smaller(rows: Floats) -> Floats:
    """Those of which no other is at least as large in every coefficient."""
    rows = np.unique(rows, axis=0)
    kept = [i for i, row in enumerate(rows) if not any((other >= row).all() for j, other in enumerate(rows) if j != i)]
    return rows[kept]


# -- what lies beside the trace ----------------------------------------------------------------------------------------


class KeptStructure:
    """Bytes that a device keeps from step to step beside the two arrays of its structure, which the trace has.

    Numbers and out-degrees of nodes, and numbers of rows that are sent. Edges by source for the gradients, by which
    rows are divided among a GPU's programs, DGL's lists, entries of sparse features by column: each only where an
    operator of the trace asks for it.

    Args:
        trace: Of a graph; samples have none.
        overlap: See `nugnn.planning.step_program.make_program`.
        device: Its type; the trace's when None.
    """

    def __init__(self, trace: StepTrace, overlap: Passes = "none", *, device: str | None = None) -> None:
        self._is_graph, self._is_gpu = trace.family == "graph", (device or trace.device) == "cuda"
        on_edges = [r for r in trace.operators if r.kind in ("spmm", "sddmm", "attention") and "edges" in r.sizes]
        graph = [r for r in on_edges if not _is_on_features(r)]
        self._features = next(iter(_OfFeatures.all(trace.operators)), None)
        self._backward = [r for r in graph if r.phase == "backward"]
        self._forward = [r for r in graph if r.phase != "backward"]
        self._has_weights = any(_has_weights(record) for record in self._backward)
        self._has_ends = any(r.kind == "sddmm" and "v" in _targets(r) for r in graph)
        self._has_extremes = any(r.attrs.get("reduce") in ("max", "min") for r in self._forward)
        is_beside = any(r.attrs.get("op") == "copy_lhs" for r in self._forward)
        self._is_in_stages, self._is_some_early = (overlap == each and is_beside for each in ("both", "some"))
        self._of_cpu = [] if self._is_gpu else [_OfCpu.of(record) for record in graph]
        self._is_split = trace.ranks > 1

    def bytes(self, sizes: PartSizes) -> int:
        """Of a part; of an empty one nothing."""
        if not self._is_graph:
            return 0
        structure = self._on_gpu(sizes) if self._is_gpu else self._on_cpu(sizes)
        structure += _NODE_BYTES * sizes.inner
        structure += 0 if self._features is None else self._features.bytes(sizes, is_gpu=self._is_gpu)
        return structure + (_OFFSET_BYTES * sizes.sent if self._is_split else 0)

    def _on_gpu(self, sizes: PartSizes) -> int:
        edges, index = sizes.edges, _index_bytes(sizes.local)
        total = _schedule(sizes.inner, edges) if self._forward or self._backward else 0
        if self._backward:
            total += _OFFSET_BYTES * (sizes.local + 1) + _index_bytes(sizes.inner) * edges
            total += _schedule(sizes.local, edges)
            total += self._has_weights * _index_bytes(edges) * edges
        total += self._has_ends * index * edges  # the destination of each
        total += self._has_extremes * 2 * edges  # which of a row's edges each is
        if self._is_in_stages:
            total += 2 * _OFFSET_BYTES * (sizes.inner + 1) + index * edges + 2 * _schedule(sizes.inner, edges // 2)
        if self._is_some_early:  # at most: whether the bytes of an exchange are enough depends on its width
            early = min(edges, EDGES_PER_ROW * max(sizes.halo, sizes.sent))
            rows = sizes.inner * early // max(edges, 1)
            total += 2 * _OFFSET_BYTES * (rows + 1) + index * early + 2 * _schedule(rows, early // 2)
        return total

    def _on_cpu(self, sizes: PartSizes) -> int:
        """What our sums need, and DGL's lists where an operator is DGL's."""
        edges = sizes.edges
        is_ours_back = has_weights = is_dgls = is_dgls_back = is_sddmm = False
        for record in self._of_cpu:
            if edges >= record.least_edges:
                is_ours_back |= record.is_backward
                has_weights |= record.is_backward and record.has_weights
            else:
                is_dgls = True
                is_dgls_back |= record.is_backward
                is_sddmm |= record.is_sddmm
        total = 0
        if is_ours_back:
            total += _OFFSET_BYTES * (sizes.local + 1) + _index_bytes(sizes.inner) * edges
            total += has_weights * _index_bytes(edges) * edges
        if is_dgls:
            index = _index_bytes(max(sizes.local, edges))
            total += index * (sizes.inner + 1 + edges)  # offsets again, and numbers of edges
            total += is_dgls_back * index * (sizes.local + 1 + 2 * edges) + is_sddmm * 2 * index * edges
        return total


class _OfCpu(NamedTuple):
    """An operator on a graph: from how many edges on a sum is ours and not DGL's, and what it needs."""

    least_edges: float
    is_backward: bool
    has_weights: bool
    is_sddmm: bool

    @classmethod
    def of(cls, record: OperatorRecord) -> _OfCpu:
        is_sum = record.kind == "spmm" and record.attrs.get("op", "copy_lhs") in ("copy_lhs", "mul")
        row_bytes = number(record.sizes["width"]) * item_bytes(record.outputs[0].dtype)
        least_edges = FEWEST_BYTES / row_bytes if is_sum and row_bytes else math.inf
        return cls(least_edges, record.phase == "backward", _has_weights(record), record.kind == "sddmm")


class _OfFeatures(NamedTuple):
    """A product with sparse features: how many values they store, and how many columns they have."""

    stored: Dim
    columns: int

    @classmethod
    def all(cls, operators: Iterable[OperatorRecord]) -> Iterator[_OfFeatures]:
        """Of the products whose weight has a gradient; all are of the same features."""
        for record in operators:
            if record.phase != "backward":
                continue
            if record.kind == "sparse_product":
                yield cls(record.sizes["stored"], number(record.sizes["columns"]))
            elif _is_on_features(record):
                yield cls(record.sizes["edges"], number(record.sizes["rows"]))

    def bytes(self, sizes: PartSizes, *, is_gpu: bool) -> int:
        """Entries by column, with their rows and places; on a GPU a structure and its schedules as of a graph."""
        stored = value_of(self.stored, sizes.symbols())
        total = _OFFSET_BYTES * (self.columns + 1) + (_index_bytes(sizes.inner) + _index_bytes(stored)) * stored
        if is_gpu:
            total += _OFFSET_BYTES * (sizes.inner + 1) + _INDEX_BYTES * stored
            total += _schedule(sizes.inner, stored) + _schedule(self.columns, stored)
        return total


def _is_on_features(record: OperatorRecord) -> bool:
    """Whether an operator on edges is a GPU's product with sparse features, some values for each node."""
    edges = record.sizes.get("edges")
    return record.kind == "spmm" and isinstance(edges, str) and parsed(edges)[1] == "N"


def _index_bytes(largest: int) -> int:
    return _INDEX_BYTES if largest < 2**31 else _OFFSET_BYTES


def _schedule(rows: int, edges: int) -> int:
    """Of all rows in lockstep, and of the groups that light rows make; heavy rows, which are few, do not count."""
    groups = (edges + ROW_COST * rows) // GROUP_COST + 1
    return _index_bytes(rows) * (rows + 2 * groups)


def _has_weights(record: OperatorRecord) -> bool:
    """Whether the rows of edges are asked for, besides their ends."""
    return record.kind != "spmm" or record.attrs.get("op", "copy_lhs") != "copy_lhs"


def _targets(record: OperatorRecord) -> Sequence[str]:
    return [record.attrs.get(side, "") for side in ("lhs_target", "rhs_target")]
