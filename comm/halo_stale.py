"""Stale boundaries: a step reads the halo rows, and the gradients of its own rows, that were sent in the step before.

What a step sends is on its way until the same operator asks for it in the next step, so the exchange runs beside all
of the computation between. The first time that an operator sends rows, nothing is there to be read: it waits for the
rows of this step, and the next step reads them once more. The same holds where rows have another shape or type than
they had, or belong to another split.

Source: Wan et al., "PipeGCN: Efficient Full-Graph Training of Graph Convolutional Networks with Pipelined Feature
Communication", ICLR 2022. There the first epoch reads zeros; here it reads what is true. Their smoothing of stale rows
is not offered.

Shape suffixes: H halo, S rows sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nugnn.comm.halo_transfer import HaloPlan


class Arriving(Protocol):
    """Rows on their way here."""

    def finish(self) -> Tensor:
        """All of them; waits, the first time."""
        ...


@dataclass(frozen=True, eq=False)
class Arrived:
    """Rows that are here already."""

    rows: Tensor

    def finish(self) -> Tensor:
        """The rows."""
        return self.rows


@dataclass(frozen=True, eq=False)
class _Copy:
    """``out``, filled from rows that are somebody else's."""

    out: Tensor
    source: Arriving

    def finish(self) -> Tensor:
        return self.out.copy_(self.source.finish())


_Form = tuple[torch.Size, torch.dtype, torch.device]


def _form(rows: Tensor) -> _Form:
    return rows.shape, rows.dtype, rows.device


@dataclass(eq=False)
class _Sent:
    """What came of an exchange in the last step that made it.

    Args:
        plan: Of the exchange.
        form: Of the rows.
        step: Of `StaleRows`.
        rows: Those of ``step``.
        earlier: Those that ``step`` reads, from a step before; None where it reads its own.
    """

    plan: HaloPlan
    form: _Form
    step: int
    rows: Arriving
    earlier: Arriving | None

    def fits(self, out: Tensor, plan: HaloPlan) -> bool:
        return self.plan is plan and self.form == _form(out)


_sent_under: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
"""For each plan those who have sent under it."""


def arrived(plan: HaloPlan) -> None:
    """Wait for all rows that are on their way under ``plan``, which are not read any more: the next step of whoever
    sent them reads what is true. To be called before rows get other owners: an exchange that nobody holds is lost.
    """
    for stale in list(_sent_under.get(plan, ())):
        stale.restart()


class StaleRows:
    """What this rank was sent in the last step, by what it is: rows ``(H, ...)``, gradients ``(S, ...)``.

    Exchanges come in the same order on every rank, so all know the same names.
    """

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._num_calls: dict[str, int] = {}
        self._step = 0

    def begin_step(self) -> None:
        """What is sent from now on is another step's."""
        self._step += 1
        self._num_calls.clear()

    def end_step(self) -> None:
        """Nobody reads any more what this step read."""
        for sent in self._sent.values():
            sent.earlier = None

    def begin(
        self, name: str, out: Tensor, plan: HaloPlan, send: Callable[[Tensor], Arriving], *, repeats: bool
    ) -> Arriving:
        """Send what this step sends under ``name``, and get what is to be read in its place.

        Args:
            name: What travels, the same in every step.
            out: Filled with the rows that are read.
            plan: Of the exchange.
            send: Begins it; fills the tensor that it is given.
            repeats: Whether ``name`` once more in a step is a layer that runs again: it reads what it read and sends
                nothing. Otherwise it is a further exchange, such as that of a second backward pass.
        """
        if not repeats:
            count = self._num_calls.get(name, 0)
            self._num_calls[name] = count + 1
            name = f"{name} #{count}" if count else name
        before = self._sent.get(name)
        if before is not None and not before.fits(out, plan):
            before.rows.finish()  # on its way, perhaps
            before = None
        if before is None or before.step != self._step:
            rows = send(out.new_empty(out.shape))
            before = _Sent(plan, _form(out), self._step, rows, None if before is None else before.rows)
            self._sent[name] = before
            _sent_under.setdefault(plan, WeakSet()).add(self)
        return _Copy(out, before.earlier or before.rows)

    def restart(self) -> None:
        """The next step reads what is true, as the first one."""
        for sent in self._sent.values():
            sent.rows.finish()
        self._sent.clear()

    def rows(self, plan: HaloPlan) -> dict[str, Tensor]:
        """What the next step will read, by name, for a checkpoint of this very split; waits until it is here."""
        return {name: sent.rows.finish() for name, sent in sorted(self._sent.items()) if sent.plan is plan}

    def load(self, rows: Mapping[str, Tensor], plan: HaloPlan) -> None:
        """Read in the next step what `rows` gave."""
        self.restart()
        for name, value in rows.items():
            here = value.to(plan.send_rows.device)
            self._sent[name] = _Sent(plan, _form(here), self._step, Arrived(here), None)
