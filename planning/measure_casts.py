"""Casts on a device: seconds of writing numbers in another type, by both types and how many."""

from __future__ import annotations

import itertools

import torch

from nugnn.planning import device_facts
from nugnn.planning.casts import CAST
from nugnn.planning.operator_costs import item_bytes
from nugnn.planning.timed_operators import OperandShape, TimedOperator, TimedPoint
from nugnn.planning.timing import time_calls

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_VALUES = (1 << 12, 1 << 17, 1 << 22, 1 << 26)
_MEMORY_PART = 16
"""A cast takes no more than this part of what is free."""
_MOST_AXES = 4
"""Of tensors that are cast: those of images."""


def measure_casts(device: torch.device, *, seconds: float, most_values: int = _VALUES[-1]) -> tuple[TimedOperator, ...]:
    """Entries for a table of times, one for each pair of float32, bfloat16 and float16 and each number of axes.

    What a cast takes follows from how many numbers there are, however many axes they have.

    Args:
        device: Idle otherwise.
        seconds: For all timed calls together.
        most_values: Of one cast.
    """
    most_values = min(most_values, device_facts.free_bytes(device) // _MEMORY_PART // 8)
    counts = [count for count in _VALUES if count <= most_values] or [_VALUES[0]]
    pairs = list(itertools.permutations(_TYPES, 2))
    budget = seconds / (len(pairs) * len(counts))
    measured = (_measured(source, target, counts, device, budget) for source, target in pairs)
    return tuple(_with_axes(each, axes) for each in measured for axes in range(1, _MOST_AXES + 1))


def _with_axes(measured: TimedOperator, axes: int) -> TimedOperator:
    operands = {
        side: tuple(x.model_copy(update={"shape": (None,) * axes}) for x in getattr(measured, side))
        for side in ("inputs", "outputs")
    }
    return measured.model_copy(update=operands)


def _measured(
    source: torch.dtype, target: torch.dtype, counts: list[int], device: torch.device, budget: float
) -> TimedOperator:
    names = [str(each).removeprefix("torch.") for each in (source, target)]
    points = []
    for count in counts:
        given = torch.ones(count, dtype=source, device=device)
        timing = time_calls(lambda given=given: given.to(target), device, budget_seconds=budget)  # type: ignore[misc]
        points.append(TimedPoint(rest=count * sum(map(item_bytes, names)), seconds=timing.seconds))
    inputs, outputs = ((OperandShape(dtype=name, shape=(None,)),) for name in names)
    return TimedOperator(kind="copy", op=CAST, inputs=inputs, outputs=outputs, points=tuple(points))
