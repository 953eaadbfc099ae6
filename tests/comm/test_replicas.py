"""One number for each tensor tells replicas apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nugnn.comm import replicas
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.comm.replicas import fingerprint, first_difference

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_bit_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(replicas, "_BLOCK", 7)
    x = (torch.randn(5, 6, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    seen = {int(fingerprint(x))}
    for i in range(30):
        y = x.clone()
        bits = y.view(-1).view(torch.uint8)
        bits[i * y.element_size()] ^= 1
        seen.add(int(fingerprint(y)))
    assert len(seen) == 31
    assert int(fingerprint(x.t().contiguous().t())) == int(fingerprint(x))  # wherever its values lie


@given(st.integers(0, 40), st.integers(0, 39), st.integers(0, 39))
def test_places_count(size: int, i: int, j: int) -> None:
    x = torch.arange(float(size))
    if i < size and j < size and i != j:
        y = x.clone()
        y[[i, j]] = x[[j, i]]
        assert int(fingerprint(x)) != int(fingerprint(y))
    assert int(fingerprint(x)) == int(fingerprint(x.clone()))


def test_zeros_of_both_signs_and_nans_are_told_apart() -> None:
    assert int(fingerprint(torch.tensor([0.0]))) != int(fingerprint(torch.tensor([-0.0])))
    assert int(fingerprint(torch.tensor([torch.nan]))) == int(fingerprint(torch.tensor([torch.nan])))


def test_the_first_tensor_that_differs_is_named_on_all_ranks() -> None:
    def run(ranks: Ranks) -> list[str | None]:
        named: dict[str, Tensor] = {name: torch.arange(9.0) for name in "abcd"} | {"e": torch.zeros(0)}
        answers = [first_difference(named, ranks.max_), first_difference({}, ranks.max_)]
        named["c"][3] += ranks.rank == 2
        named["d"][0] += ranks.rank
        return [*answers, first_difference(named, ranks.max_)]

    assert run_local_ranks(3, run) == [[None, None, "c"]] * 3
