"""The ranks of a run: who we are, how many we are, and the process group each kind of traffic uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nugnn.comm.pulse import Pulse


@dataclass
class CommClock:
    """Seconds this rank spent in communication, waiting for peers included; read and reset by the trainer."""

    halo_seconds: float = 0.0
    sync_seconds: float = 0.0
    halo_rounds: int = 0
    """Halo exchanges begun since the run started, those of backward included; the same on every rank."""

    def take(self) -> tuple[float, float]:
        """``(halo_seconds, sync_seconds)`` since the last call."""
        taken = (self.halo_seconds, self.sync_seconds)
        self.halo_seconds = self.sync_seconds = 0.0
        return taken


@dataclass(frozen=True, eq=False)
class Ranks:
    """Process groups of a run, one for each kind of traffic so that their orders cannot interfere.

    Args:
        rank: This process, in ``[0, world_size)``.
        world_size: P, the number of ranks (= parts).
        halo: Group of halo exchanges; None when P = 1.
        control: Group of gradient sums, metrics and decisions; None when P = 1.
        clock: Where communication time is added up.
        pulse: Where this rank notes its progress and what it waits for.
    """

    rank: int = 0
    world_size: int = 1
    halo: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    clock: CommClock = field(default_factory=CommClock)
    pulse: Pulse = field(default_factory=Pulse)

    @property
    def is_split(self) -> bool:
        return self.world_size > 1

    def sum_(self, x: Tensor) -> Tensor:
        """All-reduce ``x`` by sum, in place."""
        if self.is_split:
            with self.pulse.waiting("a sum over all workers"):
                dist.all_reduce(x, group=self.control)
        return x

    def max_(self, x: Tensor) -> Tensor:
        """All-reduce ``x`` by maximum, in place."""
        if self.is_split:
            with self.pulse.waiting("a maximum over all workers"):
                dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.control)
        return x

    def broadcast_(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite ``x`` with the values of rank ``source``."""
        if self.is_split:
            with self.pulse.waiting(f"a broadcast from worker {source}"):
                dist.broadcast(x, group_src=source, group=self.control)
        return x

    def gather_rows(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x (n_r, ...)``, on every rank, in rank order; the ``n_r`` may differ."""
        if not self.is_split:
            return [x]
        counts = torch.zeros(self.world_size, dtype=torch.int64)
        counts[self.rank] = len(x)
        self.sum_(counts)
        width = x[:1].numel() if len(x) else max(1, x.new_empty((1, *x.shape[1:])).numel())
        longest = int(counts.max())
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: len(x)] = x
        received = [torch.empty_like(padded) for _ in range(self.world_size)]
        if longest * width:
            with self.pulse.waiting("a gathering of rows from all workers"):
                dist.all_gather(
                    [r.view(torch.uint8) if r.dtype is torch.bool else r for r in received],
                    padded.view(torch.uint8) if padded.dtype is torch.bool else padded,
                    group=self.control,
                )
        return [r[:n] for r, n in zip(received, counts.tolist(), strict=True)]


def join_ranks(timeout_seconds: float = 600.0, pulse: Pulse | None = None) -> Ranks:
    """The ranks of the initialised default process group, or a single rank when there is none.

    Args:
        timeout_seconds: How long a collective may wait for its peers.
        pulse: Where this rank notes its progress; nobody sees it when None.
    """
    pulse = pulse or Pulse()
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Ranks(pulse=pulse)
    timeout = timedelta(seconds=timeout_seconds)
    with pulse.waiting("the start of all workers"):
        halo, control = dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)
    return Ranks(dist.get_rank(), dist.get_world_size(), halo, control, pulse=pulse)
