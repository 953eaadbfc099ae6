"""Bytes from each rank to all others, in both directions at once.

gloo's own exchanges post what they send before what they receive. A rank that comes last finds its peers ready and
fills the connection with its data; that it is ready itself stands behind them, so the other direction begins when this
one has ended: half the rate of a link between two ranks. Here every rank says that it is ready before it sends.

gloo forgets a message that nobody holds, and gives what a peer sends for it to whoever waits next. So an exchange
that nobody holds any more (late rows of a model that is no longer there) lives on until the next one in its group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

_TAG = 0


class Work(Protocol):
    """An exchange that has begun."""

    def wait(self) -> Any:
        """Until it is done; raises RuntimeError where a peer fails or does not come."""
        ...


_left: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Of each group, messages that nobody has waited for and nobody holds; they hold the memory they read or write."""


@dataclass(eq=False)
class _Messages:
    """An exchange that was posted.

    Args:
        works: Its messages.
        left: Takes them where nobody waits for them.
    """

    works: list[Any]
    left: list[Any] = field(repr=False)

    def wait(self) -> None:
        while self.works:
            self.works[0].wait()
            del self.works[0]  # waited for again, it would never be done

    def __del__(self) -> None:
        self.left += self.works


def begin_exchange(
    group: Any, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
) -> Work:
    """Begin to send ``sizes[r]`` bytes of ``sent`` to each rank ``r``; a collective call.

    Args:
        group: A process group, or what stands for one.
        received: ``(sum of received_sizes,)`` uint8, contiguous: ``received_sizes[r]`` bytes from each rank ``r``.
        sent: ``(sum of sizes,)`` likewise. Both belong to the exchange until it is done.
        received_sizes: What this rank's peers give as their ``sizes`` for it.
        sizes: Bytes for each rank.
    """
    if not _posts_messages(group, sent):
        return group.alltoall_base(received, sent, list(received_sizes), list(sizes))  # type: ignore[no-any-return]
    return _begin(group, received.split(list(received_sizes)), sent.split(list(sizes)))


def begin_gathering(group: Any, received: Tensor, row: Tensor) -> Work:
    """Begin to fill ``received (P * n,)`` with the ``row (n,)`` of every rank; a collective call, uint8 as above."""
    if not _posts_messages(group, row):
        return group._allgather_base(received, row)  # type: ignore[no-any-return]
    return _begin(group, received.split(len(row)), [row] * group.size())


def _posts_messages(group: Any, x: Tensor) -> bool:
    """Whether ``group`` is of gloo for ``x``; the same answer on every rank."""
    return isinstance(group, dist.ProcessGroup) and x.device.type == "cpu"


def _begin(group: Any, places: Sequence[Tensor], parts: Sequence[Tensor]) -> _Messages:
    rank, size, left = group.rank(), group.size(), _left.setdefault(group, [])
    if hasattr(os, "sched_yield"):
        # Whoever sends holds a lock meanwhile. If its slice of time ends there, gloo's reading thread gets the core and
        # asks for that lock all through its own slice (`nugnn.comm.gloo_threads`): so begin with a whole one.
        os.sched_yield()
    while left:  # all ranks have posted these, so that they end
        left.pop().wait()
    senders = [(rank - step) % size for step in range(1, size)]
    works = [group.recv([places[peer]], peer, _TAG) for peer in senders if places[peer].numel()]
    receivers = [(rank + step) % size for step in range(1, size)]
    works += [group.send([parts[peer]], peer, _TAG) for peer in receivers if parts[peer].numel()]
    if parts[rank].numel():
        places[rank].copy_(parts[rank])
    return _Messages(works, left)
