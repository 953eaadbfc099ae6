"""When the parts of a rank's last steps happened: phases, exchanges, sums of gradients, on a clock that ranks share."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from nugnn.comm.groups import Ranks

Noted = list[Any]
"""``[what, label, begin, end]``: ``halo``, ``sync`` or the name of a phase; what happened; seconds."""

_KEPT = 9
"""Steps that are kept, the last ones."""
_STEP, _NEEDED = "step", "forward"


class StepWatch:
    """Is told what a rank's clock measures, and keeps the last steps of it; see `nugnn.comm.clock.Watcher`.

    Seconds count from a moment that is the same on all ranks of a host, and within a message's time across hosts.

    Args:
        zero: Of `time.perf_counter`, what counts as 0.
        device: Of the rank.
    """

    def __init__(self, zero: float, device: torch.device) -> None:
        self._zero, self._device = zero, device
        self._steps: deque[list[Noted]] = deque(maxlen=_KEPT)
        self._open: list[Noted] = []
        self._base: tuple[Any, float] | None = None
        self.begin_lap()

    @classmethod
    def of(cls, ranks: Ranks) -> StepWatch:
        """Watch the clock of ``ranks`` from now on; a collective call."""
        ranks.sum_(torch.zeros(1))
        now = torch.tensor([time.perf_counter()], dtype=torch.float64)
        if len(set(ranks.hosts)) <= 1:  # whose processes share a clock
            ranks.broadcast_(now)
        watch = cls(float(now), ranks.device)
        ranks.clock.watcher = watch
        return watch

    def note(self, what: str, label: str, first: Any, last: Any) -> None:
        """See `nugnn.comm.clock.Watcher`."""
        if self._device.type == "cuda":
            assert self._base is not None
            event, seconds = self._base
            first, last = (seconds + event.elapsed_time(each) / 1000 for each in (first, last))
        noted = [what, label, first - self._zero, last - self._zero]
        if what == _STEP:
            self._close(noted)
        else:
            self._open.append(noted)

    def begin_lap(self) -> None:
        """See `nugnn.comm.clock.Watcher`."""
        self._open.clear()
        if self._device.type == "cuda":
            base = torch.cuda.Event(enable_timing=True)
            base.record(torch.cuda.current_stream(self._device))
            base.synchronize()
            self._base = base, time.perf_counter()

    def steps(self) -> list[list[Noted]]:
        """The last steps, of each what happened in it in order, the step itself first."""
        return list(self._steps)

    def _close(self, step: Noted) -> None:
        """Of a repeated CUDA graph the last repetition's times are known alone: of others nothing lies in the step."""
        own = {tuple(noted) for noted in self._open if noted[2] >= step[2] and noted[3] <= step[3]}
        if any(what == _NEEDED for what, *_ in own):
            self._steps.append([step, *sorted(map(list, own), key=lambda noted: noted[2])])
        self._open = [noted for noted in self._open if noted[2] >= step[3]]
