"""Longer epochs are told from noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.longer_epochs import longer_by

windows = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=9)


@given(before=windows, after=windows, factor=st.sampled_from([0.25, 2.0, 1024.0]))
def test_units_and_the_order_of_epochs_do_not_matter(before: list[float], after: list[float], factor: float) -> None:
    found = longer_by(before, after)
    assert longer_by(before[::-1], sorted(after)) == found
    assert longer_by([factor * s for s in before], [factor * s for s in after]) == factor * found
    assert not (found and longer_by(after, before)), "not both are longer than the other"


@given(window=windows, more=st.floats(0.0, 1.0))
def test_the_same_window_is_not_longer_and_a_far_one_is(window: list[float], more: float) -> None:
    assert longer_by(window, window) == 0.0
    # no distance from the median is above 1.5; a standard error is at most 1.86 * 1.5 * sqrt(2 / 3), four of them 9.1
    assert longer_by(window, [s + 9.2 + more for s in window]) == pytest.approx(9.2 + more)


def test_fewer_than_three_epochs_tell_nothing() -> None:
    assert longer_by([1.0, 1.0], [9.0] * 5) == longer_by([1.0] * 5, [9.0, 9.0]) == 0.0
    assert longer_by([1.0] * 3, [9.0] * 3) == 8.0


@pytest.mark.parametrize("out_of_line", [0, 2])
def test_how_often_noise_is_taken_for_more(out_of_line: int) -> None:
    rng, count = np.random.default_rng(0), 4000
    seconds = 1 + 0.05 * rng.standard_normal((count, 2, 5))
    seconds[:, 1, :out_of_line] *= 5
    found = sum(longer_by(before.tolist(), after.tolist()) > 0 for before, after in seconds)
    # 0.4 %, with three standard deviations of such a count; epochs out of line widen the noise that is seen
    assert found <= count * 0.0036 + 3 * (count * 0.0036) ** 0.5
