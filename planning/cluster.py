"""A cluster described in ``cluster.yaml``: the devices that a plan is made for, one for each worker, and their links.

    schema: nugnn.cluster/1
    hosts:
      - name: node-a
        devices:
          - {device: A100-SXM4-80GB, count: 4}
      - name: node-b
        devices:
          - {device: node-b.json}
    links:
      between: {gbit_per_second: 100, latency_us: 20}

``docs/plan.md`` explains the fields; `nugnn.planning.cluster_file` checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from nugnn.planning.cluster_file import (
    THIS_MACHINE,
    ClusterError,
    ClusterFields,
    DeviceFields,
    HostFields,
    LinkFields,
    check_names,
    line_of,
    read_cluster_fields,
)
from nugnn.planning.datasheet import SheetError, sheet_of
from nugnn.planning.limited import limited, shared
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.profiles import DeviceProfile, LinkProfile, MachineProfile, ProfileError, read_profile

Floats = npt.NDArray[np.float64]

_LATENCY_INSIDE, _LATENCY_BETWEEN = 10e-6, 30e-6
"""Seconds, where nothing says more."""
_HOST_BYTES = 5e9
"""Between workers on a CPU through the host's memory, bytes a second one way, where nothing says more."""


@dataclass(frozen=True, kw_only=True)
class ClusterDevice:
    """What one worker computes on.

    Args:
        host: Name of its host.
        profile: What it can do; overrides, factors and limits are in it.
        limits: What the worker may use of it.
        is_here: Whether the file says that it is this machine's.
    """

    host: str
    profile: DeviceProfile
    limits: DeviceLimits = DeviceLimits()
    is_here: bool = False

    @property
    def kind(self) -> str:
        """Equal for devices that are alike, wherever they are."""
        return self.profile.model_dump_json(exclude={"uuid", "spread"})


@dataclass(frozen=True, eq=False, kw_only=True)
class Cluster:
    """Devices in the order of ranks, and links.

    Args:
        devices: P of them.
        bytes_per_second: ``(P, P)`` of each pair one way while the other way and all other pairs are as busy; infinite
            on the diagonal. A host's way to others is divided by the number of its devices.
        latency_seconds: ``(P, P)``, 0 on the diagonal.
        notes: What had to be assumed, for people.
    """

    devices: tuple[ClusterDevice, ...]
    bytes_per_second: Floats
    latency_seconds: Floats
    notes: tuple[str, ...] = field(default=())

    @property
    def profiles(self) -> tuple[DeviceProfile, ...]:
        return tuple(device.profile for device in self.devices)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Of each device."""
        return tuple(device.host for device in self.devices)

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        return tuple(device.profile.memory_bytes for device in self.devices)

    def part(self, ranks: Sequence[int]) -> Cluster:
        """Some of the devices, in another order; hosts keep their links to others as they are divided here."""
        chosen = np.asarray(ranks, np.int64)
        return Cluster(
            devices=tuple(self.devices[rank] for rank in ranks),
            bytes_per_second=self.bytes_per_second[np.ix_(chosen, chosen)],
            latency_seconds=self.latency_seconds[np.ix_(chosen, chosen)],
            notes=self.notes,
        )


def read_cluster(path: Path | str, this_machine: Callable[[], MachineProfile] | None = None) -> Cluster:
    """The cluster that a file describes.

    Args:
        path: Of the file. Profiles that it names are seen from its folder.
        this_machine: Gives the profile of this machine when the file names it.

    Raises:
        ClusterError: The file cannot be read; a field is wrong, which the text names by its line; a card has no data
            sheet, or a profile cannot be read or has too few devices.
    """
    path = Path(path)
    fields, root = read_cluster_fields(path)
    try:
        check_names(fields)
        return _Builder(fields, path.parent, this_machine).cluster()
    except ClusterError as error:
        raise ClusterError(_placed(str(error), path, root)) from error


def cluster_of_machine(
    machine: MachineProfile, chosen: Sequence[DeviceProfile], limits: Sequence[DeviceLimits] | None = None
) -> Cluster:
    """The workers of one host, each on a device of its profile; a device that is chosen more than once is shared.

    Args:
        machine: The profile.
        chosen: The device of each worker, whole.
        limits: What each may use of it.
    """
    each = [DeviceLimits()] * len(chosen) if limits is None else list(limits)
    profiles = _after_limits(chosen, each)
    devices = tuple(
        ClusterDevice(host="this machine", profile=profile, limits=limit, is_here=True)
        for profile, limit in zip(profiles, each, strict=True)
    )
    return _linked(devices, lambda a, b: _link_inside(devices[a].profile, devices[b].profile, machine.links), ())


def _placed(text: str, path: Path, root: yaml.Node) -> str:
    """``hosts.0.devices.1: ...`` with the line of that field."""
    place, colon, _ = text.partition(":")
    steps = tuple(int(step) if step.isdigit() else step for step in place.split("."))
    is_place = bool(colon) and " " not in place
    return f"{path}, line {line_of(root, steps)}: {text}" if is_place else f"{path}: {text}"


class _Builder:
    """From the fields of a file to a cluster."""

    def __init__(self, fields: ClusterFields, folder: Path, this_machine: Callable[[], MachineProfile] | None) -> None:
        self._fields, self._folder, self._this_machine = fields, folder, this_machine
        self._machines: dict[str, MachineProfile] = {}
        self._notes: dict[str, None] = {}
        self._links_of: dict[str, tuple[LinkProfile, ...]] = {}

    def cluster(self) -> Cluster:
        devices: list[ClusterDevice] = []
        for number, host in enumerate(self._fields.hosts):
            found = self._devices_of(host, f"hosts.{number}")
            for name in host.names:
                devices += [ClusterDevice(host=name, profile=p, limits=x, is_here=here) for p, x, here in found]
                used = [each.device for each in host.devices if each.device in self._machines]
                self._links_of[name] = tuple(link for one in dict.fromkeys(used) for link in self._machines[one].links)
        counts = {
            name: sum(device.host == name for device in devices) for host in self._fields.hosts for name in host.names
        }
        groups = {host.name: set(host.names) for host in self._fields.hosts} | {name: {name} for name in counts}
        pairs = {
            frozenset((one, other)): pair
            for pair in self._fields.links.pairs
            for one in groups[pair.ends[0]]
            for other in groups[pair.ends[1]]
        }

        def link(a: int, b: int) -> tuple[float, float]:
            one, other = devices[a], devices[b]
            fields = pairs.get(frozenset((one.host, other.host)))
            if one.host == other.host:
                if fields is None and self._fields.links.inside is None:
                    return _link_inside(one.profile, other.profile, self._links_of[one.host])
                return _rates(fields or self._fields.links.inside, _LATENCY_INSIDE, 1)
            return _rates(
                fields or self._fields.links.between, _LATENCY_BETWEEN, max(counts[one.host], counts[other.host])
            )

        return _linked(tuple(devices), link, tuple(self._notes))

    def _devices_of(self, host: HostFields, place: str) -> list[tuple[DeviceProfile, DeviceLimits, bool]]:
        whole: list[DeviceProfile] = []
        limits: list[DeviceLimits] = []
        here: list[bool] = []
        taken: dict[tuple[str, str], int] = {}
        for number, entry in enumerate(host.devices):
            at = f"{place}.devices.{number}"
            for profile in self._profiles_of(entry, at, taken):
                whole.append(_changed(profile, entry))
                limits.append(entry.limits.limits())
                here.append(entry.device == THIS_MACHINE)
        try:
            return list(zip(_after_limits(whole, limits), limits, here, strict=True))
        except ValueError as error:
            raise ClusterError(f"{place}.devices: {error}") from error

    def _profiles_of(self, entry: DeviceFields, at: str, taken: dict[tuple[str, str], int]) -> list[DeviceProfile]:
        if entry.device != THIS_MACHINE and not entry.is_file:
            if entry.kind is not None:
                raise ClusterError(f"{at}.kind: is for a profile or {THIS_MACHINE!r}; leave it out")
            try:
                sheet = sheet_of(entry.device)
            except SheetError as error:
                raise ClusterError(f"{at}.device: {error}") from error
            self._notes.setdefault(f"{sheet.name}: by its data sheet, which may be off by tens of percent")
            return [sheet.as_profile()] * entry.count
        machine = self._machine(entry, at)
        kinds = {device.kind for device in machine.devices}
        kind = entry.kind or ("cuda" if "cuda" in kinds else "cpu")
        found = [device for device in machine.devices if device.kind == kind]
        if not found:
            raise ClusterError(f"{at}.kind: {entry.device} has no device of kind {kind}")
        if kind == "cpu":  # workers on it share it
            return [found[0]] * entry.count
        first = taken.get((entry.device, kind), 0)
        taken[entry.device, kind] = first + entry.count
        if len(found) == 1 and entry.is_file:  # a profile of one card stands for others like it
            is_alone = first + entry.count == 1
            return [found[0] if is_alone else found[0].model_copy(update={"uuid": None})] * entry.count
        if first + entry.count > len(found):
            raise ClusterError(
                f"{at}.count: {entry.device} has {len(found)} GPUs, and {first + entry.count} are asked for"
            )
        return found[first : first + entry.count]

    def _machine(self, entry: DeviceFields, at: str) -> MachineProfile:
        if entry.device not in self._machines:
            try:
                if entry.is_file:
                    self._machines[entry.device] = read_profile(self._folder / entry.device)
                elif self._this_machine is None:
                    raise ClusterError(f"{at}.device: {THIS_MACHINE!r} cannot be looked at here; name a profile's file")
                else:
                    self._machines[entry.device] = self._this_machine()
            except ProfileError as error:
                raise ClusterError(f"{at}.device: {error}") from error
        return self._machines[entry.device]


def _changed(profile: DeviceProfile, entry: DeviceFields) -> DeviceProfile:
    """With overrides, then factors."""
    values: dict[str, Any] = entry.overrides.model_dump(exclude_none=True)
    if "gemm_flops" in values:
        values["gemm_flops"] = profile.gemm_flops | values["gemm_flops"]
    changed = profile.model_copy(update=values)
    factors = {name: factor for name, factor in entry.factors.model_dump().items() if factor != 1.0}
    scaled: dict[str, Any] = {}
    for name, factor in factors.items():
        value = getattr(changed, name)
        scaled[name] = {form: x * factor for form, x in value.items()} if isinstance(value, dict) else value * factor
    return changed.model_copy(update=scaled) if scaled else changed


def _after_limits(whole: Sequence[DeviceProfile], limits: Sequence[DeviceLimits]) -> list[DeviceProfile]:
    """What each worker of a host has; workers on its CPU, or on the very same GPU, share it."""
    groups: dict[tuple[str, str | None], list[int]] = {}
    for worker, profile in enumerate(whole):
        alone = None if profile.kind == "cpu" else profile.uuid or f"worker {worker}"
        groups.setdefault((profile.kind, alone), []).append(worker)
    found = list(whole)
    for workers in groups.values():
        if len(workers) == 1:
            found[workers[0]] = limited(whole[workers[0]], limits[workers[0]])
            continue
        together = [limits[worker] for worker in workers]
        for place, worker in enumerate(workers):
            found[worker] = shared(whole[worker], together)[place]
    return found


def _rates(fields: LinkFields | None, latency_seconds: float, sharers: int) -> tuple[float, float]:
    assert fields is not None, "checked before: every pair has a link"
    latency = latency_seconds if fields.latency_us is None else fields.latency_us * 1e-6
    return fields.bytes_per_second / sharers, latency


def _link_inside(one: DeviceProfile, other: DeviceProfile, links: Sequence[LinkProfile]) -> tuple[float, float]:
    """Between two devices of a host: as it was measured, else as data sheets say."""
    wanted = {"nccl"} if one.kind == other.kind == "cuda" else {"gloo"}
    measured = [link for link in links if link.between == "devices" and link.via in wanted]
    ends = {one.uuid, other.uuid}
    exact = [link for link in measured if link.ends and set(link.ends) == ends]
    for link in exact or [link for link in measured if not link.ends]:
        return link.bytes_per_second, link.latency_seconds
    return min(_reach(one), _reach(other)), _LATENCY_INSIDE


def _reach(profile: DeviceProfile) -> float:
    """Bytes a second that get out of a device, by its sheet."""
    if profile.kind == "cpu":
        return _HOST_BYTES
    try:
        sheet = sheet_of(profile.name)
    except SheetError:
        return _HOST_BYTES
    host = sheet.host_link().bytes_per_second
    return host if sheet.fabric_gb_per_s is None else max(0.8 * sheet.fabric_gb_per_s * 1e9, host)


def _linked(
    devices: tuple[ClusterDevice, ...], link: Callable[[int, int], tuple[float, float]], notes: tuple[str, ...]
) -> Cluster:
    """Links of all pairs, each pair of alike devices asked for once."""
    count = len(devices)
    rates, latencies = np.full((count, count), np.inf), np.zeros((count, count))
    known: dict[tuple[Any, ...], tuple[float, float]] = {}
    keys = [(device.host, device.profile.name, device.profile.uuid) for device in devices]
    for a in range(count):
        for b in range(a):
            key = (keys[a], keys[b])
            if key not in known:
                known[key] = link(a, b)
            rates[a, b] = rates[b, a] = known[key][0]
            latencies[a, b] = latencies[b, a] = known[key][1]
    return Cluster(devices=devices, bytes_per_second=rates, latency_seconds=latencies, notes=notes)
