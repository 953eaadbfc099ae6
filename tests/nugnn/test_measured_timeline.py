"""What ranks note of their steps becomes a timeline without gaps, in which exchanges begin when all have come."""

from __future__ import annotations

import itertools

import pytest
import torch

import nugnn
from nugnn.comm.groups import Ranks
from nugnn.comm.step_watch import StepWatch
from nugnn.datasets.registry import load
from nugnn.measured_timeline import measured_timeline
from nugnn.networks import MLP
from nugnn.planning.timeline import Timeline, picture


def _step(begin: float, *, slow: float = 0.0, label: str = "layers.0/spmm") -> list[list]:
    """Forward with an exchange, backward, a sum, the optimizer; ``slow`` is more work before the exchange."""
    at = begin + slow
    return [
        ["step", "", begin, at + 10.0],
        ["forward", "", begin, at + 4.0],
        ["halo", label, at + 1.0, at + 1.5],
        ["halo", label, at + 2.0, at + 3.0],
        ["backward", "", at + 4.0, at + 8.0],
        ["sync", "sums of gradients", at + 8.0, at + 9.0],
        ["optimizer", "", at + 9.0, at + 10.0],
    ]


def _kinds(timeline: Timeline, rank: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for event in timeline.events[rank]:
        if event.lane == "device":
            found[event.kind] = found.get(event.kind, 0.0) + event.seconds
    return found


def _check_lane(timeline: Timeline) -> None:
    for rank, events in enumerate(timeline.events):
        own = [event for event in events if event.lane == "device"]
        assert all(one.end == pytest.approx(other.start) for one, other in itertools.pairwise(own))
        assert own[-1].end == pytest.approx(timeline.ends[rank])


def test_a_rank_waits_until_the_last_one_has_come_and_then_for_bytes():
    timeline = measured_timeline([[_step(100.0)], [_step(100.0, slow=1.75)]], ["fast", "slow"])
    assert timeline is not None
    _check_lane(timeline)
    assert timeline.makespan == pytest.approx(11.75)
    # the other comes at 2.75, a quarter of a second before what the first waits for ends; sums begin at 9.75
    assert timeline.seconds(0) == pytest.approx({"epoch": 10, "compute": 7.5, "halo": 1.5, "sync": 1, "wait": 1.75})
    assert timeline.seconds(1)["wait"] == 0
    assert _kinds(timeline, 0)["wait"] == pytest.approx(0.75 + 1.0)
    wires = [event for event in timeline.events[0] if event.lane == "wire"]
    assert [(event.kind, event.start) for event in wires] == [("halo", 2.75), ("sync", 9.0)]


def test_the_median_step_of_all_ranks_is_shown():
    spans = [_step(100.0 * i, slow=slow) for i, slow in enumerate((9.0, 0.0, 3.0))]
    timeline = measured_timeline([spans, spans[1:]], ["a", "b"])
    assert timeline is not None and timeline.makespan == 10.0  # the lower one of the two that both have
    assert measured_timeline([spans], ["a"]).makespan == 13.0  # type: ignore[union-attr]
    assert measured_timeline([[], spans], ["a", "b"]) is None


def test_the_last_steps_are_kept_and_what_lies_outside_of_steps_is_not():
    watch = StepWatch(10.0, torch.device("cpu"))
    for number in range(20):
        begin = 20.0 + number
        watch.note("halo", "evaluation", begin - 0.2, begin - 0.1)
        watch.note("forward", "", begin, begin + 0.5)
        watch.note("step", "", begin, begin + 0.6)
    steps = watch.steps()
    assert len(steps) == 9
    assert steps[-1] == [["step", "", pytest.approx(29.0), pytest.approx(29.6)], ["forward", "", 29.0, 29.5]]


@pytest.mark.usefixtures("forked_workers")
def test_a_run_shows_when_its_workers_exchange_and_is_the_same_as_any_other():
    graph = load("digits")
    how = {"workers": 2, "shares": (0.7, 0.3), "epochs": 6, "check": False, "device": "cpu"}
    results = []
    for timeline in (True, False):
        torch.manual_seed(0)
        model = nugnn.GNN("gcn", graph.features.shape[1], graph.num_classes, hidden=8, layers=2)
        results.append(nugnn.fit(model, graph, timeline=timeline, **how))
    watched, plain = results
    assert [epoch.loss for epoch in watched.history] == [epoch.loss for epoch in plain.history]
    assert plain.timeline is None
    timeline = watched.timeline
    assert timeline is not None and timeline.names == ("cpu", "cpu")
    _check_lane(timeline)
    names = {event.name for event in timeline.events[0] if event.lane == "wire"}
    assert {"layers.0/spmm", "gradient of layers.1/spmm", "sums of gradients"} <= names
    for rank in (0, 1):
        told = timeline.seconds(rank)
        assert 0 < told["halo"] and 0 < told["sync"] and told["compute"] > 0
    longest = max(epoch.seconds["epoch"] for epoch in watched.history)  # of rank 0, from its own start
    assert timeline.ends[0] - timeline.events[0][0].start <= longest
    assert picture(timeline).splitlines()[0].startswith("rank 0 cpu |")


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_steps_of_a_gpu_are_timed_on_the_gpu_whether_they_are_recorded_or_not(cuda_graphs):
    torch.manual_seed(0)
    samples = torch.utils.data.TensorDataset(torch.randn(512, 30), torch.randint(5, (512,)))
    how = {"epochs": 5, "batch_size": 128, "device": "cuda", "check": False, "cuda_graphs": cuda_graphs}
    result = nugnn.fit(MLP(30, 5, hidden=64, layers=3), samples, val=samples, timeline=True, **how)
    timeline = result.timeline
    assert timeline is not None
    _check_lane(timeline)
    phases = {event.phase: event.seconds for event in timeline.events[0] if event.lane == "device"}
    assert {"forward", "backward", "optimizer"} <= phases.keys()
    assert all(seconds > 0 for seconds in phases.values())
    assert timeline.makespan <= max(epoch.seconds["epoch"] for epoch in result.history)


def test_a_watch_of_one_rank_needs_nobody():
    ranks = Ranks()
    watch = StepWatch.of(ranks)
    with ranks.clock.phase("forward", ranks.device), ranks.clock.measure("halo", ranks.device, "x"):
        pass
    assert watch.steps() == []
    assert ranks.clock.take()[0] > 0
