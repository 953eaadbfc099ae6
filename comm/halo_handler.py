"""Halo rows for the operators that read them: fetched once for each tensor in a step, on the way of the operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nugnn.comm.halo_exchange import HaloPlan, fetch_halo
from nugnn.comm.meeting import meet
from nugnn.comm.overlap import Fetch, Passes, can_overlap, overlapped_sum, repeated_sum
from nugnn.kernels.interceptor import Interceptor, OperatorCall
from nugnn.kernels.structure import Structure


@dataclass(eq=False)
class _Known:
    """What has come of a tensor's halo rows in this step: ``(H, ...)`` alone, or behind the inner rows."""

    rows: weakref.ref[Tensor]
    version: int
    halo: Tensor | None
    local: Tensor | None

    def answers(self, x_N: Tensor) -> bool:
        """Whether it holds for ``x_N`` as it is now, with the gradient asked for."""
        held = self.halo if self.local is None else self.local
        assert held is not None
        grad_as_asked = held.requires_grad or not (x_N.requires_grad and torch.is_grad_enabled())
        return self.rows() is x_N and self.version == x_N._version and grad_as_asked


class HaloHandler:
    """Extends source operands by their halo rows, once for each (tensor, version, plan) in a step.

    Args:
        passes: In which passes plain and scaled sums of source rows overlap with the exchange of their halo rows, see
            `nugnn.comm.overlap`. The same on every rank.
    """

    kinds = frozenset({"spmm", "sddmm"})

    def __init__(self, *, passes: Passes = "none") -> None:
        self.passes = passes
        self.num_exchanges = 0
        """Exchanges made since the handler exists; for tests and reports."""
        self.num_overlapped = 0
        """How many of them travel while edges are summed, in backward if not in both passes."""
        self.halo_bytes = 0
        """Bytes received since the handler exists."""
        self._memo: dict[tuple[int, int], _Known] = {}

    def begin_step(self) -> None:
        self._memo.clear()

    def end_step(self) -> None:
        self._memo.clear()

    def local(self, x_N: Tensor, plan: HaloPlan, label: str = "source rows of a user function") -> Tensor:
        """``fetch_halo(x_N, plan)``, remembered until ``x_N`` changes or the step ends."""
        if not plan.ranks.is_split:
            return x_N
        known = self._known(x_N, plan)
        if known is None:
            known = self._remember(x_N, plan, None, fetch_halo(x_N, plan, label))
        if known.local is None:
            assert known.halo is not None
            known.local = torch.cat([x_N, known.halo])
        return meet(known.local)

    def _known(self, x_N: Tensor, plan: HaloPlan) -> _Known | None:
        known = self._memo.get((id(x_N), id(plan)))
        return known if known is not None and known.answers(x_N) else None

    def _remember(self, x_N: Tensor, plan: HaloPlan, halo_H: Tensor | None, x_L: Tensor | None) -> _Known:
        self.num_exchanges += 1
        self.halo_bytes += plan.num_halo * x_N.shape[1:].numel() * x_N.element_size()
        memo, key = self._memo, (id(x_N), id(plan))
        memo[key] = _Known(weakref.ref(x_N, lambda _: memo.pop(key, None)), x_N._version, halo_H, x_L)
        return memo[key]

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        plan: HaloPlan | None = call.attrs["plan"]
        attrs = {key: value for key, value in call.attrs.items() if key != "plan"}
        if plan is None:  # over out-edges: the result goes home instead
            return proceed(replace(call, attrs=attrs))
        if self._overlaps(call, plan):
            return proceed(replace(call, attrs=attrs, run=self._overlapped(plan, call.name)))
        targets = ("u", "e") if call.kind == "spmm" else (attrs["lhs_target"], attrs["rhs_target"])
        inputs = tuple(
            self.local(x, plan, call.name) if target == "u" and x is not None else x
            for x, target in zip(call.inputs, targets, strict=True)
        )
        return proceed(replace(call, inputs=inputs, attrs=attrs))

    def begin_fetch(self, x_N: Tensor, plan: HaloPlan) -> Fetch | None:
        """Send rows whose plain or scaled sum comes later, so that they travel until then: it has to be given this.

        None where sums do not overlap with the exchange.
        """
        return Fetch(x_N, plan, "rows of a layer") if self.passes != "none" and can_overlap(x_N, plan) else None

    def _overlaps(self, call: OperatorCall, plan: HaloPlan) -> bool:
        is_sum = call.kind == "spmm" and call.attrs["op"] == "copy_lhs" and call.attrs["reduce"] == "sum"
        return is_sum and self.passes != "none" and can_overlap(call.inputs[0], plan)

    def _overlapped(self, plan: HaloPlan, label: str) -> Callable[..., Tensor]:
        def run(
            structure: Structure,
            x_N: Tensor,
            _: None,
            src_scale: Tensor | None = None,
            dst_scale: Tensor | None = None,
            add_to: Tensor | None = None,
            fetch: Fetch | None = None,
            **__: Any,
        ) -> Tensor:
            if fetch is None and (known := self._known(x_N, plan)) is not None:
                if known.halo is None:
                    assert known.local is not None
                    known.halo = known.local[plan.num_inner :]
                return repeated_sum(structure, x_N, known.halo, src_scale, dst_scale, add_to, passes=self.passes)
            out_N, halo_H = overlapped_sum(
                structure, x_N, plan, src_scale, dst_scale, add_to, passes=self.passes, fetch=fetch, label=label
            )
            self._remember(x_N, plan, halo_H, None)
            self.num_overlapped += 1
            return out_N

        return run
