"""What the benchmark of unequal GPUs makes of its measurements."""

from __future__ import annotations

import pytest
from harness import Timing
from unequal_gpus import Alone, bound_ms, figures, work_of

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
