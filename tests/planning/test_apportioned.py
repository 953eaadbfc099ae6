"""Whole numbers by shares."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.apportioned import one_each


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_whoever_has_most_gives_the_first_of_equal_ones_first(counts: list[int]) -> None:
    expected = list(counts)
    for rank, count in enumerate(counts):
        if count == 0 and sum(counts) >= len(counts):
            expected[expected.index(max(expected))] -= 1
            expected[rank] = 1
    assert one_each(counts) == tuple(expected)
