"""What compressed halo rows have left out is added to the same rows in the next step.

A row is sent as ``Q(x + kept)``, to nearest, and ``kept`` becomes ``x + kept - Q(x + kept)``: over many steps, what was
sent adds up to what was to be sent. Rounding to nearest between the ends of a row leaves at most half a step, so what
is kept is bounded from 2 bits on, by ``range / (2 (2**bits - 2))``.

Source: the error feedback of Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014, on rows in place of
gradients.

Shape suffixes: N inner, S rows sent, D values of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nugnn.comm.halo_wire import HaloWire


class HaloFeedback:
    """What this rank, as the owner of rows that it sends, still owes to each of them.

    Nothing changes within a step: a layer that runs again sends what it sent.

    Args:
        num_inner: N.
        send_rows: ``(S,)`` int64 inner rows; a row that has several readers stands here several times.
    """

    def __init__(self, num_inner: int, send_rows: Tensor) -> None:
        self._num_inner, self._send_rows = num_inner, send_rows
        self._kept: dict[str, Tensor] = {}
        self._next: dict[str, Tensor] = {}

    def encode(self, name: str, x_SD: Tensor, wire: HaloWire) -> Tensor:
        """Rows ``(S, D)`` for the wire, with what is owed to them.

        Args:
            name: What they are, the same in every step. Under another width than in the last step nothing is owed.
            x_SD: Floating.
            wire: Of few bits.
        """
        x = x_SD.detach().float()
        kept = self.owed(name, x)
        if kept is None:
            kept = torch.zeros_like(x)
        else:
            x = x + kept
        coded = wire.encode(x, None, None)
        arrived = torch.empty_like(x)
        wire.decode(coded, arrived)
        is_number = torch.isfinite(arrived).all(1, keepdim=True)
        self._next[name] = torch.where(is_number, x - arrived, kept)
        return coded

    def owed(self, name: str, x_SD: Tensor) -> Tensor | None:
        """``(S, D)`` float32 that this step adds to rows ``x_SD``; None for nothing."""
        kept = self._kept.get(name)
        return kept if kept is not None and kept.shape == x_SD.shape else None

    def settle(self) -> None:
        """The step counts: what it left out is owed from now on."""
        self._kept.update(self._next)
        self._next = {}

    def discard(self) -> None:
        """The step was left out, an overflow on some rank: what is owed stays as it was."""
        self._next = {}

    def rows(self) -> dict[str, Tensor]:
        """``(N, D)`` float32 by name, for a checkpoint; zeros for rows that nobody reads."""
        self.settle()
        whole: dict[str, Tensor] = {}
        for name, kept in self._kept.items():
            whole[name] = kept.new_zeros((self._num_inner, kept.shape[1])).index_copy_(0, self._send_rows, kept)
        return whole

    def load(self, rows: Mapping[str, Tensor]) -> None:
        """What `rows` gave, for the inner rows of this rank."""
        self._next = {}
        self._kept = {
            name: whole.to(self._send_rows.device).index_select(0, self._send_rows) for name, whole in rows.items()
        }
