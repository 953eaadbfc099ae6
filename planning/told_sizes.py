"""What a dimension counts, told from two recordings of one step at different sizes; nothing is guessed from one.

A dimension that is the same in both is a number. One that differs has to be ``factor * count + offset`` with whole
numbers for exactly one of the counts; sizes in which no two counts grow alike make that unique. What fits none stays
untold, with both of its values, and a trace with such a dimension refuses to be scaled. Memory that an operator takes
and gives up inside may follow from how a GPU divides its work (a row of partial sums for each program): where it grows
no faster than a count it is told as the least multiple of that count which is enough in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import Dim, OperatorRecord, TraceError, dims_of, formula, map_dims

_MOST_OFFSET = 1
"""``N + 1`` is the length of offsets into rows; nothing further off is known to occur."""
_DIVIDED = frozenset("NLEB")
"""Rows, edges and samples: what programs of a GPU divide among them, and what every device has."""


def told(first: StepTrace, at_first: PartSizes, second: StepTrace, at_second: PartSizes) -> StepTrace:
    """``first`` with formulas for its dimensions.

    Args:
        first: Recorded, its dimensions are numbers.
        at_first: The sizes it was recorded at.
        second: The same step at other sizes.
        at_second: Its sizes.

    Raises:
        TraceError: The two are not the same operators in the same order: which run depends on the sizes, or on what
            the graph looks like.
    """
    symbols = _grown(at_first.symbols(), at_second.symbols())
    _check_same(first, second)

    def tell(one: Dim, other: Dim, *, is_inside: bool = False) -> Dim:
        assert isinstance(one, int) and isinstance(other, int)
        exactly = _told(one, other, symbols)
        return _at_most(one, other, symbols) or exactly if is_inside and str(exactly).startswith("?") else exactly

    operators = []
    for record, twin in zip(first.operators, second.operators, strict=True):
        others = iter(dims_of(twin))

        def tell_next(dim: Dim, others: Iterator[tuple[str, Dim]] = others) -> Dim:
            place, other = next(others)
            return tell(dim, other, is_inside=place.startswith("workspace"))

        operators.append(map_dims(record, tell_next))
    storages = tuple(
        storage.model_copy(update={"values": tell(storage.values, twin.values)})
        for storage, twin in zip(first.storages, second.storages, strict=True)
    )
    return first.model_copy(update={"operators": tuple(operators), "storages": storages})


def _grown(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """The counts that differ, once each: without a halo, L is N."""
    found: dict[str, tuple[int, int]] = {}
    for symbol, one in first.items():
        pair = one, second[symbol]
        if pair[0] != pair[1] and pair not in found.values():
            found[symbol] = pair
    return found


def _told(one: int, other: int, symbols: Mapping[str, tuple[int, int]]) -> Dim:
    if one == other:
        return one
    fits: dict[int, list[Dim]] = {}
    for symbol, (first, second) in symbols.items():
        factor, rest = divmod(other - one, second - first)
        offset = one - factor * first
        if rest == 0 and factor > 0 and abs(offset) <= _MOST_OFFSET:
            fits.setdefault(abs(offset), []).append(formula(factor, symbol, offset))
    best = fits[min(fits)] if fits else []
    if len(best) != 1:
        return f"?{one} and {other}" + (f", {' or '.join(map(str, best))}" if best else "")
    return best[0]


def _at_most(one: int, other: int, symbols: Mapping[str, tuple[int, int]]) -> Dim | None:
    """A multiple, no less at either size, of the count that grows most alike among those that work is divided by.

    None where this grows faster than all of them.
    """
    bounds = []
    for symbol, (first, second) in symbols.items():
        if symbol in _DIVIDED and other * first <= one * second:
            factor = max(-(-one // first), -(-other // second))
            bounds.append((second / first, formula(factor, symbol, 0)))
    return min(bounds)[1] if bounds else None


def _check_same(first: StepTrace, second: StepTrace) -> None:
    for number, (one, other) in enumerate(zip(first.operators, second.operators, strict=False)):
        if (difference := _difference(one, other)) is not None:
            raise TraceError(
                f"which operators run depends on the sizes: number {number} is {one.name} ({one.op}) at one, "
                f"{other.name} ({other.op}) at the other; {difference}"
            )
    if len(first.operators) != len(second.operators):
        raise TraceError(
            f"which operators run depends on the sizes: there are {len(first.operators)} at one, and "
            f"{len(second.operators)} at the other"
        )
    for number, (a, b) in enumerate(zip(first.storages, second.storages, strict=False)):
        if a.model_copy(update={"values": 0}) != b.model_copy(update={"values": 0}):
            raise TraceError(f"memory lives differently at two sizes: storage {number} is {a} and {b}")
    if len(first.storages) != len(second.storages):
        raise TraceError(
            f"the step touches {len(first.storages)} storages at one size, {len(second.storages)} at another"
        )


def _difference(one: OperatorRecord, other: OperatorRecord) -> str | None:
    """What is not the same, dimensions aside."""
    a, b = (map_dims(record, lambda _: 0) for record in (one, other))
    for field in OperatorRecord.model_fields:
        if getattr(a, field) != getattr(b, field):
            return f"{field}: {getattr(a, field)} and {getattr(b, field)}"
    return None
