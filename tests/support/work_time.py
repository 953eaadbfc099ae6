"""Stands for ``time`` where epochs are measured: it passes where work is said to be done, however slow the machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nugnn import balancer, node_move, trainer
from nugnn.comm import clock
from nugnn.comm.groups import Ranks

_MEASURING: tuple[Any, ...] = (balancer, clock, node_move, trainer)
_CPU = torch.device("cpu")


class WorkTime:
    """A rank's clock, which stands still but for `work` and `exchange`."""

    def __init__(self) -> None:
        self._now = time.perf_counter()

    def perf_counter(self) -> float:
        return self._now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In the modules that measure epochs, of this process."""
        before = [module.time for module in _MEASURING]
        self.install()
        try:
            yield
        finally:
            for module, own in zip(_MEASURING, before, strict=True):
                module.time = own

    def install(self) -> WorkTime:
        """For as long as this process lives."""
        for module in _MEASURING:
            module.time = self
        return self

    def work(self, ranks: Ranks, seconds: float) -> None:
        """Compute for so long, and then wait for all others to have done so; a collective call."""
        self._now += seconds
        at_last = float(ranks.max_(torch.tensor([self._now], dtype=torch.float64)))
        with ranks.clock.measure("sync", _CPU):
            self._now = at_last

    def exchange(self, ranks: Ranks, seconds: float) -> None:
        """Take so long for rows of others."""
        with ranks.clock.measure("halo", _CPU):
            self._now += seconds


def work_time() -> WorkTime:
    """The clock that is in place in this process; from the first call on where there was none."""
    found = balancer.time  # type: ignore[attr-defined]
    return found if hasattr(found, "exchange") else WorkTime().install()
