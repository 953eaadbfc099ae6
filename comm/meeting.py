"""Collectives of layers that run again in backward come in the same order on every rank.

Activation checkpointing repeats a layer when backward first asks for a tensor that the layer saved, and stops when it
has the last one. Which tensors are saved may differ from rank to rank (another device, another kernel). So every
differentiable collective saves a tensor without elements: a layer is repeated before the first collective of its own
backward, on every rank, and not left before its last collective.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nugnn.kernels.operator import Operator


def ranks_meet(ctx: Any, x: Tensor) -> None:
    """To be called in ``forward`` of an autograd function whose backward is a collective; ``x`` is its operand."""
    ctx.save_for_backward(x.new_empty(0))


def ranks_have_met(ctx: Any) -> None:
    """To be called first in ``backward``: whatever has to be repeated is repeated now."""
    _ = ctx.saved_tensors


class _Meet(Operator):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ranks_meet(ctx, x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        ranks_have_met(ctx)
        return grads[0]


def meet(x: Tensor) -> Tensor:
    """``x``, the result of a collective that may be remembered: each use saves as much, whether it was made or known.

    A repeated layer has to save as many tensors as it did first, though it then finds what came for its input.
    """
    return _Meet.apply(x) if x.requires_grad else x  # type: ignore[no-untyped-call, no-any-return]
