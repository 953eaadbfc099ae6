"""A rested link saves what a token bucket lets pass, and no more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.rested import Rested


@given(
    burst=st.floats(0, 5),
    exchanges=st.lists(st.tuples(st.floats(0, 4), st.floats(0, 4)), min_size=1, max_size=12),
)
def test_a_rested_link_saves_no_more_than_its_rest(burst, exchanges):
    rested, now, took, passed = Rested(burst, 1), 0.0, 0.0, 0.0
    for pause, passing in exchanges:
        now += pause
        (left,) = rested.left(now, np.array([passing]))
        assert 0 <= left <= passing and passing - left <= burst + 1e-9
        now, took, passed = now + left, took + left, passed + passing
        # over all time so far, no more than the burst and what the rate lets pass
        assert passed <= burst + now + 1e-9
    if burst == 0:
        assert took == pytest.approx(passed)


def test_a_link_that_rested_long_enough_is_as_at_the_start():
    rested = Rested(2.0, 2)
    assert rested.left(0.0, np.array([5.0, 1.0])).tolist() == [3.0, 0.0]
    assert rested.left(3.0, np.array([1.0, 1.0])).tolist() == [1.0, 0.0]
    assert rested.left(10.0, np.array([5.0, 5.0])).tolist() == [3.0, 3.0]
