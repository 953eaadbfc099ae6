"""Picks the network interface on which processes of several hosts can reach each other."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Callable

_SIOCGIFADDR = 0x8915
_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

Resolve = Callable[[str], list[str]]
LocalAddress = Callable[[str], str | None]


def advertised_interface(
    master: str,
    *,
    is_one_host: bool,
    given: str | None = None,
    resolve: Resolve | None = None,
    local_address: LocalAddress | None = None,
    interfaces: dict[str, str] | None = None,
) -> str:
    """Name of the interface whose address this process should tell its peers.

    Loopback only when all processes are on one host. Otherwise the interface of the route to the master; on the
    master's own host, where that route may be loopback (distributions map the host's name to 127.0.1.1), the interface
    of the default route. No packet is sent.

    Args:
        master: Host name or address on which rank 0 is reached.
        is_one_host: Whether all processes run on this host.
        given: What the user asks for (``GLOO_SOCKET_IFNAME``); taken as it is when it exists.
        resolve: Name -> addresses; the system's by default, as the next two.
        local_address: Address this host would use towards another; None when there is no route.
        interfaces: Name of each interface -> its address.

    Raises:
        ValueError: The interface asked for does not exist, or none can be reached from other hosts; says what to set.
    """
    known = _interfaces() if interfaces is None else interfaces
    if given:
        if given not in known:
            raise ValueError(
                f"{_VARIABLE}={given}: there is no such network interface with an address here; there are "
                f"{', '.join(sorted(known))}"
            )
        if _is_loopback(known[given]) and not is_one_host:
            raise ValueError(
                f"{_VARIABLE}={given} is the loopback interface, which other hosts cannot reach; name another of "
                f"{', '.join(sorted(known))}, or leave it unset"
            )
        return given
    if is_one_host:
        return LOOPBACK
    towards = local_address or _local_address
    candidates = [
        *(resolve or _resolve)(master),
        "192.0.2.1",
    ]  # the last, a documentation address, has the default route
    by_address = {address: name for name, address in known.items()}
    for target in candidates:
        own = None if _is_loopback(target) else towards(target)
        if own is not None and not _is_loopback(own) and own in by_address:
            return by_address[own]
    raise ValueError(
        f"no network interface leads from here to {master}; set {_VARIABLE} to the interface that other hosts reach "
        f"(there are {', '.join(sorted(known)) or 'none'})"
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _resolve(name: str) -> list[str]:
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return []


def _local_address(target: str) -> str | None:
    """The address that a datagram to ``target`` would come from; connecting one sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
