"""Sums that begin in backward are those of `sum_gradients`, whatever a rank's loss depends on."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nugnn.comm import backward_sums, buckets
from nugnn.comm.backward_sums import BackwardSums, in_buckets
from nugnn.comm.buckets import Bucket, memory_order
from nugnn.comm.gradients import sum_gradients
from nugnn.comm.groups import Ranks


class _Net(nn.Module):
    """Layers that all use, one that rank 1 leaves out, one that nobody uses, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.sometimes, self.never, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        x = self.frozen(self.first(self.conv(x).amax((2, 3))))
        return self.last(x if leaves_out else self.sometimes(x))  # type: ignore[no-any-return]


def _steps(
    ranks: Ranks, begins: bool, parts: int, bucket_bytes: int, is_direct: bool = False, resumed_at: int | None = None
) -> tuple[list[list[Tensor | None]], int]:
    """Gradients after each of three steps, and how many sums had begun when the last backward ended.

    Args:
        ranks: Who takes part.
        begins: Whether sums may begin while backward runs.
        parts: Backward passes of a step.
        bucket_bytes: Of a bucket, at least.
        is_direct: Whether ranks send each other few values directly, as workers do.
        resumed_at: Step before which all that sums have seen is forgotten.
    """
    assert ranks.direct is not None
    ranks = ranks if is_direct else dataclasses.replace(ranks, direct=None)
    torch.manual_seed(3)
    model = _Net().double()
    parameters, found, num_early = list(model.parameters()), [], 0
    with mock.patch.object(backward_sums, "FIRST_BUCKET_BYTES", bucket_bytes):
        with mock.patch.object(backward_sums, "BUCKET_BYTES", bucket_bytes):
            sums = BackwardSums(parameters, ranks, while_backward_runs=begins)
            for step in range(3):
                model.zero_grad(set_to_none=True)
                if step == resumed_at:
                    sums = BackwardSums(parameters, ranks, while_backward_runs=begins)
                for part in range(parts):
                    x = torch.randn(4, 2, 3, 3, dtype=torch.float64) * (ranks.rank + 1)
                    loss = model(x, ranks.rank == 1 and part == parts - 1).square().sum()
                    if part < parts - 1:
                        loss.backward()
                        continue
                    with sums.last_backward():
                        loss.backward()
                    num_early = len(sums._sent)
                expected = copy.deepcopy([p.grad for p in parameters]) if not begins or step == 0 else None
                sums.finish()
                if expected is not None:
                    twins = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in parameters]
                    for twin, grad in zip(twins, expected, strict=True):
                        twin.grad = grad
                    sum_gradients(twins, ranks)
                    for p, twin in zip(parameters, twins, strict=True):
                        assert (p.grad is None) == (twin.grad is None)
                        assert p.grad is None or torch.allclose(p.grad, twin.grad, rtol=1e-13, atol=0)
                assert model.conv.weight.grad.stride() == model.conv.weight.stride()  # type: ignore[union-attr]
                found.append([None if p.grad is None else p.grad.clone() for p in parameters])
    return found, num_early


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_sums_that_begin_in_backward_are_the_same_bits(ranks: Any, parts: int, bucket_bytes: int) -> None:
    after = ranks.run(3, _steps, False, parts, bucket_bytes)
    during = ranks.run(3, _steps, True, parts, bucket_bytes)
    for rank in range(3):
        for a, b, first in zip(after[rank][0], during[rank][0], during[0][0], strict=True):
            for x, y, z in zip(a, b, first, strict=True):
                assert (x is None) == (y is None) == (z is None)
                assert x is None or (torch.equal(x, y) and torch.equal(y, z))
    # small buckets: on rank 0 those of all layers before the one that nobody uses, which stands near the end
    assert after[0][1] == 0
    if bucket_bytes == 1:
        assert [run[1] for run in during] == [0, 0, 0]  # `never` stands last, and holds all others back


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("begins", [True, False])
def test_a_step_after_a_run_is_resumed_is_summed_as_in_the_run_that_was_not(
    ranks: Any, is_direct: bool, begins: bool
) -> None:
    """It is watched there alone; sums that go from rank to rank add in another order than gloo's."""
    whole = ranks.run(3, _steps, begins, 1, 200, is_direct)
    for step in (1, 2):
        resumed = ranks.run(3, _steps, begins, 1, 200, is_direct, step)
        for (of_whole, _), (of_resumed, _) in zip(whole, resumed, strict=True):
            for x, y in zip(of_whole[step], of_resumed[step], strict=True):
                assert x is y is None or torch.equal(x, y)


class _All(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def _watched(ranks: Ranks) -> list[Any]:
    """Sums under way whenever a gradient arrives; the hooks that are left when the trainer is gone."""
    torch.manual_seed(0)
    model, seen = _All(), []
    with mock.patch.object(backward_sums, "FIRST_BUCKET_BYTES", 1), mock.patch.object(backward_sums, "BUCKET_BYTES", 1):
        sums = BackwardSums(list(model.parameters()), ranks, while_backward_runs=True)
        for step in range(3):
            model.zero_grad(set_to_none=True)
            loss = model(torch.ones(2, 4)).sum()
            with sums.last_backward():
                loss.backward()
            seen.append(len(sums._sent))
            sums.finish()
            if step == 1:  # others are trained from here on: watched once more
                model.layers[0].requires_grad_(False)
    del sums
    model.zero_grad(set_to_none=True)
    model(torch.ones(2, 4)).sum().backward()
    return [seen, model.layers[4].bias.grad.tolist()]


def test_sums_begin_while_backward_runs_after_a_step_that_is_watched(ranks: Any) -> None:
    for seen, own in ranks.run(2, _watched):
        assert seen == [0, 6, 0]
        assert own == [2.0, 2.0]  # nobody sums the gradients of the user's next backward


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("a backward of the user's own")


def _after_an_error(ranks: Ranks) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's gradients, and their sums, in a step after one whose backward failed with sums on their way."""
    torch.manual_seed(0)
    model = _All().double()
    with mock.patch.object(backward_sums, "FIRST_BUCKET_BYTES", 1), mock.patch.object(backward_sums, "BUCKET_BYTES", 1):
        sums = BackwardSums(list(model.parameters()), ranks, while_backward_runs=True)
        for step in range(3):
            x = torch.full((2, 4), step + ranks.rank + 1.0, dtype=torch.float64)
            model.zero_grad(set_to_none=True)
            hidden = model.layers[1](model.layers[0](x))
            loss = model.layers[2:](_Failing.apply(hidden) if step == 1 else hidden).sum()
            if step == 2:
                own = list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
            try:
                with sums.last_backward():
                    loss.backward()
            except ArithmeticError:
                assert len(sums._sent) == 4
                continue
            sums.finish()
    return own, [p.grad for p in model.parameters()]  # type: ignore[misc]


def test_sums_of_a_backward_that_failed_are_not_those_of_the_next(ranks: Any) -> None:
    (own_0, total_0), (own_1, total_1) = ranks.run(2, _after_an_error)
    for a, b, total, other in zip(own_0, own_1, total_0, total_1, strict=True):
        assert torch.equal(a + b, total) and torch.equal(total, other)


def _in_pieces(ranks: Ranks) -> list[Tensor]:
    """A layer under reentrant checkpoints, called twice: two gradients, one after the other."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    sums = BackwardSums(list(layer.parameters()), ranks, while_backward_runs=True)
    for _ in range(3):
        layer.zero_grad(set_to_none=True)
        x = torch.full((2, 3), ranks.rank + 1.0, dtype=torch.float64, requires_grad=True)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=True)
        with sums.last_backward():
            x.sum().backward()
        own = layer.weight.grad.clone()  # type: ignore[union-attr]
        sums.finish()
    return [own, layer.weight.grad]  # type: ignore[list-item]


def test_gradients_in_pieces_are_summed_after_backward(ranks: Any) -> None:
    (own_0, total_0), (own_1, total_1) = ranks.run(2, _in_pieces)
    torch.testing.assert_close(total_0, own_0 + own_1, rtol=1e-13, atol=0)
    assert torch.equal(total_0, total_1)


def test_buckets_hold_every_parameter_once_from_the_last_on() -> None:
    parameters = [nn.Parameter(torch.zeros(n, dtype=t)) for n, t in ((3, torch.float32), (2, torch.float64)) * 3]
    groups = in_buckets(parameters)
    assert [id(p) for group in groups for p in group].count(id(parameters[0])) == 1
    assert sorted(id(p) for group in groups for p in group) == sorted(map(id, parameters))
    assert all(len({p.dtype for p in group}) == 1 for group in groups) and groups[0][0] is parameters[-1]
    many = [nn.Parameter(torch.zeros(1 << 17)) for _ in range(8)]  # 512 KiB each
    assert [len(group) for group in in_buckets(many)] == [2, 6]
    assert buckets.FIRST_BUCKET_BYTES == 1 << 20


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3), (2, 3, 4, 5), (2, 1, 3, 1)], ids=str)
def test_a_bucket_gives_back_what_it_took_in_the_memory_order_of_the_parameter(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    if len(shape) == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    parameter = nn.Parameter(values)
    parameter.grad = torch.randn(shape)
    expected = parameter.grad.clone()
    bucket = Bucket([parameter], [memory_order(parameter)])
    bucket.unpack(bucket.packed())
    assert torch.equal(parameter.grad, expected) and parameter.grad.stride() == parameter.stride()
