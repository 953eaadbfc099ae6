"""Seconds of operators as they were measured inside training steps: a table for one device, as checked JSON.

An entry is an operator with its attributes, types and those dimensions that do not grow with the data; its points are
seconds by how much there was to do, and between points the seconds follow a `Curve`. What was not measured is answered
by the entry that is most like it, and the answer says so.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, PrivateAttr

from nugnn.datasets.whole_file import write_whole
from nugnn.planning.after_rest import AfterRest
from nugnn.planning.casts import CAST
from nugnn.planning.measured_peaks import MeasuredPeaks
from nugnn.planning.nearest_operator import Entries, Lookup
from nugnn.planning.profiles import DeviceKind
from nugnn.planning.timed_operators import Quantity, TimedOperator, joined_operators
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import OperatorRecord, Storage, Strict, TensorRecord
from nugnn.planning.validation import read_json

SCHEMA: Literal["nugnn.times/1"] = "nugnn.times/1"


class TimesError(ValueError):
    """A table of times cannot be made or read, or is asked for what it is not about."""


class MeasuredTimes(Strict):
    """What operators take on one device; see `nugnn.planning.operator_times.OperatorTimes`.

    Args:
        schema_name: What kind of file this is; ``schema`` in JSON.
        device: Name of the product.
        kind: How torch reaches it.
        uuid: Who it is; None for a CPU.
        limits: Under which it was measured, in words, such as ``sms=32``; empty for none.
        multiprocessors: Of a GPU; threads in use of a CPU.
        launch_seconds: The host's time to put one more operator, metadata aside, into a GPU's queue; 0 for a CPU, where
            it is a part of what the operators took.
        captured_launch_seconds: The same in steps that run as CUDA graphs, see
            `nugnn.planning.operator_times.OperatorTimes`; None where none was measured.
        after_rest: What steps take longer after a rest; None of a GPU, and where none was timed after one.
        peaks: Memory of the steps that operators were timed in; None on a CPU, where the trace sees all.
        operators: The entries.
        versions: ``torch``, ``driver``, ``nugnn``, as far as there are such.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_name: Literal["nugnn.times/1"] = Field(SCHEMA, alias="schema")
    device: str
    kind: DeviceKind
    uuid: str | None = None
    limits: str = ""
    multiprocessors: int = Field(ge=1)
    launch_seconds: Quantity = 0.0
    captured_launch_seconds: Quantity | None = None
    after_rest: AfterRest | None = None
    operators: tuple[TimedOperator, ...] = Field(min_length=1)
    peaks: MeasuredPeaks | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    _entries: Entries = PrivateAttr()

    def model_post_init(self, _: object) -> None:
        self._entries = Entries(self.operators, self.kind)

    def seconds(self, record: OperatorRecord, storages: Sequence[Storage]) -> float:
        """Seconds of ``record``, whose dimensions are numbers; 0 of metadata."""
        return self.lookup(record, storages).seconds

    def lookup(self, record: OperatorRecord, storages: Sequence[Storage]) -> Lookup:
        """As `seconds`, and which entry answered if it was not the operator's own."""
        if record.kind == "metadata":
            return Lookup(0.0)
        seconds, fallback = self._entries.lookup(record, storages)
        return Lookup(seconds, fallback)

    def cast_seconds(self, values: int, source: str, target: str) -> float:
        """Of writing ``values`` numbers in another type; types by torch's names, without ``torch.``."""
        storages = [Storage(values=values, dtype=t, category="activation", made_by=-1) for t in (source, target)]
        one, other = (TensorRecord(storage=i, shape=(values,), dtype=t) for i, t in enumerate((source, target)))
        return self.seconds(
            OperatorRecord(name="", op=CAST, kind="copy", phase="forward", inputs=(one,), outputs=(other,)), storages
        )

    def fallbacks(self, trace: StepTrace) -> dict[str, int]:
        """Why operators of a step were not answered by entries of their own, and how many were for that reason.

        Args:
            trace: At numbers.
        """
        found: dict[str, int] = {}
        for record in trace.operators:
            if (reason := self.lookup(record, trace.storages).fallback) is not None:
                found[reason] = found.get(reason, 0) + 1
        return found

    def joined(self, others: Iterable[MeasuredTimes]) -> MeasuredTimes:
        """With what other tables of the same device know; launches and peaks are this table's.

        What steps take longer after a rest is that of the first table that knows it.

        Raises:
            TimesError: One is of another device, other limits or versions.
        """
        operators, others = list(self.operators), list(others)
        for other in others:
            for field in ("device", "kind", "uuid", "limits", "multiprocessors", "versions"):
                if getattr(self, field) != getattr(other, field):
                    raise TimesError(
                        f"times of two devices cannot be joined: {field} is {getattr(self, field)!r} in one and "
                        f"{getattr(other, field)!r} in the other; measure both the same way"
                    )
            operators += other.operators
        known = [each.after_rest for each in (self, *others) if each.after_rest is not None]
        return self.with_operators(operators).model_copy(update={"after_rest": next(iter(known), None)})

    def with_operators(self, operators: Iterable[TimedOperator]) -> MeasuredTimes:
        """The same device with these entries; those of one operator become one."""
        return self.model_copy(update={"operators": joined_operators(operators)})

    def model_copy(self, *, update: dict[str, object] | None = None, deep: bool = False) -> MeasuredTimes:  # type: ignore[override]
        """Checked anew, so that what is looked up follows."""
        return MeasuredTimes(**({field: getattr(self, field) for field in type(self).model_fields} | (update or {})))

    def to_json(self) -> str:
        """One line for each entry."""
        whole = self.model_dump(mode="json", by_alias=True, exclude={"operators"})
        parts = [f'"{key}": {json.dumps(value)}' for key, value in whole.items()]
        lines = ",\n  ".join(each.model_dump_json(exclude_defaults=True) for each in self.operators)
        parts.append(f'"operators": [\n  {lines}\n ]')
        return "{\n " + ",\n ".join(parts) + "\n}\n"

    def file_name(self) -> str:
        """Of a table of this device, with this driver and these versions, among other tables.

        >>> MeasuredTimes.model_validate({"schema": "nugnn.times/1", "device": "a CPU", "kind": "cpu", "operators": [
        ...     {"kind": "copy", "op": "a", "points": [{"rest": 1, "seconds": 1}]}], "multiprocessors": 2,
        ...     "versions": {"torch": "2.11.0+cpu"}}).file_name()
        'times-cpu-a-CPU-2-torch-2.11.0+cpu.json'
        """
        versions = [f"{name}-{self.versions[name]}" for name in ("driver", "torch", "nugnn") if name in self.versions]
        words = ["times", self.kind, self.uuid or self.device, str(self.multiprocessors), self.limits, *versions]
        return re.sub(r"[^\w.+=-]+", "-", "-".join(word for word in words if word)) + ".json"

    def keep(self, folder: Path) -> MeasuredTimes:
        """Write the table into a folder of tables, joined with what is known there of the same device.

        Args:
            folder: That exists.

        Returns:
            What has been written. A file of that name that is damaged is replaced.
        """
        path, whole = folder / self.file_name(), self
        if path.is_file():
            with contextlib.suppress(TimesError):
                whole = self.joined([read_times(path)])
        write_whole(path, lambda file: file.write(whole.to_json().encode()))
        return whole


def read_times(path: Path | str) -> MeasuredTimes:
    """The table in a file.

    Raises:
        TimesError: It cannot be read, is no JSON, is of another version, or has a field that is missing, unknown or out
            of range.
    """
    return read_json(path, MeasuredTimes, TimesError)
