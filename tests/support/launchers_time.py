"""Stands for ``time`` in the launcher: limits run from where a test wants them to, by what is done, not by a clock.

A limit of seconds on processes that start, import torch and are scheduled beside others is one on the machine, too.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nugnn import launch, worker_watch
from nugnn.comm import pulse
from nugnn.job import pulse_path
from nugnn.process_state import process_state

PATIENCE_SECONDS = 120.0
"""For what comes in any case, by the real clock: longer than any machine takes, so that a hang ends."""

_SECONDS_OF_A_LOOK = worker_watch.POLL_SECONDS
_REAL_SECONDS_OF_A_LOOK = 0.01
"""What is waited for has come when time begins to pass: from then on nobody needs as long as it says."""


class TimeOfLooks:
    """Time that passes with the launcher's looks at its workers, once what a test waits for has come.

    Args:
        has_come: Until then it stands still.
    """

    def __init__(self, has_come: Callable[[], bool]) -> None:
        self._has_come, self._is_there, self.now = has_come, False, 0.0

    def monotonic(self) -> float:
        self._is_there = self._is_there or self._has_come()
        self.now += _SECONDS_OF_A_LOOK * self._is_there
        return self.now

    @staticmethod
    def sleep(seconds: float) -> None:
        time.sleep(seconds)  # for others, which do something meanwhile

    def stands_for_time(self, patch: pytest.MonkeyPatch) -> None:
        """In `nugnn.launch` and in its watch."""
        for module in (launch, worker_watch):
            patch.setattr(module, "time", self)
            patch.setattr(module, "POLL_SECONDS", _REAL_SECONDS_OF_A_LOOK)


class TimeOfComputing(TimeOfLooks):
    """Time that passes as processes compute: who computes is seen to do so however small its part of a core.

    Args:
        has_come: Until then it stands still.
        pids: Processes; the more of them, the less time is a second of one's.
    """

    def __init__(self, has_come: Callable[[], bool], pids: Callable[[], Sequence[int]]) -> None:
        super().__init__(has_come)
        self._pids, self._seen, self._before = pids, dict[int, float](), 0.0

    def monotonic(self) -> float:
        for pid in self._pids():
            state = process_state(pid)
            if state is not None:  # else it has ended, and what it had computed stays
                self._seen[pid] = max(state.cpu_seconds, self._seen.get(pid, 0.0))
        seconds = sum(self._seen.values()) / max(len(self._seen), 1)
        self._is_there = self._is_there or self._has_come()
        self.now += (seconds - self._before) * self._is_there
        self._before = seconds
        return self.now


def stamp_of(folder: Path, rank: int) -> pulse.Stamp:
    """Of a worker whose job lies in ``folder``; an empty one before it is there."""
    path = pulse_path(folder, rank)
    written = path.read_bytes() if path.exists() else b""
    return pulse.read(written) if len(written) == pulse.SIZE else pulse.Stamp()


def letter_of(pid: int) -> str:
    """Of the state that a process is in: T when it is stopped, Z when it has ended, nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until(is_so: Callable[[], bool]) -> None:
    """Until it is, or for as long as no machine takes."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)


def seconds_waited(process: subprocess.Popen[str]) -> float:
    """How long a process waits until it ends; what it computes, and waits for a core, does not count."""
    seconds, end = 0.0, time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None:
        assert time.monotonic() < end, "it does not end"
        time.sleep(0.02)
        seconds += 0.02 * (letter_of(process.pid) == "S")
    return seconds
