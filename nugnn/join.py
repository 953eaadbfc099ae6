"""Join the ranks that were started together; leave them in good order."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from nugnn.addresses import advertised_interface
from nugnn.comm.groups import Ranks, join_ranks, leave_ranks
from nugnn.devices import own_device
from nugnn.member import member_from


def init(timeout_seconds: float = 600.0, *, device: str = "cpu") -> Ranks:
    """Join the ranks that ``torchrun`` (or `nugnn.fit`) started; a single rank when nothing was started.

    Args:
        timeout_seconds: How long a rank waits for its peers in a collective before it gives up.
        device: ``cpu``, ``cuda`` (the GPU of this process's number on its host) or ``auto``: a GPU if there is one.

    Raises:
        ValueError: No network interface leads to the other hosts; says which variable to set. Or there is no GPU.
    """
    if not dist.is_initialized() and (member := member_from(os.environ)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = advertised_interface(
            member.address, is_one_host=member.is_one_host, given=os.environ.get("GLOO_SOCKET_IFNAME")
        )
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _meet(timedelta(seconds=timeout_seconds))
    ranks = join_ranks(timeout_seconds, device=own_device(device))
    if dist.is_initialized():
        atexit.register(_leave, ranks)
    return ranks


_meetings = itertools.count()


def _meet(timeout: timedelta) -> None:
    """Make the default group, also after another one was destroyed.

    torch gives the groups of the second one the names that those of the first had, and ranks would find the addresses
    that these have left in the store.
    """
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
    own = dist.PrefixStore(f"nugnn.init {next(_meetings)}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=timeout)


def _leave(ranks: Ranks) -> None:
    """Leave in good order; after an uncaught exception at once instead, so that the peers hear of it."""
    if not hasattr(sys, "last_type"):
        leave_ranks(ranks)
