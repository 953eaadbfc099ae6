"""What the benchmark of unequal GPUs makes of its measurements."""

from __future__ import annotations

import pytest
from harness import Timing
from unequal_figures import Alone, bound_ms, figures, halo_bound_ms, verdict
from unequal_gpus import correction
from unequal_steps import slowed

from nugnn.planning.datasheet import sheet_of
from nugnn.planning.links import Links
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.predicted_work import DeviceWork, PredictedWork
from step_traces import LinearTimes, graph_trace

FAST, SLOW = Alone(30.0), Alone(120.0)


def test_the_bound_is_what_both_do_together() -> None:
    assert bound_ms([FAST, FAST]) == pytest.approx(15.0) and bound_ms([FAST, SLOW]) == pytest.approx(24.0)


def test_gains_count_from_even_shares_to_the_bound() -> None:
    timings = {
        name: Timing(median, median, median, 5)
        for name, median in {"even": 60.0, "flops": 30.0, "bandwidth": 36.0, "auto": 27.0}.items()
    }
    even, auto = (figures(timings, name, [FAST, SLOW]) for name in ("even", "auto"))
    assert even["gain_share"] == 0 and even["over_bound"] == pytest.approx(2.5)
    assert auto["gain_share"] == pytest.approx(33 / 36) and auto["best_static_ratio"] == pytest.approx(30 / 27)


def test_the_bound_with_halo_is_when_both_end_if_rows_cost_time_as_well() -> None:
    sizes = (PartSizes(800, 32_000, halo=3000, sent=1000), PartSizes(200, 8_000, halo=1000, sent=3000))
    bound = halo_bound_ms([FAST, SLOW], sizes, 1e-6)
    left = [(bound - 4.0) / each.whole_ms for each in (FAST, SLOW)]  # 4000 rows of a microsecond each
    assert sum(left) == pytest.approx(1.0)
    assert halo_bound_ms([FAST, SLOW], sizes, 0.0) == bound_ms([FAST, SLOW])


def test_auto_is_held_against_the_best_other() -> None:
    samples = {"even": [60.0, 62.0, 61.0], "flops": [33.0, 36.0, 30.0], "auto": [30.0, 30.0, 30.0]}
    found = {name: {"samples_ms": each} for name, each in samples.items()}
    timings = {name: Timing(sorted(each)[1], min(each), max(each), 3) for name, each in samples.items()}
    assert verdict(found, timings).startswith(
        "best static: flops, 1.100 (1.000-1.200) times as long as auto; even 2.03"
    )


def test_a_correction_lets_both_end_together_and_leaves_what_travels_where_it_is() -> None:
    trace = graph_trace("sage")
    times = [LinearTimes(1e-9), LinearTimes(3e-9)]
    work = PredictedWork([DeviceWork(trace, each) for each in times], Links.equal(2, 1e9))
    sizes = (PartSizes(inner=700, edges=9000, halo=300, sent=200), PartSizes(inner=300, edges=4000, halo=200, sent=300))
    busy = [work.computing().seconds(0, sizes[0]), 1.5 * work.computing().seconds(1, sizes[1])]
    level = correction(work, sizes, busy)
    assert level.predicted[0] == pytest.approx(level.predicted[1])
    assert min(busy) < level.predicted[0] < max(busy) and level.given[1] > 0 > level.given[0]


def test_a_slowed_device_has_a_part_of_each_rate() -> None:
    profile = sheet_of("Tesla T4").as_profile()
    slower = slowed(profile, 4.0)
    assert slower.gemm_flops == {form: rate / 4 for form, rate in profile.gemm_flops.items()}
    assert (slower.stream_bytes, slower.pack_bytes) == (profile.stream_bytes / 4, profile.pack_bytes / 4)
