"""Sums over in-edges while halo rows travel: edges from inner rows first, the others when their rows have come.

Edges are split, not destinations: with two parts of a graph such as ogbn-products most destinations have a remote
neighbour, but most edges do not leave their part. Backward works the other way round: the gradients of halo rows are
computed and sent first, those of inner rows meanwhile.

Shape suffixes: N inner, H halo, L = N + H local rows, S rows sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from nugnn.comm.groups import Ranks
from nugnn.comm.halo_exchange import HaloPlan, add_home, add_returned_, begin_fetch, begin_return, travels_padded
from nugnn.kernels.interceptor import OperatorCall
from nugnn.kernels.operator import Operator
from nugnn.kernels.padded import as_buffer, from_buffer
from nugnn.kernels.spmm import spmm_sum
from nugnn.kernels.spmm.staged import accumulator_dtype, add_sum
from nugnn.kernels.structure import Structure

Overlap = Literal["auto", "on", "off"]
"""Whether sums overlap with the exchange.

``auto``: where every rank has a GPU of its own and some pair of them cannot read each other's memory. Over NVLink the
exchange takes less time than a float32 sum that is put down between two stages: 24.9 ms without overlap, 26.6 with it,
an epoch of 3-layer SAGE on two H200 (`docs/performance.md`).
"""


def overlaps(choice: Overlap, ranks: Ranks) -> bool:
    """What ``choice`` means for these ranks; the same answer on each.

    Raises:
        ValueError: No such choice.
    """
    if choice not in ("auto", "on", "off"):
        raise ValueError(f"overlap is {choice!r}, must be auto, on or off")
    pays = ranks.carries_cuda and not ranks.reads_peers
    return ranks.is_split and (choice == "on" or (choice == "auto" and pays))


def is_staged(call: OperatorCall, plan: HaloPlan) -> bool:
    """Whether :func:`overlapped_sum` computes ``call``: a sum of floating source rows, without weights."""
    x = call.inputs[0]
    return (
        plan.ranks.is_split
        and call.kind == "spmm"
        and call.attrs["op"] == "copy_lhs"
        and call.attrs["reduce"] == "sum"
        and x.is_floating_point()
        and len(x) == plan.num_inner
        and 0 not in x.shape[1:]
    )


def overlapped_sum(
    structure: Structure,
    x_N: Tensor,
    plan: HaloPlan,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
    *,
    label: str = "halo rows",
) -> tuple[Tensor, Tensor]:
    """``dst_scale[v] * sum of src_scale[u] * x[u] + add_to[v]`` over v's in-edges, and the halo rows it fetched.

    Args:
        structure: In-edges of the N inner nodes from L local rows.
        x_N: ``(N, ...)`` floating, no width 0.
        plan: Every rank of the plan has to call with the same trailing shape and dtype.
        src_scale: ``(L,)`` floating, without gradient; None for ones.
        dst_scale: ``(N,)`` likewise.
        add_to: ``(N, ...)`` in the dtype of ``x_N``, each row contiguous; None for zeros. It stays as it is.
        label: What is fetched, for error messages.

    Returns:
        ``(N, ...)`` and ``(H, ...)`` in the dtype of ``x_N``. A gradient of the halo rows goes home together with that
        of the sum, in one exchange.

    Raises:
        HaloExchangeError: A peer failed, or did not take part before the timeout.
    """
    structure = structure.to(x_N.device)
    return _OverlappedSum.apply(x_N, add_to, structure, plan, src_scale, dst_scale, label)  # type: ignore[no-untyped-call, no-any-return]


def staged_sum(
    structure: Structure,
    x_N: Tensor,
    halo_H: Tensor,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """:func:`overlapped_sum` of halo rows that are here already; their gradient goes to ``halo_H``."""
    structure = structure.to(x_N.device)
    out: Tensor = _StagedSum.apply(x_N, halo_H, add_to, structure, src_scale, dst_scale)  # type: ignore[no-untyped-call]
    return out


class _OverlappedSum(Operator):
    @staticmethod
    def forward(
        ctx: Any,
        x_N: Tensor,
        add_to: Tensor | None,
        structure: Structure,
        plan: HaloPlan,
        src_scale_L: Tensor | None,
        dst_scale_N: Tensor | None,
        label: str,
    ) -> tuple[Tensor, Tensor]:
        rows_N = as_buffer(x_N) if travels_padded(x_N, plan) else x_N
        buffer_H = x_N.new_empty((plan.num_halo, *rows_N.shape[1:]))
        halo_H = from_buffer(buffer_H, x_N.shape[1]) if x_N.dim() == 2 else buffer_H
        exchange = begin_fetch(rows_N, buffer_H, plan, label)

        def fetched() -> Tensor:
            exchange.finish()
            return halo_H

        out_N = _sum(structure, x_N, fetched, src_scale_L, dst_scale_N, add_to)
        ctx.structure, ctx.plan, ctx.label = structure, plan, label
        _save(ctx, x_N, src_scale_L, dst_scale_N)
        ctx.set_materialize_grads(False)
        return out_N, halo_H

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, src_scale_L, dst_scale_N = ctx.saved_tensors  # before the exchange: see `nugnn.comm.meeting`
        plan: HaloPlan = ctx.plan
        label = f"gradient of {ctx.label}"
        grad_N, grad_H = grads
        if grad_N is None:  # the halo rows alone were used
            assert grad_H is not None
            grad_N = grad_H.new_zeros((plan.num_inner, *grad_H.shape[1:]))
        if torch.is_grad_enabled():  # this gradient has a gradient
            y_L = _sum_back(ctx.structure, grad_N, src_scale_L, dst_scale_N)
            if grad_H is not None:
                y_L = torch.cat([y_L[: plan.num_inner], y_L[plan.num_inner :] + grad_H])
            return add_home(y_L, plan, label), (grads[0] if ctx.needs_input_grad[1] else None), *[None] * 5
        parts = ctx.structure.split(plan.num_inner)
        src_scale_N, src_scale_H = _halves(src_scale_L, plan.num_inner)
        grad_H = None if grad_H is None else grad_H.contiguous()
        y_H = add_sum(parts.rest_reversed, grad_N, src_scale=dst_scale_N, dst_scale=src_scale_H, add_to=grad_H)
        exchange = begin_return(as_buffer(y_H) if travels_padded(y_H, plan) else y_H, plan, label)
        y_N = add_sum(parts.first_reversed, grad_N, src_scale=dst_scale_N, dst_scale=src_scale_N)
        grad_add = grads[0] if ctx.needs_input_grad[1] else None
        received_S = exchange.finish()
        received_S = received_S[:, : y_N.shape[1]] if y_N.dim() == 2 else received_S
        return add_returned_(y_N, received_S, plan), grad_add, *[None] * 5


class _StagedSum(Operator):
    """Saves what `_OverlappedSum` does: a layer that runs again in backward may find its halo rows remembered."""

    @staticmethod
    def forward(
        ctx: Any,
        x_N: Tensor,
        halo_H: Tensor,
        add_to: Tensor | None,
        structure: Structure,
        src_scale_L: Tensor | None,
        dst_scale_N: Tensor | None,
    ) -> Tensor:
        ctx.structure, ctx.num_inner = structure, len(x_N)
        _save(ctx, x_N, src_scale_L, dst_scale_N)
        return _sum(structure, x_N, lambda: halo_H, src_scale_L, dst_scale_N, add_to)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, src_scale_L, dst_scale_N = ctx.saved_tensors
        grad_add = grads[0] if ctx.needs_input_grad[2] else None
        if torch.is_grad_enabled():
            y_L = _sum_back(ctx.structure, grads[0], src_scale_L, dst_scale_N)
            return y_L[: ctx.num_inner], y_L[ctx.num_inner :], grad_add, None, None, None
        parts = ctx.structure.split(ctx.num_inner)
        halves = zip((parts.first_reversed, parts.rest_reversed), _halves(src_scale_L, ctx.num_inner), strict=True)
        y_N, y_H = (add_sum(part, grads[0], src_scale=dst_scale_N, dst_scale=scale) for part, scale in halves)
        return y_N, y_H, grad_add, None, None, None


def _save(ctx: Any, x: Tensor, *scales: Tensor | None) -> None:
    ctx.save_for_backward(x.new_empty(0), *scales)


def _sum(
    structure: Structure,
    x_N: Tensor,
    halo: Callable[[], Tensor],
    src_scale_L: Tensor | None,
    dst_scale_N: Tensor | None,
    add_to: Tensor | None,
) -> Tensor:
    """Both stages; ``halo`` is asked for its rows in between."""
    parts = structure.split(len(x_N))
    src_scale_N, src_scale_H = _halves(src_scale_L, len(x_N))
    wide = accumulator_dtype(x_N.dtype)
    begun = add_sum(parts.first, x_N, src_scale=src_scale_N, dst_scale=dst_scale_N, add_to=add_to, dtype=wide)
    rest = {"src_scale": src_scale_H, "dst_scale": dst_scale_N}
    return add_sum(parts.rest, halo(), **rest, add_to=begun, in_place=True, dtype=x_N.dtype)


def _sum_back(structure: Structure, grad_N: Tensor, src_scale_L: Tensor | None, dst_scale_N: Tensor | None) -> Tensor:
    """The gradient of local rows ``(L, ...)``, differentiable."""
    return spmm_sum(structure.reversed(), grad_N, src_scale=dst_scale_N, dst_scale=src_scale_L)


def _halves(scale_L: Tensor | None, num_inner: int) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if scale_L is None else (scale_L[:num_inner], scale_L[num_inner:])
