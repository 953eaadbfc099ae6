"""Bytes that operators of a GPU take while they run and give back, as cuDNN's workspaces: measured inside steps.

A trace does not see them. Measured for each operator in steps of one format, they are those of the same operators in
a step of several.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nugnn.planning.measure_operators import OperatorTimer
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.operator_costs import storage_bytes, workspace_bytes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.timed_operators import TimedOperator, operators_at
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import WorkspaceRecord
from nugnn.sample_family import SampleFamily
from nugnn.trainer import Trainer

InsideStep = tuple[list[str], list[float]]
"""Operators of a step, as records name them, and the bytes inside of each."""


class Allocator(NamedTuple):
    """Who is asked; torch's, for the current GPU.

    Args:
        held: Bytes that are given out.
        most: The most that were since ``forget``.
        forget: Begins anew.
    """

    held: Callable[[], int] = torch.cuda.memory_allocated
    most: Callable[[], int] = torch.cuda.max_memory_allocated
    forget: Callable[[], None] = torch.cuda.reset_peak_memory_stats


class BytesClock:
    """Counts bytes in place of seconds: the most beyond what an operator has found, or leaves if that is more.

    An `nugnn.planning.measure_operators.OperatorClock`.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._found: list[float] = []
        self._before = 0

    def open(self) -> None:
        self._found = []

    def begin(self, number: int) -> None:
        self._allocator.forget()
        self._before = self._allocator.held()

    def end(self) -> None:
        around = max(self._before, self._allocator.held())
        self._found.append(float(max(self._allocator.most() - around, 0)))

    def close(self) -> list[float]:
        return self._found


def bytes_inside(trainer: Trainer, allocator: Allocator | None = None) -> InsideStep:
    """One more step of a trainer of samples."""
    assert isinstance(trainer.family, SampleFamily)
    watcher = OperatorTimer(trainer.optimizer, BytesClock(allocator or Allocator()))
    works = next(iter(trainer.family.steps(0)))
    with watcher.timing(trainer.family.interceptor):
        trainer.step(works)
    return watcher.names, watcher.laps


def table_of(
    traces: Sequence[StepTrace], found: Sequence[Sequence[tuple[PartSizes, InsideStep]]], times: MeasuredTimes
) -> MeasuredTimes:
    """A table of bytes in place of seconds.

    Args:
        traces: With formulas; of a step in each format.
        found: Of each, `bytes_inside` at some sizes.
        times: Of the same device.
    """
    operators: list[TimedOperator] = []
    for trace, steps in zip(traces, found, strict=True):
        for sizes, inside in steps:
            at = trace.at(sizes)
            operators += operators_at(trace, at, _bytes_of_records(at, inside))
    return times.with_operators(operators)


def _bytes_of_records(at: StepTrace, inside: InsideStep) -> list[float]:
    """Those of a step's operators that the trace has, too; none of other records.

    A step that is watched may make others as well: one of a trainer that may be recorded fills a table of keys first.
    """
    names, taken = inside
    found = [0.0] * len(at.operators)
    matcher = difflib.SequenceMatcher(None, names, [record.op for record in at.operators], autojunk=False)
    for begin, first, count in matcher.get_matching_blocks():
        found[first : first + count] = taken[begin : begin + count]
    return found


def with_bytes_inside(trace: StepTrace, table: MeasuredTimes) -> StepTrace:
    """``trace``, at numbers, whose operators take inside what ``table`` has; others what was recorded."""
    made = Counter[int]()
    for storage in trace.storages:
        made[storage.made_by] += storage_bytes(storage)
    operators = []
    for number, record in enumerate(trace.operators):
        inside, fallback = table.lookup(record, trace.storages)
        most = made[number] + round(inside)  # what is inside counts from before the results
        if fallback is None and inside and most > workspace_bytes(record):
            workspace = (WorkspaceRecord(storage=-1, shape=(most,), dtype="uint8"),)
            record = record.model_copy(update={"workspace": workspace})
        operators.append(record)
    return trace.model_copy(update={"operators": tuple(operators)})
