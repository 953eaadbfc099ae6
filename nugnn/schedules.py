"""Learning rates as functions of the optimizer step: the factor on the rate that the optimizer was made with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from nugnn._counted import counted

SCHEDULES = ("constant", "cosine", "step")
"""By name; see `Constant`, `Cosine` and `Steps`."""


class Schedule(Protocol):
    """``schedule(step)``, from step 0 on; its ``repr`` tells two schedules apart in a checkpoint."""

    def __call__(self, step: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same rate throughout, after a linear warm-up.

    Args:
        warmup_steps: Steps until the full rate is reached; 0 for none.

    >>> [Constant(warmup_steps=4)(step) for step in (0, 1, 3, 4, 100)]
    [0.25, 0.5, 1.0, 1.0, 1.0]
    """

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps, None)

    def __call__(self, step: int) -> float:
        return _warmup(step, self.warmup_steps)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from the full rate to ``final``, after a linear warm-up.

    Args:
        num_steps: Optimizer steps of the whole training, those of the warm-up among them.
        warmup_steps: Steps until the full rate is reached; 0 for none.
        final: Factor from step ``num_steps`` on.

    Raises:
        ValueError: A number of steps does not fit.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017, without restarts.

    >>> [round(Cosine(10, warmup_steps=2, final=0.1)(step), 3) for step in (0, 1, 2, 6, 10, 50)]
    [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    """

    num_steps: int
    warmup_steps: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps, self.num_steps)

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return _warmup(step, self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / (self.num_steps - self.warmup_steps))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Steps:
    """``factor`` times the rate after every ``every`` steps, after a linear warm-up.

    Args:
        every: Optimizer steps between two changes.
        factor: On the rate, at each of them.
        warmup_steps: Steps until the full rate is reached; 0 for none.

    Raises:
        ValueError: A number of steps does not fit.

    >>> [Steps(every=10, factor=0.5)(step) for step in (0, 9, 10, 25)]
    [1.0, 1.0, 0.5, 0.25]
    """

    every: int
    factor: float = 0.1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"the rate changes every {counted(self.every, 'step')}; give 1 or more")
        _check_warmup(self.warmup_steps, None)

    def __call__(self, step: int) -> float:
        return float(_warmup(step, self.warmup_steps) * self.factor ** (step // self.every))


def usual_warmup(schedule: object, epochs: int) -> float:
    """Epochs of warm-up where nothing is said: of ``cosine`` a tenth of all, one at most; of others none.

    >>> [usual_warmup("cosine", epochs) for epochs in (1, 5, 20)], usual_warmup("constant", 20)
    ([0.1, 0.5, 1.0], 0.0)
    """
    return min(1.0, epochs / 10) if schedule == "cosine" else 0.0


def check_schedule(schedule: object, epochs: int, warmup_epochs: float, decay_epochs: int | None) -> None:
    """Refuse what is no schedule, or options that have no effect on it.

    Raises:
        ValueError: Says what may be given.
    """
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        raise ValueError(
            f"schedule {schedule!r} is not known; choose one of {', '.join(SCHEDULES)}, or give a function of the "
            "optimizer step"
        )
    if not isinstance(schedule, str) and not callable(schedule):
        raise ValueError(f"schedule is {schedule!r}; give one of {', '.join(SCHEDULES)}, or a function of the step")
    if decay_epochs is not None and decay_epochs < 1:
        raise ValueError(f"decay_epochs is {decay_epochs}, must be 1 or more")
    if decay_epochs is not None and schedule != "step":
        raise ValueError("decay_epochs has an effect on schedule step alone; leave it out")
    if warmup_epochs and not isinstance(schedule, str):
        raise ValueError("warmup_epochs has no effect on a schedule of your own; leave it out")
    if not 0 <= warmup_epochs < epochs:
        raise ValueError(f"warmup_epochs is {warmup_epochs:g}, must be from 0 to less than epochs, {epochs}")


def _warmup(step: int, warmup_steps: int) -> float:
    return 1.0 if step >= warmup_steps else (step + 1) / warmup_steps


def _check_warmup(warmup_steps: int, num_steps: int | None) -> None:
    if warmup_steps < 0 or (num_steps is not None and warmup_steps >= num_steps):
        least = (
            "0 or more" if num_steps is None else f"0 to {num_steps - 1}: the schedule has {counted(num_steps, 'step')}"
        )
        raise ValueError(f"warmup_steps is {warmup_steps}, must be {least}")
