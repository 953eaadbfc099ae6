"""Computing beside sums lasts longer by what they take while it runs, and by nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.cores_taken import CoresTaken

SOME = st.floats(0, 4)


@given(sums=st.lists(st.tuples(SOME, SOME, SOME), max_size=6), computing=st.lists(st.tuples(SOME, SOME), max_size=8))
def test_computing_loses_the_part_of_the_time_that_sums_take(
    sums: list[tuple[float, float, float]], computing: list[tuple[float, float]]
) -> None:
    taken, now, parts = CoresTaken(), 0.0, []
    for pause, lasting, part in sums:
        begin, now = now + pause, now + pause + lasting
        taken.add(begin, now, part * lasting)
        parts.append((begin, now, min(part, 1.0)))
    at = 0.0
    for pause, alone in computing:
        start = at + pause
        took = taken.seconds(start, alone)
        at = start + took
        lost = sum(part * max(min(at, end) - max(start, begin), 0.0) for begin, end, part in parts)
        assert took == pytest.approx(alone + lost, abs=1e-9)
        assert took >= alone - 1e-9


def test_sums_beside_each_other_are_refused() -> None:
    taken = CoresTaken()
    taken.add(1.0, 5.0, 1.0)
    with pytest.raises(AssertionError, match=r"begins at 2.0, within \(1.0, 5.0"):
        taken.add(2.0, 3.0, 0.5)
    taken.add(5.0, 6.0, 0.5)
