"""Halo rows for the operators that read them: fetched once for each tensor in a step, on the way of the operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nugnn.comm.halo_auto import AutoBits
from nugnn.comm.halo_exchange import add_home, fetch_halo
from nugnn.comm.halo_feedback import HaloFeedback
from nugnn.comm.halo_mode import HaloMode
from nugnn.comm.halo_sample import HaloSampler
from nugnn.comm.halo_stale import StaleRows
from nugnn.comm.halo_traffic import Direction, HaloTraffic
from nugnn.comm.halo_transfer import HaloPlan
from nugnn.comm.halo_wire import HaloWire, Travel
from nugnn.comm.meeting import meet
from nugnn.comm.overlap import Fetch, Passes, can_overlap, overlapped_sum, repeated_sum
from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.operator_call import OperatorCall
from nugnn.kernels.structure import Structure


class _Way(NamedTuple):
    """In which form rows travel, and which rows are read."""

    wire: HaloWire
    mode: HaloMode
    bits: AutoBits | None = None


_AS_THEY_ARE = _Way(HaloWire(), HaloMode())
_AFFINE = frozenset(("copy_lhs", "mul", "div", "add", "sub"))
"""Messages that are right in the mean if the source rows are."""


@dataclass(eq=False)
class _Known:
    """What has come of a tensor's halo rows in this step: ``(H, ...)`` alone, or behind the inner rows."""

    rows: weakref.ref[Tensor]
    version: int
    halo: Tensor | None
    local: Tensor | None
    way: _Way
    travel: Travel

    def is_of(self, x_N: Tensor) -> bool:
        """Whether these are rows of ``x_N`` as it is now."""
        return self.rows() is x_N and self.version == x_N._version

    def has_gradient_asked(self, x_N: Tensor) -> bool:
        """Whether a gradient reaches ``x_N`` from here, if one is asked for."""
        held = self.halo if self.local is None else self.local
        assert held is not None
        return held.requires_grad or not (x_N.requires_grad and torch.is_grad_enabled())


class HaloHandler:
    """Extends source operands by their halo rows, once for each (tensor, version, plan) in a step.

    Args:
        passes: In which passes plain and scaled sums of source rows overlap with the exchange of their halo rows, see
            `nugnn.comm.overlap`. The same on every rank.
        wire: How floating rows travel while ``is_training()``, forward and backward; as they are otherwise. The same
            on every rank.
        is_training: Asked at each exchange; the same answer on every rank.
        feedback: Of compressed rows forward; those are rounded at random when None.
        mode: Which floating rows are read while ``is_training()``, and which of their gradients; all of this step
            otherwise. The same on every rank.
        bits: Decides about wires in place of ``wire``.
    """

    kinds = frozenset({"spmm", "sddmm"})

    def __init__(
        self,
        *,
        passes: Passes = "none",
        wire: HaloWire = _AS_THEY_ARE.wire,
        is_training: Callable[[], bool] = lambda: True,
        feedback: HaloFeedback | None = None,
        mode: HaloMode = _AS_THEY_ARE.mode,
        bits: AutoBits | None = None,
    ) -> None:
        self.passes, self.feedback, self.mode, self.bits = passes, feedback, mode, bits
        self._way = _Way(wire, mode, bits)
        self.stale = StaleRows() if mode.kind == "stale" else None
        """What the last step was sent."""
        self._sampler = HaloSampler(mode.share) if mode.kind == "sampled" else None
        self.num_exchanges = 0
        """Exchanges made since the handler exists; for tests and reports."""
        self.num_overlapped = 0
        """How many of them travel while edges are summed, in backward if not in both passes."""
        self.traffic = HaloTraffic()
        """What was exchanged since the handler exists."""
        self._is_training, self._is_exact = is_training, False
        self._memo: dict[tuple[int, int], _Known] = {}

    @property
    def halo_bytes(self) -> int:
        """Bytes that this rank handed over for halo rows and their gradients since the handler exists."""
        return self.traffic.forward + self.traffic.gradient + self.traffic.evaluation

    def begin_step(self) -> None:
        self._memo.clear()
        if self.feedback is not None:
            self.feedback.settle()
        if self.stale is not None:
            self.stale.begin_step()
        if self.bits is not None and self._is_training():
            self.bits.begin_step()

    def end_step(self) -> None:
        self._memo.clear()
        if self.stale is not None:
            self.stale.end_step()
        if self.bits is not None:
            self.bits.end_step()

    @contextmanager
    def exact(self) -> Iterator[None]:
        """While open, all rows of this step travel as they are, and later their gradients: for values that ranks have
        to share.
        """
        before, self._is_exact = self._is_exact, True
        try:
            yield
        finally:
            self._is_exact = before

    def local(self, x_N: Tensor, plan: HaloPlan, interceptor: Interceptor) -> Tensor:
        """``(L, ...)`` of ``x_N`` for a user's function, remembered until ``x_N`` changes or the step ends."""
        if not plan.ranks.is_split:
            return x_N
        what = "source rows of a user function"
        name = interceptor.coming_name(what)
        interceptor.skip(what)  # counted whether they travel or are known, as in a layer's second run
        return self._local(x_N, plan, name, interceptor, reader="a user's function, or nugnn.halo,")

    def home(self, y_L: Tensor, plan: HaloPlan, interceptor: Interceptor) -> Tensor:
        """``(N, ...)``: sums ``y_L`` over out-edges, those of halo rows added to their owners'."""
        if not plan.ranks.is_split:
            return y_L
        what = "rows that go home"
        name = interceptor.coming_name(what)
        interceptor.skip(what)
        return add_home(y_L, plan, name, self._travel(name, plan, self._way_now(y_L), interceptor))

    def _local(
        self,
        x_N: Tensor,
        plan: HaloPlan,
        name: str,
        interceptor: Interceptor,
        *,
        is_kept: bool = False,
        reader: str | None = None,
    ) -> Tensor:
        """``reader``: who reads the rows, if it is no sum of messages that are affine in them."""
        way = self._way_now(x_N, is_kept=is_kept)
        if reader is not None and way.mode.kind == "sampled":
            raise NotImplementedError(
                f"{name}: under halo_mode {way.mode} a share of the halo rows arrives, scaled so that sums and means "
                f"over neighbours are right in the mean; {reader} is no such sum and would be wrong. Use halo_mode "
                "exact or stale for this model, or a layer that sums or averages"
            )
        known = self._known(x_N, plan, way)
        if known is None:
            travel = self._travel_of(x_N, plan, name, way, interceptor)
            known = self._remember(x_N, plan, None, fetch_halo(x_N, plan, name, travel), way, travel)
        if known.local is None:
            assert known.halo is not None
            known.local = torch.cat([x_N, known.halo])
        return meet(known.local)

    def _way_now(self, x: Tensor, *, is_kept: bool = False) -> _Way:
        """``is_kept``: what is made of these rows serves other steps, too, and evaluation."""
        is_plain = self._is_exact or is_kept or not x.is_floating_point() or not self._is_training()
        return _AS_THEY_ARE if is_plain else self._way

    def _travel_of(self, x_N: Tensor, plan: HaloPlan, name: str, way: _Way, interceptor: Interceptor) -> Travel:
        """A tensor that travels twice in a step, since now its gradient is asked for, travels as it did first."""
        known = self._memo.get((id(x_N), id(plan)))
        if known is not None and known.is_of(x_N) and known.way == way:
            return known.travel
        return self._travel(name, plan, way, interceptor)

    def _travel(self, name: str, plan: HaloPlan, way: _Way, interceptor: Interceptor) -> Travel:
        stale = self.stale if way.mode.kind == "stale" else None
        if way.wire.is_random or way.bits is not None or stale is not None:
            interceptor.random_key(name)  # refuses what runs again under another name
        direction: Direction = "forward" if self._is_training() else "evaluation"
        when = interceptor.seed, interceptor.step_number
        sample = None
        if self._sampler is not None and way.mode.kind == "sampled":
            sample = self._sampler.of_step(plan, *when)
        how: dict[str, Any] = {"feedback": self.feedback, "sample": sample, "stale": stale}
        if way.bits is not None:
            how |= {"bits": way.bits.bits, "watch": way.bits.watch}
        return Travel(way.wire, f"halo of {name}", *when, self.traffic, direction, **how)

    def _known(self, x_N: Tensor, plan: HaloPlan, way: _Way) -> _Known | None:
        known = self._memo.get((id(x_N), id(plan)))
        if known is None or not known.is_of(x_N) or known.way != way:
            return None
        return known if known.has_gradient_asked(x_N) else None

    def _remember(
        self, x_N: Tensor, plan: HaloPlan, halo_H: Tensor | None, x_L: Tensor | None, way: _Way, travel: Travel
    ) -> _Known:
        self.num_exchanges += 1
        memo, key = self._memo, (id(x_N), id(plan))
        memo[key] = _Known(weakref.ref(x_N, lambda _: memo.pop(key, None)), x_N._version, halo_H, x_L, way, travel)
        return memo[key]

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        plan: HaloPlan | None = call.attrs["plan"]
        is_kept = call.attrs.get("is_kept", False)
        attrs = {key: value for key, value in call.attrs.items() if key not in ("plan", "is_kept")}
        if plan is None:  # over out-edges: the result goes home instead
            return proceed(replace(call, attrs=attrs))
        if self._overlaps(call, plan):
            run = self._overlapped(plan, call.name, interceptor, is_kept=is_kept)
            return proceed(replace(call, attrs=attrs, run=run))
        targets = ("u", "e") if call.kind == "spmm" else (attrs["lhs_target"], attrs["rhs_target"])
        names = (call.name, f"{call.name}, right operand")  # which may be rows of the same nodes as the left one
        how: dict[str, Any] = {"is_kept": is_kept, "reader": _reader(call)}
        inputs = tuple(
            self._local(x, plan, name, interceptor, **how)
            if target == "u" and x is not None and plan.ranks.is_split
            else x
            for x, target, name in zip(call.inputs, targets, names, strict=True)
        )
        return proceed(replace(call, inputs=inputs, attrs=attrs))

    def begin_fetch(self, x_N: Tensor, plan: HaloPlan, interceptor: Interceptor) -> Fetch | None:
        """Send rows whose plain or scaled sum comes next, so that they travel until then: it has to be given this.

        None where sums do not overlap with the exchange.
        """
        if self.passes == "none" or not can_overlap(x_N, plan):
            return None
        name = interceptor.coming_name("spmm")
        return Fetch(x_N, plan, name, self._travel_of(x_N, plan, name, self._way_now(x_N), interceptor))

    def _overlaps(self, call: OperatorCall, plan: HaloPlan) -> bool:
        is_sum = call.kind == "spmm" and call.attrs["op"] == "copy_lhs" and call.attrs["reduce"] == "sum"
        return is_sum and self.passes != "none" and can_overlap(call.inputs[0], plan)

    def _overlapped(
        self, plan: HaloPlan, name: str, interceptor: Interceptor, *, is_kept: bool
    ) -> Callable[..., Tensor]:
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
            way = self._way_now(x_N, is_kept=is_kept)
            if fetch is None and (known := self._known(x_N, plan, way)) is not None:
                if known.halo is None:
                    assert known.local is not None
                    known.halo = known.local[plan.num_inner :]
                return repeated_sum(structure, x_N, known.halo, plan, src_scale, dst_scale, add_to, passes=self.passes)
            travel = self._travel_of(x_N, plan, name, way, interceptor)
            out_N, halo_H = overlapped_sum(
                structure, x_N, plan, src_scale, dst_scale, add_to, passes=self.passes, fetch=fetch, label=name,
                travel=travel,
            )  # fmt: skip
            self._remember(x_N, plan, halo_H, None, way, travel)
            self.num_overlapped += 1
            return out_N

        return run


def _reader(call: OperatorCall) -> str | None:
    """What ``call`` is, if it is no sum over neighbours of messages that are affine in the source rows."""
    if call.kind == "sddmm":
        return "a value for each edge, as attention has it,"
    op, reduce = call.attrs["op"], call.attrs["reduce"]
    if reduce != "sum":
        return f"a {reduce}imum over neighbours"
    return None if op in _AFFINE else op
