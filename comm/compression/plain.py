"""Gradients that travel as they are, by the process group's own all-reduce, where compressed ones could."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nugnn.comm.compression.link import Link
from nugnn.comm.compression.residuals import Order
from nugnn.comm.compression.traffic import PlainCounts
from nugnn.comm.groups import Ranks


class PlainGradients:
    """Stands for a `nugnn.comm.compression.compressor.Compressor`, with values of any type.

    Args:
        ranks: Who takes part, through the group ``control``.
    """

    residuals: Mapping[str, Tensor] = {}
    """Nothing is left out."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._counts = ranks, PlainCounts()
        self.step = self._first_step = 0

    def open(self, scale: float | Tensor = 1.0) -> None:
        """Begin a step; nothing is kept that a scale would be in."""

    def sum_(self, values: Tensor, names: Sequence[str], orders: Sequence[Order], num_plain: int, link: Link) -> None:
        """Sum ``values`` over ranks, in place; a collective call."""
        begin = time.perf_counter()
        wire = self._ranks.on_wire(values)
        dist.all_reduce(wire, group=self._ranks.control)
        if wire is not values:
            values.copy_(wire)
        group = names[0] if names else ""
        self._counts.count(group, len(values) - num_plain, self._ranks.bytes_of_sum(values))
        self._counts.wait(group, time.perf_counter() - begin)

    def settle(self, link: Link, *, is_good: bool = True) -> None:
        """End a step."""
        self.step += 1

    def shared_state(self) -> dict[str, Any]:
        """As that of a compressor which compresses nothing."""
        return {"step": self.step, "bits": None, "arranged": {}}

    def load(self, shared: Mapping[str, Any], residuals: Mapping[str, Tensor]) -> None:
        """Go on where `shared_state` was taken.

        Raises:
            ValueError: It is of gradients that were compressed.
        """
        if named := sorted({*shared["arranged"], *residuals}):
            raise ValueError(f"the state is of other settings: {named[0]} is not compressed here")
        self.step = self._first_step = int(shared["step"])

    def report(self) -> dict[str, Any]:
        """What has travelled in this process, as plain numbers."""
        return self._counts.report(self.step - self._first_step, len(set(self._ranks.hosts)))
