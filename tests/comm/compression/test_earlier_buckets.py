"""Buckets of a run before: each gradient is summed once, with its neighbours of then, and comes back to its place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nugnn.comm.compression.earlier_buckets import Bucket, EarlierBuckets
from nugnn.comm.compression.residuals import Order

SIZES = {"a": 1, "b": 3, "c": 0, "d": 5, "e": 2}


def held(names: Sequence[str], dtype: torch.dtype = torch.float32) -> Bucket:
    """Gradients that say whose they are; their sums go to a tensor of ``dtype``."""
    values = torch.cat([torch.full((SIZES[name],), float(ord(name))) for name in names])
    target = values if dtype == torch.float32 else values.to(dtype)
    return Bucket(values, [*names], [[ord(name)] for name in names], [SIZES[name] for name in names], target)


def cut(names: Sequence[str], places: Sequence[int]) -> list[list[str]]:
    """Into stretches that are not empty."""
    ends = sorted({0, len(names), *places})
    return [[*names[begin:end]] for begin, end in pairwise(ends)]


orders = st.permutations(sorted(SIZES))
places = st.lists(st.integers(1, len(SIZES) - 1), max_size=3)


@given(orders, places, orders, places, st.sampled_from([torch.float32, torch.bfloat16]))
def test_sums_are_made_in_the_earlier_buckets(
    now: list[str], cuts_now: list[int], then: list[str], cuts_then: list[int], dtype: torch.dtype
) -> None:
    seen: list[list[str]] = []

    def twice(values: Tensor, names: Sequence[str], of_each: Sequence[Order]) -> None:
        assert [*of_each] == [[ord(name)] for name in names]
        assert torch.equal(values, held(names).values)
        seen.append([*names])
        values.mul_(2)

    earlier, buckets = EarlierBuckets(cut(then, cuts_then)), [held(names, dtype) for names in cut(now, cuts_now)]
    for bucket in buckets:
        earlier.hold(bucket)
    assert earlier.sum_(twice) == seen == cut(then, cuts_then)
    for bucket in buckets:
        assert bucket.target.dtype == dtype and torch.equal(bucket.target, (2 * held(bucket.names).values).to(dtype))


@pytest.mark.parametrize("then", [["a", "b"], ["a", "b", "d", "e"], ["a", "a", "d"]])
def test_buckets_with_other_gradients_are_summed_as_they_came(then: list[str]) -> None:
    seen: list[list[str]] = []
    earlier = EarlierBuckets([then])
    earlier.hold(held(["b", "a"]))
    earlier.hold(held(["d"]))
    assert earlier.sum_(lambda values, names, _: seen.append([*names])) == seen == [["b", "a"], ["d"]]


def test_what_a_step_left_that_failed_is_not_summed_in_the_next() -> None:
    earlier, seen = EarlierBuckets([["a"]]), []
    earlier.hold(held(["a"]))
    earlier.forget()
    earlier.hold(held(["a"]))
    earlier.sum_(lambda values, names, _: seen.append([*names]))
    assert seen == [["a"]]


def test_buckets_count_for_as_many_steps_as_they_are_told() -> None:
    earlier, done = EarlierBuckets([["a"]], num_steps=2), []
    for _ in range(2):
        done.append(earlier.is_done)
        earlier.hold(held(["a"]))
        earlier.sum_(lambda *_: None)
    assert [*done, earlier.is_done] == [False, False, True]
