"""Operators of a model's training step timed on this device, inside steps of the trainer, at a few sizes.

trace = trace_graph_step(model, in_features=100, num_classes=47)
times = measure_graph_step(model, trace, ladder(sizes), seconds=20, in_features=100, num_classes=47)
alone_seconds(trace.at(other_sizes), times)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nugnn.graph_family import GraphFamily
from nugnn.kernels.spmm.sums import FEWEST_BYTES
from nugnn.measured_memory import peak_of_step
from nugnn.partition.shard import Shard
from nugnn.planning.measure_operators import Now, OperatorTimer, clock_for
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.step_laps import StepLaps
from nugnn.planning.timed_operators import is_large_sum, row_bytes
from nugnn.planning.times_of_steps import times_of
from nugnn.planning.timing import synchronize
from nugnn.planning.trace import StepTrace
from nugnn.sample_family import SampleFamily
from nugnn.traced_step import LonePart, graph_trainer, sample_trainer, sizes_of
from nugnn.trainer import Trainer

T = TypeVar("T")
_ROUNDS = (5, 40)
"""Fewest and most."""
_CAPTURED_ROUNDS = 5
_STEPS_BEFORE = 3


def ladder(sizes: PartSizes, trace: StepTrace | None = None, *, steps: int = 4, factor: float = 2.0) -> list[PartSizes]:
    """Where to measure operators for parts up to ``sizes``: at these, and at smaller ones; the smallest first.

    The smallest is far below the others. One more has half as many edges for a node, so that what edges take and what
    nodes take can be told apart. On a CPU, which computes small sums over neighbours in another way than large ones,
    there is one right below each change.

    Args:
        sizes: The largest.
        trace: Of the step; None to leave such changes out.
        steps: How many; fewer where they would become smaller than a few hundred edges or a batch of one.
        factor: Between two.
    """
    found = [sizes]
    while len(found) < steps and (smaller := _of_use(sizes, factor ** -len(found))) is not None:
        found.append(smaller)
    if (tiny := _of_use(sizes, factor ** -(2 * steps))) is not None:
        found.append(tiny)  # which is all launches
    if sizes.inner and len(found) > 1:
        half = found[1]
        if (edges := half.edges // 2) >= max(half.inner, half.halo):
            found.append(dataclasses.replace(half, edges=edges))
    if trace is not None and sizes.edges:
        below = (_of_use(sizes, share) for share in changes_of_kernel(trace, sizes))
        found += [each for each in below if each is not None and each.edges > min(f.edges for f in found)]
    return sorted(found, key=lambda each: (each.inner, each.edges, each.batch))


def changes_of_kernel(trace: StepTrace, sizes: PartSizes) -> set[float]:
    """Shares of ``sizes`` right below which a CPU takes the kernel for small sums; none on a GPU."""
    if trace.device != "cpu":
        return set()
    large = [record for record in trace.at(sizes).operators if is_large_sum(record)]
    return {0.98 * FEWEST_BYTES / (row_bytes(record) * sizes.edges) for record in large if record.kind == "spmm"}


def scaled(sizes: PartSizes, share: float) -> PartSizes:
    """All counts in proportion, so that there is such a part if there is one of ``sizes``; what there is stays 1."""
    counts = {name: max(round(share * count), min(count, 1)) for name, count in dataclasses.asdict(sizes).items()}
    counts["edges"] = max(counts["edges"], counts["inner"], counts["halo"])
    counts["train"] = min(counts["train"], counts["inner"])
    return PartSizes(**counts)


def _of_use(sizes: PartSizes, share: float) -> PartSizes | None:
    """`scaled`; None where next to nothing is left."""
    found = scaled(sizes, share)
    if any(count and not round(share * count) for count in (sizes.batch, sizes.halo)):
        return None
    return None if not sizes.batch and (found.inner < 32 or found.edges < 256) else found


@dataclass(eq=False)
class Place:
    """A trainer whose steps are timed.

    Args:
        trainer: Without CUDA graphs, if its operators are to be timed.
        sizes: Of its data.
        now: The host's clock; see `nugnn.planning.measure_operators.Now`.
        in_a_row: Steps of a GPU that are timed as one: the host may go ahead, as in training.

    Attributes:
        device: Of the trainer.
    """

    trainer: Trainer
    sizes: PartSizes
    now: Now = time.perf_counter
    in_a_row: int = 4
    _laps: list[tuple[float, ...]] = field(default_factory=list)
    _seconds: list[float] = field(default_factory=list)
    _host: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        family = self.trainer.family
        assert isinstance(family, (GraphFamily, SampleFamily))
        self._interceptor = family.net.interceptor if isinstance(family, GraphFamily) else family.interceptor
        self.device = family.ranks.device
        self._works = list(itertools.islice(family.steps(0), self.in_a_row))
        self._clock = clock_for(self.device, self.now)
        self.trainer.model.train()
        self._timer = OperatorTimer(self.trainer.optimizer, self._clock)

    def warm_up(self) -> None:
        """Steps that do not count: they compile, aggregate features, and tell how long the host needs for each."""
        for number in range(_STEPS_BEFORE):
            self._step(number)
        for _ in range(2 if self.device.type == "cuda" else 1):
            self.time_inside()
        self._laps = []

    def time_whole(self) -> None:
        """One step as in training; on a GPU some in a row."""
        count = self.in_a_row if self.device.type == "cuda" else 1
        synchronize(self.device)
        begin = self.now()
        for number in range(count):
            self._step(number)
        self._host.append((self.now() - begin) / count)
        synchronize(self.device)
        self._seconds.append((self.now() - begin) / count)

    def time_inside(self) -> None:
        """One step, operator by operator."""
        synchronize(self.device)
        with self._timer.timing(self._interceptor):
            self._step(0)
        self._laps.append(tuple(self._timer.laps))

    def captured_host_seconds(self) -> float | None:
        """The host's part of a step that runs as a CUDA graph; None of a trainer that records none."""
        for number in range(_STEPS_BEFORE + 2):  # the fourth is recorded
            self._step(number)
        if not self.trainer.num_recorded:
            return None
        before = len(self._host)
        for _ in range(_CAPTURED_ROUNDS):
            self.time_whole()
        return statistics.median(self._host[before:])

    @property
    def laps(self) -> StepLaps:
        """So far."""
        return StepLaps(tuple(self._timer.names), tuple(self._laps), tuple(self._seconds), tuple(self._host))

    def _step(self, number: int) -> None:
        self.trainer.step(self._works[number % len(self._works)])


def measure_graph_step(
    model: nn.Module | Callable[[int], nn.Module],
    trace: StepTrace,
    parts: Sequence[PartSizes | Shard | LonePart],
    *,
    seconds: float,
    in_features: int | None,
    num_classes: int,
    multilabel: bool = False,
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
    how |= {"device": device, "ranks": ranks, **options}

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

    On a CPU, which others may use as well, places take turns, so that all of them have the same share of bad moments;
    on a GPU one is done before the next is made, and memory has to suffice for one. There the most memory that a step
    takes is measured as well.

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
        time_in_turns(made, rounds=_ROUNDS, seconds=seconds)
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
        with _current(device), contextlib.suppress(ValueError, torch.OutOfMemoryError):
            host_seconds = places[smallest]("on").captured_host_seconds()
    return times_of(trace, measured, device, limits=limits, captured_seconds=host_seconds, peaks=peaks)


def time_in_turns(
    timed: Sequence[Place], plain: Sequence[Place] = (), *, rounds: tuple[int, int], seconds: float = math.inf
) -> None:
    """Steps of places on one device, in turns.

    Args:
        timed: Whose steps are also timed operator by operator.
        plain: Whose steps are not.
        rounds: Fewest and most of them.
        seconds: After which no other begins, once there are the fewest.
    """
    with _current((*timed, *plain)[0].device):
        for place in (*timed, *plain):
            place.warm_up()
        begin = time.perf_counter()
        for number in range(rounds[1]):
            if number >= rounds[0] and time.perf_counter() - begin > seconds:
                break
            for place in timed:
                place.time_whole()
                place.time_inside()
            for place in plain:
                place.time_whole()


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """While open, events and Triton's launches are of ``device``, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def laps_one_by_one(
    places: Sequence[Callable[[], Place]],
    look: Callable[[Place], T],
    *,
    rounds: tuple[int, int],
    seconds: float = math.inf,
) -> tuple[list[tuple[PartSizes, StepLaps]], list[T]]:
    """Laps on a GPU, whose memory has to suffice for one place.

    Args:
        places: Make them; one is gone before the next is made.
        look: Called with each when it has been timed.
        rounds: As for `time_in_turns`.
        seconds: Likewise, of each place.

    Returns:
        Sizes and laps of each, and what ``look`` gave.
    """
    found, looked = list[tuple[PartSizes, StepLaps]](), list[T]()
    for make in places:
        place = make()
        with _current(place.device):
            time_in_turns([place], rounds=rounds, seconds=seconds)
            found.append((place.sizes, place.laps))
            looked.append(look(place))
        del place
    return found, looked
