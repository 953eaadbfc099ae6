"""Batch norm over all ranks' rows: the steps, and torch's kernels for GPUs in their place."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nugnn.comm.batch_norm import _FusedBatchNorm, split_batch_norm
from nugnn.comm.groups import Ranks

EPS, MOMENTUM = 1e-5, 0.1


def _axes(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view([1, -1] + [1] * (x.dim() - 2))


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.mean(_axes(x)), torch.rsqrt(x.var(_axes(x), correction=0) + eps)


def _gather(
    x: Tensor, means: Tensor, inverses: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As torch's kernel goes: one rank after the other, dividing by the count so far."""
    if counts.dtype is not (x if running_mean is None else running_mean).dtype:
        raise RuntimeError("expected another scalar type of counts")
    n, mean, sum_squares = 0.0, torch.zeros_like(means[0]), torch.zeros_like(means[0])
    for rank in range(len(counts)):
        count = float(counts[rank])
        factor = 1 / (n + count)
        sum_squares += (inverses[rank].pow(-2) - eps) * count + (mean - means[rank]).square() * n * count * factor
        mean, n = n * factor * mean + count * factor * means[rank], n + count
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(sum_squares / (n - 1), momentum)
    return mean, torch.rsqrt(sum_squares / n + eps)


def _normalise(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, eps: float) -> Tensor:
    normal = (x - _per_channel(mean, x)) * _per_channel(inverse, x)
    return normal * _per_channel(weight, x) + _per_channel(bias, x)


def _reduce(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, *needed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sum_grad, sum_grad_x = grad.sum(_axes(x)), (grad * (x - _per_channel(mean, x))).sum(_axes(x))
    return sum_grad, sum_grad_x, sum_grad_x * inverse, sum_grad


def _grad_of_x(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, sum_grad: Tensor, sum_grad_x: Tensor,
    counts: Tensor,
) -> Tensor:  # fmt: skip
    n = int(counts.sum())
    assert counts.dtype is torch.int32
    centred = (x - _per_channel(mean, x)) * _per_channel(inverse.square() * sum_grad_x / n, x)
    return (grad - _per_channel(sum_grad / n, x) - centred) * _per_channel(inverse * weight, x)


_KERNELS = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather,
    "batch_norm_elemt": _normalise,
    "batch_norm_backward_reduce": _reduce,
    "batch_norm_backward_elemt": _grad_of_x,
}


def _run(ranks: Ranks, counts: tuple[int, ...], shape: tuple[int, ...], fused: bool) -> list[Tensor]:
    """Output, gradients, and running statistics of this rank's rows."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(sum(counts), *shape, generator=generator, dtype=torch.float64) * 2 + 3
    first = sum(counts[: ranks.rank])
    x = whole[first : first + counts[ranks.rank]].clone().requires_grad_()
    weight = torch.linspace(0.5, 2, shape[0], dtype=torch.float64).requires_grad_()
    bias = torch.linspace(-1, 1, shape[0], dtype=torch.float64).requires_grad_()
    running = (torch.zeros(shape[0], dtype=torch.float64), torch.ones(shape[0], dtype=torch.float64))
    if fused:
        with mock.patch.multiple(torch, **_KERNELS):
            out = _FusedBatchNorm.apply(x, weight, bias, running, MOMENTUM, EPS, ranks)
            (out.square() * out).sum().backward()
    else:
        out = split_batch_norm(x, *running, weight, bias, MOMENTUM, EPS, ranks)
        (out.square() * out).sum().backward()
    return [out.detach(), x.grad, weight.grad, bias.grad, *running]  # type: ignore[list-item]


@pytest.mark.parametrize("counts", [(5, 2), (0, 6), (4, 0, 1)], ids=str)
@pytest.mark.parametrize("shape", [(3,), (3, 2, 2)], ids=str)
def test_torch_kernels_and_the_steps_agree(ranks: Any, counts: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """The kernels stand in as their definitions, which is what the exchange around them needs; `gpu` tests run them."""
    steps = ranks.run(len(counts), _run, counts, shape, False)
    for ours, expected in zip(ranks.run(len(counts), _run, counts, shape, True), steps, strict=True):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stored", [None, torch.float16, torch.float32], ids=str)
def test_16_bit_rows_and_statistics_are_counted_in_float32(stored: torch.dtype | None) -> None:
    """70,000 rows are more than a float16 holds, and beside statistics in another type torch refuses counts."""
    x = torch.randn(70_000, 2, generator=torch.Generator().manual_seed(1)).half()
    norm = nn.BatchNorm1d(2, track_running_stats=stored is not None).to(stored)
    running = (norm.running_mean, norm.running_var)
    with mock.patch.multiple(torch, **_KERNELS | {"batch_norm_stats": lambda x, eps: _stats(x.float(), eps)}):
        out = _FusedBatchNorm.apply(x, torch.ones(2), torch.zeros(2), running, MOMENTUM, EPS, Ranks())
    mean, var = x.float().mean(0), x.float().var(0)
    torch.testing.assert_close(out, (x - mean) * torch.rsqrt(var + EPS), rtol=1e-3, atol=1e-3)
    if stored is not None:
        torch.testing.assert_close(running[0], (MOMENTUM * mean).to(stored))
        torch.testing.assert_close(running[1], (1 - MOMENTUM + MOMENTUM * var).to(stored))


def _single_value(ranks: Ranks, fused: bool) -> None:
    _run(ranks, (1, 0), (3,), fused)


@pytest.mark.parametrize("fused", [True, False])
def test_one_row_over_all_ranks_is_refused(ranks: Any, fused: bool) -> None:
    with pytest.raises(AssertionError, match="batch norm needs more than 1 row over all ranks"):
        ranks.run(2, _single_value, fused)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 24), (8, 24, 6, 5)], ids=str)
@pytest.mark.parametrize("is_channels_last", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
def test_on_a_gpu_it_is_torchs_own(
    dtype: torch.dtype, shape: tuple[int, ...], is_channels_last: bool, tracks: bool
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    x = torch.randn(shape, device=device).to(dtype)
    if is_channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    results = []
    for fused in (True, False):
        norm, own = nn.BatchNorm1d(shape[1], device=device, track_running_stats=tracks), x.clone().requires_grad_()
        running = (norm.running_mean, norm.running_var)
        if fused:
            out = _FusedBatchNorm.apply(own, norm.weight, norm.bias, running, MOMENTUM, EPS, Ranks(device=device))
        else:
            out = F.batch_norm(own, *running, norm.weight, norm.bias, True, MOMENTUM, EPS)
        (out.float().square() * out.float()).sum().backward()
        results.append([out, own.grad, norm.weight.grad, norm.bias.grad, *(running if tracks else ())])
    # float32 statistics in both, added in another order; results are rounded to the type of x
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    for a, b in zip(*results, strict=True):
        scale = float(b.detach().abs().max())
        assert float((a.detach().float() - b.detach().float()).abs().max()) <= tolerance * scale
