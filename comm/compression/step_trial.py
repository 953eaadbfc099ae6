"""Which of the ways that sums alone leave open makes the fastest steps: tried in real ones, in turns.

A sum alone does not tell what a step pays for it. Backward hides some of what travels, and encoding takes longer beside
it, of gradients that are in no cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

from nugnn.comm.compression.choice import CANDIDATES, Choice, decided
from nugnn.comm.groups import Ranks
from nugnn.comm.together import slowest

MOST_SECONDS = 10.0
"""Of a trial, after the steps without sums; no round begins that is expected to end later."""
MARGIN = 1.03
"""A more exact way whose step takes at most so much longer than the fastest one is preferred."""
STEPS_BEFORE = 2
"""Of a way that do not count: the first measures how values share buckets, each makes memory that is kept."""

_ROUNDS = 7
_HOPELESS = 1.25
"""A way whose fastest step so far takes so many times the fastest of all is not asked again."""

Timed = Callable[[str | None], float]
"""``timed(name)``: this rank's seconds of a step whose gradients travel by ``name``, or do not travel where it is None.
All ranks begin it at once. The first one of a way comes after `STEPS_BEFORE` others."""


def tried(choice: Choice, timed: Timed, ranks: Ranks) -> Choice:
    """The most exact way whose steps are as fast as any; the same on every rank, a collective call.

    Ways take turns, and of each the slowest rank and the median count. ``choice`` stays where no other way is worth
    trying, or where a single round would take too long.

    Args:
        choice: By sums alone.
        timed: Makes steps.
        ranks: Who takes part.
    """
    if not choice.seconds:
        return choice
    (alone_seconds,) = slowest([min(timed(None), timed(None))], ranks)
    names = worth_trying(choice.seconds, alone_seconds)
    expected = sum((STEPS_BEFORE + 1) * (alone_seconds + choice.seconds[name]) for name in names)
    if len(names) < 2 or expected > MOST_SECONDS:
        return choice
    taken: dict[str, list[float]] = {name: [] for name in names}
    begin = perf_counter()
    for number in range(_ROUNDS):
        for name in names if number % 2 == 0 else reversed(names):
            taken[name] += slowest([timed(name)], ranks)
        least = min(map(min, taken.values()))
        names = [name for name in names if min(taken[name]) <= _HOPELESS * least]
        (spent,) = slowest([perf_counter() - begin], ranks)
        if len(names) < 2 or spent + sum(taken[name][-1] for name in names) > MOST_SECONDS:
            break
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    best = min(medians.values())
    name = next(name for name in medians if medians[name] <= MARGIN * best)
    return replace(choice, name=name, step_seconds=medians, trial_seconds=spent)


def worth_trying(seconds: Mapping[str, float], alone_seconds: float) -> list[str]:
    """The ways that can be the fastest in steps, from the most exact one.

    A way can not if its sum alone takes longer than the fastest one and a step besides: no step hides more than itself.
    Of ``8bit`` and ``4bit``, whose encoding costs the same, sums alone tell which is better; with one of them a trial
    takes no more memory than a run in that way.

    Args:
        seconds: Of sums alone.
        alone_seconds: Of a step in which nothing travels.

    >>> seconds = {"fp32": 1.1, "bf16": 0.5, "8bit": 0.3, "4bit": 0.2}
    >>> worth_trying(seconds, 0.4), worth_trying(seconds, 0.01)
    (['bf16', '4bit'], ['4bit'])
    """
    short = decided({name: seconds[name] for name in ("8bit", "4bit")}, 0).name
    longest = min(seconds.values()) + alone_seconds
    return [name for name in CANDIDATES if seconds[name] <= longest and name in ("fp32", "bf16", short)]
