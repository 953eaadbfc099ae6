"""Sums of what travels encoded: the same bits everywhere, the errors of two roundings, nothing lost without a trace."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nugnn.comm.compression.layout import Layout
from nugnn.comm.compression.link import Link
from nugnn.comm.compression.reduction import Rounding, sum_encoded
from nugnn.comm.compression.wire import WIRES, Wire
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks

_NEAREST, _STOCHASTIC = Rounding(), Rounding(seed=7, step=3)


def _summands(num_ranks: int, size: int) -> Tensor:
    return torch.randn(num_ranks, size, generator=torch.Generator().manual_seed(size))


def _layout(sizes: list[int], name: str, num_ranks: int, num_slices: int) -> Layout:
    wires = [Wire(name if size > 5 else "fp32", bucket=64) for size in sizes]
    return Layout(sizes, wires, range(len(sizes)), num_ranks * num_slices)


def _sum(
    ranks: Ranks, summands: Tensor, sizes: list[int], name: str, rounding: Rounding, num_slices: int = 1
) -> tuple[Any, ...]:
    layout, link = _layout(sizes, name, ranks.world_size, num_slices), Link.of(ranks)
    values = summands[ranks.rank].clone()
    rest = torch.full_like(values, torch.nan)
    sum_encoded(values, layout, link, rounding, rest=rest)
    return values, rest, link.sent_bytes


@pytest.mark.parametrize(
    ("num_ranks", "nearest", "stochastic"), [(2, 0.155, 0.219), (4, 0.166, 0.236), (8, 0.173, 0.244)]
)
def test_error_of_two_roundings_whatever_the_number_of_ranks(num_ranks: int, nearest: float, stochastic: float) -> None:
    """The published figures for 4 bits and buckets of 1024 Gaussian values."""
    size = 1 << 18
    summands = _summands(num_ranks, size)
    exact = summands.sum(0)
    for rounding, expected in ((_NEAREST, nearest), (_STOCHASTIC, stochastic)):

        def run(ranks: Ranks, rounding: Rounding = rounding) -> Tensor:
            layout = Layout([size], [Wire("4bit", 1024)], [0], num_ranks)
            values = summands[ranks.rank].clone()
            sum_encoded(values, layout, Link.of(ranks), rounding)
            return values

        out = run_local_ranks(num_ranks, run)[0]
        assert float((out - exact).norm() / exact.norm()) == pytest.approx(expected, rel=0.02)


def _on_gloo(ranks: Ranks) -> list[tuple[Any, ...]]:
    found = []
    for sizes in ([], [0], [1], [6, 0, 1000], [65, 3, 257, 1], [7] * 9):
        summands = _summands(ranks.world_size, sum(sizes))
        for name in ("fp32", "bf16", "fp16", "8bit", "3bit", "1bit"):
            for rounding, num_slices in itertools.product((_NEAREST, _STOCHASTIC), (1, 3)):
                result = _sum(ranks, summands, sizes, name, rounding, num_slices)
                found.append((sizes, name, num_slices, summands, *result))
    return found


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_every_rank_has_the_same_bits_and_rests_make_up_for_the_error(ranks: Any, num_ranks: int) -> None:
    for results in zip(*ranks.run(num_ranks, _on_gloo), strict=True):
        sizes, name, num_slices, summands, first = results[0][:5]
        assert all(torch.equal(first, out) for *_, out, _, _ in results)
        kept = sum(rest.double() for *_, rest, _ in results)
        error = (first.double() + kept - summands.double().sum(0)).abs()
        # P - 1 additions and P + 1 subtractions in float32, of values below 2 P max
        assert error.numel() == 0 or float(error.max()) <= 2 * num_ranks * 2.0**-24 * 2 * num_ranks * float(
            summands.abs().max()
        )
        slices = [piece.chunk_bytes for piece in _layout(sizes, name, num_ranks, num_slices).pieces(num_slices)]
        for rank, result in enumerate(results):  # to each other its chunk, and one's own, padded, to each other
            sent = [sum(chunks) - chunks[rank] + (num_ranks - 1) * max(chunks) for chunks in slices]
            assert result[-1] == sum(sent)


def test_summands_are_added_in_the_order_of_ranks() -> None:
    """Whoever owns them: float32 sums of four values in another order are others."""
    summands = _summands(4, 1000)
    in_order = functools.reduce(torch.add, summands)
    assert not torch.equal(in_order, functools.reduce(torch.add, summands.flip(0)))
    for num_slices in (1, 3):

        def run(ranks: Ranks, num_slices: int = num_slices) -> Tensor:
            return _sum(ranks, summands, [1000], "fp32", _NEAREST, num_slices)[0]

        assert all(torch.equal(out, in_order) for out in run_local_ranks(4, run))


def test_what_is_drawn_depends_on_seed_and_step_alone() -> None:
    summands = _summands(3, 1000)
    roundings = [Rounding(7, 3), Rounding(7, 3), Rounding(7, 4), Rounding(8, 3), Rounding()]

    def run(ranks: Ranks) -> list[Tensor]:
        return [_sum(ranks, summands, [1000], "4bit", rounding)[0] for rounding in roundings]

    before = torch.get_rng_state()
    results = run_local_ranks(3, run)
    assert torch.equal(torch.get_rng_state(), before)
    for first, again, *others in results:
        assert torch.equal(first, again)
        assert not any(torch.equal(a, b) for a, b in itertools.combinations([first, *others], 2))


def test_threads_and_processes_make_the_same_bits(ranks: Any) -> None:
    for a, b in zip(run_local_ranks(3, _on_gloo)[1], ranks.run(3, _on_gloo)[1], strict=True):
        assert torch.equal(a[4], b[4]) and torch.equal(a[5], b[5])


def test_what_is_not_finite_on_one_rank_is_nan_on_all() -> None:
    for name in WIRES:
        for bad in (math.nan, math.inf, -math.inf):
            for rank in range(3):
                summands = torch.ones(3, 300)
                summands[rank, 100] = bad

                def run(ranks: Ranks, summands: Tensor = summands, name: str = name) -> tuple[Any, ...]:
                    return _sum(ranks, summands, [300], name, _NEAREST)

                for out, *_ in run_local_ranks(3, run):
                    assert not torch.isfinite(out[100]) and torch.equal(out[:64], torch.full((64,), 3.0))


def test_a_sum_that_overflows_is_seen_by_all() -> None:
    """Finite everywhere, and their sum is not."""

    def run(ranks: Ranks) -> Tensor:
        return _sum(ranks, torch.full((4, 64), 1.2e38), [64], "4bit", _NEAREST)[0]

    assert all(torch.isnan(out).all() or torch.isinf(out).all() for out in run_local_ranks(4, run))


def test_comm_01_mean_of_four_gradients_of_30_000_in_16_bits() -> None:
    def run(ranks: Ranks) -> Tensor:
        return _sum(ranks, torch.full((4, 100), 30_000.0), [100], "fp16", _NEAREST)[0] / 4

    assert all(torch.equal(out, torch.full((100,), 30_000.0)) for out in run_local_ranks(4, run))


class _Diary:
    """A process group that notes when an exchange begins and when it is waited for; one rank."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def _begin(self, what: str, received: Tensor, sent: Tensor) -> _Diary:
        received.copy_(sent[: len(received)])
        self.said.append(what)
        return self

    def alltoall_base(self, received: Tensor, sent: Tensor, *_: Any) -> _Diary:
        return self._begin("send", received, sent)

    def _allgather_base(self, received: Tensor, sent: Tensor) -> _Diary:
        return self._begin("gather", received, sent)

    def wait(self) -> None:
        self.said.append("wait")


def test_one_slice_travels_while_the_next_is_encoded() -> None:
    diary, values = _Diary(), torch.randn(900, generator=torch.Generator().manual_seed(0))
    out, rest = values.clone(), torch.empty_like(values)
    sum_encoded(out, _layout([900], "4bit", 1, 3), Link(0, 1, diary), _NEAREST, rest=rest)
    assert float((out + rest - values).abs().max()) <= 2.0**-24 * 8  # a subtraction and an addition, of values below 4
    assert " ".join(diary.said) == "send send wait gather send wait gather wait wait gather wait wait"
