"""A trainer whose steps are timed, whole and operator by operator; several in turns, or one after the other."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from nugnn.graph_family import GraphFamily
from nugnn.planning.after_rest import LONG_REST, SHORT_REST
from nugnn.planning.measure_operators import Now, OperatorTimer, clock_for
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.step_laps import StepLaps
from nugnn.planning.timing import synchronize
from nugnn.sample_family import SampleFamily
from nugnn.trainer import Trainer

T = TypeVar("T")
_STEPS_BEFORE = 3
_CAPTURED_ROUNDS = 5
_LONGEST_RESTED = 0.1
"""Seconds of a step; what it loses to a rest is about one percent of that, and less of a longer one."""


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
    _rested: dict[float, list[float]] = field(default_factory=lambda: {0.0: [], SHORT_REST: [], LONG_REST: []})
    """Seconds of steps by the rest that they followed."""

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

    def time_rested(self) -> None:
        """Of a CPU, steps after none, a short and a long rest; none of steps so long that it would be lost."""
        if self.device.type == "cuda" or (self._seconds and statistics.median(self._seconds) > _LONGEST_RESTED):
            return
        for rest, seconds in self._rested.items():
            if rest:
                time.sleep(rest)
            begin = self.now()
            self._step(0)
            seconds.append(self.now() - begin)

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
        rested = map(tuple, self._rested.values())
        return StepLaps(tuple(self._timer.names), tuple(self._laps), tuple(self._seconds), tuple(self._host), *rested)

    def _step(self, number: int) -> None:
        self.trainer.step(self._works[number % len(self._works)])


def time_in_turns(
    timed: Sequence[Place],
    plain: Sequence[Place] = (),
    *,
    rounds: tuple[int, int],
    seconds: float = math.inf,
    rests: bool = False,
) -> None:
    """Steps of places on one device, in turns.

    Args:
        timed: Whose steps are also timed operator by operator.
        plain: Whose steps are not.
        rounds: Fewest and most of them.
        seconds: After which no other begins, once there are the fewest.
        rests: Time steps of ``timed`` after rests, too.
    """
    with current((*timed, *plain)[0].device):
        for place in (*timed, *plain):
            place.warm_up()
        begin = time.perf_counter()
        for number in range(rounds[1]):
            if number >= rounds[0] and time.perf_counter() - begin > seconds:
                break
            for place in timed:
                place.time_whole()
                place.time_inside()
                if rests:
                    place.time_rested()
            for place in plain:
                place.time_whole()


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
        with current(place.device):
            time_in_turns([place], rounds=rounds, seconds=seconds)
            found.append((place.sizes, place.laps))
            looked.append(look(place))
        del place
    return found, looked


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """While open, events and Triton's launches are of ``device``, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
