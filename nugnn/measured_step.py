"""Operators of a model's training step timed on this device, inside steps of the trainer, at a few sizes.

trace = trace_graph_step(model, in_features=100, num_classes=47)
times = measure_graph_step(model, trace, ladder(sizes), seconds=20, in_features=100, num_classes=47)
alone_seconds(trace.at(other_sizes), times)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nugnn.measured_memory import peak_of_step
from nugnn.partition.shard import Shard
from nugnn.planning.measure_operators import Now
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.times_of_steps import times_of
from nugnn.planning.trace import StepTrace
from nugnn.timed_place import Place, current, laps_one_by_one, time_in_turns
from nugnn.traced_step import LonePart, graph_trainer, sample_trainer, sizes_of

_ROUNDS = (5, 40)
"""Fewest and most."""


def measure_graph_step(
    model: nn.Module | Callable[[int], nn.Module],
    trace: StepTrace,
    parts: Sequence[PartSizes | Shard | LonePart],
    *,
    seconds: float,
    in_features: int | None,
    num_classes: int,
    multilabel: bool = False,
    stored_features: int | None = None,
    ranks: int = 2,
    device: str = "cpu",
    limits: str = "",
    now: Now = time.perf_counter,
    captured: bool = False,
    **options: Any,
) -> MeasuredTimes:
    """Times of the operators of a graph model's step.

    Args:
        model: As for `nugnn.traced_step.trace_graph_step`.
        trace: Of that model, with the same options, on the same device.
        parts: Where to measure: sizes, of which random parts are made; or real parts. Sums over neighbours take less
            time where neighbours lie near each other, as in real parts, so the part that will be trained on, or a piece
            of it, tells more than its sizes.
        seconds: For the timed steps of all places together; each is timed five times at least.
        in_features: As for `nugnn.traced_step.trace_graph_step`.
        num_classes: Likewise.
        multilabel: Likewise.
        stored_features: Likewise; a real part has its own.
        ranks: Likewise; a real part has its own.
        device: Where to measure.
        limits: Of the device, in words.
        now: Clock of a CPU.
        captured: Whether such steps are trained as CUDA graphs: on a GPU what the host does for one is measured, too.
        **options: As for `nugnn.traced_step.trace_graph_step`; operators are never timed in CUDA graphs.

    Raises:
        TraceError: The trace is of another model or device.
    """
    how: dict[str, Any] = {"in_features": in_features, "num_classes": num_classes, "multilabel": multilabel}
    how |= {"stored_features": stored_features, "device": device, "ranks": ranks, **options}

    def place(part: PartSizes | Shard | LonePart, cuda_graphs: str) -> Place:
        sizes = part if isinstance(part, PartSizes) else sizes_of(part)
        return Place(graph_trainer(model, part, **how, cuda_graphs=cuda_graphs), sizes, now)

    places = [functools.partial(place, part) for part in parts]
    return measure_places(trace, places, seconds=seconds, limits=limits, captured=captured)


def measure_sample_step(
    model: nn.Module,
    trace: StepTrace,
    sample: Sequence[Tensor],
    sizes: Sequence[PartSizes],
    *,
    seconds: float,
    num_classes: int,
    ranks: int = 1,
    device: str = "cpu",
    limits: str = "",
    now: Now = time.perf_counter,
    captured: bool = False,
    **options: Any,
) -> MeasuredTimes:
    """Times of the operators of a step on a batch; arguments as for `measure_graph_step`."""
    how: dict[str, Any] = {"num_classes": num_classes, "device": device, "ranks": ranks, **options}

    def place(sizes: PartSizes, cuda_graphs: str) -> Place:
        return Place(sample_trainer(model, sample, sizes, **how, cuda_graphs=cuda_graphs), sizes, now)

    places = [functools.partial(place, each) for each in sizes]
    return measure_places(trace, places, seconds=seconds, limits=limits, captured=captured)


def measure_places(
    trace: StepTrace,
    places: Sequence[Callable[[str], Place]],
    *,
    seconds: float,
    limits: str = "",
    captured: bool = False,
) -> MeasuredTimes:
    """Times of a trace's operators from steps at some places.

    On a CPU, which others may use as well, places take turns, so that all of them have the same share of bad moments,
    and steps that wait for other ranks are timed after rests, too; on a GPU one is done before the next is made, and
    memory has to suffice for one. There the most memory that a step takes is measured as well.

    Args:
        trace: Of their step.
        places: Make them, given ``cuda_graphs`` of their trainer.
        seconds: For the timed steps of all places together; each is timed five times at least.
        limits: Of the device, in words.
        captured: Whether such steps are trained as CUDA graphs: what the host does for one is measured on the smallest.

    Raises:
        TraceError: The trace is of another model or device.
    """
    if trace.device != "cuda":
        made = [make("off") for make in places]
        time_in_turns(made, rounds=_ROUNDS, seconds=seconds, rests=trace.ranks > 1)
        return times_of(trace, [(place.sizes, place.laps) for place in made], made[0].device, limits=limits)
    measured, looked = laps_one_by_one(
        [functools.partial(make, "off") for make in places],
        lambda place: (peak_of_step(place.trainer, trace.at(place.sizes)), place.device),
        rounds=_ROUNDS,
        seconds=seconds / len(places),
    )
    peaks, device, host_seconds = [peak for peak, _ in looked], looked[0][1], None
    if captured:
        smallest = min(range(len(places)), key=lambda number: dataclasses.astuple(measured[number][0]))
        # steps that cannot be recorded are launched operator by operator in training, too, or refused there
        with current(device), contextlib.suppress(ValueError, torch.OutOfMemoryError):
            host_seconds = places[smallest]("on").captured_host_seconds()
    return times_of(trace, measured, device, limits=limits, captured_seconds=host_seconds, peaks=peaks)
