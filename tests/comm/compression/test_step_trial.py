"""What steps decide of what sums alone have left open: on given times, and alike on ranks whose clocks differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest

from nugnn.comm.compression import step_trial
from nugnn.comm.compression.choice import CANDIDATES, Choice, decided
from nugnn.comm.compression.step_trial import tried
from nugnn.comm.groups import Ranks


class _Steps:
    """Steps that take what is said."""

    def __init__(self, seconds: Mapping[str | None, float]) -> None:
        self._seconds, self.asked = seconds, []

    def timed(self, name: str | None) -> float:
        self.asked.append(name)
        return self._seconds[name]


def _sums(*seconds: float) -> Choice:
    return decided(dict(zip(CANDIDATES, seconds, strict=True)), 7)


def _steps(alone: float, fp32: float, bf16: float, short: float) -> _Steps:
    """``short`` of 8 and of 4 bits."""
    return _Steps({None: alone, "fp32": fp32, "bf16": bf16, "8bit": short, "4bit": short})


def test_the_most_exact_way_whose_steps_are_as_fast_is_taken() -> None:
    sums = _sums(0.5, 0.3, 0.25, 0.2)
    assert sums.name == "4bit"
    for steps, name in {
        (0.6, 0.45, 0.5): "bf16",  # less of the processor
        (0.4, 0.45, 0.5): "fp32",  # backward hides what travels
        (0.9, 0.8, 0.5): "4bit",
        (0.9, 0.51, 0.5): "bf16",  # as fast, and more exact
    }.items():
        found = tried(sums, _steps(0.35, *steps).timed, Ranks())
        assert found.name == name and found.seconds == sums.seconds and found.num_values == 7
        assert found.step_seconds == dict(zip(("fp32", "bf16", "4bit"), steps, strict=True))
        assert f"grad_sync auto: {name}, which " in found.as_text()
        assert "s of trial steps say in place of sums alone; forward, backward and sums take fp32 " in found.as_text()


def test_nothing_is_tried_that_cannot_win() -> None:
    for sums, alone, asked in (
        (_sums(0.2, 0.3, 0.4, 0.5), 0.05, [None]),
        (Choice("fp32", {}, 0), 1.0, []),
        (_sums(5.0, 2.6, 1.4, 0.7), 0.1, [None]),  # the link is all that counts
        (_sums(1.5, 0.8, 0.5, 0.3), 0.6, [None, "bf16", "4bit"]),
        (_sums(2.5, 0.3, 0.205, 0.2), 1.0, [None, "bf16", "8bit"]),  # which is as fast as 4 bits
        (_sums(50.0, 26.0, 14.0, 7.0), 20.0, [None]),  # it would take too long
    ):
        steps = _steps(alone, 1.0, 1.0, 1.0)
        found = tried(sums, steps.timed, Ranks())
        assert list(dict.fromkeys(steps.asked)) == asked
        assert found == sums or len(asked) > 1


def test_ways_take_turns_and_slow_ones_are_not_asked_again() -> None:
    steps, turn = _steps(0.35, 0.9, 0.4, 0.44), ["4bit", "bf16", "bf16", "4bit"]
    assert tried(_sums(0.2, 0.3, 0.25, 0.22), steps.timed, Ranks()).name == "bf16"  # fp32 looked faster by itself
    assert steps.asked == [None, None, "fp32", "bf16", "4bit", *turn, *turn, *turn]


def test_one_slow_step_decides_nothing() -> None:
    steps = _steps(0.35, 0.6, 0.4, 0.44)
    hiccups = iter([0.0, 0.0, 0.0, 5.0])  # of the first step of bf16

    def timed(name: str | None) -> float:
        return steps.timed(name) + next(hiccups, 0.0)

    with mock.patch.object(step_trial, "_HOPELESS", 100.0):
        assert tried(_sums(0.5, 0.3, 0.25, 0.2), timed, Ranks()).name == "bf16"


def test_a_trial_ends_when_its_time_is_over() -> None:
    clock = iter([100.0, 100.0 + step_trial.MOST_SECONDS - 1.0])
    steps = _steps(0.35, 0.4, 0.4, 0.44)
    with mock.patch.object(step_trial, "perf_counter", lambda: next(clock)):
        found = tried(_sums(0.5, 0.3, 0.25, 0.2), steps.timed, Ranks())
    assert steps.asked == [None, None, "fp32", "bf16", "4bit"]
    assert found.trial_seconds == pytest.approx(step_trial.MOST_SECONDS - 1.0)


def _on_a_rank(ranks: Ranks) -> Choice:
    """``bf16`` is the faster one by rank 0's clock alone, and 4 bits by that of the slowest in each step."""
    bf16, short = (0.3, 0.5) if ranks.rank == 0 else (0.6, 0.4)
    clock = iter([float(ranks.rank), 3.0 * ranks.rank + 1])  # of one rank the time is over
    with mock.patch.object(step_trial, "perf_counter", lambda: next(clock)):
        with mock.patch.object(step_trial, "MOST_SECONDS", 4.0):
            return tried(_sums(0.5, 0.3, 0.25, 0.2), _steps(0.15, 1.0, bf16, short).timed, ranks)


def test_all_ranks_decide_alike_whatever_their_clocks_say(ranks: Any) -> None:
    first, *others = ranks.run(3, _on_a_rank)
    assert all(other == first for other in others)
    assert first.name == "4bit" and first.step_seconds["bf16"] == 0.6
    assert first.trial_seconds == 5.0
