"""Gradient sums: every rank ends with the same bits, absent gradients stay absent, types keep apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nugnn.comm.gradients import broadcast_state, sum_gradients
from nugnn.comm.groups import Ranks


def _mixed(ranks: Ranks) -> list[Tensor | None]:
    """Parameters of three types; gradients on all ranks, on some, on none; one sparse; one frozen."""
    torch.manual_seed(0)
    everywhere = nn.Parameter(torch.zeros(3, 2))
    on_rank_1 = nn.Parameter(torch.zeros(4))
    nowhere = nn.Parameter(torch.zeros(2))
    wide = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    narrow = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    sparse = nn.Parameter(torch.zeros(4, 2))
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    scalar = nn.Parameter(torch.zeros(()))
    empty = nn.Parameter(torch.zeros(0, 3))
    everywhere.grad = torch.full((3, 2), float(ranks.rank + 1))
    if ranks.rank == 1:
        on_rank_1.grad = torch.arange(4.0)
    wide.grad = torch.full((2,), 1e-12 * (ranks.rank + 1), dtype=torch.float64)
    narrow.grad = torch.full((3,), ranks.rank + 1, dtype=torch.bfloat16)
    if ranks.rank != 2:
        sparse.grad = torch.sparse_coo_tensor([[1, 1, 3]], torch.ones(3, 2), (4, 2))
    scalar.grad = torch.tensor(float(ranks.rank))
    empty.grad = torch.zeros(0, 3)
    parameters = [everywhere, on_rank_1, nowhere, wide, narrow, sparse, frozen, scalar, empty]
    sum_gradients(iter(parameters), ranks)
    for parameter in parameters:
        assert parameter.grad is None or (parameter.grad.dtype, parameter.grad.shape) == (
            parameter.dtype,
            parameter.shape,
        )
    return [p.grad for p in parameters]


def test_comm_01_sums_whatever_each_rank_has(ranks: Any) -> None:
    results = ranks.run(3, _mixed)
    everywhere, on_rank_1, nowhere, wide, narrow, sparse, frozen, scalar, empty = results[0]
    assert torch.equal(everywhere, torch.full((3, 2), 6.0))
    assert torch.equal(on_rank_1, torch.arange(4.0))
    assert nowhere is None and frozen is None
    # 1e-12 * (1 + 2 + 3) in float64: a pass through float32 would be off by 1e-19 relative 1e-7
    assert torch.allclose(wide, torch.full((2,), 6e-12, dtype=torch.float64), rtol=1e-15, atol=0)
    assert torch.equal(narrow, torch.full((3,), 6, dtype=torch.bfloat16))
    assert torch.equal(sparse, torch.tensor([[0.0, 0], [4, 4], [0, 0], [2, 2]]))
    assert float(scalar) == 3 and empty.shape == (0, 3)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


def test_one_rank_changes_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    gradient = parameter.grad = torch.ones(2)
    sum_gradients([parameter, nn.Parameter(torch.zeros(1))], Ranks())
    assert parameter.grad is gradient


def _nothing(ranks: Ranks) -> None:
    sum_gradients([], ranks)
    parameter = nn.Parameter(torch.zeros(2))
    sum_gradients([parameter], ranks)
    assert parameter.grad is None


def test_no_parameters_and_no_gradients(ranks: Any) -> None:
    ranks.run(2, _nothing)


def _order_of_the_sum(ranks: Ranks) -> Tensor:
    parameter = nn.Parameter(torch.zeros(1000))
    generator = torch.Generator().manual_seed(ranks.rank)
    parameter.grad = torch.randn(1000, generator=generator) * 10.0 ** (3 * ranks.rank)
    sum_gradients([parameter], ranks)
    assert parameter.grad is not None
    return parameter.grad


def test_replicas_stay_equal_to_the_bit(ranks: Any) -> None:
    first, *others = ranks.run(5, _order_of_the_sum)
    assert all(torch.equal(first, other) for other in others)


def _state(ranks: Ranks, differ: bool) -> tuple[list[Tensor], bool]:
    torch.manual_seed(ranks.rank if differ else 0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    columns = torch.randn(4, 3).t()  # not contiguous
    tensors = [
        *model.parameters(),
        *model.buffers(),
        columns,
        torch.randn(2).double(),
        torch.tensor([True]),
        torch.tensor(3),
    ]
    differed = broadcast_state(tensors, ranks)
    return [t.detach().clone() for t in tensors], differed


@pytest.mark.parametrize("differ", [True, False])
def test_state_becomes_that_of_rank_0(ranks: Any, differ: bool) -> None:
    results = ranks.run(3, _state, differ)
    for tensors, differed in results:
        assert all(torch.equal(a, b) for a, b in zip(tensors, results[0][0], strict=True))
        assert differed == differ, "state travels when it differs, and only then"
