"""One training step on one device as a list of operators whose shapes are formulas in what the device has to do.

A trace is recorded at small sizes (`nugnn.traced_step`) and holds for any: each dimension is a number, or a number
times one of the counts of `PartSizes`. `StepTrace.at` puts counts in. What the step computes, moves and holds follows
from the records alone, so a planner can ask for a part that nobody has cut yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError

from nugnn._counted import counted
from nugnn.planning.operator_costs import bytes_of, flops_of, storage_bytes, workspace_bytes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.trace_records import (
    CATEGORIES,
    Category,
    Dim,
    Kind,
    OperatorRecord,
    Phase,
    Storage,
    Strict,
    TensorRecord,
    TraceError,
    dims_of,
    map_dims,
    value_of,
)
from nugnn.planning.validation import what_is_wrong

__all__ = ["OperatorRecord", "StepTrace", "Storage", "TensorRecord", "TraceError", "read_trace"]

SCHEMA: Literal["nugnn.trace/1"] = "nugnn.trace/1"


class StepTrace(Strict):
    """The operators of one training step on one device, in the order in which they run.

    Args:
        schema_name: What kind of file this is; ``schema`` in JSON.
        family: Of the data.
        ranks: How many devices shared the work where it was recorded; with one there are no exchanges in it.
        device: On which it was recorded: which operators run depends on it.
        operators: The records.
        storages: All memory they touch.
        versions: Of ``torch`` and ``nugnn``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_name: Literal["nugnn.trace/1"] = Field(SCHEMA, alias="schema")
    family: Literal["graph", "samples"]
    ranks: int = Field(ge=1)
    device: str
    operators: tuple[OperatorRecord, ...]
    storages: tuple[Storage, ...]
    versions: dict[str, str] = Field(default_factory=dict)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def at(self, sizes: PartSizes) -> StepTrace:
        """The step of a device with these sizes: numbers in place of formulas.

        Raises:
            TraceError: A dimension could not be told when the trace was made; the sizes are of the other family of
                data; or they have a halo, and the trace was recorded without other devices.
        """
        self.check_told()
        self.check(sizes)
        known = sizes.symbols()

        def told(dim: Dim) -> Dim:
            return value_of(dim, known)

        operators = tuple(map_dims(record, told) for record in self.operators)
        storages = tuple(s.model_copy(update={"values": told(s.values)}) for s in self.storages)
        return self.model_copy(update={"operators": operators, "storages": storages})

    def check(self, sizes: PartSizes) -> None:
        """Raises TraceError unless sizes are of the trace's family, and have a halo only if the trace has exchanges."""
        wanted, other = ("inner", "batch") if self.family == "graph" else ("batch", "inner")
        if getattr(sizes, other) and not getattr(sizes, wanted):
            raise TraceError(f"the trace is of {self.family}, whose sizes have {wanted}; these have {other} alone")
        if self.ranks == 1 and sizes.halo:
            raise TraceError(
                f"the trace was recorded on one device, and the sizes have {counted(sizes.halo, 'halo row')}"
            )

    def check_told(self) -> None:
        """Raises TraceError if of a dimension it is not known what it counts."""
        if untold := self.untold():
            raise TraceError(f"what these dimensions count is not known: {'; '.join(untold[:5])}")

    def untold(self) -> list[str]:
        """Where dimensions stand of which it is not known what they count; empty for most models."""
        found = []
        places: list[tuple[str, OperatorRecord | Storage]] = []
        places += [(f"operator {i} ({record.name}, {record.op})", record) for i, record in enumerate(self.operators)]
        places += [(f"storage {i} {storage.name}", storage) for i, storage in enumerate(self.storages)]
        for place, each in places:
            for what, dim in dims_of(each):
                if isinstance(dim, str) and dim.startswith("?"):
                    found.append(f"{place}, {what}: {dim[1:]}")
        return found

    # -- what it takes -------------------------------------------------------------------------------------------------

    def flops(self, sizes: PartSizes | None = None) -> dict[tuple[Phase, Kind], int]:
        """Multiplications and additions by phase and kind, of kinds whose time is theirs; the others go by bytes.

        Args:
            sizes: Put in first; not needed after `at`.
        """
        return self._totals(sizes, flops_of)

    def bytes_moved(self, sizes: PartSizes | None = None) -> dict[tuple[Phase, Kind], int]:
        """Bytes read and written by phase and kind, each operand once, rows that are gathered once an edge."""
        return self._totals(sizes, bytes_of)

    def _totals(
        self, sizes: PartSizes | None, count: Callable[[OperatorRecord, Sequence[Storage]], int]
    ) -> dict[tuple[Phase, Kind], int]:
        trace = self if sizes is None else self.at(sizes)
        totals: dict[tuple[Phase, Kind], int] = {}
        for record in trace.operators:
            key = record.phase, record.kind
            totals[key] = totals.get(key, 0) + count(record, trace.storages)
        return {key: total for key, total in totals.items() if total}

    def saved_bytes(self, sizes: PartSizes | None = None) -> int:
        """Bytes that the step makes and autograd keeps for backward; inputs and parameters are not among them."""
        trace = self if sizes is None else self.at(sizes)
        return sum(storage_bytes(s) for s in trace.storages if s.is_saved and s.category == "activation")

    def live_bytes(self, sizes: PartSizes | None = None) -> list[int]:
        """While each operator runs: parameters, gradients, optimizer state, inputs, activations and its workspace."""
        trace = self if sizes is None else self.at(sizes)
        return [live for live, _ in trace._alive()]

    def peak_bytes(self, sizes: PartSizes | None = None) -> int:
        """The most of `live_bytes`."""
        return max(self.live_bytes(sizes), default=0)

    def at_peak(self, sizes: PartSizes | None = None) -> tuple[OperatorRecord, dict[str, int]]:
        """The operator during which most is alive, and bytes by category; ``workspace`` is its own."""
        trace = self if sizes is None else self.at(sizes)
        number, (_, held) = max(enumerate(trace._alive()), key=lambda item: item[1][0])
        return trace.operators[number], held

    def _alive(self) -> Iterator[tuple[int, dict[str, int]]]:
        made, freed = made_and_freed(self.storages)
        held = dict.fromkeys(CATEGORIES, 0)
        _add(held, made.get(-1, ()), 1)
        _add(held, freed.get(-1, ()), -1)
        for number, record in enumerate(self.operators):
            before = sum(held.values())
            _add(held, made.get(number, ()), 1)
            inside = before + workspace_bytes(record)
            extra = max(inside - sum(held.values()), 0)
            yield sum(held.values()) + extra, {**{str(key): held[key] for key in held}, "workspace": extra}
            _add(held, freed.get(number, ()), -1)

    def to_json(self) -> str:
        """One line for each operator, so that traces can be compared with a tool for texts."""
        whole = self.model_dump(mode="json", by_alias=True, exclude={"operators", "storages"})
        parts = [f'"{key}": {json.dumps(value)}' for key, value in whole.items()]
        for key, items in (("operators", self.operators), ("storages", self.storages)):
            lines = ",\n  ".join(item.model_dump_json(exclude_defaults=True) for item in items)
            parts.append(f'"{key}": [\n  {lines}\n ]')
        return "{\n " + ",\n ".join(parts) + "\n}\n"


def made_and_freed(storages: Iterable[Storage]) -> tuple[dict[int, list[Storage]], dict[int, list[Storage]]]:
    """Storages by the record that makes them, and by the last one before they go; -1 stands for before the step."""
    made: dict[int, list[Storage]] = {}
    freed: dict[int, list[Storage]] = {}
    for storage in storages:
        made.setdefault(storage.made_by, []).append(storage)
        if storage.freed_by is not None:
            freed.setdefault(storage.freed_by, []).append(storage)
    return made, freed


def _add(held: dict[Category, int], storages: Iterable[Storage], sign: int) -> None:
    for storage in storages:
        held[storage.category] += sign * storage_bytes(storage)


def read_trace(path: Path) -> StepTrace:
    """The trace in a file.

    Raises:
        TraceError: It cannot be read, is no JSON, is of another version, or has a field that is missing, unknown or out
            of range.
    """
    try:
        return StepTrace.model_validate_json(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise TraceError(f"{path}: {what_is_wrong(error, StepTrace)}") from error
