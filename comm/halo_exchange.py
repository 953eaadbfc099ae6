"""Halo rows travel from their owners forward, and their gradients travel back to be added.

Shape suffixes: N inner, H halo, L = N + H local rows, S rows sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nugnn.comm.halo_stale import Arriving
from nugnn.comm.halo_transfer import HaloPlan, begin_transfer
from nugnn.comm.halo_wire import Travel
from nugnn.comm.meeting import ranks_have_met, ranks_meet
from nugnn.kernels.add_rows import add_rows_
from nugnn.kernels.operator import Operator
from nugnn.kernels.padded import as_buffer, from_buffer


def begin_fetch(
    x_N: Tensor, halo_H: Tensor, plan: HaloPlan, label: str, travel: Travel | None = None, width: int | None = None
) -> Arriving:
    """Send inner rows to the peers that read them; ``halo_H (H, ...)`` fills with theirs. Without autograd.

    Args:
        x_N: ``(N, ...)``, each row contiguous.
        halo_H: Contiguous.
        plan: Its ranks take part.
        label: For error messages.
        travel: In which form; as they are when None.
        width: Columns of a matrix, the rest being zeros that only pad its rows; all when None.
    """
    return begin_transfer(x_N, halo_H, plan, label, travel, width, goes_home=False)


def begin_return(
    halo_H: Tensor, plan: HaloPlan, label: str, travel: Travel | None = None, width: int | None = None
) -> Arriving:
    """Send halo rows to their owners, and receive ``(S, ...)``, in ``send_rows`` order. Without autograd.

    Arguments as in `begin_fetch`.
    """
    received_S = halo_H.new_empty((len(plan.send_rows), *halo_H.shape[1:]))
    return begin_transfer(halo_H, received_S, plan, label, travel, width, goes_home=True)


def add_returned_(x_N: Tensor, received_S: Tensor, plan: HaloPlan) -> Tensor:
    """Add what peers sent for each of our rows, in place; peer by peer: sums keep their order, rows are distinct."""
    for rows, values in zip(plan.send_rows.split(plan.send_splits), received_S.split(plan.send_splits), strict=True):
        add_rows_(x_N, rows, values)
    return x_N


PADDED_DEVICES = {"cuda"}
"""Types of devices whose kernels read padded rows."""


def travels_padded(x: Tensor, plan: HaloPlan) -> bool:
    """Whether rows like ``x`` travel with zeros to a multiple of 32 bytes, in which kernels want them.

    Every rank has to answer the same, so it must not depend on how ``x`` lies in memory here.
    """
    return x.dim() == 2 and x.is_floating_point() and x.device.type in PADDED_DEVICES and plan.ranks.is_uniform


def _fetch(x_N: Tensor, plan: HaloPlan, label: str, travel: Travel | None) -> Tensor:
    if travels_padded(x_N, plan):
        width = x_N.shape[1]
        return from_buffer(_fetch_whole(as_buffer(x_N), plan, label, travel, width), width)
    return _fetch_whole(x_N.contiguous(), plan, label, travel)


def _fetch_whole(x_N: Tensor, plan: HaloPlan, label: str, travel: Travel | None, width: int | None = None) -> Tensor:
    x_L = x_N.new_empty((plan.num_local, *x_N.shape[1:]))
    exchange = begin_fetch(x_N, x_L[plan.num_inner :], plan, label, travel, width)
    x_L[: plan.num_inner] = x_N
    exchange.finish()
    return x_L


def _add_home(y_L: Tensor, plan: HaloPlan, label: str, travel: Travel | None) -> Tensor:
    if travels_padded(y_L, plan):
        width = y_L.shape[1]
        return from_buffer(_add_home_whole(as_buffer(y_L), plan, label, travel, width), width)
    return _add_home_whole(y_L, plan, label, travel)


def _add_home_whole(y_L: Tensor, plan: HaloPlan, label: str, travel: Travel | None, width: int | None = None) -> Tensor:
    exchange = begin_return(y_L[plan.num_inner :].contiguous(), plan, label, travel, width)
    y_N = y_L[: plan.num_inner].clone(memory_format=torch.contiguous_format)
    return add_returned_(y_N, exchange.finish(), plan)


class _Fetch(Operator):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, plan: HaloPlan, label: str, travel: Travel | None) -> Tensor:
        ctx.plan, ctx.label, ctx.travel = plan, label, travel
        return _fetch(x_N, plan, label, travel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        given = ctx.plan, f"gradient of {ctx.label}", of_gradient(ctx.travel)
        return _AddHome.apply(grads[0], *given), None, None, None  # type: ignore[no-untyped-call]


class _AddHome(Operator):
    @staticmethod
    def forward(ctx: Any, y_L: Tensor, plan: HaloPlan, label: str, travel: Travel | None) -> Tensor:
        ctx.plan, ctx.label, ctx.travel = plan, label, travel
        ranks_meet(ctx, y_L)
        return _add_home(y_L, plan, label, travel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ranks_have_met(ctx)
        given = ctx.plan, f"gradient of {ctx.label}", of_gradient(ctx.travel)
        return _Fetch.apply(grads[0], *given), None, None, None  # type: ignore[no-untyped-call]


def of_gradient(travel: Travel | None) -> Travel | None:
    """How gradients travel of rows that travelled so."""
    return None if travel is None else travel.of_gradient()


def fetch_halo(x_N: Tensor, plan: HaloPlan, label: str = "halo rows", travel: Travel | None = None) -> Tensor:
    """Inner rows followed by halo rows.

    Args:
        x_N: ``(N, ...)`` values of inner nodes, any dtype.
        plan: Every rank of the plan has to call with the same trailing shape and dtype.
        label: What is fetched, for error messages: the name of an operator.
        travel: In which form rows travel, and their gradients; as they are when None.

    Returns:
        ``(L, ...)``; its gradient goes back to the owners and is added there. ``x_N`` itself on one rank.

    Raises:
        ValueError: ``x_N`` does not have N rows, or rows without a value.
        HaloExchangeError: A peer failed, or did not take part before the timeout.
    """
    if len(x_N) != plan.num_inner:
        raise ValueError(f"expected {plan.num_inner} rows, one for each inner node of this rank, got {len(x_N)}")
    if 0 in x_N.shape[1:]:
        raise ValueError(
            f"{label}: rows of shape {tuple(x_N.shape[1:])} hold no value; a feature width of 0 is refused"
        )
    if not plan.ranks.is_split:
        return x_N
    return _Fetch.apply(x_N, plan, label, travel)  # type: ignore[no-untyped-call, no-any-return]


def add_home(y_L: Tensor, plan: HaloPlan, label: str = "rows that go home", travel: Travel | None = None) -> Tensor:
    """Add the halo rows of ``y_L (L, ...)`` to their owners' rows: ``(N, ...)``; the transpose of `fetch_halo`."""
    if not plan.ranks.is_split:
        return y_L
    return _AddHome.apply(y_L, plan, label, travel)  # type: ignore[no-untyped-call, no-any-return]


def max_home(y_L: Tensor, plan: HaloPlan, label: str = "rows that go home") -> Tensor:
    """Maximum of each inner row and the halo copies of it elsewhere: ``(N, ...)``, without gradient."""
    if not plan.ranks.is_split:
        return y_L
    y_L = y_L.detach()
    received_S = begin_return(y_L[plan.num_inner :].contiguous(), plan, label).finish()
    index = plan.send_rows.view(-1, *([1] * (y_L.dim() - 1))).expand_as(received_S)
    return y_L[: plan.num_inner].scatter_reduce(0, index, received_S, "amax")


class _Tie(Operator):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *anchors: Tensor) -> Tensor:
        ctx.shapes = [(a.shape, a.dtype) for a in anchors]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        zeros = (grads[0].new_zeros(()).to(dtype).expand(shape) for shape, dtype in ctx.shapes)
        return grads[0], *zeros


def tie(x: Tensor, anchors: list[Tensor]) -> Tensor:
    """``x``, made to depend on ``anchors`` with zero gradient.

    An exchange whose result no local edge uses (a rank without in-edges) must still take part in the backward
    exchange; its peers wait for it otherwise.
    """
    anchors = [a for a in anchors if a.requires_grad]
    return _Tie.apply(x, *anchors) if anchors else x  # type: ignore[no-untyped-call, no-any-return]
