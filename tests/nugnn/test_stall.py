"""When a run has come to a standstill, with a clock of our own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.stall import Sample, StallWatch

STEPPING = Sample(is_stepping=True, beats=1, cpu_seconds=0.0, transferred_bytes=0)


def seconds_until_stall(
    timeline: Any, *, timeout: float = 10.0, until: float = 60.0, step: float = 0.5
) -> float | None:
    """When the run that ``timeline(t) -> samples`` describes is found to stand still; None when it is not."""
    watch, t = StallWatch(timeout, 0.0), 0.0
    while t <= until:
        if watch.is_stalled(timeline(t), t):
            return t
        t += step
    return None


def sample(**changes: Any) -> Sample:
    return Sample(**({"is_stepping": True, "beats": 1, "cpu_seconds": 0.0, "transferred_bytes": 0} | changes))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.floats(1.0, 9.4))
def test_a_run_goes_on_exactly_as_long_as_somebody_makes_progress(idle: list[int], gap: float) -> None:
    """One worker beats every ``gap`` seconds, less than the timeout, until 30 s; the others stand still or compute."""

    def timeline(t: float) -> list[Sample]:
        lively = sample(beats=int(min(t, 30.0) / gap))
        return [sample(beats=count, cpu_seconds=t * (count % 2)) for count in idle] + [lively]

    found = seconds_until_stall(timeline)
    last_beat = int(30.0 / gap) * gap
    assert found is not None and last_beat + 10.0 <= found <= last_beat + 10.0 + 2 * 0.5


def test_computing_counts_before_the_first_step_only() -> None:
    assert seconds_until_stall(lambda t: [sample(is_stepping=False, cpu_seconds=t)]) is None
    assert seconds_until_stall(lambda t: [sample(is_stepping=True, cpu_seconds=t)]) == 10.0
    # a loop around a wait uses a little time
    assert seconds_until_stall(lambda t: [sample(is_stepping=False, cpu_seconds=t * 0.01)]) == 10.0


def test_reading_and_writing_count() -> None:
    assert seconds_until_stall(lambda t: [sample(transferred_bytes=int(t * 10**5))]) is None
    assert seconds_until_stall(lambda t: [sample(transferred_bytes=int(t * 1000))]) == 10.0


def test_a_stopped_worker_ends_the_run_though_others_go_on() -> None:
    found = seconds_until_stall(lambda t: [sample(beats=int(t * 10)), sample(is_stopped=t >= 5.0)])
    assert found == pytest.approx(15.0, abs=0.6)
    # it was let go on in time
    assert seconds_until_stall(lambda t: [sample(beats=int(t * 10)), sample(is_stopped=5 <= t < 14)]) is None


def test_the_time_in_which_the_watch_itself_was_stopped_does_not_count() -> None:
    watch = StallWatch(10.0, 0.0)
    assert not watch.is_stalled([STEPPING], 0.0) and not watch.is_stalled([STEPPING], 1.0)
    assert not watch.is_stalled([STEPPING], 1000.0)  # Ctrl-Z, and fg a while later
    assert not watch.is_stalled([STEPPING], 1000.5)
    assert next(t for t in range(1001, 1020) if watch.is_stalled([STEPPING], float(t))) == 1009


def test_a_system_that_tells_nothing_leaves_the_stamps() -> None:
    assert seconds_until_stall(lambda t: [Sample(beats=int(t))]) is None
    assert seconds_until_stall(lambda t: [Sample(beats=3)]) == 10.0


def test_workers_that_finish_are_progress_and_then_nothing() -> None:
    assert seconds_until_stall(lambda t: [sample(is_done=t >= 8.0), sample()]) == 18.0
