"""A slowed process has its part of the time and no more, computes the same, and is free again afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nugnn
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


def state(pid: int) -> tuple[str, float]:
    """Letter of the state, seconds of computing."""
    columns = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return columns[0], (int(columns[11]) + int(columns[12])) / os.sysconf("SC_CLK_TCK")


def computed_share(pid: int, seconds: float) -> float:
    """Part of the next ``seconds`` that the process computes for."""
    begin, before = time.monotonic(), state(pid)[1]
    time.sleep(seconds)
    return (state(pid)[1] - before) / (time.monotonic() - begin)


def test_a_process_has_its_part_of_the_time(spinning: Any) -> None:
    with slowed(spinning.pid, FACTOR):
        time.sleep(0.2)
        share = computed_share(spinning.pid, 1.0)
    # one tick of the counter, a period at either end; on a busy machine others take from what is left
    assert 0.02 < share < 1 / FACTOR + 0.07
    time.sleep(0.1)
    assert state(spinning.pid)[0] == "R"


def test_it_goes_on_when_nobody_slows_it_any_more(spinning: Any) -> None:
    slower = slow_down(spinning.pid, 50.0)
    end = time.monotonic() + 20
    while state(spinning.pid)[0] != "T" and time.monotonic() < end:  # until it has begun
        time.sleep(0.01)
    slower.send_signal(signal.SIGTERM)
    assert slower.wait(10) == 0 and state(spinning.pid)[0] == "R"


def test_it_ends_with_the_process(spinning: Any) -> None:
    slower = slow_down(spinning.pid, FACTOR)
    spinning.kill()
    assert slower.wait(10) == 0


class SlowFromStep(nn.Module):
    """A GNN that becomes slower on rank 1 in a step of its training, and three steps later notes by how much.

    Args:
        step: Which.
        factor: By how much; 1 for never.
        note: File for the seconds of the clock that 0.05 s of computing take.
    """

    def __init__(self, step: int, factor: float, note: Path) -> None:
        super().__init__()
        self.inner = nugnn.GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=8)
        self.layers, self.step, self.factor, self.note, self.steps = self.inner.layers, step, factor, note, 0

    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.training and self.factor > 1 and os.environ.get("RANK") == "1":
            if self.steps == self.step:
                slow_down(os.getpid(), self.factor)
            if self.steps == self.step + 3:
                begin, until = time.monotonic(), time.process_time() + 0.05
                while time.process_time() < until:
                    pass
                self.note.write_text(str(time.monotonic() - begin))
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
    # 0.25 s, less what may be left of the period in which it was let go on; on a busy machine more
    assert float((tmp_path / "note").read_text()) > 0.2
