"""A slowed process has its part of the time and no more, computes the same, and is free again afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import nugnn
import slowed as slowed_module
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from slowed import slow_down, slowed

FACTOR = 3.0


@pytest.fixture
def spinning() -> Any:
    """A process that computes all the time."""
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def state(pid: int) -> str:
    """Its letter."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_for(letter: str, pid: int) -> None:
    end = time.monotonic() + 60
    while state(pid) != letter:
        assert time.monotonic() < end, f"never {letter}"
        time.sleep(0.001)


def test_a_process_stands_still_and_goes_on_in_turn(spinning: Any) -> None:
    with slowed(spinning.pid, FACTOR):
        for letter in "TRTR":
            wait_for(letter, spinning.pid)
    assert state(spinning.pid) == "R"


class BusyMachine:
    """Stands for ``time`` and ``os``: sleeps last longer than asked for, by what is given in turn, and then all ends.

    Args:
        delays: Seconds.
    """

    def __init__(self, delays: list[float]) -> None:
        self._delays, self._now, self._is_stopped = iter(delays), 0.0, False
        self.ran, self.stood = 0.0, 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        try:
            seconds += next(self._delays)
        except StopIteration:
            raise ProcessLookupError from None
        self._now += seconds
        if self._is_stopped:
            self.stood += seconds
        else:
            self.ran += seconds

    def kill(self, pid: int, number: int) -> None:
        self._is_stopped = number == signal.SIGSTOP

    def getppid(self) -> int:
        return 1


@given(
    factor=st.floats(1.1, 50.0),
    delays=st.lists(st.sampled_from([0.0, 1e-3, 0.01, 0.5]), min_size=1, max_size=60),
)
def test_it_has_its_part_of_the_time_however_late_its_watch_wakes(factor: float, delays: list[float]) -> None:
    """It has stood still for as long as it had to, and for no longer than a single delay more."""
    machine = BusyMachine(delays)
    before = signal.getsignal(signal.SIGTERM)
    with (
        mock.patch.multiple(slowed_module, time=machine, os=machine, _is_alive=lambda pid: True),
        redirect_stdout(StringIO()),
    ):
        slowed_module.main(7, factor)
    signal.signal(signal.SIGTERM, before)
    # of the last period it may have had the first part alone
    last = (factor - 1) * (slowed_module.PERIOD_SECONDS / factor + max(delays))
    owed = (factor - 1) * machine.ran
    assert owed - last - 1e-9 <= machine.stood <= owed + max(delays) + 1e-9


def test_it_goes_on_when_nobody_slows_it_any_more(spinning: Any) -> None:
    slower = slow_down(spinning.pid, 50.0)
    wait_for("T", spinning.pid)
    slower.send_signal(signal.SIGTERM)
    assert slower.wait(60) == 0 and state(spinning.pid) == "R"


def test_it_ends_with_the_process(spinning: Any) -> None:
    slower = slow_down(spinning.pid, FACTOR)
    spinning.kill()
    assert slower.wait(60) == 0


class SlowFromStep(nn.Module):
    """A GNN that becomes slower on rank 1 in a step of its training, and three steps later notes that it does.

    Args:
        step: Which.
        factor: By how much; 1 for never.
        note: File that is there once it was stopped and went on three times.
    """

    def __init__(self, step: int, factor: float, note: Path) -> None:
        super().__init__()
        self.inner = nugnn.GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=8)
        self.layers, self.step, self.factor, self.note, self.steps = self.inner.layers, step, factor, note, 0
        self.went_on: list[int] = []

    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.training and self.factor > 1 and os.environ.get("RANK") == "1":
            if self.steps == self.step:
                signal.signal(signal.SIGCONT, lambda number, _: self.went_on.append(number))
                slow_down(os.getpid(), self.factor)
            if self.steps == self.step + 3:
                end = time.monotonic() + 60
                while len(self.went_on) < 3 and time.monotonic() < end:
                    pass
                self.note.write_text(str(len(self.went_on)))
        return self.inner(graph, x)


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_slowed_in_mid_run_trains_the_same(tmp_path: Path) -> None:
    def train(factor: float) -> nugnn.FitResult:
        torch.manual_seed(0)
        model = SlowFromStep(4, factor, tmp_path / "note")
        options = {"workers": 2, "check": False, "device": "cpu", "evaluate_every": 9}
        return nugnn.fit(model, make_graph(dtype=torch.float32), epochs=9, **options)

    free, slow = train(1.0), train(5.0)
    assert [epoch.loss for epoch in free.history] == [epoch.loss for epoch in slow.history]
    assert torch.equal(free.logits, slow.logits)
    assert int((tmp_path / "note").read_text()) >= 3
