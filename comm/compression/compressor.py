"""Compressed sums of gradients from step to step: what travels how, and what each rank still owes to the sum."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nugnn.comm.compression.adaptive import BITS, bits_for, quantization_errors
from nugnn.comm.compression.arrangement import Arrangement, across, best, errors_of
from nugnn.comm.compression.layout import Layout
from nugnn.comm.compression.link import Link
from nugnn.comm.compression.reduction import Rounding, num_slices, sum_encoded
from nugnn.comm.compression.residuals import Order, Residuals
from nugnn.comm.compression.rooms import RestRooms
from nugnn.comm.compression.settings import ADAPTIVE, Compression, check_types
from nugnn.comm.compression.traffic import Traffic, by_group, sums_of
from nugnn.comm.compression.wire import Wire

FIRST_PLAN, STEPS_BETWEEN_PLANS = 8, 200
"""``adaptive``: after so many steps, and again and again after that, bits are chosen anew; from the first step on, and
as often, how tensors are arranged in buckets."""
STEPS_BETWEEN_LOOKS = 100
"""Steps whose rounding error is measured."""


@dataclass
class _Pending:
    """What a step leaves to the next, if it counts."""

    groups: set[str] = field(default_factory=set)
    rests: dict[str, Tensor] = field(default_factory=dict)
    is_finite: list[Tensor] = field(default_factory=list)
    errors: dict[str, list[float]] = field(default_factory=dict)


class Compressor:
    """Sums gradients over ranks in few bits.

    A step is `open`, then `sum` for each group of gradients, then `settle`; all ranks do the same in the same order.

    What rounding left out is kept by name of the parameter, in units of the gradient without a loss scale, and is
    added to the gradient of the next step (error feedback). Where a rank's whole gradient of a parameter is zero,
    because it does not use it, it sends nothing of what it has kept either: a parameter that nobody uses has no
    gradient. What a rank keeps and what was summed always add up to the gradients so far.

    Args:
        named: Parameters whose gradients will come, in the same order on every rank.
        settings: How they travel.
        world_size: P.

    Raises:
        ValueError: A parameter is neither float32 nor of 16 bits; ``exact`` names one that is not there.
    """

    def __init__(self, named: Mapping[str, Tensor], settings: Compression, world_size: int) -> None:
        self.settings, self._world_size = settings, world_size
        self._named = dict(named)
        check_types(self._named)
        settings.check_names(self._named)
        self._numbers = {name: number for number, name in enumerate(self._named)}
        self._compressed = [
            name for name, p in self._named.items() if settings.takes(p) and not settings.is_exact(name)
        ]
        self._plain = Wire("fp32")
        self._wires = dict.fromkeys(self._compressed, settings.first_wire)
        self._choices = Arrangement.choices(settings.bucket)
        self._arranged = dict.fromkeys(self._compressed, self._choices[0])
        self._residuals = Residuals(self._named)
        self._packed: dict[str, Order] = {}
        """In which gradients come."""
        self._room: Tensor | None = None
        self._rest_rooms = RestRooms()
        self.step = self._first_step = 0
        self.traffic: dict[str, Traffic] = {}
        self._plans = Traffic()
        self._layouts: dict[tuple[tuple[str, ...], int], Layout] = {}
        self._scale: float | Tensor = 1.0
        self._pending = _Pending()

    @property
    def bits(self) -> dict[str, int]:
        """Of each compressed parameter now."""
        return {name: self._wires[name].bits for name in self._compressed}

    def open(self, scale: float | Tensor = 1.0) -> None:
        """Begin a step.

        Args:
            scale: Factor that is in the gradients (a loss scale) and has to stay in their sums: a number, or a scalar
                on their device.
        """
        self._scale, self._pending = scale, _Pending()

    def sum_(self, values: Tensor, names: Sequence[str], orders: Sequence[Order], num_plain: int, link: Link) -> None:
        """Sum ``values`` over ranks, in place, the same bits on every rank; a collective call.

        A value that is not finite on some rank makes its bucket NaN on all.

        Args:
            values: float32: gradients of the parameters ``names``, and ``num_plain`` values that travel as they are.
                Becomes the sum.
            names: Of parameters.
            orders: Of each the order in which its values come.
            num_plain: Values at the end.
            link: To the other ranks.
        """
        begin, before = time.perf_counter(), replace(link.sent)
        feeds_back, looks = self.settings.feeds_back, self.step % STEPS_BETWEEN_LOOKS == 0
        self._packed |= zip(names, orders, strict=True)
        held = self._as_they_travel(values, names, feeds_back=feeds_back)
        if self.settings.is_quantized and self.step % STEPS_BETWEEN_PLANS == 0:
            held = self._arrange(values, names, held, link)
        group, num_gradients = names[0] if names else "", len(values) - num_plain
        rest = None
        if feeds_back:
            rest = self._rest_rooms.room(group, values, self._residuals.tensors())
        elif looks:
            rest = torch.empty_like(values)  # for one step in many: not held in between
        sizes: list[Tensor] = []

        def look(sent: Tensor) -> None:
            if looks:
                sizes.append(sent[:num_gradients].norm().clamp(min=torch.finfo(sent.dtype).tiny))
            if self._bits_are_measured:
                for name, part in self._parts(sent, names):
                    self._pending.errors[name] = quantization_errors(part, self._arranged[name].bucket)

        self._reduce_(values, names, num_plain, link, rest, look)
        least, most = torch.aminmax(values[:num_gradients]) if num_gradients else (values.new_zeros(()),) * 2
        self._pending.groups.add(group)
        self._pending.is_finite.append(torch.isfinite(least) & torch.isfinite(most))
        traffic = self.traffic.setdefault(group, Traffic())
        if rest is not None and looks:
            error = float(rest[:num_gradients].norm() / sizes[0])
            traffic.error = error if math.isfinite(error) else None
        if rest is not None and feeds_back:
            self._keep(rest, names, held)
        traffic.num_values, traffic.steps = num_gradients, traffic.steps + 1
        traffic.count(before, link.sent)
        traffic.seconds += time.perf_counter() - begin

    def settle(self, link: Link, *, is_good: bool = True) -> None:
        """End a step; a collective call in steps after which bits are chosen anew.

        Args:
            link: To the other ranks.
            is_good: False when the optimizer leaves the step out, the same on every rank. What was kept before stays
                then, as it does where a sum is not finite.
        """
        if is_good and self._pending.is_finite:
            self._commit_all(torch.stack(self._pending.is_finite).all())
            self._rest_rooms.keep_groups(self._pending.groups)
        if self._bits_are_measured:
            before = replace(link.sent)
            self._choose_bits(self._pending.errors, link)
            self._plans.count(before, link.sent)
        self._pending = _Pending()
        self.step += 1

    def _reduce_(
        self,
        values: Tensor,
        names: Sequence[str],
        num_plain: int,
        link: Link,
        rest: Tensor | None,
        look: Callable[[Tensor], object],
    ) -> None:
        """``values`` as they travel become the sum as it comes, and ``rest`` what this rank has not sent; see
        `sum_encoded`.
        """
        rounding = Rounding(self.settings.seed if self.settings.rounding == "stochastic" else None, self.step)
        sum_encoded(values, self._layout(tuple(names), num_plain), link, rounding, rest=rest, look=look)
        self._turn(values, names, back=True)

    def _as_they_travel(self, values: Tensor, names: Sequence[str], *, feeds_back: bool) -> dict[str, Tensor]:
        """Pack ``values`` as they are arranged and add what was kept; see `_add_residuals`."""
        self._turn(values, names, back=False)
        for name in names:
            self._residuals.pack_as(name, self._travelling(name))
        return self._add_residuals(values, names) if feeds_back else {}

    def _turn(self, values: Tensor, names: Sequence[str], *, back: bool) -> None:
        """Pack those that are arranged across column by column, or back."""
        for name, part in self._parts(values, names):
            if self._arranged[name].is_across:
                part.copy_(across(part, self._shape(name)[back], self._room_for(part)))

    def _room_for(self, part: Tensor) -> Tensor | None:
        """As large; on a CPU the same in each step, for the system takes longer to make memory than we to turn it."""
        if part.device.type != "cpu":
            return None
        if self._room is None:
            largest = max(self._named[name].numel() for name in self._compressed)
            self._room = torch.empty(largest, dtype=torch.float32, device=part.device)
        return self._room[: len(part)]

    def _travelling(self, name: str) -> Order:
        """The order of axes in which its values travel: across, the first axis of those that are packed is the last."""
        order = self._packed[name]
        if name not in self._arranged or not self._arranged[name].is_across:
            return order
        axes = range(self._named[name].dim()) if order is None else order
        return [*axes[1:], axes[0]]

    def _shape(self, name: str) -> tuple[int, int]:
        """Rows and columns, as values come."""
        shape, order = self._named[name].shape, self._packed.get(name)
        rows = shape[0 if order is None else order[0]]
        return rows, self._named[name].numel() // max(rows, 1)

    # -- error feedback ------------------------------------------------------------------------------------------------

    def _add_residuals(self, values: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Add what was kept, where there is a gradient; where there is none it stays, and is returned."""
        held = {}
        for name, part in self._parts(values, names):
            kept = self._residuals[name]
            if part.device.type == "cpu":
                if part.numel() and any(end != 0 for end in torch.stack(torch.aminmax(part)).tolist()):  # NaN, too
                    part.add_(kept, alpha=float(self._scale))
                else:
                    held[name] = kept
            else:  # without waiting for an answer
                is_used = part.any()  # by NaN, too
                part.add_(kept * torch.where(is_used, self._scale, 0.0))
                held[name] = torch.where(is_used, 0.0, kept)
        return held

    def _keep(self, rest: Tensor, names: Sequence[str], held: dict[str, Tensor]) -> None:
        for name, part in self._parts(rest, names):
            if isinstance(self._scale, Tensor) or self._scale != 1:
                part.div_(self._scale)
            self._pending.rests[name] = part.add_(held[name]) if name in held else part

    def _commit_all(self, finite: Tensor) -> None:
        """Keep what the step has left, unless something was not finite."""
        self._residuals.commit(self._pending.rests, finite)

    def _parts(self, values: Tensor, names: Sequence[str]) -> list[tuple[str, Tensor]]:
        """Each compressed parameter's values."""
        parts, start = [], 0
        for name in names:
            size = self._named[name].numel()
            if name in self._wires:
                parts.append((name, values[start : start + size]))
            start += size
        return parts

    @property
    def residuals(self) -> dict[str, Tensor]:
        """What this rank has kept, by name and in the shape of the parameter, float32: copies."""
        return self._residuals.copies()

    # -- plans, the same on every rank ---------------------------------------------------------------------------------

    @property
    def _bits_are_measured(self) -> bool:
        """Whether bits are chosen anew after this step."""
        if self.settings.wire != ADAPTIVE or not self._compressed:
            return False
        return self.step + 1 == FIRST_PLAN or (self.step + 1) % STEPS_BETWEEN_PLANS == 0

    def _choose_bits(self, errors: dict[str, list[float]], link: Link) -> None:
        sizes, nothing = [self._named[name].numel() for name in self._compressed], [0.0] * len(BITS)
        buckets = [self._arranged[name].bucket for name in self._compressed]
        of_each = [errors.get(name, nothing) for name in self._compressed]

        def choose(total: list[list[float]]) -> list[int]:
            bits = list(self.bits.values())
            known = [number for number, errors in enumerate(total) if any(errors)]  # others did not travel
            if known:
                known_sizes, known_buckets = ([given[number] for number in known] for given in (sizes, buckets))
                chosen = bits_for(known_sizes, [total[number] for number in known], known_buckets)
                for number, bits_of_one in zip(known, chosen, strict=True):
                    bits[number] = bits_of_one
            return bits

        device = self._named[self._compressed[0]].device
        bits = self._agreed(of_each, choose, link, device)
        self._set_wires({name: f"{b}bit" for name, b in zip(self._compressed, bits, strict=True)})

    def _arrange(
        self, values: Tensor, names: Sequence[str], held: Mapping[str, Tensor], link: Link
    ) -> dict[str, Tensor]:
        """Choose how gradients that are to be summed now lie in buckets, and pack all as chosen; gives ``held`` so."""
        self._turn(values, names, back=True)
        parts = self._parts(values, names)
        wires = {name: self._wires[name].name for name, _ in parts}
        of_each = [errors_of(part, self._shape(name)[0], wires[name], self._choices) for name, part in parts]

        def choose(total: list[list[float]]) -> list[int]:
            return [
                best(errors, len(part), wires[name], self._choices, self._choices.index(self._arranged[name]))
                for (name, part), errors in zip(parts, total, strict=True)
            ]

        if parts:
            plan = self._agreed(of_each, choose, link, parts[0][1].device)
            self._arranged |= {name: self._choices[number] for (name, _), number in zip(parts, plan, strict=True)}
            self._set_wires(wires)
        packed, before = dict(held), {name: self._residuals.order(name) for name in held}
        self._as_they_travel(values, names, feeds_back=False)
        for name, kept in held.items():
            packed[name] = self._residuals.repacked(kept, name, before[name], self._residuals.order(name))
        return packed

    def _agreed(
        self,
        errors: Sequence[Sequence[float]],
        choose: Callable[[list[list[float]]], Sequence[int]],
        link: Link,
        device: torch.device,
    ) -> list[int]:
        """What rank 0 chooses for each tensor by what all have measured; ``device`` is the process group's home."""
        rows = torch.tensor(errors, dtype=torch.float64, device=device)
        gathered = link.gather(rows.view(torch.uint8).flatten()).clone().view(torch.float64)
        plan = torch.zeros(len(errors), dtype=torch.uint8, device=device)
        if link.rank == 0:
            total = gathered.view(self._world_size, *rows.shape).sum(0)
            plan = torch.tensor(choose(total.tolist()), dtype=torch.uint8, device=device)
        chosen: list[int] = link.gather(plan)[0].tolist()
        return chosen

    def _set_wires(self, wires: Mapping[str, str]) -> None:
        self._wires |= {name: Wire(wire, self._arranged[name].bucket) for name, wire in wires.items()}
        self._layouts.clear()

    def _layout(self, names: tuple[str, ...], num_plain: int) -> Layout:
        key = (names, num_plain)
        if key not in self._layouts:
            self._layouts[key] = Layout(
                [*(self._named[name].numel() for name in names), num_plain],
                [*(self._wires.get(name, self._plain) for name in names), self._plain],
                [*(self._numbers[name] for name in names), len(self._named)],
                self._world_size * num_slices(sum(self._named[name].numel() for name in names)),
            )
        return self._layouts[key]

    # -- state ---------------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        """Plain values that are the same on every rank."""
        is_planned = self.settings.wire == ADAPTIVE
        arranged = {name: [self._arranged[name].is_across, self._arranged[name].bucket] for name in self._compressed}
        return {"step": self.step, "bits": self.bits if is_planned else None, "arranged": arranged}

    def load(self, shared: Mapping[str, Any], residuals: Mapping[str, Tensor]) -> None:
        """Go on where `shared_state` and `residuals` were taken.

        Raises:
            ValueError: They are of other parameters.
        """
        self.step = self._first_step = int(shared["step"])
        self._check_names(shared["arranged"])
        arranged = {name: Arrangement(*each) for name, each in shared["arranged"].items()}
        if unknown := [str(each) for each in arranged.values() if each not in self._choices]:
            raise ValueError(f"the state is of other buckets: {unknown[0]} is none of these settings")
        self._arranged |= arranged
        wires = {name: wire.name for name, wire in self._wires.items()}
        if shared["bits"] is not None:
            self._check_names(shared["bits"])
            wires |= {name: f"{bits}bit" for name, bits in shared["bits"].items()}
        self._set_wires(wires)
        self._check_names(residuals)
        self._residuals.load(residuals)
        if missing := [name for name in self._compressed if name not in shared["arranged"]]:
            raise ValueError(f"the state is of other settings: {missing[0]} was not compressed there")

    def _check_names(self, given: Iterable[str]) -> None:
        if unknown := sorted(set(given) - set(self._compressed)):
            raise ValueError(f"the state is of other parameters: {unknown[0]} is not compressed here")

    def report(self) -> dict[str, Any]:
        """What has travelled in this process, as plain numbers: in all, and of each group of gradients by its first
        parameter.
        """
        return {
            "wire": self.settings.wire,
            "error_feedback": self.settings.feeds_back,
            "steps": self.step - self._first_step,
            "compressed_values": sum(self._named[name].numel() for name in self._compressed),
            **sums_of(self.traffic, self._plans),
            **({"bits": self.bits} if self.settings.wire == ADAPTIVE else {}),
            **({"arranged": self.shared_state()["arranged"]} if self.settings.is_quantized else {}),
            "buckets": by_group(self.traffic),
        }
