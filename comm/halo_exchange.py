"""Halo rows travel from their owners forward, and their gradients travel back to be added.

Shape suffixes: N inner, H halo, L = N + H local rows, S rows sent.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nugnn.comm.groups import Ranks
from nugnn.comm.meeting import meet, ranks_have_met, ranks_meet
from nugnn.kernels.interceptor import Interceptor, OperatorCall


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """Which inner rows go to whom, and where received rows land.

    Args:
        num_inner: N.
        send_rows: ``(S,)`` int64 inner rows, concatenated by peer, on the device of the rank.
        send_splits: Rows sent to each rank, length P.
        recv_splits: Rows received from each rank, length P; halo rows are ordered by owner.
        ranks: Groups the exchange runs on.
        version: Grows when re-balancing replaces the plan.
    """

    num_inner: int
    send_rows: Tensor
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    ranks: Ranks
    version: int = 0

    @property
    def num_halo(self) -> int:
        return sum(self.recv_splits)

    @property
    def num_local(self) -> int:
        return self.num_inner + self.num_halo

    def verify(self) -> None:
        """Compare counts with every peer; a mismatch raises on every rank, naming the pair and both counts."""
        if not self.ranks.is_split:
            return
        table = torch.zeros(2, self.ranks.world_size, self.ranks.world_size, dtype=torch.int64)
        if len(self.send_splits) == len(self.recv_splits) == self.ranks.world_size:
            table[0, self.ranks.rank] = torch.tensor(self.send_splits)
            table[1, :, self.ranks.rank] = torch.tensor(self.recv_splits)
        else:
            table[:, self.ranks.rank] = -1
        self.ranks.sum_(table)
        wrong = (table[0] != table[1]).nonzero()
        if len(wrong):
            sender, receiver = wrong[0].tolist()
            raise ValueError(
                f"halo plan: rank {sender} plans to send {int(table[0, sender, receiver])} rows to rank {receiver}, "
                f"which plans to receive {int(table[1, sender, receiver])}. "
                "The shards come from different runs; partition again into an empty folder."
            )


class HaloExchangeError(RuntimeError):
    """An exchange of halo rows failed or did not finish in time; says where and who was waited for."""


def _all_to_all_rows(
    out: Tensor, rows: Tensor, out_splits: tuple[int, ...], splits: tuple[int, ...], plan: HaloPlan, label: str
) -> None:
    """Send ``splits[r]`` rows to each rank r and fill ``out``; any dtype, as bytes."""
    ranks, row_bytes = plan.ranks, out.element_size() * out.shape[1:].numel()
    if row_bytes == 0:
        return
    begin = time.perf_counter()
    ranks.clock.halo_rounds += 1
    waiting = ranks.pulse.waiting(f"halo exchange {ranks.clock.halo_rounds} ({label})")
    try:
        with ranks.clock.measure("halo", out.device), waiting:
            if ranks.on_wire(rows) is rows:
                _transfer(out, rows, out_splits, splits, row_bytes, ranks)
            else:
                received = torch.empty(out.shape, dtype=out.dtype)
                _transfer(received, rows.cpu(), out_splits, splits, row_bytes, ranks)
                out.copy_(received)
    except RuntimeError as error:
        peers = [str(peer) for peer in range(ranks.world_size) if out_splits[peer] or splits[peer]]
        raise HaloExchangeError(
            f"rank {ranks.rank}: halo exchange {ranks.clock.halo_rounds} of this run ({label}) failed after "
            f"{time.perf_counter() - begin:.1f} s. It exchanges rows with rank{'s' * (len(peers) > 1)} "
            f"{', '.join(peers) or 'none'}; one of them stopped, is slow, or made other calls than this rank. "
            f"The transport says: {error}"
        ) from error


def _transfer(
    out: Tensor, rows: Tensor, out_splits: tuple[int, ...], splits: tuple[int, ...], row_bytes: int, ranks: Ranks
) -> None:
    assert ranks.halo is not None
    work = ranks.halo.alltoall_base(
        out.view(torch.uint8).view(-1) if out.numel() else out.new_empty(0, dtype=torch.uint8),
        rows.contiguous().view(torch.uint8).view(-1) if rows.numel() else rows.new_empty(0, dtype=torch.uint8),
        [n * row_bytes for n in out_splits],
        [n * row_bytes for n in splits],
    )
    work.wait()


def _fetch(x_N: Tensor, plan: HaloPlan, label: str) -> Tensor:
    x_N = x_N.contiguous()
    x_L = x_N.new_empty((plan.num_local, *x_N.shape[1:]))
    x_L[: plan.num_inner] = x_N
    _all_to_all_rows(x_L[plan.num_inner :], x_N[plan.send_rows], plan.recv_splits, plan.send_splits, plan, label)
    return x_L


def _return_rows(y_L: Tensor, plan: HaloPlan, label: str) -> Tensor:
    """The ``(S, ...)`` values that peers hold for the rows we sent them, in ``send_rows`` order."""
    received_S = y_L.new_empty((len(plan.send_rows), *y_L.shape[1:]))
    _all_to_all_rows(received_S, y_L[plan.num_inner :], plan.send_splits, plan.recv_splits, plan, label)
    return received_S


def _add_home(y_L: Tensor, plan: HaloPlan, label: str) -> Tensor:
    y_L = y_L.contiguous()
    return y_L[: plan.num_inner].index_add(0, plan.send_rows, _return_rows(y_L, plan, label))


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, plan: HaloPlan, label: str) -> Tensor:
        ctx.plan, ctx.label = plan, label
        return _fetch(x_N, plan, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _AddHome.apply(grads[0], ctx.plan, f"gradient of {ctx.label}"), None, None  # type: ignore[no-untyped-call]


class _AddHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_L: Tensor, plan: HaloPlan, label: str) -> Tensor:
        ctx.plan, ctx.label = plan, label
        ranks_meet(ctx, y_L)
        return _add_home(y_L, plan, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ranks_have_met(ctx)
        return _Fetch.apply(grads[0], ctx.plan, f"gradient of {ctx.label}"), None, None  # type: ignore[no-untyped-call]


def fetch_halo(x_N: Tensor, plan: HaloPlan, label: str = "halo rows") -> Tensor:
    """Inner rows followed by halo rows.

    Args:
        x_N: ``(N, ...)`` values of inner nodes, any dtype.
        plan: Every rank of the plan has to call with the same trailing shape and dtype.
        label: What is fetched, for error messages: the name of an operator.

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
    return _Fetch.apply(x_N, plan, label)  # type: ignore[no-untyped-call, no-any-return]


def add_home(y_L: Tensor, plan: HaloPlan, label: str = "rows that go home") -> Tensor:
    """Add the halo rows of ``y_L (L, ...)`` to their owners' rows: ``(N, ...)``; the transpose of `fetch_halo`."""
    if not plan.ranks.is_split:
        return y_L
    return _AddHome.apply(y_L, plan, label)  # type: ignore[no-untyped-call, no-any-return]


def max_home(y_L: Tensor, plan: HaloPlan, label: str = "rows that go home") -> Tensor:
    """Maximum of each inner row and the halo copies of it elsewhere: ``(N, ...)``, without gradient."""
    if not plan.ranks.is_split:
        return y_L
    y_L = y_L.detach().contiguous()
    received_S = _return_rows(y_L, plan, label)
    index = plan.send_rows.view(-1, *([1] * (y_L.dim() - 1))).expand_as(received_S)
    return y_L[: plan.num_inner].scatter_reduce(0, index, received_S, "amax")


class _Tie(torch.autograd.Function):
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


class HaloHandler:
    """Extends source operands by their halo rows, once for each (tensor, version, plan) in a step."""

    kinds = frozenset({"spmm", "sddmm"})

    def __init__(self) -> None:
        self.num_exchanges = 0
        """Exchanges made since the handler exists; for tests and reports."""
        self.halo_bytes = 0
        """Bytes received since the handler exists."""
        self._memo: dict[tuple[int, int], tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def begin_step(self) -> None:
        self._memo.clear()

    def end_step(self) -> None:
        self._memo.clear()

    def local(self, x_N: Tensor, plan: HaloPlan, label: str = "source rows of a user function") -> Tensor:
        """``fetch_halo(x_N, plan)``, remembered until ``x_N`` changes or the step ends."""
        if not plan.ranks.is_split:
            return x_N
        return meet(self._fetched_or_known(x_N, plan, label))

    def _fetched_or_known(self, x_N: Tensor, plan: HaloPlan, label: str) -> Tensor:
        key = (id(x_N), id(plan))
        known = self._memo.get(key)
        if known is not None and known[0]() is x_N and known[1] == x_N._version:
            grad_as_asked = known[2].requires_grad or not (x_N.requires_grad and torch.is_grad_enabled())
            if grad_as_asked:
                return known[2]
        x_L = fetch_halo(x_N, plan, label)
        self.num_exchanges += 1
        self.halo_bytes += (x_L[plan.num_inner :]).numel() * x_L.element_size()
        memo = self._memo
        self._memo[key] = (weakref.ref(x_N, lambda _: memo.pop(key, None)), x_N._version, x_L)
        return x_L

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        plan: HaloPlan | None = call.attrs["plan"]
        attrs = {key: value for key, value in call.attrs.items() if key != "plan"}
        if plan is None:  # over out-edges: the result goes home instead
            return proceed(OperatorCall(call.name, call.kind, call.structure, call.inputs, attrs, call.run))
        targets = ("u", "e") if call.kind == "spmm" else (attrs["lhs_target"], attrs["rhs_target"])
        inputs = tuple(
            self.local(x, plan, call.name) if target == "u" and x is not None else x
            for x, target in zip(call.inputs, targets, strict=True)
        )
        return proceed(OperatorCall(call.name, call.kind, call.structure, inputs, attrs, call.run))
