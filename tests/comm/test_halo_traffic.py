"""What is reported of an exchange is what travelled: its count, bytes, and the error of its rounding by hand."""

from __future__ import annotations

import math
import zlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nugnn.comm import halo_exchange, halo_traffic, halo_transfer
from nugnn.comm.clock import CommClock
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_bits import HaloBits
from nugnn.comm.halo_exchange import fetch_halo
from nugnn.comm.halo_feedback import HaloFeedback
from nugnn.comm.halo_traffic import STEPS_BETWEEN_LOOKS, ExchangeTraffic, HaloTraffic
from nugnn.comm.halo_wire import WIRES, HaloWire, Travel
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.kernels.philox import RandomKey
from shard_calls import make_data, shard_of

SEED, STEP, WIDTH = 3, 2 * STEPS_BETWEEN_LOOKS, 30
BOUND = 2.0**-24
"""Differences are rounded to float32 once, here they are not; errors are below 1."""


def _rows(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _arrived(wire: HaloWire, rows: Tensor, name: str, ids: Tensor | None) -> Tensor:
    """What `rows` become on the way, to nearest without ids."""
    if not len(rows) or not wire.compresses(WIDTH, rows.dtype):
        return rows
    key = None if ids is None else RandomKey(SEED, STEP, zlib.crc32(name.encode()))
    out = torch.empty_like(rows)
    wire.decode(wire.encode(rows, key, ids), out)
    return out


def _relative(wanted: Tensor, arrived: Tensor) -> float:
    wanted, arrived = wanted.double(), arrived.double()
    size = float(wanted.norm())
    return float((wanted - arrived).norm()) / size if size else 0.0


def _by_hand(ranks: Ranks, name: str, dtype: torch.dtype, how: str) -> tuple[float, ...]:
    """How far reported errors are from those by hand: of rows, of gradients; bytes and counts that are off."""
    graph, wire, traffic = shard_of(ranks, make_data()), HaloWire(name), HaloTraffic()
    plan = graph.index.plan
    assert plan.row_ids is not None
    x, grad_L = _rows(plan.num_inner, ranks.rank, dtype), _rows(plan.num_local, 9 + ranks.rank, dtype)
    travel = Travel(wire, "here", SEED, STEP, traffic)
    fetch_halo(x.requires_grad_(), plan, "here", travel).backward(grad_L)
    sent, returned = x.detach()[plan.send_rows], grad_L[plan.num_inner :]
    ids, of_home = plan.row_ids.sent, plan.row_ids.returned
    forward, gradient = traffic.of("forward", "here"), traffic.of("gradient", "gradient of here")
    assert forward.error is not None and gradient.error is not None
    row_bytes = wire.row_bytes(WIDTH, dtype)
    if how == "padded" and not wire.compresses(WIDTH, dtype):
        row_bytes = -(-row_bytes // 32) * 32
    return (
        abs(forward.error - _relative(sent, _arrived(wire, sent, "here", ids))),
        abs(gradient.error - _relative(returned, _arrived(wire, returned, "gradient of here", of_home))),
        forward.num_bytes - len(sent) * row_bytes,
        gradient.num_bytes - len(returned) * row_bytes,
        traffic.forward + traffic.gradient + traffic.evaluation - forward.num_bytes - gradient.num_bytes,
        forward.count - 1,
        gradient.count - 1,
        float(forward.error == 0) - float(not wire.compresses(WIDTH, dtype) or not len(sent)),
        float(forward.seconds <= 0),
    )


@pytest.mark.parametrize("how", ["usual", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WIRES)
def test_the_error_is_that_of_the_rows_that_were_sent(name: str, dtype: torch.dtype, how: str) -> None:
    with (
        mock.patch.object(halo_exchange, "PADDED_DEVICES", {"cpu"} if how == "padded" else set()),
        mock.patch.object(halo_transfer, "_VALUES_OF_A_LOOK", 1),
    ):
        found = run_local_ranks(3, lambda ranks: _by_hand(ranks, name, dtype, how))
    for forward, gradient, *off in found:
        assert forward <= BOUND and gradient <= BOUND
        assert off == [0] * len(off)


def test_what_was_owed_is_a_part_of_what_was_to_be_sent() -> None:
    def run(ranks: Ranks) -> float:
        graph, wire, traffic = shard_of(ranks, make_data()), HaloWire("int2"), HaloTraffic()
        plan = graph.index.plan
        feedback, owed, worst = HaloFeedback(plan.num_inner, plan.send_rows), 0.0, 0.0
        for step in range(3):
            x = _rows(plan.num_inner, 10 * step + ranks.rank)
            fetch_halo(x, plan, "here", Travel(wire, "here", SEED, STEP, traffic, feedback=feedback))
            feedback.settle()
            wanted = x[plan.send_rows] + owed
            arrived = _arrived(wire, wanted, "here", None)
            owed = wanted - arrived
            worst = max(worst, abs((traffic.of("forward", "here").error or 0.0) - _relative(wanted, arrived)))
        return worst

    assert max(run_local_ranks(3, run)) <= BOUND


def test_wires_by_peer_count_together() -> None:
    wires = (("fp32", "int2", "fp32"), ("int8", "fp32", "bf16"), ("fp32", "fp32", "fp32"))

    def run(ranks: Ranks) -> tuple[float, float | None]:
        plan, traffic = shard_of(ranks, make_data()).index.plan, HaloTraffic()
        assert plan.row_ids is not None
        x, bits = _rows(plan.num_inner, ranks.rank), HaloBits({"here": wires})
        fetch_halo(x, plan, "here", Travel(HaloWire(), "here", SEED, STEP, traffic, bits=bits))
        sent = x[plan.send_rows]
        rows, ids = (whole.split(plan.send_splits) for whole in (sent, plan.row_ids.sent))
        parts = zip(map(HaloWire, wires[ranks.rank]), rows, ids, strict=True)
        arrived = torch.cat([_arrived(wire, some, "here", of_some) for wire, some, of_some in parts])
        error = traffic.of("forward", "here").error
        return abs((error or 0.0) - _relative(sent, arrived)), error

    found = run_local_ranks(3, run)
    assert max(off for off, _ in found) <= BOUND
    assert [error is not None and error > 0 for _, error in found] == [True, True, False]
    assert found[2][1] == 0


# -- when it is measured -------------------------------------------------------------------------------------------


def _looks(ranks: Ranks, steps: list[tuple[int, Any]], value: float = 1.0) -> list[tuple[bool, float | None]]:
    """For each step, under a plan of wires or none: whether its rounding was measured, and the error in the report."""
    plan, traffic, found = shard_of(ranks, make_data()).index.plan, HaloTraffic(), []
    counted = traffic.of("forward", "here")
    looked = mock.Mock(side_effect=counted.measured)
    counted.measured = looked  # type: ignore[method-assign]
    for step, bits in steps:
        looked.reset_mock()
        x = _rows(plan.num_inner, step)
        x[:, 3] *= value
        fetch_halo(x, plan, "here", Travel(HaloWire("int4"), "here", SEED, step, traffic, bits=bits))
        found.append((looked.called, counted.error))
    return found


def test_one_step_of_100_is_measured_and_the_first() -> None:
    steps = [0, 1, 99, 100, 101, 300]
    first, *_ = run_local_ranks(3, lambda ranks: _looks(ranks, [(step, None) for step in steps]))
    assert [looked for looked, _ in first] == [step % 100 == 0 for step in steps]
    assert first[0][1] == first[2][1] != first[3][1] == first[4][1]
    resumed, *_ = run_local_ranks(3, lambda ranks: _looks(ranks, [(57, None), (58, None), (100, None)]))
    assert [looked for looked, _ in resumed] == [True, False, True]


def test_another_plan_of_wires_is_measured_anew() -> None:
    def plan(wire: str) -> HaloBits:
        return HaloBits({"here": ((wire,) * 3,) * 3})

    first, second, none = plan("int8"), plan("int2"), HaloBits()
    steps = [(1, none), (2, first), (3, first), (4, second), (5, second), (6, none), (7, second)]
    found, *_ = run_local_ranks(3, lambda ranks: _looks(ranks, steps))
    assert [looked for looked, _ in found] == [False, True, False, True, False, False, True]
    errors = [error for _, error in found]
    assert errors[0] == errors[5] == 0
    assert 0 < (errors[1] or 0) == errors[2] < (errors[3] or 0) == errors[4]


def test_what_is_not_finite_has_no_error_and_is_not_asked_again() -> None:
    found, *_ = run_local_ranks(3, lambda ranks: _looks(ranks, [(1, None), (2, None)], value=math.inf))
    assert found == [(True, None), (False, None)]


def test_nothing_is_measured_while_a_step_is_recorded() -> None:
    with mock.patch.object(halo_transfer, "is_recording", lambda device: True):
        found, *_ = run_local_ranks(3, lambda ranks: _looks(ranks, [(0, None), (100, None)]))
    assert found == [(False, None)] * 2


def test_a_recorded_step_counts_each_time_that_it_runs() -> None:
    clock, traffic, gpu = CommClock(), ExchangeTraffic(), torch.device("cuda")
    with mock.patch("nugnn.comm.clock.is_recording", lambda device: True):
        clock.count(gpu, lambda: traffic.begun(7))
    assert traffic.count == 0
    recorded = clock.withdraw()
    for _ in range(3):
        clock.add(recorded)
    clock.count(torch.device("cpu"), lambda: traffic.begun(1))
    assert (traffic.count, traffic.num_bytes) == (4, 22)


class _Event:
    """Of a GPU, at a time in milliseconds."""

    times = iter(range(0, 10_000, 250))

    def __init__(self, **_: bool) -> None:
        self.time = 0

    def record(self) -> None:
        self.time = next(self.times)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return other.time - self.time


def test_seconds_between_events_are_counted_when_the_clock_is_read() -> None:
    clock, traffic, gpu = CommClock(), ExchangeTraffic(), torch.device("cuda")
    with (
        mock.patch("nugnn.comm.clock.is_recording", lambda device: False),
        mock.patch.object(torch.cuda, "Event", _Event),
        clock.measure("halo", gpu, "here", traffic.took),
    ):
        pass
    assert traffic.seconds == 0 and clock.halo_seconds() == 0.25
    clock.catch_up()
    clock.catch_up()
    assert traffic.seconds == 0.25 and clock.halo_seconds() == 0.25
    assert clock.take() == (0.25, 0.0) and traffic.seconds == 0.25


def test_looks_are_as_seldom_as_those_at_gradients() -> None:
    from nugnn.comm.compression import compressor

    assert halo_traffic.STEPS_BETWEEN_LOOKS is compressor.STEPS_BETWEEN_LOOKS
