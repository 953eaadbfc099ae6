"""Bytes between ranks: what compressed sums need of torch.distributed, counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nugnn.comm.byte_exchange import begin_exchange, begin_gathering
from nugnn.comm.groups import Ranks
from nugnn.comm.pulse import Pulse


@dataclass(eq=False)
class Link:
    """A process group that carries bytes.

    Args:
        rank: This process, in the group.
        world_size: P.
        group: A process group, or what stands for one.
        carries_cuda: Whether it takes CUDA tensors; they travel through the host's memory otherwise.
        pulse: Where this rank notes what it waits for.
        sent_bytes: Of what was handed over, as many as leave this rank: all rows for others, and for a gathering its
            own row once for each of them.
        seconds: In exchanges, waiting for peers included; of the host, on a GPU without what is still queued.
    """

    rank: int
    world_size: int
    group: Any
    carries_cuda: bool = False
    pulse: Pulse = field(default_factory=Pulse)
    sent_bytes: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, ranks: Ranks, *, aside: bool = False) -> Link:
        """Through the group of gradient sums; ``aside``: through that of halo exchanges, on a thread beside backward.

        The stamp of progress is the main thread's, so that ``aside`` leaves it alone.
        """
        if aside:
            return cls(ranks.rank, ranks.world_size, ranks.halo, ranks.carries_cuda)
        group = ranks.halo if ranks.control is None else ranks.control
        return cls(ranks.rank, ranks.world_size, group, ranks.carries_cuda, ranks.pulse)

    def exchange(self, rows: Tensor, sizes: Sequence[int], own_sizes: Sequence[int]) -> Tensor:
        """Send ``sizes[r]`` bytes of ``rows`` to each rank ``r``.

        Returns:
            ``own_sizes[r]`` bytes from each rank ``r``, one after the other.
        """
        wire = self._on_wire(rows)
        received = wire.new_empty(sum(own_sizes))
        self.sent_bytes += sum(sizes) - sizes[self.rank]
        begin = time.perf_counter()
        with self.pulse.waiting("gradients of all workers"):
            begin_exchange(self.group, received, wire, own_sizes, sizes).wait()
        self.seconds += time.perf_counter() - begin
        return received.to(rows.device)

    def gather(self, row: Tensor) -> Tensor:
        """``(P, n)``: every rank's ``row (n,)``, on every rank."""
        wire = self._on_wire(row)
        received = wire.new_empty(self.world_size * len(row))
        self.sent_bytes += (self.world_size - 1) * row.numel() * row.element_size()
        begin = time.perf_counter()
        if len(row):
            with self.pulse.waiting("sums of all workers"):
                begin_gathering(self.group, received, wire).wait()
        self.seconds += time.perf_counter() - begin
        return received.view(self.world_size, -1).to(row.device)

    def _on_wire(self, x: Tensor) -> Tensor:
        return (x if self.carries_cuda or x.device.type == "cpu" else x.cpu()).contiguous()
