"""Runs of a seed with and without compression: the arithmetic of the interval, and of the time to an accuracy."""

from __future__ import annotations

import math
import statistics
from typing import Any

import paired_runs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paired_runs import paired_interval
from scipy import stats

points = st.floats(-5, 5)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(40, 99), points), min_size=2, max_size=40))
def test_the_interval_is_that_of_the_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    ours, plain = [a + b for a, b in pairs], [a for a, _ in pairs]
    differences = [x - y for x, y in zip(ours, plain, strict=True)]
    found = paired_interval(differences)
    assert found.num_pairs == len(pairs) and found.mean == pytest.approx(statistics.fmean(differences))
    if statistics.stdev(differences) > 1e-9:  # scipy refuses to judge samples that are all the same
        expected = stats.ttest_rel(ours, plain).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-12)
    moved = paired_interval([x + 3 for x in differences])
    assert (moved.low, moved.high) == pytest.approx((found.low + 3, found.high + 3), abs=1e-9)


def test_of_two_pairs_the_interval_has_a_closed_form() -> None:
    found = paired_interval([0.0, 1.0])  # t with one degree of freedom is Cauchy: its quantile is a tangent
    assert (found.low, found.high) == pytest.approx(
        (0.5 - 0.5 * math.tan(0.475 * math.pi), 0.5 * (1 + math.tan(0.475 * math.pi)))
    )


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, -0.1, 0.2, 0.0], "within"),
        ([-1.1, -0.9, -1.0, -1.0], "beyond"),
        ([1.1, 0.9, 1.0, 1.0], "beyond"),
        ([-2.0, 2.0, 0.0, 0.1], "open"),
        ([0.0], "open"),
        ([0.0, 0.0], "within"),
    ],
)
def test_what_an_interval_tells(differences: list[float], verdict: str) -> None:
    assert paired_interval(differences).verdict == verdict


def a_run(val: tuple[float, ...], **more: Any) -> dict[str, Any]:
    """An epoch takes half a second."""
    seconds = [0.5 * (place + 1) for place in range(len(val))]
    return {"val": list(val), "at": list(range(1, len(val) + 1)), "train_seconds": seconds} | more


def test_time_to_accuracy_counts_runs_that_never_get_there() -> None:
    plain = a_run((0.5, 0.79, 0.81, 0.8))  # 99 % of 0.8 is 0.792
    pairs = [(plain, a_run(values)) for values in ((0.8, 0.1, 0.1, 0.1), (0.1, 0.1, 0.795, 0.1), (0.1,) * 4)]
    assert paired_runs.time_to_accuracy(pairs) == (3, 1.5, 1)
    assert paired_runs.time_to_accuracy([(plain, plain)]) == (3, 1.5, 0)
    assert paired_runs.time_to_accuracy(pairs[2:]) == (math.inf, math.inf, 1)
    late = a_run((0.5, 0.5, 0.5, 0.8))  # epoch 4 and 2 s, where this seed's fp32 run took epoch 2 and 1 s
    assert paired_runs.beside_baseline([(a_run((0.5, 0.8, 0.8, 0.8)), late)]) == (2, 2)
    assert paired_runs.beside_baseline(pairs) == (1, 1)  # of 1/3, 1 and never
    other = [tuple(run | {"jobs": 1} for run in pair) for pair in pairs]
    assert paired_runs.timed_alike([*other[:1], *pairs, *other[1:]]) == other
