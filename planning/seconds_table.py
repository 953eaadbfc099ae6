"""Seconds of a trace's operators at any sizes, from few evaluations: tables that fill where they are asked.

Whoever looks for shares asks for thousands of sizes, while `OperatorTimes` may be anything. Each operator depends on
few counts, so it is evaluated at the corners of cells that are 10 % wide and is linear in each count in between: exact
for times that are linear in the counts, and close for all that are smooth. What grows everywhere grows here, too.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from nugnn.planning.operator_times import OperatorTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import (
    OperatorRecord,
    Storage,
    dims_of,
    parsed,
    value_of,
)

Floats = npt.NDArray[np.float64]
_Record = TypeVar("_Record", bound=BaseModel)

_GROWTH = 1.1
_MOST = 2**45
_COUNTS = {"N": ("inner",), "H": ("halo",), "L": ("inner", "halo")} | {
    "E": ("edges",), "T": ("train",), "S": ("sent",), "B": ("batch",),
}  # fmt: skip
"""Counts behind each symbol."""


def _edges_of_cells() -> list[int]:
    edges, at = [0, 1], 1.0
    while edges[-1] < _MOST:
        at *= _GROWTH
        if round(at) > edges[-1]:
            edges.append(round(at))
    return edges


_EDGES = _edges_of_cells()


class SecondsTable:
    """Seconds of each record of a trace by the counts of a part.

    Args:
        trace: Its dimensions are formulas.
        times: Of its device.

    Raises:
        TraceError: Of a dimension it is not known what it counts.
    """

    def __init__(self, trace: StepTrace, times: OperatorTimes) -> None:
        trace.check_told()
        self._fixed = np.zeros(len(trace.operators))
        alike: dict[_Counts, list[int]] = {}
        for number, record in enumerate(trace.operators):
            if record.kind == "metadata":
                continue
            storages = {x.storage for x in (*record.inputs, *record.outputs) if x.storage >= 0}
            dims = [dim for _, dim in dims_of(record)] + [trace.storages[i].values for i in storages]
            symbols = {parsed(dim)[1] for dim in dims if isinstance(dim, str)}
            counts = tuple(sorted({count for symbol in symbols for count in _COUNTS[symbol]}))
            alike.setdefault(counts, []).append(number)
        constant = _Group((), trace, times, alike.pop((), []))
        self._fixed[constant.numbers] = constant.seconds({})
        self._groups = [_Group(counts, trace, times, numbers) for counts, numbers in _joined(alike).items()]
        self._counts = sorted({count for group in self._groups for count in group.counts})

    def seconds(self, sizes: PartSizes) -> Floats:
        """``(R,)`` of each record, in order; views take none."""
        places = {}
        for count in self._counts:
            value = getattr(sizes, count)
            place = bisect_right(_EDGES, value) - 1
            low = _EDGES[place]
            places[count] = place, (value - low) / (_EDGES[place + 1] - low)
        found = self._fixed.copy()
        for group in self._groups:
            found[group.numbers] = group.seconds(places)
        return found


_Counts = tuple[str, ...]
_FEW = 12


def _joined(alike: dict[_Counts, list[int]]) -> dict[_Counts, list[int]]:
    """Few records that depend on some counts go with others that depend on these and more: that is one look less."""
    joined: dict[_Counts, list[int]] = {}
    for counts in sorted(alike, key=len, reverse=True):
        wider = [other for other in joined if set(counts) < set(other)]
        if wider and len(alike[counts]) <= _FEW:
            joined[min(wider, key=len)] += alike[counts]
        else:
            joined[counts] = alike[counts]
    return joined


class _Group:
    """Records that depend on the same counts."""

    def __init__(self, counts: _Counts, trace: StepTrace, times: OperatorTimes, numbers: Sequence[int]) -> None:
        self.counts, self.numbers = counts, np.array(numbers, np.intp)
        self._trace, self._times = trace, times
        self._corners: dict[tuple[int, ...], Floats] = {}
        self._cells: dict[tuple[int, ...], Floats] = {}

    def seconds(self, places: Mapping[str, tuple[int, float]]) -> Floats:
        """Of each record in `numbers`, by the cell of each count and the place in it."""
        weights, key = [1.0], []
        for count in self.counts:
            place, share = places[count]
            key.append(place)
            weights = [weight * part for weight in weights for part in (1.0 - share, share)]
        corners = self._cells.get(cell := tuple(key))
        if corners is None:
            around = itertools.product(*((place, place + 1) for place in cell))
            corners = self._cells[cell] = np.stack([self._at(corner) for corner in around])
        return np.dot(weights, corners)  # type: ignore[no-any-return]

    def _at(self, corner: tuple[int, ...]) -> Floats:
        known = self._corners.get(corner)
        if known is None:
            sizes = PartSizes(**{count: _EDGES[place] for count, place in zip(self.counts, corner, strict=True)})
            symbols = sizes.symbols()
            storages = _StoragesAt(self._trace.storages, symbols)
            records = (_at(self._trace.operators[i], symbols) for i in self.numbers)
            known = self._corners[corner] = np.array([self._times.seconds(each, storages) for each in records])
        return known


def _at(record: OperatorRecord, symbols: Mapping[str, int]) -> OperatorRecord:
    """`map_dims` with numbers, without a copy of what does not change: tables ask for it often."""

    def told(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            x
            if all(type(dim) is int for dim in x.shape)
            else _changed(x, {"shape": tuple([value_of(dim, symbols) for dim in x.shape])})
            for x in tensors
        )

    return _changed(
        record,
        {
            "inputs": told(record.inputs),
            "outputs": told(record.outputs),
            "workspace": told(record.workspace),
            "sizes": {key: value_of(dim, symbols) for key, dim in record.sizes.items()},
        },
    )


def _changed(record: _Record, values: Mapping[str, Any]) -> _Record:
    """A copy with some other values, which are right; `model_copy` and `model_construct` take ten times as long."""
    copy = object.__new__(type(record))
    object.__setattr__(copy, "__dict__", {**record.__dict__, **values})
    object.__setattr__(copy, "__pydantic_fields_set__", record.__pydantic_fields_set__)
    object.__setattr__(copy, "__pydantic_extra__", None)
    object.__setattr__(copy, "__pydantic_private__", None)
    return copy


class _StoragesAt(Sequence[Storage]):
    """Storages at sizes, as far as somebody looks at them."""

    def __init__(self, storages: Sequence[Storage], symbols: dict[str, int]) -> None:
        self._storages, self._symbols = storages, symbols

    @overload
    def __getitem__(self, number: int) -> Storage: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Storage]: ...
    def __getitem__(self, number: int | slice) -> Storage | Sequence[Storage]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        storage = self._storages[number]
        return _changed(storage, {"values": value_of(storage.values, self._symbols)})

    def __len__(self) -> int:
        return len(self._storages)

    def __iter__(self) -> Iterator[Storage]:
        return (self[i] for i in range(len(self)))
