"""Every way to start a backward keeps the interceptor on, and gives what torch gives without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.operator_call import OperatorCall


class _CountsMatmuls:
    kinds = frozenset({"matmul"})

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        self.count += 1
        return proceed(call)


class _Again(torch.autograd.Function):
    """Computes ``x @ w`` again in backward, as activation checkpointing does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x, w = (z.detach().requires_grad_() for z in ctx.saved_tensors)
        with torch.enable_grad():
            out = x @ w
        return torch.autograd.grad(out, (x, w), grad)


def _leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(3, 4, generator=generator, requires_grad=True),
        torch.randn(4, 2, generator=generator, requires_grad=True),
    )


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "backward": lambda y, x, w: y.sum().backward(),
    "gradient": lambda y, x, w: y.backward(torch.full_like(y, 2)),
    "gradient by name": lambda y, x, w: y.backward(gradient=torch.full_like(y, 2), retain_graph=True),
    "inputs": lambda y, x, w: y.sum().backward(inputs=[x]),
    "inputs by position": lambda y, x, w: y.sum().backward(None, None, False, w),
    "torch.autograd.backward": lambda y, x, w: torch.autograd.backward([y.sum(), y.square().sum()]),
    "with grad_tensors": lambda y, x, w: torch.autograd.backward(y, torch.ones_like(y), inputs=[w]),
    "grad": lambda y, x, w: torch.autograd.grad(y.sum(), [x, w]),
    "grad, one input": lambda y, x, w: torch.autograd.grad(y, w, torch.ones_like(y)),
    "grad by name": lambda y, x, w: torch.autograd.grad(outputs=y.sum(), inputs=(x,)),
    "grad, unused": lambda y, x, w: torch.autograd.grad(y.sum(), [x, _leaves()[1]], allow_unused=True),
    "grad, materialized": lambda y, x, w: torch.autograd.grad(y.sum(), [x, _leaves()[1]], materialize_grads=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_torch(way: str) -> None:
    results = []
    for counter in (None, _CountsMatmuls()):
        x, w = _leaves()
        if counter is None:
            returned = WAYS[way](_Again.apply(x, w), x, w)  # type: ignore[no-untyped-call]
        else:
            with Interceptor((counter,)).step(0):
                returned = WAYS[way](_Again.apply(x, w), x, w)  # type: ignore[no-untyped-call]
            assert counter.count == 2, "forward, and again in backward"
        results.append([x.grad, w.grad, *(returned or ())])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_errors_are_those_of_torch() -> None:
    with Interceptor(()).step(0), pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(2).sum().backward()
    x, _ = _leaves()
    with Interceptor(()).step(0), pytest.raises(RuntimeError, match="scalar outputs"):
        x.exp().backward()


def test_the_gradient_of_an_operator_is_not_an_operator_of_the_model() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return torch.mm(torch.eye(3), grad)

    counter = _CountsMatmuls()
    x, _ = _leaves()
    with Interceptor((counter,)).step(0):
        Own.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert counter.count == 0
