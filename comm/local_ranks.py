"""Several ranks as threads of this process, for checks on small graphs that should not wait for processes to start."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from nugnn.comm.groups import Ranks

T = TypeVar("T")


def run_local_ranks(num_ranks: int, function: Callable[[Ranks], T], *, timeout_seconds: float = 60.0) -> list[T]:
    """Call ``function(ranks)`` on ``num_ranks`` threads joined by gloo over loopback.

    Args:
        num_ranks: P; one rank runs in the calling thread.
        function: Must not share mutable state between ranks (give each its own copy of a model).
        timeout_seconds: How long a rank waits for its peers.

    Returns:
        Results in rank order.

    Raises:
        BaseException: What the first failing rank raised; peers that wait for it end with their timeout.
    """
    if num_ranks == 1:
        return [function(Ranks())]
    store = dist.HashStore()
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []
    settled = threading.Semaphore(0)
    groups: list[dist.ProcessGroup] = []

    def group(name: str, rank: int) -> dist.ProcessGroup:
        prefix = dist.PrefixStore(name, store)
        made: Any = dist.ProcessGroupGloo(prefix, rank, num_ranks, timedelta(seconds=timeout_seconds))
        groups.append(made)
        return made  # type: ignore[no-any-return]  # a backend, which has a group's collectives

    def run(rank: int) -> None:
        try:
            ranks = Ranks(rank, num_ranks, group("halo", rank), group("control", rank))
            results[rank] = function(ranks)
        except BaseException as error:
            errors.append((rank, error))
        finally:
            settled.release()

    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        for rank in range(num_ranks):
            threading.Thread(target=run, args=(rank,), name=f"nugnn-rank-{rank}", daemon=True).start()
        for _ in range(num_ranks):
            settled.acquire()
            if errors:
                raise errors[0][1]
    finally:
        for made in groups:  # also frees peers that still wait, and lets the process end in order
            made.abort() if errors else made.shutdown()
        if interface is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    return [results[rank] for rank in range(num_ranks)]
