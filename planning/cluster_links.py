"""Links between the devices of a cluster: as they were described or measured, else as data sheets say."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from nugnn.planning.cluster_file import LinkFields
from nugnn.planning.datasheet import SheetError, sheet_of
from nugnn.planning.links import Floats, Links, Sums
from nugnn.planning.plan import KnownDevice
from nugnn.planning.profiles import DeviceProfile, LinkProfile

LOOPBACK = LinkProfile(between="devices", via="gloo", bytes_per_second=1.5e9, latency_seconds=1e-4)
"""Between two processes of one host, through sockets, where nobody has measured it: assumed."""
CPU = "cpu"
"""What links call it."""
LATENCY_INSIDE, LATENCY_BETWEEN = 10e-6, 30e-6
"""Seconds, where nothing says more."""
_UNKNOWN_BUS_BYTES = 1e10
"""Of a GPU that has no sheet, to others and to its host, where nothing was measured."""


class Placed(Protocol):
    """A device on its host; see `nugnn.planning.cluster.ClusterDevice`."""

    @property
    def host(self) -> str: ...

    @property
    def profile(self) -> DeviceProfile: ...


class Way(NamedTuple):
    """From one device to another.

    Args:
        bytes_per_second: One way, while the other way is as busy.
        latency_seconds: Of an exchange without bytes.
        sums: Over devices of the host, where they were measured.
        burst_seconds: What it takes less after a rest of as long, where that was measured.
    """

    bytes_per_second: float
    latency_seconds: float
    sums: Sums | None = None
    burst_seconds: float = 0.0


def rates_of(fields: LinkFields | None, latency_seconds: float) -> Way:
    """Of a described link; ``latency_seconds`` where it says none."""
    assert fields is not None, "checked before: every pair has a link"
    return Way(fields.bytes_per_second, latency_seconds if fields.latency_us is None else fields.latency_us * 1e-6)


def uses_nccl(hosts: Sequence[str], devices: Sequence[KnownDevice]) -> bool:
    """Whether GPUs exchange directly: each rank has one of its own.

    Args:
        hosts: Of each rank.
        devices: Likewise.
    """
    own = [(host, device.uuid) for host, device in zip(hosts, devices, strict=True) if device.uuid is not None]
    return all(device.kind == "cuda" for device in devices) and len(set(own)) == len(own)


def link_inside(one: DeviceProfile, other: DeviceProfile, links: Sequence[LinkProfile], *, is_nccl: bool) -> Way:
    """Between two devices of a host: as it was measured, else as data sheets say."""
    via = "nccl" if is_nccl else "gloo"
    measured = [link for link in links if link.between == "devices" and link.via == via]
    exact = [link for link in measured if link.ends and set(link.ends) == {_end(one), _end(other)}]
    for link in exact or [link for link in measured if not link.ends]:
        return Way(link.bytes_per_second, link.latency_seconds, Sums.of(link), link.burst_seconds or 0.0)
    if not is_nccl:
        return Way(LOOPBACK.bytes_per_second, LOOPBACK.latency_seconds)
    return Way(min(_reach(one), _reach(other)), LATENCY_INSIDE)


def _end(profile: DeviceProfile) -> str | None:
    """What a link calls it; None for a GPU that nobody has seen."""
    return CPU if profile.kind == "cpu" else profile.uuid


def _reach(profile: DeviceProfile) -> float:
    """Bytes a second that get out of a GPU to others of its host, by its sheet."""
    try:
        sheet = sheet_of(profile.name)
    except SheetError:
        return _UNKNOWN_BUS_BYTES
    host = sheet.host_link().bytes_per_second
    return host if sheet.fabric_gb_per_s is None else max(0.8 * sheet.fabric_gb_per_s * 1e9, host)


def _copy_seconds(profile: DeviceProfile, links: Sequence[LinkProfile]) -> float:
    """Seconds of a byte between a device and its host's memory; 0 for a CPU."""
    if profile.kind == "cpu":
        return 0.0
    copies = [link for link in links if link.between == "host"]
    own = [link for link in copies if profile.uuid is not None and profile.uuid in link.ends]
    for link in own or [link for link in copies if not link.ends]:
        return 1 / link.bytes_per_second
    try:
        return 1 / sheet_of(profile.name).host_link().bytes_per_second
    except SheetError:
        return 1 / _UNKNOWN_BUS_BYTES


def linked(
    devices: Sequence[Placed],
    link: Callable[[int, int], Way],
    measured: Mapping[int, Sequence[LinkProfile]],
    *,
    is_nccl: bool,
    places: Sequence[Hashable] | None = None,
) -> Links:
    """Links of all pairs; hosts are numbered as they come.

    Args:
        devices: In the order of ranks.
        link: Between two of them, by number; asked once for each pair of alike devices.
        measured: Links that were measured, by the number of a host.
        is_nccl: Whether GPUs exchange directly.
        places: Of each device, equal where the ways to and from other hosts are the same, whatever the devices; each
            host and sort of device is one of its own when None.
    """
    number_of = {name: number for number, name in enumerate(dict.fromkeys(device.host for device in devices))}
    hosts = tuple(number_of[device.host] for device in devices)
    keys = [(device.host, device.profile.name, device.profile.uuid) for device in devices]
    rates, latencies, between = _between_hosts(keys if places is None else places, hosts, link)
    cards = _fastest_of_host(rates, hosts)
    bursts = [way.burst_seconds for way in between]
    sums_inside: dict[int, Sums] = {}
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    for host, ranks in ranks_of.items():
        known: dict[tuple[Any, ...], Way] = {}
        for a, b in ((a, b) for place, a in enumerate(ranks) for b in ranks[:place]):
            key = keys[a], keys[b]
            if key not in known:
                known[key] = link(a, b)
            rate, latency, sums, burst = known[key]
            bursts.append(burst)
            rates[a, b] = rates[b, a] = rate
            latencies[a, b] = latencies[b, a] = latency
            if sums is not None:
                sums_inside[host] = sums
    np.fill_diagonal(rates, math.inf)
    np.fill_diagonal(latencies, 0.0)
    staging = None
    if not is_nccl:
        staging = np.array(
            [_copy_seconds(d.profile, measured.get(host, ())) for d, host in zip(devices, hosts, strict=True)]
        )
    burst = min(bursts, default=0.0)
    return Links(rates, latencies, hosts, cards, staging, is_nccl, sums_inside, burst, _core_seconds(measured))


def _between_hosts(
    places: Sequence[Hashable], hosts: Sequence[int], link: Callable[[int, int], Way]
) -> tuple[Floats, Floats, list[Way]]:
    """``(P, P)`` rates and latencies of pairs on two hosts, infinite and 0 of others; and the ways that there are."""
    first: dict[Hashable, list[int]] = {}  # a rank of each place, and of those on other hosts the first
    for rank, place in enumerate(places):
        found = first.setdefault(place, [rank])
        if len(found) == 1 and hosts[rank] != hosts[found[0]]:
            found.append(rank)
    ways: list[Way] = []
    rates, latencies = (np.full((len(first), len(first)), value) for value in (math.inf, 0.0))
    for a, ones in enumerate(first.values()):
        for b, others in enumerate(list(first.values())[: a + 1]):
            pair = next(((one, other) for one in ones for other in others if hosts[one] != hosts[other]), None)
            if pair is not None:
                ways.append(link(max(pair), min(pair)))
                rates[a, b] = rates[b, a] = ways[-1].bytes_per_second
                latencies[a, b] = latencies[b, a] = ways[-1].latency_seconds
    numbers = {place: number for number, place in enumerate(first)}
    place_of = np.array([numbers[place] for place in places])
    pairs = np.ix_(place_of, place_of)
    return rates[pairs], latencies[pairs], ways


def _fastest_of_host(rates: Floats, hosts: Sequence[int]) -> dict[int, float]:
    """Of each host, by its number, the fastest of its ways to others: what its card can do; of several hosts alone.

    Args:
        rates: ``(P, P)``; between ranks of one host they do not count.
        hosts: Of each rank.
    """
    own = np.array(hosts)
    fastest: dict[int, float] = {}
    for rank, host in enumerate(hosts) if len(set(hosts)) > 1 else ():
        most = rates[rank].max(where=own != host, initial=0.0)
        fastest[host] = max(fastest.get(host, 0.0), float(most))
    return fastest


def _core_seconds(inside: Mapping[int, Sequence[LinkProfile]]) -> dict[int, float]:
    """What gloo's threads take for a byte of a sum, by the number of a host: see `Links`.

    It is the work of a host's processor, whichever way the byte goes; it was measured between workers of that host.

    Args:
        inside: Of each host by its number, the links that a `MachineProfile` has.
    """
    found = {host: [link.sum_core_seconds_per_byte for link in links] for host, links in inside.items()}
    known = {host: [seconds for seconds in each if seconds is not None] for host, each in found.items()}
    return {host: each[0] for host, each in known.items() if each}
