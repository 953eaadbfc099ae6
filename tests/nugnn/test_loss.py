"""Shares of the loss add up to the mean over all rows, whatever each rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nugnn.comm.gradients import sum_gradients
from nugnn.comm.groups import Ranks
from nugnn.loss import GlobalMean, binary_cross_entropy, cross_entropy


def _step(
    ranks: Ranks, sizes: list[int], kind: str, class_weights: Tensor | None, dtype: torch.dtype
) -> tuple[float, Tensor]:
    x, labels, model = _problem(sum(sizes), kind, dtype)
    first = sum(sizes[: ranks.rank])
    mine = slice(first, first + sizes[ranks.rank])
    loss = GlobalMean(binary_cross_entropy if kind == "multi" else cross_entropy, labels[mine], ranks, class_weights)
    share = loss(model(x[mine]))
    share.backward()
    sum_gradients(model.parameters(), ranks)
    assert model.weight.grad is not None
    return float(ranks.sum_(share.detach().double().clone())), model.weight.grad


def _problem(count: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 5, generator=generator).to(dtype)
    labels = torch.randint(0, 3, (count,), generator=generator)
    if kind == "multi":
        labels = torch.randint(0, 2, (count, 3), generator=generator, dtype=torch.uint8)
    torch.manual_seed(1)
    return x, labels, nn.Linear(5, 3).to(dtype)


@pytest.mark.parametrize("sizes", [[90, 10], [90, 10, 0], [0, 100, 0], [33, 33, 34]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["classes", "weighted", "multi"])
def test_comm_03_gradient_over_90_10_and_0_rows_is_that_of_one_process(
    ranks: Any, sizes: list[int], dtype: torch.dtype, kind: str
) -> None:
    weights = torch.tensor([1.0, 2.0, 0.25]) if kind == "weighted" else None
    x, labels, model = _problem(sum(sizes), kind, dtype)
    if kind == "multi":
        loss = F.binary_cross_entropy_with_logits(model(x), labels.to(dtype))
    else:
        loss = F.cross_entropy(model(x), labels, weight=None if weights is None else weights.to(dtype))
    loss.backward()
    # 100 terms in another order, each below 1, and a few roundings in the terms themselves
    bound = 2 * 100 * torch.finfo(dtype).eps if dtype is torch.float64 else 1e-6
    for value, gradient in ranks.run(len(sizes), _step, sizes, kind, weights, dtype):
        assert abs(value - float(loss.detach())) <= bound
        assert model.weight.grad is not None
        assert float((gradient - model.weight.grad).abs().max()) <= bound


def test_a_rank_without_rows_still_takes_part_in_backward() -> None:
    ranks = Ranks()
    loss = GlobalMean(cross_entropy, torch.zeros(1, dtype=torch.int64), ranks)
    loss._labels = torch.zeros(0, dtype=torch.int64)
    logits = torch.zeros(0, 3, requires_grad=True)
    share = loss(logits)
    share.backward()
    assert float(share) == 0 and logits.grad is not None


def test_no_row_anywhere_is_refused() -> None:
    with pytest.raises(ValueError, match="no training rows on any rank"):
        GlobalMean(cross_entropy, torch.zeros(0, dtype=torch.int64), Ranks())


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum"),
        lambda logits, labels: F.cross_entropy(logits, labels, reduction="none")[:2],
        lambda logits, labels: logits[:, :, None],
    ],
)
def test_a_loss_that_reduces_rows_is_refused_in_words(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"one value per row.*reduction='none'"):
        GlobalMean(loss, torch.zeros(4, dtype=torch.int64), Ranks())(torch.zeros(4, 3))


def test_class_weights_need_one_class_per_row() -> None:
    with pytest.raises(ValueError, match="class_weights need one class per row"):
        GlobalMean(binary_cross_entropy, torch.zeros(4, 3), Ranks(), torch.ones(3))
