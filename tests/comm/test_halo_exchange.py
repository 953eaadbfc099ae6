"""Halo rows arrive, gradients return, any type passes unchanged, and a stall says who was waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nugnn.comm.clock import CommClock
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_exchange import add_home, fetch_halo, max_home
from nugnn.comm.halo_transfer import HaloExchangeError, HaloPlan
from nugnn.comm.local_ranks import run_local_ranks
from shard_calls import make_data, shard_of

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def _plan(ranks: Ranks, send: list[list[int]], rows: int) -> HaloPlan:
    """``send[a][b]``: how many of its first rows rank a sends to rank b."""
    mine = send[ranks.rank]
    return HaloPlan(
        rows,
        torch.cat([torch.arange(count) for count in mine]),
        tuple(mine),
        tuple(counts[ranks.rank] for counts in send),
        ranks,
    )


def _copies(ranks: Ranks, dtypes: list[torch.dtype]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Rows fetched of every type, and what they should be, from global ids alone."""
    graph = shard_of(ranks, make_data())
    plan = graph.index.plan
    ids = fetch_halo(graph.global_node_ids, plan)
    results = {}
    for dtype in dtypes:

        def values(node: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            wide = torch.stack([node * 7 + 2**53 + 1, node % 2, -node, node * 3], 1)
            wide = wide if dtype is torch.int64 else wide % 200
            return wide.to(dtype).view(len(node), 2, 2)

        results[str(dtype)] = (fetch_halo(values(graph.global_node_ids), plan), values(ids))
    return results


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_kernels_10_any_type_travels_unchanged(ranks: Any, num_parts: int) -> None:
    for result in ranks.run(num_parts, _copies, DTYPES):
        for name, (got, expected) in result.items():
            assert got.dtype == expected.dtype and torch.equal(got, expected), name


def _adjoint(ranks: Ranks) -> tuple[float, float, bool]:
    """``<fetch(x), y>`` and ``<x, add_home(y)>``, whose sums over ranks are equal, and the second derivative's trip."""
    graph = shard_of(ranks, make_data())
    plan = graph.index.plan
    generator = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(plan.num_inner, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    y = torch.randn(plan.num_local, 3, dtype=torch.float64, generator=generator)
    forward = fetch_halo(x, plan)
    (gradient,) = torch.autograd.grad(forward, x, y, create_graph=True)
    same = torch.equal(gradient, add_home(y, plan))
    return float((forward * y).sum()), float((x * add_home(y, plan)).sum()), same


def test_backward_is_the_transpose_of_forward(ranks: Any) -> None:
    results = ranks.run(3, _adjoint)
    left, right = sum(r[0] for r in results), sum(r[1] for r in results)
    # the same products in two orders: fewer than 200 terms of size below 10
    assert abs(left - right) <= 200 * 10 * torch.finfo(torch.float64).eps
    assert all(r[2] for r in results)


def _largest(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    graph = shard_of(ranks, make_data())
    plan = graph.index.plan
    ids = fetch_halo(graph.global_node_ids, plan)
    return graph.global_node_ids, max_home((ids * 10 + ranks.rank).double(), plan)


def test_max_home_finds_the_largest_copy(ranks: Any) -> None:
    results = ranks.run(3, _largest)
    held: dict[int, int] = {}
    data, parts = make_data(), {}
    for rank, (ids, _) in enumerate(results):
        parts.update(dict.fromkeys(ids.tolist(), rank))
    for source, target in zip(data.src.tolist(), data.dst.tolist(), strict=True):
        held[source] = max(held.get(source, 0), parts[target])
    for ids, values in results:
        for node, value in zip(ids.tolist(), values.tolist(), strict=True):
            assert value == node * 10 + max(parts[node], held.get(node, 0))


def _verify(ranks: Ranks, send: list[list[int]], receive: list[list[int]]) -> str:
    plan = HaloPlan(
        9,
        torch.zeros(sum(send[ranks.rank]), dtype=torch.int64),
        tuple(send[ranks.rank]),
        tuple(receive[ranks.rank]),
        ranks,
    )
    try:
        plan.verify()
    except ValueError as error:
        return str(error)
    return "fits"


def test_halo_03_a_plan_that_does_not_fit_raises_on_every_rank(ranks: Any) -> None:
    texts = ranks.run(2, _verify, [[0, 2], [0, 0]], [[0, 0], [3, 0]])
    assert all("rank 0 plans to send 2 rows to rank 1, which plans to receive 3" in text for text in texts)
    # 3 rows and no split sizes on one rank
    texts = ranks.run(2, _verify, [[0, 3], [0, 0]], [[0, 0], []])
    assert all("plans to" in text for text in texts)
    assert ranks.run(2, _verify, [[0, 2], [1, 0]], [[0, 1], [2, 0]]) == ["fits", "fits"]


def _ring(ranks: Ranks, sizes: list[int], width: int) -> float:
    """Each rank sends to both neighbours, ``sizes[rank]`` rows; returns the largest wrong entry."""
    world = ranks.world_size
    send = [
        [sizes[a] if b in ((a + 1) % world, (a - 1) % world) and a != b else 0 for b in range(world)]
        for a in range(world)
    ]
    plan = _plan(ranks, send, max(sizes))
    plan.verify()
    rows = torch.full((max(sizes), width), float(ranks.rank + 1))
    rows[:, 0] = torch.arange(max(sizes), dtype=torch.float32)
    out = fetch_halo(rows, plan)
    worst, start = 0.0, plan.num_inner
    for peer, count in enumerate(plan.recv_splits):
        piece = out[start : start + count]
        if count:
            worst = max(worst, float((piece[:, 1:] - (peer + 1)).abs().max()))
            worst = max(worst, float((piece[:, 0] - torch.arange(count, dtype=torch.float32)).abs().max()))
        start += count
    assert start == len(out)
    return worst


_MIB_ROWS = 2**20 // (4 * 64)
"""Rows of 64 float32 in a MiB."""


@pytest.mark.parametrize(
    ("num_ranks", "mebibytes"),
    [(2, [64, 64]), (4, [16, 16, 16, 16]), (4, [48, 1, 0, 7])],
    ids=["64-MiB-both-ways", "ring-of-4", "unequal"],
)
def test_halo_04_large_exchanges_in_both_directions_finish(ranks: Any, num_ranks: int, mebibytes: list[int]) -> None:
    sizes = [m * _MIB_ROWS + rank for rank, m in enumerate(mebibytes)]  # no multiple of any buffer
    assert ranks.run(num_ranks, _ring, sizes, 64) == [0.0] * num_ranks


def _waits_briefly(ranks: Ranks) -> None:
    """From here on: for peers that stay away, so nobody who is slow is taken for one of them."""
    for group in (ranks.halo, ranks.control):
        group._set_default_timeout(timedelta(seconds=0.5))  # type: ignore[union-attr]


def _over_gloo(num_ranks: int, function: Callable[[Ranks], str]) -> list[str]:
    """Ranks in threads over real connections."""
    store = dist.HashStore()
    answers: dict[int, str] = {}

    def run(rank: int) -> None:
        groups = [
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, num_ranks, timedelta(seconds=60))
            for name in ("halo", "control")
        ]
        answers[rank] = function(Ranks(rank, num_ranks, *groups))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [answers[rank] for rank in range(num_ranks)]


def test_halo_04_comm_06_a_stall_names_exchange_operator_and_peers() -> None:
    noticed = [threading.Event(), threading.Event(), threading.Event()]

    def one_rank_stays_away(ranks: Ranks) -> str:
        plan = _plan(ranks, [[0, 2, 0], [1, 0, 0], [0, 0, 0]], 4)
        fetch_halo(torch.ones(4, 3), plan, "layers.0/spmm")
        if ranks.rank == 1:
            assert all(noticed[rank].wait(50) for rank in (0, 2)), "they wait as long as it stays away"
            return "away"
        _waits_briefly(ranks)
        with pytest.raises(HaloExchangeError) as raised:
            fetch_halo(torch.ones(4, 3), plan, "layers.1/spmm")
        noticed[ranks.rank].set()
        return str(raised.value)

    texts = _over_gloo(3, one_rank_stays_away)
    assert texts[1] == "away"
    assert texts[0].startswith("rank 0: halo exchange 2 of this run (layers.1/spmm) failed after")
    assert "exchanges rows with rank 1;" in texts[0]
    assert texts[2].startswith("rank 2: halo exchange 2 of this run (layers.1/spmm)")


def test_the_gradient_of_an_exchange_is_named_too() -> None:
    noticed = threading.Event()

    def one_rank_skips_backward(ranks: Ranks) -> str:
        plan = _plan(ranks, [[0, 2], [2, 0]], 4)
        x = torch.ones(4, 3, requires_grad=True)
        out = fetch_halo(x, plan, "layers.0/spmm")
        if ranks.rank == 1:
            assert noticed.wait(50)
            return "skipped"
        _waits_briefly(ranks)
        with pytest.raises(HaloExchangeError) as raised:
            out.sum().backward()
        noticed.set()
        return str(raised.value)

    texts = _over_gloo(2, one_rank_skips_backward)
    assert "halo exchange 2 of this run (gradient of layers.0/spmm)" in texts[0]


def _empty_exchanges(ranks: Ranks) -> tuple[int, torch.Tensor]:
    world = ranks.world_size
    plan = _plan(ranks, [[0] * world for _ in range(world)], 3)
    plan.verify()
    x = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    out = fetch_halo(x, plan)
    out.sum().backward()
    assert x.grad is not None
    return len(out), x.grad


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_halo_05_parts_without_a_halo(ranks: Any, num_ranks: int) -> None:
    for rows, gradient in ranks.run(num_ranks, _empty_exchanges):
        assert rows == 3 and torch.equal(gradient, torch.ones(3, 2, dtype=torch.float64))


def test_halo_05_width_0_is_refused() -> None:
    def fetch(ranks: Ranks) -> str:
        with pytest.raises(ValueError, match="width of 0 is refused") as raised:
            fetch_halo(torch.ones(3, 0), _plan(ranks, [[0, 1], [1, 0]], 3), "layers.0/spmm")
        return str(raised.value)

    assert all(text.startswith("layers.0/spmm") for text in run_local_ranks(2, fetch))


def test_a_wrong_number_of_rows_is_refused() -> None:
    plan = HaloPlan(3, torch.empty(0, dtype=torch.int64), (0,), (0,), Ranks())
    with pytest.raises(ValueError, match="expected 3 rows, one for each inner node of this rank, got 2"):
        fetch_halo(torch.ones(2, 2), plan)


def test_one_rank_fetches_nothing() -> None:
    plan = HaloPlan(3, torch.empty(0, dtype=torch.int64), (0,), (0,), Ranks())
    x = torch.ones(3, 2)
    assert fetch_halo(x, plan) is x and add_home(x, plan) is x and max_home(x, plan) is x


def test_the_clock_counts_and_starts_again() -> None:
    clock = CommClock({"halo": 1.5, "sync": 0.5}, halo_rounds=3)
    assert clock.take() == (1.5, 0.5) and clock.take() == (0.0, 0.0) and clock.halo_rounds == 3
