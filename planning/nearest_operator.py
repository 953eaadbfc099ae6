"""Which entry of a table of times answers for an operator: its own, or the one that is most like it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from nugnn.planning.operator_costs import number
from nugnn.planning.time_curves import Amount, Curve, edge_weight
from nugnn.planning.timed_operators import BY_OPERATIONS, TimedOperator, amount_of, attributes_of
from nugnn.planning.trace_records import Kind, OperatorRecord, Storage

_Like = tuple[Kind, str, tuple[tuple[str, str], ...], tuple[str, ...]]
"""Kind, operator, attributes, and types of all operands."""


_Ranks = tuple[int, ...]
"""Axes of each operand."""
_Mask = tuple[int, ...]
"""Places, among the dimensions of all operands, of those that do not grow."""

_UNLIKE = BY_OPERATIONS | {"exchange", "optimizer"}
"""Kinds whose seconds say nothing about what another operator takes for its bytes."""


_FAR = 4.0
"""Times as much as was measured: there an entry of fewer fixed dimensions knows better, if it was measured further."""


class Lookup(NamedTuple):
    """An answer of a table.

    Args:
        seconds: Of the operator.
        fallback: Why another entry than the operator's own had to answer; None where it was its own.
    """

    seconds: float
    fallback: str | None = None


class _Entry:
    """An operator with its curve."""

    def __init__(self, timed: TimedOperator) -> None:
        self.timed = timed
        amounts, seconds = [p.amount for p in timed.points], [p.seconds for p in timed.points]
        self._weight = edge_weight(amounts, seconds)
        works = [a.weighed(self._weight) for a in amounts]
        self._most = max(a.edges + a.rest for a in amounts)
        self._curve = Curve(list(zip(works, seconds, strict=True)))

    def __call__(self, amount: Amount) -> float:
        return self._curve(amount.weighed(self._weight))

    def reaches(self, amount: Amount) -> bool:
        """Whether about as much was measured, or more."""
        return amount.edges + amount.rest <= _FAR * self._most


class Entries:
    """Finds the entry of a record.

    Args:
        operators: All entries.
        device: Of which kind they are, ``cpu`` or ``cuda``.
    """

    def __init__(self, operators: Sequence[TimedOperator], device: str) -> None:
        self._operators, self._device = operators, device
        self._own: dict[tuple[_Like, _Ranks], dict[_Mask, dict[tuple[int, ...], _Entry]]] = {}
        self._like: dict[_Like, list[_Entry]] = {}
        self._of_kind: dict[Kind, list[_Entry]] = {}
        for timed in operators:
            entry = _Entry(timed)
            operands = (*timed.inputs, *timed.outputs)
            dims = [dim for x in operands for dim in x.shape]
            mask = tuple(place for place, dim in enumerate(dims) if dim is not None)
            like = _like(timed, timed.attrs)
            by_mask = self._own.setdefault((like, tuple(len(x.shape) for x in operands)), {})
            by_mask.setdefault(mask, {})[tuple(dim for dim in dims if dim is not None)] = entry
            self._like.setdefault(like, []).append(entry)
            self._of_kind.setdefault(timed.kind, []).append(entry)
        for key, by_mask in self._own.items():  # the more is said, the sooner it is asked, as far as it was measured
            self._own[key] = dict(sorted(by_mask.items(), key=lambda item: -len(item[0])))

    def __eq__(self, other: object) -> bool:
        """Pydantic asks, of two tables."""
        return isinstance(other, Entries) and self._operators == other._operators

    __hash__ = None  # type: ignore[assignment]

    def lookup(self, record: OperatorRecord, storages: Sequence[Storage]) -> Lookup:
        operands = (*record.inputs, *record.outputs)
        dims = [number(dim) for x in operands for dim in x.shape]
        like = _like(record, attributes_of(record, self._device))
        amount = amount_of(record, storages)
        by_mask = self._own.get((like, tuple(len(x.shape) for x in operands)), {})
        own = [entries.get(tuple(dims[place] for place in mask)) for mask, entries in by_mask.items()]
        found = [entry for entry in own if entry is not None]
        if found:
            return Lookup(next((entry for entry in found if entry.reaches(amount)), found[0])(amount))
        entry, why = self._nearest(record, like, dims, amount)
        return Lookup(entry(amount), f"{record.op} ({record.kind}, {_types(record)}) {why}")

    def _nearest(self, record: OperatorRecord, like: _Like, dims: Sequence[int], amount: Amount) -> tuple[_Entry, str]:
        if near := self._like.get(like):
            return min(near, key=lambda e: (_distance(e, dims), _reach(e, amount))), "was measured in other shapes"
        if of_kind := self._of_kind.get(record.kind):
            wanted = _types(record)
            same = [e for e in of_kind if _types(e.timed) == wanted]
            entry = min(same or of_kind, key=lambda e: (e.timed.op != record.op, _distance(e, dims), _reach(e, amount)))
            what = f"was not measured: as {entry.timed.op}, of the same kind"
            return entry, what if same else f"{what}, in {_types(entry.timed)}"
        by_bytes = [e for kind, each in self._of_kind.items() if kind not in _UNLIKE for e in each]
        entry = min(by_bytes or self._of_kind[next(iter(self._of_kind))], key=lambda e: _reach(e, amount))
        return entry, f"nothing of its kind was measured: as {entry.timed.op}, by what it moves"


def _like(x: OperatorRecord | TimedOperator, attrs: dict[str, str]) -> _Like:
    types = tuple(each.dtype for each in (*x.inputs, *x.outputs))
    return x.kind, x.op, tuple(sorted(attrs.items())), types


def _types(x: OperatorRecord | TimedOperator) -> str:
    """What it computes in: the first floating type that it reads, or makes."""
    found = [each.dtype for each in (*x.inputs, *x.outputs)]
    return next((dtype for dtype in found if "float" in dtype), found[0] if found else "nothing")


def _distance(entry: _Entry, dims: Sequence[int]) -> float:
    """How far the entry's dimensions are from ``dims``, in powers of e; those that grow are not compared."""
    own: list[int | None] = [dim for x in (*entry.timed.inputs, *entry.timed.outputs) for dim in x.shape]
    if len(own) != len(dims):
        return math.inf
    return sum(abs(math.log((a + 1) / (b + 1))) for a, b in zip(own, dims, strict=True) if isinstance(a, int))


def _reach(entry: _Entry, amount: Amount) -> float:
    """How far beyond what was measured an amount is, in powers of e."""
    most = max(p.edges + p.rest for p in entry.timed.points)
    return abs(math.log((amount.edges + amount.rest + 1) / (most + 1)))
