"""What the benchmark of unequal GPUs makes of its measurements."""

from __future__ import annotations

import pytest
from harness import Timing
from unequal_gpus import Alone, bound_ms, corrected, figures, halo_bound_ms, verdict, work_of

from nugnn.planning.part_sizes import PartSizes

FAST, SLOW = Alone(30.0, 18.0, 1000, 40_000, 20_000), Alone(120.0, 70.0, 1000, 40_000, 20_000)


def test_costs_give_back_what_was_measured() -> None:
    work = work_of([FAST, SLOW], 1e-6)
    for part, alone in enumerate((FAST, SLOW)):
        assert 1e3 * work.seconds(part, PartSizes(1000, 40_000)) == pytest.approx(alone.whole_ms)
        assert 1e3 * work.seconds(part, PartSizes(1000, 20_000)) == pytest.approx(alone.thin_ms)
        travelling = work.seconds(part, PartSizes(1000, 40_000, halo=30, sent=20)) - alone.whole_ms / 1e3
        assert travelling == pytest.approx(50e-6)


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


def test_a_corrected_model_takes_the_seconds_that_were_seen():
    sizes = (PartSizes(inner=60, edges=900, halo=10, sent=8), PartSizes(inner=40, edges=600, halo=8, sent=10))
    work = corrected(work_of([FAST, SLOW], 1e-6), sizes, [0.5, 0.25])
    assert [work.seconds(part, size) for part, size in enumerate(sizes)] == pytest.approx([0.5, 0.25])
