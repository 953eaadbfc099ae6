"""Differentiable sums, maxima and gathers over all nodes of a split graph.

A result is the same on every rank. Each rank may use it in its own part of the loss; the total gradient is the sum
over ranks, so backward of a sum is again a sum over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nugnn.comm.groups import Ranks
from nugnn.comm.meeting import ranks_have_met, ranks_meet
from nugnn.kernels.operator import Operator
from nugnn.kernels.rows import REPLICATED, tag


class _SumOverRanks(Operator):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        ranks_meet(ctx, x)
        return ranks.sum_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ranks_have_met(ctx)
        return _SumOverRanks.apply(grads[0], ctx.ranks), None  # type: ignore[no-untyped-call]


class _GatherRows(Operator):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ranks_meet(ctx, x)
        parts = ranks.gather_rows(x)
        ctx.ranks, ctx.first, ctx.count = ranks, sum(len(p) for p in parts[: ranks.rank]), len(x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ranks_have_met(ctx)
        total = ctx.ranks.sum_(grads[0].clone(memory_format=torch.contiguous_format))
        return total[ctx.first : ctx.first + ctx.count], None


def sum_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Element-wise sum of every rank's ``x``; backward sums the gradients of every rank's use of it."""
    if not ranks.is_split:
        return x
    return tag(_SumOverRanks.apply(x, ranks), REPLICATED)  # type: ignore[no-untyped-call]


def gather_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Rows of every rank, in rank order, on every rank; backward sums the gradients of every rank's use of a row."""
    if not ranks.is_split:
        return x
    return tag(_GatherRows.apply(x, ranks), REPLICATED)  # type: ignore[no-untyped-call]


def extreme_over_ranks(x: Tensor, priority: Tensor, ranks: Ranks, *, largest: bool = True) -> Tensor:
    """Element-wise maximum (or minimum) of every rank's ``x``.

    Args:
        x: Same shape on every rank.
        priority: int64, shape of ``x``: among equal values the lowest one gets the gradient (a global id, say).
        ranks: Who takes part.
        largest: Maximum, or minimum.
    """
    if not ranks.is_split:
        return x
    signed = x.detach() if largest else -x.detach()
    best = ranks.max_(signed.clone(memory_format=torch.contiguous_format))
    candidate = torch.where(signed == best, -priority, torch.iinfo(torch.int64).min)
    winner = ranks.max_(candidate.clone())
    return sum_over_ranks(torch.where((signed == best) & (-priority == winner), x, torch.zeros_like(x)), ranks)
