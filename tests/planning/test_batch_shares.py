"""Divided batches are as fast as any division is, keep to memories, and lose no sample."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.batch_shares import fastest_split, split_by_shares
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.part_sizes import PartSizes

positive = st.floats(0.01, 100)


class Affine:
    """Seconds and bytes ``a + b * samples`` for each device."""

    def __init__(self, seconds: list[tuple[float, float]], bytes: list[float] | None = None) -> None:
        self._seconds, self._bytes = seconds, bytes or [1.0] * len(seconds)

    def seconds(self, part: int, sizes: PartSizes) -> float:
        fixed, each = self._seconds[part]
        return fixed + each * sizes.batch

    def bytes(self, part: int, sizes: PartSizes) -> int:
        return math.ceil(self._bytes[part] * sizes.batch)


@given(
    st.lists(st.tuples(st.floats(0, 10), positive), min_size=1, max_size=3),
    st.integers(3, 14),
    st.lists(st.integers(1, 14), min_size=3, max_size=3),
)
def test_no_division_is_faster(seconds: list[tuple[float, float]], batch: int, room: list[int]) -> None:
    work, count = Affine(seconds), len(seconds)
    limits = [float(room[rank]) for rank in range(count)]
    every = itertools.product(range(1, batch + 1), repeat=count - 1)
    fitting = [
        split
        for rest in every
        if (split := (*rest, batch - sum(rest)))[-1] >= 1 and all(n <= m for n, m in zip(split, limits, strict=True))
    ]

    def slowest(split: tuple[int, ...]) -> float:
        return max(work.seconds(rank, PartSizes(batch=n)) for rank, n in enumerate(split))

    if not fitting:
        with pytest.raises(DoesNotFitError, match="does not fit: the devices together hold"):
            fastest_split(work, batch, limits)
        return
    found = fastest_split(work, batch, limits)
    assert sum(found) == batch and min(found) >= 1
    assert all(n <= m for n, m in zip(found, limits, strict=True))
    assert slowest(found) <= min(map(slowest, fitting)) * (1 + 1e-12)


@given(st.integers(1, 500), st.lists(positive, min_size=1, max_size=8))
def test_split_by_shares_loses_nothing(batch: int, shares: list[float]) -> None:
    if batch < len(shares):
        with pytest.raises(ValueError, match="each needs at least one"):
            split_by_shares(batch, shares)
        return
    split = split_by_shares(batch, shares)
    assert sum(split) == batch and min(split) >= 1
    if min(batch * share / sum(shares) for share in shares) >= 1:
        assert all(abs(n - batch * s / sum(shares)) < 1 for n, s in zip(split, shares, strict=True))


def test_alike_devices_are_asked_once_and_others_are_never_better() -> None:
    asked: list[int] = []

    class Stairs(Affine):  # in steps of eight: no model of the kind that a search finds the best of
        def seconds(self, part: int, sizes: PartSizes) -> float:
            asked.append(part)
            return math.ceil(sizes.batch / 8) * (1 + part % 2)

    work = Stairs([(0, 1)] * 4)
    other = (16, 8, 16, 8)
    found = fastest_split(work, 48, [1e9] * 4, ["a", "b", "a", "b"], [other])
    assert max(work.seconds(rank, PartSizes(batch=n)) for rank, n in enumerate(found)) <= 2
    assert set(asked[:-4]) <= {0, 1}


def test_what_would_fit_is_said() -> None:
    work = Affine([(0, 1), (0, 1)], [100.0, 100.0])
    with pytest.raises(DoesNotFitError) as raised:
        fastest_split(work, 64, [1000.0, 2000.0])
    text = str(raised.value)
    assert "together hold 30 of them" in text and "--batch-size 30, or with --micro-batches 3" in text
    with pytest.raises(DoesNotFitError, match="do not hold one sample"):
        fastest_split(work, 64, [50.0, 1e9])
