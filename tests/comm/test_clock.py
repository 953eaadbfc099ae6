"""Seconds add up on the host and between events of a GPU; what is counted in a recorded step counts when it runs."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from nugnn.comm import backward_sums, clock
from nugnn.comm.backward_sums import PlainSums
from nugnn.comm.buckets import Bucket
from nugnn.comm.clock import Stopwatch
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks


def test_a_stopwatch_adds_up_what_lies_between_start_and_stop() -> None:
    watch = Stopwatch(torch.device("cpu"))
    begin = time.perf_counter()
    for _ in range(2):
        watch.start()
        time.sleep(0.05)
        watch.stop()
    spent = time.perf_counter() - begin
    time.sleep(0.05)
    assert 0.1 <= watch.seconds() <= spent


@pytest.mark.gpu
def test_a_stopwatch_of_a_gpu_waits_only_when_it_is_read() -> None:
    device, spins = torch.device("cuda", 0), 200_000_000
    watch = Stopwatch(device)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(2):
        watch.start()
        torch.cuda._sleep(spins)
        watch.stop()
    queued = time.perf_counter() - begin
    seconds = watch.seconds()
    assert queued < seconds / 2 and seconds == pytest.approx(time.perf_counter() - begin, rel=0.2)


def test_plain_sums_in_a_recorded_step_count_each_time_that_it_runs() -> None:
    is_recording = mock.Mock(return_value=True)

    def run(ranks: Ranks) -> list[dict[str, Any]]:
        layer = nn.Linear(30, 4)
        sums = PlainSums(ranks, {id(layer.weight): "weight"})
        sums.sum_(Bucket(list(layer.parameters())))
        before = sums.counts.report(0, 1)
        recorded = ranks.clock.withdraw()
        for _ in range(3):
            ranks.clock.add(recorded)
        return [before, sums.counts.report(3, 1)]

    with mock.patch.object(clock, "is_recording", is_recording):
        with mock.patch.object(backward_sums, "is_recording", is_recording):
            reports = run_local_ranks(2, run)
    for before, after in reports:
        assert before["sent_bytes"] == 0
        assert after["sent_bytes"] == 3 * 4 * (30 * 4 + 4 + 2) and after["exchange_seconds"] == 0
        assert after["buckets"]["weight"]["values"] == 124
