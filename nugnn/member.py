"""Who this process is when ``torchrun`` (or another launcher that sets its variables) started it; needs no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a run over one or several hosts.

    Args:
        rank: In ``[0, world_size)``.
        world_size: P.
        is_one_host: Whether all processes run on this host.
        address: Where the store is.
        port: Its port.
        hosts_store: Whether this process has to open it; torchrun does it otherwise.
        attempt: How often torchrun has started the processes again.
    """

    rank: int
    world_size: int
    is_one_host: bool
    address: str
    port: int
    hosts_store: bool
    attempt: str = "0"


def member_from(environment: Mapping[str, str]) -> Member | None:
    """The member that ``environment`` describes; None when this process was started alone.

    Raises:
        ValueError: A variable is missing or is no number; says which.
    """
    if "NUGNN_LIFELINE_FD" in environment or environment.get("WORLD_SIZE", "1") == "1" or "RANK" not in environment:
        return None
    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_size = int(environment.get("LOCAL_WORLD_SIZE", "0"))
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except KeyError as error:
        raise ValueError(
            f"RANK and WORLD_SIZE are set but {error.args[0]} is not; start the processes with torchrun, or unset them"
        ) from None
    except ValueError as error:
        raise ValueError(f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_PORT have to be numbers: {error}") from None
    agent_has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Member(
        rank=rank,
        world_size=world_size,
        is_one_host=local_size == world_size,
        address=address,
        port=port,
        hosts_store=rank == 0 and not agent_has_store,
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def host_name() -> str:
    """Name of this host, for messages."""
    return platform.node() or "unknown host"


def process_space() -> str:
    """Equal for processes that can see each other's process ids."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()
