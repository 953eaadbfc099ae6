"""Which of the ways that sums alone leave open makes the fastest steps: tried in real ones, in turns.

A sum alone does not tell what a step pays for it. Backward hides some of what travels, and encoding takes longer beside
it, of gradients that are in no cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from nugnn.comm.compression.choice import CANDIDATES, Choice
from nugnn.comm.groups import Ranks
from nugnn.comm.together import slowest

MOST_SECONDS = 10.0
"""Of a trial, after the steps that compile; one round may be longer than those before it were."""
MARGIN = 1.03
"""A more exact way whose step takes at most so much longer than the fastest one is preferred."""

_ROUNDS = 3
_STEPS_OF_A_TURN = 2
_HOPELESS = 1.25
"""A way whose fastest step so far takes so many times the fastest of all is not asked again."""

Timed = Callable[[str | None, int], list[float]]
"""``timed(name, n)``: this rank's seconds of ``n`` steps whose gradients travel by ``name``, or do not travel where it
is None, after one that does not count; all ranks begin a step at once."""


def tried(choice: Choice, timed: Timed, ranks: Ranks) -> Choice:
    """``choice``, or a more exact way whose steps are as fast; the same on every rank, a collective call.

    Less exact ways take no less of the processor and were not faster as sums alone, so they are not tried, nor is
    anything where `float32` was the fastest. Ways take turns, and of each the slowest rank and the median count.

    Args:
        choice: By sums alone.
        timed: Makes steps.
        ranks: Who takes part.
    """
    more_exact = CANDIDATES[: CANDIDATES.index(choice.name)]
    if not choice.seconds or not more_exact:
        return choice
    alone_seconds = min(slowest(timed(None, _STEPS_OF_A_TURN), ranks))
    names = worth_trying(choice, alone_seconds)
    round_seconds = sum((1 + _STEPS_OF_A_TURN) * (alone_seconds + choice.seconds[name]) for name in names)
    if len(names) < 2 or round_seconds > MOST_SECONDS:
        return choice
    taken: dict[str, list[float]] = {name: [] for name in names}
    begin = perf_counter()
    for number in range(_ROUNDS):
        for name in names if number % 2 == 0 else reversed(names):
            taken[name] += slowest(timed(name, _STEPS_OF_A_TURN), ranks)
        (spent,) = slowest([perf_counter() - begin], ranks)
        least = min(map(min, taken.values()))
        names = [name for name in names if min(taken[name]) <= _HOPELESS * least]
        if len(names) < 2 or spent * (number + 2) / (number + 1) > MOST_SECONDS:
            break
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    best = min(medians.values())
    name = next(name for name in medians if medians[name] <= MARGIN * best)
    return replace(choice, name=name, step_seconds=medians, trial_seconds=spent)


def worth_trying(choice: Choice, alone_seconds: float) -> list[str]:
    """What was chosen and the more exact ways that can be as fast, from the most exact one.

    A way can not if its sum alone takes longer than that of the chosen one behind a whole step, for no step hides more
    than itself.

    Args:
        choice: By sums alone.
        alone_seconds: Of a step in which nothing travels.

    >>> choice = Choice("4bit", {"fp32": 1.1, "bf16": 0.5, "8bit": 0.3, "4bit": 0.2}, 10)
    >>> worth_trying(choice, 0.4), worth_trying(choice, 0.01)
    (['bf16', '8bit', '4bit'], ['4bit'])
    """
    names = CANDIDATES[: CANDIDATES.index(choice.name) + 1]
    longest = choice.seconds[choice.name] + alone_seconds
    return [name for name in names if choice.seconds[name] <= longest]
