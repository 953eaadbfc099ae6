"""Ranks in threads agree with ranks over gloo to the bit, and disagreement is an error at once, never a crash."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exactness import NUM_CLASSES, NUM_FEATURES, make_graph, make_parts, run_steps
from nugnn import global_sum
from nugnn.check import ModelDiffers, check_model
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_exchange import fetch_halo
from nugnn.comm.halo_transfer import HaloExchangeError, HaloPlan
from nugnn.comm.local_ranks import RanksDisagree, run_local_ranks
from nugnn.models import GNN


def _everything(ranks: Ranks) -> list[Tensor]:
    count = [3, 0, 5][ranks.rank]
    rows = torch.arange(count * 2.0).view(count, 2) + ranks.rank
    send = [[0, 2, 1], [0, 0, 0], [3, 0, 0]]
    plan = HaloPlan(
        5,
        torch.cat([torch.arange(n) for n in send[ranks.rank]]),
        tuple(send[ranks.rank]),
        tuple(s[ranks.rank] for s in send),
        ranks,
    )
    plan.verify()
    return [
        ranks.sum_(torch.tensor([0.1, 0.2]) * (ranks.rank + 1)),
        ranks.max_(torch.tensor([ranks.rank, -ranks.rank], dtype=torch.int64)),
        ranks.broadcast_(torch.full((2,), ranks.rank, dtype=torch.uint8), source=2),
        *ranks.gather_rows(rows),
        *ranks.gather_rows(rows > 2),
        fetch_halo(torch.arange(10.0).view(5, 2) + ranks.rank, plan),
    ]


def test_collectives_equal_those_over_gloo(ranks: Any) -> None:
    for ours, theirs in zip(run_local_ranks(3, _everything), ranks.run(3, _everything), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            # three terms in another order
            assert a.dtype == b.dtype and a.shape == b.shape
            assert torch.equal(a, b) or torch.allclose(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=0)


def test_training_in_threads_equals_training_in_processes(ranks: Any) -> None:
    data = make_graph()
    torch.manual_seed(0)
    model = GNN("gat", NUM_FEATURES, NUM_CLASSES, hidden=4, heads=2, norm="batch", dropout=0.3).double()
    arguments = (data, make_parts(data, 3, "unequal"), model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    threads = run_local_ranks(3, lambda rank: run_steps(rank, *arguments))
    processes = ranks.run(3, run_steps, *arguments)
    for a, b in zip(threads, processes, strict=True):
        # gradients are summed over three ranks in another order: the bound of the exactness tests
        assert float((a.logits - b.logits).abs().max()) <= 1e-10 and a.metrics == b.metrics


def test_results_come_in_rank_order() -> None:
    assert run_local_ranks(3, lambda ranks: int(ranks.sum_(torch.tensor(ranks.rank))) + ranks.rank) == [3, 4, 5]
    assert run_local_ranks(1, lambda ranks: ranks.world_size) == [1]


def test_the_error_of_the_rank_that_failed_comes_first() -> None:
    def rank_1_fails(ranks: Ranks) -> None:
        if ranks.rank == 1:
            time.sleep(0.2)
            raise KeyError("only here")
        ranks.sum_(torch.zeros(1))

    begin = time.perf_counter()
    with pytest.raises(KeyError, match="only here"):
        run_local_ranks(3, rank_1_fails, timeout_seconds=600)
    assert time.perf_counter() - begin < 120, "peers do not wait for the timeout"


@pytest.mark.parametrize(
    ("on_rank_0", "words"),
    [
        (
            lambda ranks: ranks.sum_(torch.zeros(2)),
            r"rank 0 sums torch.float32 \(2,\); rank 1 sums torch.float32 \(3,\)",
        ),
        (lambda ranks: ranks.sum_(torch.zeros(3).double()), "rank 0 sums torch.float64"),
        (lambda ranks: ranks.max_(torch.zeros(3)), "rank 0 takes the maximum of"),
        (lambda ranks: ranks.gather_rows(torch.zeros(3)), "rank 0 gathers rows of"),
        (lambda ranks: ranks.halo.alltoall_base(torch.zeros(0), torch.zeros(0), [0, 0], [0, 0]), "exchanges halo rows"),
        (lambda ranks: None, "rank 0 has ended and will not take part"),
    ],
)
def test_different_calls_are_an_error_on_all_ranks_at_once(on_rank_0: Any, words: str) -> None:
    def run(ranks: Ranks) -> None:
        if ranks.rank == 0:
            on_rank_0(ranks)
        else:
            ranks.sum_(torch.zeros(3))

    with pytest.raises(RanksDisagree, match=words):
        run_local_ranks(2, run, timeout_seconds=60)


def test_exchanges_of_different_shapes_are_an_error() -> None:
    def run(ranks: Ranks) -> None:
        plan = HaloPlan(2, torch.arange(2), ((0, 2), (2, 0))[ranks.rank], ((0, 2), (2, 0))[ranks.rank], ranks)
        fetch_halo(torch.zeros(2, 3 + ranks.rank), plan, "layers.0/spmm")

    with pytest.raises(HaloExchangeError, match=r"layers.0/spmm.*rank 1 sends 32 bytes to rank 0, which expects 24"):
        run_local_ranks(2, run)


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_told() -> None:
    has_given_up = threading.Event()

    def run(ranks: Ranks) -> None:
        if ranks.rank == 1:
            assert has_given_up.wait(60)
            return
        try:
            ranks.sum_(torch.zeros(1))
        finally:
            has_given_up.set()

    with pytest.raises(RuntimeError, match=r"rank 0 sums torch.float32 \(1,\) and waited 0.5 s for rank 1"):
        run_local_ranks(2, run, timeout_seconds=0.5)


class _DependsOnItsRows(nn.Module):
    """Control flow by the number of rows here: what `nugnn.check_model` has to find without a wait or a crash."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        if graph.num_nodes() < 12:
            x = x + global_sum(x, graph)
        y = self.layer(x)
        return y + global_sum(y[:, :1], graph)


def test_check_names_calls_that_differ_between_ranks() -> None:
    begin = time.perf_counter()
    with pytest.raises(ModelDiffers, match=r"ranks made different calls.*control flow must not depend"):
        check_model(_DependsOnItsRows(), make_graph())
    assert time.perf_counter() - begin < 120
