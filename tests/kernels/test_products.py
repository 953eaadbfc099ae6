"""Dense products of a layer: equal to `F.linear` one by one, padded or not, joined or not, and how long inputs live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels import products as module
from nugnn.kernels.padded import is_padded, padded_copy, with_padding
from nugnn.kernels.products import products, sum_of_products

WIDTHS = [(40, (7, 7)), (40, (7,)), (12, (12, 5)), (10, (31, 3)), (16, (16, 16)), (5, (1, 2, 1))]
"""Of an input and of products: joined in one, alone, wider than the input, of whole sectors, three."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(width: int, outs: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Input, bias of the first product, weights; leaves."""
    weights = [randn(out, width, seed=2 + i, dtype=dtype) for i, out in enumerate(outs)]
    return [t.requires_grad_() for t in (randn(23, width, dtype=dtype), randn(outs[0], seed=1, dtype=dtype), *weights)]


@pytest.fixture(params=[False, True], ids=["plain", "padded"])
def padding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(module, "pays", lambda dtype: request.param)
    return bool(request.param)


@pytest.mark.parametrize(("width", "outs"), WIDTHS)
@pytest.mark.parametrize("lay_out", [lambda x: x * 1, lambda x: x.t().contiguous().t()], ids=["rows", "columns"])
def test_products_are_those_of_linear(
    padding: bool, width: int, outs: tuple[int, ...], lay_out: Callable[[Tensor], Tensor]
) -> None:
    leaves = operands(width, outs)
    x, bias, *weights = leaves
    mine = products(lay_out(x), weights, bias)
    right = [F.linear(x, w, bias if i == 0 else None) for i, w in enumerate(weights)]
    grads = [randn(23, out, seed=20 + i) for i, out in enumerate(outs)]
    for ours, theirs in zip(mine, right, strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=1e-13 * width)
        whole = with_padding(ours.detach())
        assert (whole[:, ours.shape[1] :] == 0).all() and (padding or whole.shape == ours.shape)
    both = [torch.autograd.grad(outs_, leaves, grads) for outs_ in (mine, right)]
    # sums of at most 62 products of normal values
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("width", [10, 16])
@pytest.mark.parametrize("out", [7, 32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_sum_of_products_is_the_sum(padding: bool, width: int, out: int, has_bias: bool) -> None:
    x, bias, w = operands(width, (out,))
    y, _, v = (t.detach().flip(0).requires_grad_() for t in operands(width, (out,)))
    leaves = [x, y, w, v, *([bias] * has_bias)]
    mine = sum_of_products((x, padded_copy(y.detach()).requires_grad_()), (w, v), bias if has_bias else None)
    assert is_padded(mine) == (padding and out == 7)
    mine = sum_of_products((x, y), (w, v), bias if has_bias else None)
    right = F.linear(x, w, bias if has_bias else None) + F.linear(y, v)
    assert torch.allclose(mine, right, rtol=0, atol=1e-12)
    both = [torch.autograd.grad(z, leaves, randn(23, out, seed=30)) for z in (mine, right)]
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("outs", [(47, 47), (100, 33)])
def test_bfloat16_stays_within_its_roundings(outs: tuple[int, ...]) -> None:
    x, bias, *weights = operands(100, outs, torch.bfloat16)
    results = [*products(x, weights, bias), sum_of_products((x, x), (weights[0], weights[0]), bias)]
    wide = [t.detach().double() for t in (x, bias, *weights)]
    exact = [wide[0] @ wide[2].t() + wide[1], wide[0] @ wide[3].t(), 2 * (wide[0] @ wide[2].t()) + wide[1]]
    mass = [a.abs() @ w.abs().t() for a, w in ((wide[0], wide[2]), (wide[0], wide[3]), (2 * wide[0], wide[2]))]
    # at most three roundings to bfloat16 (half a unit each) of partial sums that the mass bounds; float32 sums besides
    unit = 1.5 * torch.finfo(torch.bfloat16).eps + 200 * torch.finfo(torch.float32).eps
    for ours, right, bound in zip(results, exact, mass, strict=True):
        assert ours.dtype == torch.bfloat16 and is_padded(ours)
        assert ((ours.double() - right).abs() <= unit * (bound + wide[1].abs().max())).all()


def test_products_that_nobody_uses_and_gradients_that_nobody_asks_for(padding: bool) -> None:
    for width, outs in ((40, (7, 7)), (12, (12, 5))):
        x, bias, *weights = operands(width, outs)
        _, used = products(x, weights, bias)
        grads = torch.autograd.grad(used.sum(), [x, bias, *weights], allow_unused=True)
        assert grads[1] is None and grads[2] is None
        assert torch.allclose(grads[0], torch.ones(23, outs[1], dtype=torch.float64) @ weights[1])
        assert torch.allclose(grads[3], x.sum(0).expand(outs[1], width))
        (only,) = torch.autograd.grad(sum(y.sum() for y in products(x.detach(), weights, bias)), weights[:1])
        assert torch.allclose(only, x.sum(0).expand(outs[0], width))
        frozen = [w.detach() for w in weights]
        (only,) = torch.autograd.grad(sum(y.sum() for y in products(x, frozen)), x)
        assert torch.allclose(only, sum(w.sum(0) for w in frozen).expand(23, width))


def test_a_graph_that_is_kept_gives_its_gradients_twice(padding: bool) -> None:
    leaves = operands(40, (7, 7))
    first, second = products(leaves[0], leaves[2:], leaves[1])
    loss = (first * second).sum() + sum_of_products([leaves[0]], [leaves[2]]).square().sum()
    once, twice = (torch.autograd.grad(loss, leaves, retain_graph=keep) for keep in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_inputs_may_come_back_in_another_layout(padding: bool) -> None:
    """As from a host that they were moved to meanwhile."""
    leaves = operands(10, (7, 7))
    x, bias, *weights = leaves
    results = []
    for pack in (lambda t: t, lambda t: t.contiguous().clone()):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            h = padded_copy(x.detach()).requires_grad_()
            loss = sum(y.square().sum() for y in products(h, weights, bias))
            loss = loss + sum_of_products((h, h), weights, bias).square().sum()
        results.append(torch.autograd.grad(loss, [h, bias, *weights]))
    # the library may sum in another order in another layout: relative to the largest, 40 roundings at the most
    assert all(torch.allclose(a, b, rtol=0, atol=1e-14 * float(b.abs().max())) for a, b in zip(*results, strict=True))


def test_autocast_decides_about_types() -> None:
    x, bias, w, v = (t.float() for t in operands(12, (12, 5)))
    with torch.autocast("cpu", torch.bfloat16):
        outs = [*products(x, (w, v), bias), sum_of_products((x, x), (w, w), bias)]
        right = [F.linear(x, w, bias), F.linear(x, v), torch.addmm(F.linear(x, w, bias), x, w.t())]
    assert all(torch.equal(a, b) and a.dtype == torch.bfloat16 for a, b in zip(outs, right, strict=True))


class _Watched(torch.autograd.Function):
    """Notes whether what it returned is alive when its gradient arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


def test_the_input_is_gone_before_its_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    seen = []
    plain = module._row_gradient
    monkeypatch.setattr(module, "_row_gradient", lambda *args: seen.append(alive() is None) or plain(*args))
    for run in (lambda x, w: products(x, (w, w))[0], lambda x, w: sum_of_products((x,), (w,))):
        x, _, w = operands(12, (12,))
        h = _Watched.apply(x)
        alive = weakref.ref(h.untyped_storage())
        loss = run(h, w).sum()
        del h
        assert alive() is not None
        loss.backward()
    assert seen == [True, True]
