"""Measured runs say how far predictions are off, never more than they know; the factor changes times and no shares."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.calibration import FEW, Calibration, StandsOn, calibrated, in_words
from nugnn.planning.plan import Baseline, DataFacts, Plan, PlannedDevice, PlannedSizes
from nugnn.planning.run_pairs import kind_of, subject_of
from nugnn.planning.timeline import Event, Timeline


@dataclass
class Run:
    subject: str
    ratio: float


RATIOS = st.floats(1e-3, 1e3)
RUNS = st.lists(st.builds(Run, st.sampled_from("abcd"), RATIOS), max_size=9)


def of_models(*ratios: float) -> list[Run]:
    return [Run(f"model {number}", ratio) for number, ratio in enumerate(ratios)]


@pytest.mark.parametrize("stands_on", ["operators", "rates", "sheets"])
def test_without_a_run_nothing_is_claimed_and_after_one_no_error_bar(stands_on: Any) -> None:
    nothing = calibrated([], stands_on, "a")
    assert (nothing.runs, nothing.factor, nothing.error_bar, nothing.told_error) == (0, None, None, None)
    assert nothing.applied_factor == 1 and "is not known: no earlier run to compare with" in in_words(nothing)
    usual = {source: "they are off by factors" in in_words(calibrated([], source)) for source in get_args(StandsOn)}
    assert usual == {"operators": False, "rates": True, "sheets": True}
    for subject, whose in (("a", "this model on this data"), ("b", "one other model")):
        one = calibrated([Run("a", 3.0)], stands_on, subject)
        assert (one.factor, one.error_bar, one.told_error, one.is_applied) == (3.0, None, None, False)
        assert f"one measured run, of {whose}, took 3 x" in in_words(one) and "is not known" in in_words(one)


def test_runs_of_other_versions_are_said_not_to_count_where_too_little_is_known_without_them() -> None:
    """Those who see them in ``nugnn calibration`` would wonder; once enough runs count they are no news."""
    were = "; 2 earlier runs were of another version of nugnn, of torch or of the predictions, and do not count"
    for known in ([], of_models(2.0), [Run("a", 2.0), Run("a", 2.5)]):
        assert in_words(calibrated(known, "operators", of_other_versions=2)).endswith(were)
        assert "earlier runs were" not in in_words(calibrated(known, "operators"))
    assert "1 earlier run was of another" in in_words(calibrated([], "operators", of_other_versions=1))
    assert "earlier run" not in in_words(calibrated(of_models(2.0, 2.5), "operators", of_other_versions=2))


@given(st.lists(RATIOS, min_size=2, max_size=8))
def test_the_error_bar_is_that_of_runs_which_did_not_set_the_factor(ratios: list[float]) -> None:
    found = calibrated(of_models(*ratios), "rates")
    assert math.log(found.factor or 0) == pytest.approx(statistics.median(map(math.log, ratios)), abs=1e-9)
    errors = []
    for left_out, measured in enumerate(ratios):  # of a prediction of 1 second
        others = [math.log(ratio) for other, ratio in enumerate(ratios) if other != left_out]
        errors.append(abs(statistics.median(others) - math.log(measured)))
    assert found.error_bar == pytest.approx(math.exp(statistics.fmean(errors)) - 1)
    without = statistics.fmean(abs(math.log(ratio)) for ratio in ratios)
    assert found.error_without == pytest.approx(math.exp(without) - 1)
    assert found.told_error == (found.error_bar if found.is_applied else found.error_without)


def test_a_perfect_predictor_has_factor_1_and_bar_0() -> None:
    found = calibrated(of_models(1.0, 1.0, 1.0, 1.0), "rates")
    assert (found.factor, found.error_bar, found.error_without, found.is_applied) == (1.0, 0.0, 0.0, False)


def test_the_factor_is_applied_where_a_few_runs_show_that_it_helps_and_never_to_timed_operators() -> None:
    for number in range(1, 5):
        assert calibrated(of_models(*[7.0] * number), "sheets").is_applied == (number >= FEW)
    assert calibrated(of_models(2.0, 2.1, 1.9), "rates").applied_factor == 2.0
    assert not calibrated(of_models(2.0, 2.1, 1.9), "operators").is_applied
    hardly = calibrated(of_models(0.621, 0.417, 0.972), "rates")  # as measured once: off by 58 %, and by 54 % with it
    assert not hardly.is_applied and (hardly.error_bar or 0) < (hardly.error_without or 0)
    contradicting = calibrated(of_models(0.01, 1.0, 1.0, 100.0), "rates")
    assert not contradicting.is_applied and contradicting.applied_factor == 1
    assert contradicting.error_bar is not None and contradicting.error_without is not None
    assert contradicting.error_bar >= contradicting.error_without
    assert in_words(contradicting).endswith("the factor is not applied")


@given(st.lists(RATIOS, min_size=2, max_size=8), st.floats(1e-2, 1e2))
def test_too_long_and_too_short_are_as_wrong_and_another_clock_changes_the_factor_alone(
    ratios: list[float], clock: float
) -> None:
    found, turned = (calibrated(of_models(*each), "rates") for each in (ratios, [1 / ratio for ratio in ratios]))
    other = calibrated(of_models(*[clock * ratio for ratio in ratios]), "rates")
    assert found.factor is not None and turned.factor == pytest.approx(1 / found.factor)
    assert other.factor == pytest.approx(clock * found.factor)
    assert found.error_bar == pytest.approx(turned.error_bar, rel=1e-6, abs=1e-9)
    assert found.error_bar == pytest.approx(other.error_bar, rel=1e-6, abs=1e-9)
    assert found.error_without == pytest.approx(turned.error_without, rel=1e-6, abs=1e-9)


@given(RUNS, st.sampled_from("abcd"))
def test_it_is_applied_only_where_it_is_closer_in_the_runs_that_are_there(runs: list[Run], subject: str) -> None:
    found = calibrated(runs, "rates", subject)
    assert found.runs == len(runs) and found.models == len({run.subject for run in runs})
    if found.is_applied:
        assert found.error_bar is not None and found.error_without is not None
        assert found.used >= FEW and math.log1p(found.error_bar) <= 0.75 * math.log1p(found.error_without)
    assert Calibration.model_validate_json(found.model_dump_json(), strict=True) == found


def test_a_model_that_is_trained_often_does_not_stand_for_others() -> None:
    often = [Run("a", 10.0)] * 6
    alone = calibrated(often, "rates", "b")
    assert (alone.used, alone.error_bar, alone.is_applied) == (1, None, False)
    assert "6 measured runs, all of one other model" in in_words(alone)
    with_others = calibrated([*often, *of_models(2.0, 2.2)], "rates", "b")
    assert with_others.factor == 2.2 and with_others.used == 3 and not with_others.of_this
    assert "8 measured runs of 3 models or data sets" in in_words(with_others)


def test_a_model_s_own_runs_alone_count_where_they_are_enough() -> None:
    others = of_models(2.0, 2.2, 2.1)
    assert not calibrated([*others, Run("a", 9.0), Run("a", 9.0)], "rates", "a").of_this
    own = calibrated([*others, *[Run("a", 9.0)] * FEW], "rates", "a")
    assert own.of_this and own.factor == 9.0 and own.error_bar == 0 and own.is_applied and own.runs == 6
    assert "3 measured runs of this model on this data took 9 x" in in_words(own)
    assert in_words(own).endswith("times here have the factor")


# plans


def device(host: str = "a", **changes: Any) -> PlannedDevice:
    values: dict[str, Any] = {
        "host": host,
        "name": "NVIDIA H200",
        "kind": "cuda",
        "uuid": "GPU-1",
        "multiprocessors": 132,
        "source": "measured",
        "share": 0.5,
        "sizes": PlannedSizes(batch=4),
        "seconds": {"compute": 0.5, "halo": 0.0, "sync": 0.125, "wait": 0.25},
        "memory_bytes": 100,
        "memory_limit_bytes": 1000,
    }
    return PlannedDevice(**{**values, **changes})


def plan(*devices: PlannedDevice, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "family": "samples",
        "shares_by": "auto",
        "devices": devices or (device(), device(uuid="GPU-2", sms=32)),
        "step_seconds": 0.875,
        "steps_per_epoch": 10,
        "baselines": (Baseline(name="even", shares=(0.5, 0.5), step_seconds=1.5, fits=True),),
        "halo": "none",
        "data": DataFacts(name="eight", samples=80, classes=2),
        "model": {"class": "MLP", "parameters": 10},
        "settings": {"precision": "fp32", "batch_size": 8},
        "stands_on": "rates",
        "rates": "0123",
        "versions": {"nugnn": "1", "torch": "2"},
    }
    return Plan(**{**values, **changes})


def test_a_factor_changes_times_and_nothing_else() -> None:
    applied = plan(calibration=calibrated(of_models(4.0, 4.0, 4.0), "rates"))
    told = applied.corrected()
    assert told.epoch_seconds == 4 * applied.epoch_seconds == 35.0
    assert told.baselines[0].step_seconds == 6.0
    for before, after in zip(applied.devices, told.devices, strict=True):
        assert after.seconds == {kind: 4 * seconds for kind, seconds in before.seconds.items()}
        assert after.model_copy(update={"seconds": before.seconds}) == before
    assert told.shares == applied.shares and told.batch_split == applied.batch_split
    for known in (None, calibrated([], "rates"), calibrated(of_models(4.0, 4.0, 4.0), "operators")):
        as_it_is = plan(calibration=known)
        assert as_it_is.corrected() is as_it_is
    assert applied.compute_and_exchanges(applied.devices[0]) == (5.0, 3.75)


def test_a_stretched_timeline_has_the_same_parts() -> None:
    event = Event(name="x", kind="product", phase="forward", lane="device", start=1.0, seconds=2.0)
    once = Timeline(("a", "b"), ((event,), ()), (3.0, 4.0))
    thrice = once.stretched(3.0)
    assert thrice.makespan == 12.0 and thrice.events[0][0].start == 3.0 and thrice.events[0][0].end == 9.0
    assert [thrice.idle_share(rank) for rank in (0, 1)] == [once.idle_share(rank) for rank in (0, 1)]


def test_predictions_are_of_one_kind_on_the_same_devices_from_the_same_rates_by_the_same_code_alone() -> None:
    one, other = device(), device(uuid="GPU-2", sms=32)
    kind = kind_of(plan(one, other))
    assert kind is not None and kind.devices == (("GPU-1, 132 multiprocessors", "GPU-2, 132 multiprocessors, sms=32"),)
    assert kind_of(plan(other, one)) == kind  # in whatever order
    others = [
        plan(one, device(uuid="GPU-3", sms=32)),
        plan(one, device(uuid="GPU-2", sms=64)),
        plan(one, device(uuid="GPU-2")),
        plan(one, other.model_copy(update={"host": "b"})),
        plan(one.model_copy(update={"share": 1.0, "sizes": PlannedSizes(batch=8)}), baselines=()),
        plan(one, other, stands_on="sheets"),
        plan(one, other, rates="4567"),
        plan(one, other, settings={"precision": "bf16", "batch_size": 8}),
        plan(one, other, versions={"nugnn": "2", "torch": "2"}),
    ]
    keys = [found.key for found in map(kind_of, others) if found is not None]
    assert len({kind.key, *keys}) == 1 + len(others)
    assert kind_of(plan(stands_on=None)) is None


def test_what_a_plan_is_for_has_a_key_whatever_its_devices() -> None:
    subject = subject_of(plan())
    assert subject_of(plan(device(share=1.0, sizes=PlannedSizes(batch=8)), baselines=(), rates=None)) == subject
    renamed = DataFacts(name="the same", samples=80, classes=2)
    assert subject_of(plan(data=renamed)) == subject
    others = [
        plan(data=DataFacts(name="eight", samples=81, classes=2)),
        plan(model={"class": "MLP", "parameters": 11}),
        plan(settings={"precision": "fp32", "batch_size": 16}),
    ]
    assert len({subject, *map(subject_of, others)}) == 4 and math.isclose(plan().epoch_seconds, 8.75)
