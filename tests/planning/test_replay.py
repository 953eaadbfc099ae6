"""Replays of steps on many devices: who waits, for how long, and what runs beside what, by laws of the simulation."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from typing import get_args

import numpy as np
import pytest
import torch

from nugnn.comm import early_rows
from nugnn.comm.compression.wire import Wire
from nugnn.networks import MLP
from nugnn.planning.exchange_seconds import collective_seconds
from nugnn.planning.links import Links, Sums
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.predicted_work import DeviceWork, PredictedWork
from nugnn.planning.replay import replay, replay_parts
from nugnn.planning.step_program import Do, Passes, make_program, passes_of
from nugnn.planning.timeline import Timeline, picture
from nugnn.planning.trace import StepTrace, TraceError
from nugnn.traced_step import trace_sample_step
from step_traces import LinearTimes, graph_trace, sample_trace, times_of_all

PART = PartSizes(inner=50_000, halo=10_000, edges=600_000, train=9000, sent=10_000)
CPU, GPU = LinearTimes(1e-9, 2e-6), LinearTimes(1e-9, 2e-6, launch_seconds=5e-6)
MODELS = ("gcn", "sage", "gat")
WAYS = (
    {}, {"overlap": "backward"}, {"overlap": "both"}, {"sums_in_backward": False}, {"captured": True}, {"num_steps": 3},
)  # fmt: skip


def _parts(count: int) -> list[PartSizes]:
    draw = np.random.default_rng(count)
    counts = draw.integers(5000, 60_000, (count, 4))
    return [PartSizes(inner=n, halo=h, edges=9 * n, train=t, sent=s) for n, h, t, s in counts.tolist()]


def _unequal(name: str, count: int, **how: object) -> Timeline:
    steps = [graph_trace(name).at(part) for part in _parts(count)]
    times = [LinearTimes(1e-9 * (1 + rank), 1e-6) for rank in range(count)]
    return replay(steps, times, Links.equal(count, 1e9, 1e-4), **how)


def _batches(sizes: list[int], times: list[LinearTimes], links: Links, **how: object) -> Timeline:
    return replay([sample_trace().at(PartSizes(batch=size)) for size in sizes], times, links, **how)


def test_one_rank_takes_the_sum_of_its_operators():
    step = graph_trace("gat", ranks=1).at(PartSizes(inner=50_000, edges=600_000, train=9000))
    timeline = replay([step], [CPU], Links.alone())
    assert timeline.makespan == pytest.approx(times_of_all(step, CPU))
    assert timeline.busy(0) == pytest.approx(timeline.makespan)
    assert timeline.idle_share(0) == 0
    seconds = timeline.seconds(0)
    assert (seconds["halo"], seconds["sync"], seconds["wait"]) == (0, 0, 0)
    kinds = timeline.by_kind(0)
    assert sum(kinds.values()) == pytest.approx(timeline.makespan)
    assert {("forward", "spmm"), ("backward", "product"), ("optimizer", "optimizer")} <= kinds.keys()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("times", [CPU, GPU], ids=["cpu", "gpu"])
def test_equal_ranks_never_wait_and_take_what_is_predicted_of_each_alone(name, times, monkeypatch):
    trace, links = graph_trace(name), Links.equal(3, 1e9, 1e-4)
    monkeypatch.setattr(early_rows, "LEAST_BYTES", 0)
    for overlap in get_args(Passes):
        timeline = replay([trace.at(PART)] * 3, [times] * 3, links, overlap=overlap)
        assert all(timeline.seconds(rank)["wait"] == timeline.idle_share(rank) == 0 for rank in range(3))
        work = PredictedWork([DeviceWork(trace, times)] * 3, links, overlap=overlap)
        assert timeline.makespan == pytest.approx(work.seconds(0, PART), rel=1e-9)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_rested_links_save_what_bytes_take_and_no_more(how):
    steps = [graph_trace("gcn").at(part) for part in _parts(3)]
    times = [LinearTimes(1e-9 * (1 + rank), 1e-6) for rank in range(3)]

    def makespan(links: Links) -> float:
        return replay(steps, times, links, **how).makespan

    slow, quick = Links.equal(3, 1e8, 1e-4), Links.equal(3, math.inf, 1e-4)
    bursts = [makespan(dataclasses.replace(slow, burst_seconds=burst)) for burst in (0.0, 1e-3, 1e-2, 1e3)]
    assert bursts[0] == makespan(slow)
    assert bursts == sorted(bursts, reverse=True) and bursts[0] - bursts[1] >= 1e-3 * (1 - 1e-9)
    assert bursts[-1] == pytest.approx(makespan(quick))


@pytest.mark.parametrize("burst", [1e-4, 1e-3, 1e-2, 1e3])
@pytest.mark.parametrize("name", ["gcn", "gat", "samples"])
def test_a_part_is_predicted_with_what_its_rested_link_saves(name, burst):
    links = dataclasses.replace(Links.equal(3, 1e8, 1e-4), burst_seconds=burst)
    trace, part = (sample_trace(), PartSizes(batch=64)) if name == "samples" else (graph_trace(name), PART)
    for overlap in ("none", "both"):
        work = PredictedWork([DeviceWork(trace, CPU)] * 3, links, overlap=overlap)
        free = PredictedWork([DeviceWork(trace, CPU)] * 3, Links.equal(3, 1e8, 1e-4), overlap=overlap)
        timeline = replay([trace.at(part)] * 3, [CPU] * 3, links, overlap=overlap)
        assert work.seconds(0, part) == pytest.approx(timeline.makespan, rel=1e-9)
        assert work.seconds(0, part) < free.seconds(0, part)
        assert work.computing().seconds(0, part) == free.computing().seconds(0, part)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_nobody_ends_before_what_he_and_others_have_to_do(how):
    timeline = _unequal("gcn", 4, **how)
    trace = graph_trace("gcn")
    work = PredictedWork(
        [DeviceWork(trace, LinearTimes(1e-9 * (1 + rank), 1e-6)) for rank in range(4)],
        Links.equal(4, math.inf, 0.0), overlap=how.get("overlap", "none"),
    )  # fmt: skip
    for rank, part in enumerate(_parts(4)):
        assert timeline.makespan >= timeline.ends[rank] >= timeline.busy(rank) * (1 - 1e-12)
        assert timeline.makespan >= work.seconds(rank, part) * how.get("num_steps", 1) * (1 - 1e-9)
        told = timeline.seconds(rank)
        assert told["compute"] + told["halo"] + told["sync"] == pytest.approx(told["epoch"])
        assert 0 <= told["wait"] <= told["epoch"]
        assert 0 <= timeline.idle_share(rank) < 1
    assert any(timeline.idle_share(rank) > 0.05 for rank in range(4))


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_events_of_a_lane_follow_each_other(how):
    for timeline in (_unequal("sage", 3, **how), _batches([8, 64], [GPU, GPU], Links.equal(2, 1e9, 1e-5), **how)):
        for events, end in zip(timeline.events, timeline.ends, strict=True):
            for lane in ("device", "host"):
                own = [event for event in events if event.lane == lane]
                assert all(one.end <= other.start + 1e-12 for one, other in itertools.pairwise(own))
                assert all(event.end <= end + 1e-12 for event in own)


def test_others_wait_for_a_slower_device_exactly_as_long_as_it_is_slower():
    step, links = graph_trace("gcn").at(PART), Links.equal(2, 1e9, 1e-4)
    slow, fast = LinearTimes(3e-9), LinearTimes(1e-9)
    timeline = replay([step] * 2, [slow, fast], links)
    first = next(i for i, record in enumerate(step.operators) if record.kind == "exchange")
    before = [sum(times.seconds(record, ()) for record in step.operators[: first + 1]) for times in (slow, fast)]
    waits = [event for event in timeline.events[1] if event.kind == "wait" and event.lane == "device"]
    assert waits[0].seconds == pytest.approx(before[0] - before[1])
    assert waits[0].name == "layers.0/spmm"
    assert timeline.seconds(0)["wait"] == 0
    # all that it computes less, it waits
    both = timeline.busy(0) - timeline.busy(1)
    assert timeline.seconds(1)["wait"] == pytest.approx(both)
    assert timeline.makespan == pytest.approx(replay([step] * 2, [slow] * 2, links).makespan)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_renumbered_ranks_do_what_they_did(how):
    order, parts = [2, 0, 3, 1], _parts(4)
    steps = [graph_trace("gat").at(part) for part in parts]
    times = [LinearTimes(1e-9 * (1 + rank), 1e-6) for rank in range(4)]
    links = Links.equal(4, 1e9, 1e-4)
    one = replay(steps, times, links, **how)
    other = replay([steps[i] for i in order], [times[i] for i in order], links, **how)
    assert other.makespan == pytest.approx(one.makespan)
    for place, rank in enumerate(order):
        assert other.seconds(place) == pytest.approx(one.seconds(rank))


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_everything_twice_as_slow_takes_twice_as_long(how):
    steps = [graph_trace("sage").at(part) for part in _parts(3)]
    once = [LinearTimes(1e-9 * (1 + rank), 1e-6, 5e-6) for rank in range(3)]
    twice = [LinearTimes(2 * x.of_byte, 2 * x.of_operator, 2 * x.launch_seconds) for x in once]
    one = replay(steps, once, Links.equal(3, 1e9, 1e-4), **how)
    other = replay(steps, twice, Links.equal(3, 5e8, 2e-4), **how)
    for rank in range(3):
        assert other.seconds(rank) == pytest.approx({key: 2 * value for key, value in one.seconds(rank).items()})


def test_sums_of_gradients_that_travel_beside_backward_never_cost_more():
    buckets = [exchange for exchange in make_program(sample_trace()).exchanges if exchange.is_aside]
    assert len(buckets) >= 2
    for rate in (1e7, 1e9, 1e10, 1e12):
        links = Links.equal(2, rate, 1e-5)
        beside, after = (
            _batches([64, 64], [CPU, CPU], links, sums_in_backward=where).makespan for where in (True, False)
        )
        assert beside <= after + 1e-12
    assert beside < after * (1 + 1e-9)
    quick = LinearTimes(1e-7)
    links = Links.equal(2, 1e9, 1e-5)
    beside, after = (_batches([64, 64], [quick] * 2, links, sums_in_backward=where) for where in (True, False))
    first = links.all_reduce_seconds(4 * buckets[0].sent)
    assert after.makespan - beside.makespan == pytest.approx(first, rel=1e-6)  # hidden behind the rest of backward
    assert beside.seconds(0)["sync"] < after.seconds(0)["sync"]


def test_a_small_bucket_beside_backward_goes_through_the_ring():
    links = Links.equal(2, 1e9, 1e-3)
    links = dataclasses.replace(links, sums_inside={0: Sums(1e9, 1e-3, few_seconds=1e-6)})
    bucket = next(exchange for exchange in make_program(sample_trace()).exchanges if exchange.is_aside)
    small = dataclasses.replace(bucket, sent=100)
    assert collective_seconds(small, links, Wire("fp32")) > 2e-3
    assert collective_seconds(dataclasses.replace(small, is_aside=False), links, Wire("fp32")) < 1e-5


def _on_cores(core_seconds: float | None, rate: float = 1e8, *, is_nccl: bool = False) -> Links:
    """Of two ranks, whose sums take so many seconds of a core for each byte passed on."""
    how = {"sums_inside": {0: Sums(rate, 1e-5)}, "core_seconds_per_byte": {0: core_seconds or 0.0}}
    return dataclasses.replace(Links.equal(2, rate, 1e-5, is_nccl=is_nccl), **how)


def test_sums_beside_backward_take_from_it_what_their_bytes_take_of_the_cores():
    first = next(exchange for exchange in make_program(sample_trace()).exchanges if exchange.is_aside)
    num_bytes, slow = 4 * first.sent, LinearTimes(1e-7)  # the first bucket is on its way beside backward alone
    unhindered = _batches([64, 64], [slow] * 2, _on_cores(None))
    assert _batches([64, 64], [slow] * 2, _on_cores(0.0)).events == unhindered.events
    for core_seconds, threads in ((1e-9, 1), (2e-9, 1), (2e-9, 4)):
        times = [LinearTimes(1e-7, threads=threads)] * 2
        hindered = _batches([64, 64], times, _on_cores(core_seconds))
        added = core_seconds * num_bytes / threads
        assert hindered.makespan - unhindered.makespan == pytest.approx(added, rel=1e-6)
        assert hindered.busy(0) - unhindered.busy(0) == pytest.approx(added, rel=1e-6)
    most = _batches([64, 64], [slow] * 2, _on_cores(1.0))  # which gets nothing done meanwhile
    assert most.makespan - unhindered.makespan == pytest.approx(_on_cores(1.0).all_reduce_seconds(num_bytes), rel=1e-6)


@pytest.mark.parametrize("of_byte", [1e-12, 1e-9, 1e-8, 1e-7])
@pytest.mark.parametrize("core_seconds", [1e-10, 1e-9, 1e-8, 1.0])
def test_sums_beside_backward_never_cost_more_than_after_it_and_what_they_take(of_byte, core_seconds):
    slow, quick = LinearTimes(of_byte, 1e-6), LinearTimes(of_byte / 2, 1e-6)
    links, num_bytes = _on_cores(core_seconds), sum(4 * each.sent for each in make_program(sample_trace()).exchanges)
    free, beside = (_batches([64, 8], [slow, quick], each, num_steps=2).makespan for each in (_on_cores(None), links))
    after = _batches([64, 8], [slow, quick], links, num_steps=2, sums_in_backward=False).makespan
    assert free <= beside <= after * (1 + 1e-9)
    assert beside <= free + 2 * core_seconds * num_bytes
    assert after == _batches([64, 8], [slow, quick], _on_cores(None), num_steps=2, sums_in_backward=False).makespan
    work = PredictedWork([DeviceWork(sample_trace(), slow)] * 2, links)
    timeline = _batches([64, 64], [slow] * 2, links)
    assert work.seconds(0, PartSizes(batch=64)) == pytest.approx(timeline.makespan, rel=1e-9)
    assert replay_parts(work, [PartSizes(batch=64)] * 2).makespan == pytest.approx(timeline.makespan, rel=1e-9)


@pytest.mark.parametrize("how", [{"is_nccl": True}, {"gradient_wire": "bf16"}, {"launch_seconds": 1e-6}], ids=str)
def test_only_plain_sums_of_gloo_take_from_devices_that_are_cores(how):
    times = LinearTimes(1e-8, 0.0, how.get("launch_seconds", 0.0))
    options = {"gradient_wire": how.get("gradient_wire", "fp32")}
    one, other = (
        _batches([64, 64], [times] * 2, _on_cores(each, is_nccl=how.get("is_nccl", False)), **options)
        for each in (None, 1e-9)
    )
    assert one.events == other.events


def test_gradients_in_few_bits_take_the_time_of_their_bytes():
    links, slow = Links.equal(2, 1e7, 0.0), LinearTimes(1e-12)
    wires = ("fp32", "bf16", "4bit")
    timelines = [_batches([64, 64], [slow] * 2, links, gradient_wire=wire) for wire in wires]
    plain, half, bits = (timeline.seconds(0)["sync"] for timeline in timelines)
    assert plain / half == pytest.approx(2, rel=0.01)
    assert 7 < plain / bits < 8  # a bucket's ends travel too
    work = PredictedWork([DeviceWork(sample_trace(), slow)] * 2, links, gradient_wire="4bit")
    assert work.seconds(0, PartSizes(batch=64)) == pytest.approx(timelines[2].makespan)
    with pytest.raises(ValueError, match="gradients cannot travel as 'powersgd'"):
        PredictedWork([DeviceWork(sample_trace(), slow)] * 2, links, gradient_wire="powersgd")


def test_whatever_is_exchanged_counts_as_the_trainer_counts_it():
    """Statistics of batches and the loss are sums over ranks, though none of gradients."""
    nothing, links = LinearTimes(0.0), Links.equal(2, 1e8, 1e-3)
    torch.manual_seed(0)
    model = MLP(30, 5, hidden=16, layers=3, norm="batch")
    normed = trace_sample_step(model, [torch.zeros(30)], num_classes=5, ranks=2).at(PartSizes(batch=8))
    exchanges = make_program(normed).exchanges
    assert 0 < sum(exchange.is_gradient for exchange in exchanges) < len(exchanges)
    for step in (normed, graph_trace("gcn").at(PART)):
        seconds = replay([step] * 2, [nothing] * 2, links).seconds(0)
        assert seconds["epoch"] > 0 and seconds["compute"] == pytest.approx(0, abs=1e-12)
    of_rest = [2 * (1e-3 + 0.5e-8 * each.row_bytes * each.sent) for each in exchanges if not each.is_gradient]
    coded = [links.coded_sum_seconds(Wire("4bit").num_bytes(each.sent)) for each in exchanges if each.is_gradient]
    in_few_bits = replay([normed] * 2, [nothing] * 2, links, gradient_wire="4bit", sums_in_backward=False)
    assert in_few_bits.makespan == pytest.approx(sum(of_rest) + sum(coded))


def test_sums_over_own_neighbours_hide_the_wire_as_far_as_they_last():
    step, links = graph_trace("gcn").at(PART), Links.equal(2, 1e9, 1e-4)
    sums = [r for r in step.operators if r.kind == "spmm"]
    plain = replay([step] * 2, [CPU] * 2, links)
    hidden = replay([step] * 2, [CPU] * 2, links, overlap="both", halo_shares=[0.25, 0.25])
    wires = [e.seconds for e in plain.events[0] if e.lane == "wire" and e.kind in ("fetch", "home")]
    assert len(wires) == len(sums)
    saved = sum(min(wire, 0.75 * CPU.seconds(record, ())) for wire, record in zip(wires, sums, strict=True))
    assert plain.makespan - hidden.makespan == pytest.approx(saved)
    assert hidden.busy(0) == pytest.approx(plain.busy(0))
    backward = replay([step] * 2, [CPU] * 2, links, overlap="backward")
    assert plain.makespan > backward.makespan > hidden.makespan
    # nothing to do meanwhile: all edges come from others
    assert replay([step] * 2, [CPU] * 2, links, overlap="both", halo_shares=[1, 1]).makespan == pytest.approx(
        plain.makespan
    )


def test_as_many_edges_as_fill_the_exchange_are_summed_before_halo_rows_are_waited_for(monkeypatch):
    step, links = graph_trace("gcn").at(PART), Links.equal(2, 1e9, 1e-4)
    sums = [r for r in step.operators if r.kind == "spmm" and r.phase == "forward"]
    backward = replay([step] * 2, [CPU] * 2, links, overlap="backward", halo_shares=[0.25, 0.25])
    whole = replay([step] * 2, [CPU] * 2, links, overlap="both", halo_shares=[0.25, 0.25])
    few_bytes = replay([step] * 2, [CPU] * 2, links, overlap="some", halo_shares=[0.25, 0.25])
    assert few_bytes.makespan > whole.makespan
    assert few_bytes.makespan == pytest.approx(backward.makespan)
    monkeypatch.setattr(early_rows, "LEAST_BYTES", 0)
    wires = [e.seconds for e in backward.events[0] if e.lane == "wire" and e.kind == "fetch"]
    for edges_per_row in (0.5, 1, 1000):
        monkeypatch.setattr(early_rows, "EDGES_PER_ROW", edges_per_row)
        timeline = replay([step] * 2, [CPU] * 2, links, overlap="some", halo_shares=[0.25, 0.25])
        early = 0.75 * min(1, edges_per_row * max(PART.halo, PART.sent) / PART.edges)
        saved = sum(min(wire, early * CPU.seconds(r, ())) for wire, r in zip(wires, sums, strict=True))
        assert saved > 0 and backward.makespan - timeline.makespan == pytest.approx(saved)
    assert timeline.makespan == pytest.approx(whole.makespan)


def test_attention_waits_for_its_halo_rows_whatever_overlaps():
    step, links = graph_trace("gat").at(PART), Links.equal(2, 1e9, 1e-4)
    assert replay([step] * 2, [CPU] * 2, links, overlap="both").makespan == pytest.approx(
        replay([step] * 2, [CPU] * 2, links).makespan
    )


def test_a_layers_own_product_runs_beside_its_messages():
    # as fused layers of SAGE on a GPU make them: messages, the node's own product, then the exchange and the sum
    trace = graph_trace("sage")
    operators = list(trace.operators)
    at = next(i for i, r in enumerate(operators) if r.kind == "exchange")
    own = next(i for i in range(at, len(operators)) if operators[i].kind == "product")
    operators.insert(at, operators.pop(own))
    moved = trace.model_copy(update={"operators": tuple(_renumbered(operators, at, own))})
    instructions = make_program(moved, overlap="backward").instructions
    begin = next(i for i, instruction in enumerate(instructions) if instruction.do == Do.BEGIN)
    between = [i.number for i in instructions[begin:] if i.do == Do.RUN]
    assert between[0] == at  # the product that stood before the exchange
    assert next(i for i in instructions[begin:] if i.do == Do.WAIT).number == 0


def _renumbered(operators: list, at: int, own: int) -> list:
    def new(number: int) -> int:
        return at if number == own else number + 1 if at <= number < own else number

    return [r.model_copy(update={"depends_on": tuple(sorted(map(new, r.depends_on)))}) for r in operators]


def test_a_gpu_without_work_waits_for_its_host():
    step = graph_trace("gcn", ranks=1).at(PartSizes(inner=10, edges=30, train=5))
    timeline = replay([step], [LinearTimes(0.0, 1e-9, 1e-5)], Links.alone())
    running = [record for record in step.operators if record.kind != "metadata"]
    assert timeline.makespan == pytest.approx(1e-5 * sum(record.launches for record in running), abs=2e-9)
    assert sum(event.lane == "host" for event in timeline.events[0]) == len(running)
    captured = replay([step], [LinearTimes(0.0, 1e-9, 1e-5)], Links.alone(), captured=True)
    launches = {event.name: event.seconds for event in captured.events[0] if event.lane == "host"}
    assert launches == pytest.approx({running[0].name: 1e-5, "optimizer": 1e-5 * running[-1].launches})


def test_hosts_run_ahead_from_step_to_step_of_samples():
    batch, links = [64, 64], Links.equal(2, 1e12)
    times = [LinearTimes(1e-9, 1e-5, 4e-6)] * 2  # the device is busier than the host
    one, many = (_batches(batch, times, links, num_steps=n).makespan for n in (1, 5))
    assert many < 5 * one
    assert many > 5 * replay([sample_trace().at(PartSizes(batch=64))] * 2, times, links, captured=True).busy(0)


def test_devices_of_two_types_make_the_same_exchanges_or_are_refused():
    links = Links.equal(2, 1e9)
    steps = [graph_trace(name).at(PART) for name in ("gcn", "sage")]
    with pytest.raises(TraceError, match=r"exchange 0 is fetch of layers.0/sddmm \(1 value\) on rank 0 and fetch"):
        replay([graph_trace("gat").at(PART), steps[0]], [CPU] * 2, links)
    short = steps[0].model_copy(update={"operators": steps[0].operators[:30]})
    with pytest.raises(TraceError, match="rank 0 makes 5 exchanges in a step and rank 1 2"):
        replay([steps[0], short], [CPU] * 2, links, reads_loss=False)
    with pytest.raises(TraceError, match="rank 1 was recorded on one device"):
        alone = graph_trace("gcn", ranks=1).at(PartSizes(inner=5, edges=9))
        replay([steps[0], alone], [CPU] * 2, links)
    with pytest.raises(ValueError, match="times has 1 entry; the links connect 2 ranks"):
        replay(steps, [CPU], links)


def test_who_reads_whom_decides_who_is_busy_when_it_is_known():
    steps = [graph_trace("gcn").at(PART)] * 3
    links = Links.equal(3, 1e9, 0.0)
    links.bytes_per_second[0, 1] = links.bytes_per_second[1, 0] = 1e8  # a slow pair
    together = np.array([[0, 10_000, 0], [10_000, 0, 0], [0, 0, 0]], float)
    apart = np.array([[0, 0, 5000], [0, 0, 5000], [5000, 5000, 0]], float)
    one, other = (replay(steps, [CPU] * 3, links, rows_between=rows).makespan for rows in (together, apart))
    without = replay(steps, [CPU] * 3, Links.equal(3, math.inf)).makespan
    assert one - without == pytest.approx(10 * (other - without), rel=0.02)  # sums pass the slow pair, too


@pytest.mark.parametrize("overlap", get_args(Passes))
def test_parts_of_a_work_model_are_replayed_as_their_steps_are(overlap, monkeypatch):
    monkeypatch.setattr(early_rows, "LEAST_BYTES", 0)
    parts, links = _parts(4), Links.equal(4, 1e9, 1e-4)
    times = [CPU, GPU, LinearTimes(3e-9), GPU]
    trace = graph_trace("gcn")
    work = PredictedWork([DeviceWork(trace, each) for each in times], links, overlap=overlap)
    one, other = replay_parts(work, parts), replay([trace.at(p) for p in parts], times, links, overlap=overlap)
    assert one.makespan == pytest.approx(other.makespan, rel=1e-9)
    for rank in range(4):
        assert one.seconds(rank) == pytest.approx(other.seconds(rank), rel=1e-9, abs=1e-12)
        assert len(one.events[rank]) == len(other.events[rank])
    with pytest.raises(ValueError, match="parts has 3 entries; the work model has 4 devices"):
        replay_parts(work, parts[:3])


def test_overlap_is_told_in_the_words_of_the_trainer():
    passes = {
        choice: [passes_of(choice, is_nccl=nccl, num_hosts=hosts) for nccl, hosts in ((False, 1), (True, 1), (True, 2))]
        for choice in ("off", "on", "backward", "auto")
    }
    assert passes["auto"] == ["none", "some", "both"]
    assert (passes["off"], passes["on"]) == (["none"] * 3, ["both", "some", "both"])
    with pytest.raises(ValueError, match="must be auto, on, backward or off"):
        passes_of("none", is_nccl=True, num_hosts=1)


def test_sixty_four_ranks_are_replayed_in_a_second():
    steps = [graph_trace("gat").at(part) for part in _parts(64)]
    times, links = [CPU] * 32 + [GPU] * 32, Links.equal(64, 1e9, 1e-4)
    begin = time.process_time()
    timeline = replay(steps, times, links)
    text = picture(timeline)
    assert time.process_time() - begin < 1
    assert len(timeline.events) == 64
    assert "48 ranks that wait longer are not shown" in text


def test_perfetto_gets_a_process_for_each_rank_and_a_thread_for_each_lane():
    timeline = replay(
        [graph_trace("gcn").at(PART)] * 2, [GPU, LinearTimes(4e-9, 2e-6, 5e-6)], Links.equal(2, 1e9, 1e-4),
        names=["fast", "slow"],
    )  # fmt: skip
    shown = json.loads(timeline.to_chrome())["traceEvents"]
    names = {(e["pid"], e["tid"], e["args"]["name"]) for e in shown if e["ph"] == "M"}
    lanes = {(rank, place, lane) for rank in (0, 1) for place, lane in enumerate(("device", "wire", "host"))}
    assert names == {(0, 0, "rank 0: fast"), (1, 0, "rank 1: slow")} | lanes
    spans = [e for e in shown if e["ph"] == "X"]
    assert len(spans) == sum(map(len, timeline.events))
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.makespan * 1e6)
    assert all(e["dur"] >= 0 and math.isfinite(e["ts"]) for e in spans)


def test_a_picture_shows_each_rank_in_eighty_columns():
    timeline = replay(
        [graph_trace("gcn").at(PART)] * 2, [CPU, LinearTimes(5e-9)], Links.equal(2, 1e8), names=["quick", "slow"]
    )
    lines = picture(timeline).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("rank 0 quick |")
    assert lines[1].startswith("rank 1 slow  |")
    waiting = 100 * timeline.idle_share(0)
    assert lines[0].endswith(f"{waiting:3.0f} % idle")
    drawn = lines[0].split("|")[1][: -len("  40 % idle")]
    # letters stand for the time that they cover, within two slices for each change from one to another
    changes = sum(a != b for a, b in itertools.pairwise(drawn))
    assert abs(100 * drawn.count(".") / len(drawn) - waiting) < 100 * (changes + 1) / len(drawn)
    assert set(drawn) <= set("fbohs. l")
    assert {"f", "b", "h"} <= set(drawn)
    signs = set("".join(line.split("|")[1][: -len("  40 % idle")] for line in lines[:2]))
    legend = "  ".join(lines[3:]).split("  ")
    assert {entry.split()[0].replace("blank", " ") for entry in legend} == signs
    assert picture(timeline, numbers=[7, 9]).splitlines()[1].startswith("rank 9 slow  |")


def test_steps_with_formulas_are_refused():
    trace: StepTrace = graph_trace("gcn")
    with pytest.raises(AssertionError, match="is a formula: put sizes in first"):
        replay([trace] * 2, [CPU] * 2, Links.equal(2, 1e9))


def test_sums_of_statistics_may_travel_while_gradients_do():
    """Those of batch norm in backward have a group of their own, and take nothing from computing beside them."""
    torch.manual_seed(0)
    model = MLP(400, 10, hidden=800, layers=3, norm="batch")
    trace = trace_sample_step(model, [torch.zeros(400)], num_classes=10, ranks=2)
    timeline = replay([trace.at(PartSizes(batch=64))] * 2, [LinearTimes(1e-10)] * 2, _on_cores(1e-9, 1e7))
    sums = [event for event in timeline.events[0] if event.kind == "all_reduce" and event.phase == "backward"]
    bucket = next(event for event in sums if event.name.endswith("/gradient"))
    inside = [event for event in sums if bucket.start < event.start < bucket.start + bucket.seconds]
    assert [event.name for event in inside] == ["layers.2/batch_norm"]


def test_ranks_that_do_the_same_are_followed_once_and_end_as_if_each_were():
    """Two sorts of device on each of six hosts, one of which has a slow card."""
    hosts = tuple(rank // 2 for rank in range(12))
    same = np.equal.outer(hosts, hosts)
    cards = dict.fromkeys(hosts, 1e9) | {5: 1e8}
    links = Links(np.where(same, 1e10, 1e9), np.where(same, 1e-5, 3e-5), hosts, cards)
    parts = [PartSizes(inner=500, edges=4000, halo=300, sent=290, train=50), PART]
    known, trace = [CPU, GPU], graph_trace("gcn")
    steps = [trace.at(part) for part in parts]
    times = [known[rank % 2] for rank in range(12)]
    one = replay([steps[rank % 2] for rank in range(12)], times, links, overlap="both", num_steps=2)
    each = replay([trace.at(parts[rank % 2]) for rank in range(12)], times, links, overlap="both", num_steps=2)
    assert len({id(events) for events in one.events}) == 4  # two on the host with the slow card, and two on the others
    assert len({id(events) for events in each.events}) == 12
    assert one == each
