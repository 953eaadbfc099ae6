"""Curves never fall, are exact where they were measured, and tell what an edge takes from what a row takes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.time_curves import Amount, Curve, edge_weight

_points = st.lists(st.tuples(st.integers(0, 10**12), st.floats(0, 1e3)), min_size=1, max_size=8)
_works = st.lists(st.integers(0, 10**14), min_size=2, max_size=20)


@given(_points, _works)
def test_seconds_are_never_negative_and_never_fall(points, works):
    curve = Curve(points)
    seconds = [curve(work) for work in sorted([*works, *(work for work, _ in points)])]
    assert seconds[0] >= 0
    assert all(b >= a * (1 - 1e-12) - 1e-300 for a, b in itertools.pairwise(seconds))


@given(st.dictionaries(st.integers(1, 10**9), st.integers(1, 10**6), min_size=1, max_size=8))
def test_points_that_do_not_fall_are_met_exactly(found):
    works, seconds = sorted(found), sorted(found.values())
    curve = Curve(list(zip(works, seconds, strict=True)))
    assert [curve(work) for work in works] == seconds


def test_points_that_fall_become_their_mean():
    curve = Curve([(10, 4.0), (20, 2.0), (30, 5.0)])
    assert [curve(work) for work in (10, 20, 30)] == [3.0, 3.0, 5.0]
    assert Curve([(10, 4.0), (10, 2.0)])(10) == 3.0


@pytest.mark.parametrize("fixed", [0.0, 3.0])
def test_seconds_that_are_straight_are_exact_beyond_the_points(fixed):
    curve = Curve([(work, fixed + 0.5 * work) for work in (10, 20, 80)])
    for work in (0, 5, 79, 1000):
        assert curve(work) == pytest.approx(fixed + 0.5 * work)


def test_more_work_than_was_measured_takes_longer_though_no_point_says_so():
    curve = Curve([(10, 1.0), (20, 1.0)])
    assert curve(40) == pytest.approx(1.5)  # half as steep as in proportion
    steep = Curve([(10, 0.0), (20, 1.0)])
    assert steep(40) == pytest.approx(2.5)  # one and a half times


def test_two_points_near_each_other_do_not_say_how_steep_it_goes_on():
    curve = Curve([(50, 5.0), (99, 9.9), (100, 12.0)])
    assert curve(200) == pytest.approx(12 + (12 - 5) / 50 * 100)


@pytest.mark.parametrize("weight", [0.25, 1.0, 2.0])
def test_what_an_edge_takes_beside_a_row_is_found(weight):
    amounts = [Amount(edges, rest) for edges, rest in ((10, 10), (20, 10), (5, 10), (40, 20), (30, 60))]
    seconds = [1e-6 + 1e-9 * a.weighed(weight) for a in amounts]
    assert edge_weight(amounts, seconds) == weight


def test_what_an_edge_takes_is_not_guessed():
    alike = [Amount(10.0 * n, 5.0 * n) for n in (1, 2, 4, 8)]
    assert edge_weight(alike, [1.0, 2.0, 4.0, 8.0]) == 1
    assert edge_weight(alike[:2], [1.0, 2.0]) == 1
    assert edge_weight([Amount(0, n) for n in (1.0, 2.0, 3.0)], [1.0, 2.0, 3.0]) == 1
