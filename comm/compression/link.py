"""Bytes between ranks: what compressed sums need of torch.distributed, counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nugnn.comm.byte_exchange import Work, begin_exchange, begin_gathering
from nugnn.comm.groups import Ranks
from nugnn.comm.hosts import HostGroups
from nugnn.comm.pulse import Pulse


@dataclass
class Sent:
    """What has travelled.

    Args:
        num_bytes: Of what was handed over, as many as leave this rank: all rows for others, and for a gathering its
            own row once for each of them.
        across_bytes: Those of them that are for ranks of other hosts.
        seconds: Waiting for exchanges, and so for peers; of the host, on a GPU without what is still queued.
    """

    num_bytes: int = 0
    across_bytes: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Link:
    """A process group that carries bytes.

    Args:
        rank: This process, in the group.
        world_size: P.
        group: A process group, or what stands for one.
        carries_cuda: Whether it takes CUDA tensors; they travel through the host's memory otherwise.
        pulse: Where this rank notes what it waits for.
        hosts: Number of each rank's host; all on one when empty.
        by_host: The way of sums inside hosts and across them; None where every rank exchanges with every other one.
        sent: Counts, those of ``by_host`` included.
    """

    rank: int
    world_size: int
    group: Any
    carries_cuda: bool = False
    pulse: Pulse = field(default_factory=Pulse)
    hosts: tuple[int, ...] = ()
    by_host: HostLinks | None = None
    sent: Sent = field(default_factory=Sent)

    @classmethod
    def of(cls, ranks: Ranks, *, aside: bool = False, groups: HostGroups | None = None) -> Link:
        """Through the group of gradient sums; ``aside``: through that of halo exchanges, on a thread beside backward.

        The stamp of progress is the main thread's, so that ``aside`` leaves it alone. With ``groups`` sums go by host.
        """
        group = ranks.halo if aside or ranks.control is None else ranks.control
        pulse = Pulse() if aside else ranks.pulse
        link = cls(ranks.rank, ranks.world_size, group, ranks.carries_cuda, pulse, ranks.hosts)
        if groups is not None:
            link.go_by_host(groups)
        return link

    def go_by_host(self, groups: HostGroups) -> None:
        """Have sums from now on made inside hosts first; the same on every rank."""
        grid = groups.grid
        row = next(row for row in grid.rows if self.rank in row)
        column = next(column for column in grid.columns if self.rank in column)
        self.by_host = HostLinks(self._part(row, groups.inside), self._part(column, groups.across))

    def _part(self, members: Sequence[int], group: Any) -> Link:
        hosts = tuple(self.hosts[rank] for rank in members)
        rank = members.index(self.rank)
        return Link(rank, len(members), group, self.carries_cuda, self.pulse, hosts, sent=self.sent)

    @property
    def sent_bytes(self) -> int:
        """See `Sent`."""
        return self.sent.num_bytes

    def placement(self) -> dict[str, Any]:
        """How many hosts there are, and whether sums are made inside them first, for reports."""
        return {"hosts": len(set(self.hosts)) or 1, "sums_inside_hosts_first": self.by_host is not None}

    def begin_exchange(self, rows: Tensor, sizes: Sequence[int], own_sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to send ``sizes[r]`` bytes of ``rows`` to each rank ``r``; a collective call.

        Returns:
            What waits for ``own_sizes[r]`` bytes from each rank ``r`` and returns them one after the other.
        """
        wire = self._on_wire(rows)
        received = wire.new_empty(sum(own_sizes))
        self._count(sizes)
        work = begin_exchange(self.group, received, wire, own_sizes, sizes)

        def wait() -> Tensor:
            self._wait(work, "gradients of all workers")
            return received.to(rows.device)

        return wait

    def exchange(self, rows: Tensor, sizes: Sequence[int], own_sizes: Sequence[int]) -> Tensor:
        """`begin_exchange`, waited for."""
        return self.begin_exchange(rows, sizes, own_sizes)()

    def begin_gathering(self, row: Tensor) -> Callable[[], Tensor]:
        """Begin to send ``row (n,)`` to every rank; what waits for ``(P, n)``, the rows of all. A collective call."""
        wire = self._on_wire(row)
        received = wire.new_empty(self.world_size * len(row))
        self._count([row.numel() * row.element_size()] * self.world_size)
        work = begin_gathering(self.group, received, wire) if len(row) else None

        def wait() -> Tensor:
            if work is not None:
                self._wait(work, "sums of all workers")
            return received.view(self.world_size, -1).to(row.device)

        return wait

    def gather(self, row: Tensor) -> Tensor:
        """`begin_gathering`, waited for."""
        return self.begin_gathering(row)()

    def _wait(self, work: Work, what: str) -> None:
        begin = time.perf_counter()
        with self.pulse.waiting(what):
            work.wait()
        self.sent.seconds += time.perf_counter() - begin

    def _count(self, sizes: Sequence[int]) -> None:
        self.sent.num_bytes += sum(sizes) - sizes[self.rank]
        if self.hosts:
            here = self.hosts[self.rank]
            self.sent.across_bytes += sum(size for size, host in zip(sizes, self.hosts, strict=True) if host != here)

    def _on_wire(self, x: Tensor) -> Tensor:
        return (x if self.carries_cuda or x.device.type == "cpu" else x.cpu()).contiguous()


@dataclass(frozen=True, eq=False)
class HostLinks:
    """Links of one rank in a grid of hosts.

    Args:
        inside: To the ranks of its host.
        across: To the ranks of its place in other hosts.
    """

    inside: Link
    across: Link
