"""Sums over in-edges beside the exchange of halo rows: in backward alone, or in both passes.

Backward computes the gradients of halo rows first and sends them; those of inner rows are computed meanwhile. Rows are
disjoint, so this costs nothing, and on GPUs every gradient is the same bits as without.

Forward in both passes: edges from inner rows first, the others when their rows have come. Edges are split, not
destinations: with two parts of a graph such as ogbn-products most destinations have a remote neighbour, but most edges
do not leave their part. What was summed so far is put down in between, in float32. Where GPUs read each other's memory
an exchange takes less time than the sum, so that this is done for as many destinations as fill it, and the others are
summed in one pass.

Shape suffixes: N inner, H halo, L = N + H local rows, S rows sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from nugnn.comm.early_rows import edges_begun_early
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_exchange import add_home, add_returned_, begin_fetch, begin_return, of_gradient, travels_padded
from nugnn.comm.halo_transfer import HaloPlan
from nugnn.comm.halo_wire import Travel
from nugnn.kernels.operator import Operator, unseen
from nugnn.kernels.padded import as_buffer, from_buffer
from nugnn.kernels.spmm import spmm_sum
from nugnn.kernels.spmm.staged import begin_sum, finish_sum, prepare_sum_to_sources, sum_of_both, sum_to_sources
from nugnn.kernels.structure import Structure

Overlap = Literal["auto", "on", "backward", "off"]
"""Whether sums overlap with the exchange: ``on`` in both passes, ``backward`` in backward alone, ``off`` nowhere.

``auto``: in both passes where every rank has a GPU of its own, nowhere otherwise.
"""

Passes = Literal["none", "backward", "both"]
"""Passes of a step in which sums overlap with the exchange."""


def overlapping_passes(choice: Overlap, ranks: Ranks) -> Passes:
    """What ``choice`` means for these ranks; the same answer on each.

    Raises:
        ValueError: No such choice.
    """
    if choice not in ("auto", "on", "backward", "off"):
        raise ValueError(f"overlap is {choice!r}, must be auto, on, backward or off")
    if choice == "auto":
        choice = "on" if ranks.carries_cuda else "off"
    if choice == "off" or not ranks.is_split:
        return "none"
    return "both" if choice == "on" else "backward"


def rows_begun_early(structure: Structure, x_N: Tensor, plan: HaloPlan) -> int:
    """How many rows of a plain sum forward begin while halo rows travel; each rank's own affair.

    All where the exchange is slow; where GPUs read each other's memory see `nugnn.comm.early_rows`.

    Args:
        structure: In-edges of the N inner nodes.
        x_N: ``(N, ...)`` rows that travel.
        plan: With whom rows are exchanged.
    """
    if not plan.ranks.reads_peers:
        return structure.num_dst
    row_bytes = x_N.shape[1:].numel() * x_N.element_size()
    return structure.rows_with(edges_begun_early(max(plan.num_halo, len(plan.send_rows)), row_bytes))


def can_overlap(x: Tensor, plan: HaloPlan) -> bool:
    """Whether :func:`overlapped_sum` takes source rows ``x``; the same answer on every rank."""
    return plan.ranks.is_split and x.is_floating_point() and len(x) == plan.num_inner and 0 not in x.shape[1:]


class Fetch:
    """Halo rows of ``x_N (N, ...)`` on their way here, and inner rows of it on their way to others.

    Args:
        x_N: As `can_overlap` says.
        plan: Every rank of the plan has to begin with the same trailing shape and dtype.
        label: What is fetched, for error messages.
        travel: In which form; as they are when None.
    """

    @unseen
    def __init__(self, x_N: Tensor, plan: HaloPlan, label: str, travel: Travel | None = None) -> None:
        is_padded = travels_padded(x_N, plan)
        rows_N = as_buffer(x_N) if is_padded else x_N
        rows_H = x_N.new_empty((plan.num_halo, *rows_N.shape[1:]))
        self._begun_for = x_N.data_ptr()
        is_copy = rows_N.data_ptr() != x_N.data_ptr()
        self.inner_N = from_buffer(rows_N, x_N.shape[1]) if is_copy else x_N
        """``x_N``, in the rows in which it travels."""
        self._halo_H = from_buffer(rows_H, x_N.shape[1]) if is_padded else rows_H
        width = x_N.shape[1] if is_padded else None
        self._exchange = begin_fetch(rows_N, rows_H, plan, label, travel, width)

    def is_of(self, x_N: Tensor) -> bool:
        """Whether it was begun for ``x_N``."""
        return self._begun_for == x_N.data_ptr()

    def finish(self) -> Tensor:
        """``(H, ...)``.

        Raises:
            HaloExchangeError: A peer failed, or did not take part before the timeout.
        """
        self._exchange.finish()
        return self._halo_H


def overlapped_sum(
    structure: Structure,
    x_N: Tensor,
    plan: HaloPlan,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
    *,
    passes: Passes = "both",
    fetch: Fetch | None = None,
    label: str = "halo rows",
    travel: Travel | None = None,
) -> tuple[Tensor, Tensor]:
    """``dst_scale[v] * sum of src_scale[u] * x[u] + add_to[v]`` over v's in-edges, and the halo rows it fetched.

    Args:
        structure: In-edges of the N inner nodes from L local rows.
        x_N: ``(N, ...)`` floating, no width 0.
        plan: Every rank of the plan has to call with the same trailing shape and dtype.
        src_scale: ``(L,)`` floating, without gradient; None for ones.
        dst_scale: ``(N,)`` likewise.
        add_to: ``(N, ...)`` in the dtype of ``x_N``, each row contiguous; None for zeros. Where not all rows are begun
            early, **a GPU adds a matrix in place**.
        passes: In which of them edges are summed while rows travel.
        fetch: The halo rows, where somebody has begun to fetch them; it is finished here.
        label: What is fetched, for error messages.
        travel: In which form rows travel, and their gradients; as they are when None.

    Returns:
        ``(N, ...)`` and ``(H, ...)`` in the dtype of ``x_N``. A gradient of the halo rows goes home together with that
        of the sum, in one exchange.

    Raises:
        HaloExchangeError: A peer failed, or did not take part before the timeout.
    """
    structure = structure.to(x_N.device)
    num_early = rows_begun_early(structure, x_N, plan) if passes == "both" else 0
    given = (x_N, add_to, structure, plan, src_scale, dst_scale, num_early, fetch, label, travel)
    return _OverlappedSum.apply(*given)  # type: ignore[no-untyped-call, no-any-return]


def repeated_sum(
    structure: Structure,
    x_N: Tensor,
    halo_H: Tensor,
    plan: HaloPlan,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
    *,
    passes: Passes = "both",
) -> Tensor:
    """:func:`overlapped_sum` of halo rows that are here already, the same bits; their gradient goes to ``halo_H``."""
    structure = structure.to(x_N.device)
    num_early = rows_begun_early(structure, x_N, plan) if passes == "both" else 0
    given = (x_N, halo_H, add_to, structure, src_scale, dst_scale, num_early)
    return _RepeatedSum.apply(*given)  # type: ignore[no-untyped-call, no-any-return]


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
        num_early: int,
        fetch: Fetch | None,
        label: str,
        travel: Travel | None,
    ) -> tuple[Tensor, Tensor]:
        fetch = Fetch(x_N, plan, label, travel) if fetch is None else fetch
        assert fetch.is_of(x_N)
        if ctx.needs_input_grad[0]:
            prepare_sum_to_sources(structure, x_N)
        scales = (src_scale_L, dst_scale_N)
        out_N, halo_H = _sum(ctx, structure, fetch.inner_N, fetch.finish, *scales, add_to, num_early)
        ctx.structure, ctx.plan, ctx.label, ctx.travel = structure, plan, label, of_gradient(travel)
        _save(ctx, x_N, *scales)
        ctx.set_materialize_grads(False)
        return out_N, halo_H

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, src_scale_L, dst_scale_N = ctx.saved_tensors  # before the exchange: see `nugnn.comm.meeting`
        plan: HaloPlan = ctx.plan
        label = f"gradient of {ctx.label}"
        grad_N, grad_H = grads
        needs_x, needs_add = ctx.needs_input_grad[:2]
        grad_add = grad_N if needs_add else None
        if grad_N is None:  # the halo rows alone were used
            assert grad_H is not None
            grad_N = grad_H.new_zeros((plan.num_inner, *grad_H.shape[1:]))
        if not needs_x:
            grad_x = None
        elif torch.is_grad_enabled():  # this gradient has a gradient
            y_L = _sum_back(ctx.structure, grad_N, src_scale_L, dst_scale_N)
            if grad_H is not None:
                y_L = torch.cat([y_L[: plan.num_inner], y_L[plan.num_inner :] + grad_H])
            grad_x = add_home(y_L, plan, label, ctx.travel)
        else:
            grad_x = _gradient(ctx.structure, plan, grad_N, grad_H, src_scale_L, dst_scale_N, label, ctx.travel)
        return grad_x, grad_add, *[None] * 8


@unseen
def _gradient(
    structure: Structure,
    plan: HaloPlan,
    grad_N: Tensor,
    grad_H: Tensor | None,
    src_scale_L: Tensor | None,
    dst_scale_N: Tensor | None,
    label: str,
    travel: Travel | None,
) -> Tensor:
    """The gradient of the inner rows: that of the halo rows is sent first, and what peers send is added last."""
    src_scale_N, src_scale_H = _halves(src_scale_L, plan.num_inner)
    grad_H = None if grad_H is None else grad_H.contiguous()
    y_H = sum_to_sources(
        structure, grad_N, plan.num_inner, of_rest=True, src_scale=src_scale_H, dst_scale=dst_scale_N, add_to=grad_H
    )
    is_padded = travels_padded(y_H, plan)
    width = y_H.shape[1] if is_padded else None
    exchange = begin_return(as_buffer(y_H) if is_padded else y_H, plan, label, travel, width)
    y_N = sum_to_sources(structure, grad_N, plan.num_inner, of_rest=False, src_scale=src_scale_N, dst_scale=dst_scale_N)
    received_S = exchange.finish()
    received_S = received_S[:, : y_N.shape[1]] if y_N.dim() == 2 else received_S
    return add_returned_(y_N, received_S, plan)


class _RepeatedSum(Operator):
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
        num_early: int,
    ) -> Tensor:
        ctx.structure, ctx.num_inner = structure, len(x_N)
        scales = (src_scale_L, dst_scale_N)
        _save(ctx, x_N, *scales)
        return _sum(ctx, structure, x_N, lambda: halo_H, *scales, add_to, num_early)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, src_scale_L, dst_scale_N = ctx.saved_tensors
        grad_add = grads[0] if ctx.needs_input_grad[2] else None
        if torch.is_grad_enabled():
            y_L = _sum_back(ctx.structure, grads[0], src_scale_L, dst_scale_N)
            return y_L[: ctx.num_inner], y_L[ctx.num_inner :], grad_add, *[None] * 4
        y_N, y_H = (
            sum_to_sources(
                ctx.structure, grads[0], ctx.num_inner, of_rest=of_rest, src_scale=scale, dst_scale=dst_scale_N
            )
            for of_rest, scale in zip((False, True), _halves(src_scale_L, ctx.num_inner), strict=True)
        )
        return y_N, y_H, grad_add, *[None] * 4


def _save(ctx: Any, x: Tensor, *scales: Tensor | None) -> None:
    ctx.save_for_backward(x.new_empty(0), *scales)


def _sum(
    ctx: Any,
    structure: Structure,
    x_N: Tensor,
    arrived: Callable[[], Tensor],
    src_scale_L: Tensor | None,
    dst_scale_N: Tensor | None,
    add_to: Tensor | None,
    num_early: int,
) -> tuple[Tensor, Tensor]:
    """The sum, and the halo rows.

    Args:
        ctx: Of the operator whose result it is.
        structure: As above, as are the others.
        x_N: Inner rows.
        arrived: Waits for the halo rows.
        src_scale_L: As above.
        dst_scale_N: As above.
        add_to: As above.
        num_early: Rows of the result that begin before halo rows are waited for.
    """
    how = {"src_scale": src_scale_L, "dst_scale": dst_scale_N, "add_to": add_to}
    if num_early:
        begun = begin_sum(structure, x_N, num_early, **how)
        halo_H = arrived()
        out_N = finish_sum(structure, begun, x_N, halo_H, **how)
    else:
        halo_H = arrived()
        out_N = sum_of_both(structure, x_N, halo_H, **how)
    if out_N is add_to:
        ctx.mark_dirty(add_to)
    return out_N, halo_H


def _sum_back(structure: Structure, grad_N: Tensor, src_scale_L: Tensor | None, dst_scale_N: Tensor | None) -> Tensor:
    """The gradient of local rows ``(L, ...)``, differentiable."""
    return spmm_sum(structure.reversed(), grad_N, src_scale=dst_scale_N, dst_scale=src_scale_L)


def _halves(scale_L: Tensor | None, num_inner: int) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if scale_L is None else (scale_L[:num_inner], scale_L[num_inner:])
