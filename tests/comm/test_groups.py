"""Collectives over ranks with uneven rows, and their gradients."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nugnn.comm import groups
from nugnn.comm.collectives import extreme_over_ranks, gather_over_ranks, sum_over_ranks
from nugnn.comm.groups import Ranks, keeps_exchanges, leave_ranks

COUNTS = [3, 0, 5]


def _gather(ranks: Ranks, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    count = COUNTS[ranks.rank]
    rows = torch.arange(count * max(1, int(torch.tensor(shape).prod()))).view(count, *shape) + 10 * ranks.rank
    return ranks.gather_rows((rows % 2 == 0) if dtype is torch.bool else rows.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_rows_of_every_rank_in_rank_order(ranks: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    results = ranks.run(3, _gather, dtype, shape)
    for result in results:
        assert [len(part) for part in result] == COUNTS
        for part, expected in zip(result, results[0], strict=True):
            assert part.dtype == dtype and part.shape[1:] == shape and torch.equal(part, expected)


def _uses(ranks: Ranks) -> dict[str, Tensor]:
    """Each rank uses a shared value in its own share of a loss; gradients with respect to its rows."""
    count = COUNTS[ranks.rank]
    x = (torch.arange(count * 2, dtype=torch.float64).view(count, 2) + ranks.rank).requires_grad_()
    weight = float(ranks.rank + 1)
    total = sum_over_ranks(x.sum(0), ranks)
    (of_sum,) = torch.autograd.grad((total.square() * weight).sum(), x)
    rows = gather_over_ranks(x, ranks)
    (of_gather,) = torch.autograd.grad((rows.square() * weight).sum(), x)
    return {"total": total.detach(), "rows": rows.detach(), "sum": of_sum, "gather": of_gather}


def test_gradients_count_every_rank_s_use(ranks: Any) -> None:
    results = ranks.run(3, _uses)
    rows = results[0]["rows"].clone().requires_grad_()
    ((rows.sum(0).square() + 0).sum() * 6).backward()  # weights 1 + 2 + 3
    assert rows.grad is not None
    assert torch.equal(torch.cat([r["sum"] for r in results]), rows.grad)
    assert torch.equal(torch.cat([r["gather"] for r in results]), 2 * 6 * rows.detach())


def _extreme(ranks: Ranks) -> tuple[Tensor, Tensor]:
    x = torch.tensor([[1.0, 5.0, float(ranks.rank)]], dtype=torch.float64, requires_grad=True)
    priority = torch.full((1, 3), (ranks.rank + 1) % 3)  # rank 2 has the lowest
    best = extreme_over_ranks(x, priority, ranks, largest=True)
    best.sum().backward()
    assert x.grad is not None
    return best.detach(), x.grad


def test_ties_send_the_gradient_to_the_lowest_priority(ranks: Any) -> None:
    results = ranks.run(3, _extreme)
    for rank, (best, gradient) in enumerate(results):
        assert best.tolist() == [[1.0, 5.0, 2.0]]
        # every rank used the value once, so the winner's gradient is 3
        assert gradient.tolist() == ([[3.0, 3.0, 3.0]] if rank == 2 else [[0.0, 0.0, 0.0]])


def test_one_rank_needs_no_group() -> None:
    alone = Ranks()
    x = torch.ones(2, requires_grad=True)
    assert sum_over_ranks(x, alone) is x and gather_over_ranks(x, alone) is x
    assert alone.gather_rows(x)[0] is x and alone.sum_(x) is x and alone.broadcast_(x) is x and not alone.is_split


class _Recording:
    def __init__(self) -> None:
        self.graphs = ["a graph with an exchange in it"]

    def forget(self) -> None:
        self.graphs.clear()


def test_recorded_exchanges_are_given_up_when_the_ranks_are_left() -> None:
    kept, gone = _Recording(), _Recording()
    keeps_exchanges(kept)
    keeps_exchanges(gone)
    del gone
    leave_ranks(Ranks())
    assert not kept.graphs


def _waited(ranks: Ranks, folder: Path) -> list[float]:
    """What counts as a sum's time: alone, and inside a measurement.

    On rank 0 it is 0 until rank 1 comes to the sum, which it does when rank 0 has looked at the clock, and 1 from then.
    """
    found = []
    for is_nested in (False, True):
        began, came = (folder / f"{what}, {is_nested}" for what in ("began", "came"))

        def now(began: Path = began, came: Path = came) -> float:
            if ranks.rank == 0:
                began.touch()
            return float(came.exists())

        ranks.sum_(torch.zeros(1))
        ranks.clock.take()
        with mock.patch("nugnn.comm.clock.time", SimpleNamespace(perf_counter=now)):
            if ranks.rank == 1:
                while not began.exists():
                    time.sleep(0.001)
                came.touch()
            with ranks.clock.measure("sync", ranks.device) if is_nested else nullcontext():
                ranks.sum_(torch.zeros(1))
        found.append(ranks.clock.take()[1])
    return found


def test_who_waits_for_a_late_rank_is_not_computing(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, _waited, tmp_path)[0] == [1.0, 1.0], "once, also where measurements nest"


@pytest.mark.parametrize(("backend", "is_default"), [("cuda:gloo", False), ("gloo", True)])
def test_a_users_group_may_carry_tensors_of_gpus_alone(backend: str, is_default: bool) -> None:
    """As that of ``init_process_group("nccl")`` does: what ranks first tell each other lies in the host's memory."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = groups._with_the_host()
        assert (group is None) is is_default
        assert groups._of_all_ranks(7, group) == [7]
    finally:
        dist.destroy_process_group()
