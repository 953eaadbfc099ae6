"""What computing takes longer after a rest: found from timed steps, and replayed."""

from __future__ import annotations

import math
import random

import pytest
import torch

from nugnn.networks import MLP
from nugnn.planning.after_rest import LONG_REST, SHORT_REST, AfterRest, RestedStep, Rests, after_rest_of
from nugnn.planning.links import Links
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.predicted_work import DeviceWork, PredictedWork
from nugnn.planning.replay import replay, replay_parts
from nugnn.planning.step_laps import StepLaps
from nugnn.planning.timeline import Timeline
from nugnn.timed_place import Place
from nugnn.traced_step import sample_trainer
from step_traces import LinearTimes, graph_trace, sample_trace

CONSTANT = 4e-3
BATCH = PartSizes(batch=64)


def _part(rest: float, constant: float = CONSTANT) -> float:
    return 1 - math.exp(-rest / constant)


def _laps(step: float, most: float, noise: float = 0.0, count: int = 9, lost: float = 0.0) -> StepLaps:
    """Steps that lose ``most`` to a rest, each ``noise`` times a random number longer."""
    draw = random.Random(int(1e6 * step))
    seconds = [step + lost, *(step + most * _part(rest) for rest in (0.0, SHORT_REST, LONG_REST))]
    whole, none, short, long = (tuple(x + noise * draw.gauss(0, 1) for _ in range(count)) for x in seconds)
    return StepLaps(("a",), ((step,),) * count, whole, whole, none, short, long)


def _times(most: float, seconds_of_byte: float = 1e-9) -> LinearTimes:
    times = LinearTimes(seconds_of_byte, 2e-6)
    if most:
        times.after_rest = AfterRest(constant_seconds=CONSTANT, steps=(RestedStep(seconds=1e-3, most_seconds=most),))
    return times


def _steps(times: list[LinearTimes], links: Links, **how: object) -> Timeline:
    return replay([sample_trace().at(BATCH)] * len(times), times, links, **how)


def test_what_steps_lose_and_how_quickly_is_found_again():
    found = after_rest_of([_laps(5e-3, 8e-4), _laps(2e-3, 1.2e-3)])
    assert found is not None and found.constant_seconds == pytest.approx(CONSTANT, rel=1e-3)
    assert [(each.seconds, pytest.approx(each.most_seconds, rel=1e-3)) for each in found.steps] == [
        (2e-3, 1.2e-3),
        (5e-3, 8e-4),
    ]


def test_what_steps_that_follow_others_have_lost_already_is_not_lost_again():
    found = after_rest_of([_laps(2e-3, 1e-3, lost=3e-4)])
    assert found is not None and found.constant_seconds == pytest.approx(CONSTANT, rel=1e-3)
    assert found.most_and_lost(1.0) == pytest.approx((1e-3, 3e-4), rel=1e-3)
    rests = Rests.of_step(found, 1.0)
    rests.add(1e-4)
    assert rests.lost() == 0
    rests.add(LONG_REST)
    assert rests.lost() == pytest.approx(1e-3 * _part(LONG_REST) - 3e-4, rel=1e-3)
    rests.begin_step()
    rests.add(LONG_REST)
    assert rests.lost() == pytest.approx(1e-3 * _part(LONG_REST) - 3e-4, rel=1e-3)


def test_what_is_within_noise_is_not_taken_for_a_loss():
    quiet, loud = _laps(2e-3, 1e-3, noise=1e-5), _laps(9e-2, 1e-3, noise=2e-2)
    found = after_rest_of([quiet, loud])
    assert found is not None and found.constant_seconds == pytest.approx(CONSTANT, rel=0.1)
    first, second = found.steps
    assert [first.most_seconds, second.most_seconds] == pytest.approx([1e-3, 1e-3], rel=0.1)
    assert after_rest_of([_laps(2e-3, 0.0)]) is None
    assert after_rest_of([_laps(2e-3, -1e-3)]) is None  # quicker after a rest is noise
    assert after_rest_of([StepLaps(("a",), ((1e-3,),), (1e-3,), (1e-3,))]) is None


def test_a_step_loses_what_its_rest_takes_and_no_more_than_its_most():
    links, most = Links.equal(2, 1e8, 1e-4), 1e-3
    warm, cold = (_steps([_times(each)] * 2, links, sums_in_backward=False) for each in (0.0, most))
    lost = cold.makespan - warm.makespan
    waited = warm.seconds(0)["sync"]
    assert lost == pytest.approx(most * _part(waited)) and 0 < lost < most
    assert cold.seconds(0)["compute"] == pytest.approx(warm.seconds(0)["compute"] + lost)
    several = [_steps([_times(each)] * 2, links, sums_in_backward=False, num_steps=3).makespan for each in (0.0, most)]
    assert several[1] - several[0] == pytest.approx(3 * lost)  # each step fills its caches again


def test_who_waits_for_a_slower_rank_is_the_one_that_loses():
    links = Links.equal(2, math.inf)
    slow, fast = _times(5e-3, 2e-7), _times(5e-3)
    timeline = _steps([slow, fast], links, sums_in_backward=False)
    warm = _steps([_times(0, 2e-7), _times(0)], links, sums_in_backward=False)
    waited, lost = (
        warm.seconds(1)["sync"],
        timeline.seconds(1)["compute"] - warm.seconds(1)["compute"],
    )
    assert lost == pytest.approx(5e-3 * _part(waited), rel=1e-6)
    assert timeline.seconds(0)["compute"] == pytest.approx(warm.seconds(0)["compute"])


@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e10])
def test_the_work_model_loses_what_a_replay_of_equal_ranks_does(bandwidth):
    links, times = Links.equal(2, bandwidth, 1e-4), _times(1e-3)
    for trace, sizes in (
        (sample_trace(), BATCH),
        (graph_trace("gcn"), PartSizes(inner=5000, halo=1000, edges=60_000, train=900, sent=1000)),
    ):
        work = PredictedWork([DeviceWork(trace, times)] * 2, links)
        timeline = replay([trace.at(sizes)] * 2, [times] * 2, links)
        assert work.seconds(0, sizes) == pytest.approx(timeline.makespan, rel=1e-9)
        assert replay_parts(work, [sizes] * 2).makespan == pytest.approx(timeline.makespan, rel=1e-9)
        warm = PredictedWork([DeviceWork(trace, _times(0))] * 2, links)
        assert work.seconds(0, sizes) > warm.seconds(0, sizes)
        assert work.computing().seconds(0, sizes) == warm.computing().seconds(0, sizes)


def test_a_table_keeps_it_and_takes_it_from_the_first_that_knows():
    after = AfterRest(constant_seconds=CONSTANT, steps=(RestedStep(seconds=1e-3, most_seconds=5e-4),))
    entry = {"kind": "copy", "op": "a", "points": [{"rest": 1, "seconds": 1}]}
    how = {"schema": "nugnn.times/1", "device": "a CPU", "kind": "cpu", "operators": [entry], "multiprocessors": 2}
    without = MeasuredTimes.model_validate(how)
    table = MeasuredTimes.model_validate({**how, "after_rest": after.model_dump()})
    assert MeasuredTimes.model_validate_json(table.to_json()).after_rest == after
    assert without.after_rest is None and without.joined([table]).after_rest == after
    other = AfterRest(constant_seconds=CONSTANT, steps=(RestedStep(seconds=1e-3, most_seconds=9e-4),))
    assert table.joined([table.model_copy(update={"after_rest": other})]).after_rest == after


def test_steps_are_timed_after_both_rests_unless_they_are_long():
    torch.manual_seed(0)
    trainer = sample_trainer(MLP(8, 3, hidden=8, layers=2), [torch.zeros(8)], BATCH, num_classes=3, ranks=2)
    place = Place(trainer, BATCH)
    place.warm_up()
    place.time_whole()
    for _ in range(2):
        place.time_rested()
    laps = place.laps
    assert [len(x) for x in (laps.after_no_rest, laps.after_short_rest, laps.after_long_rest)] == [2, 2, 2]
    ticks = iter(range(1000))
    slow = Place(trainer, BATCH, now=lambda: float(next(ticks)))
    slow.time_whole()
    slow.time_rested()
    assert slow.laps.after_short_rest == slow.laps.after_long_rest == ()
