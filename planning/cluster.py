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
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from nugnn._counted import counted
from nugnn.planning.cluster_file import (
    SCHEMA,
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
from nugnn.planning.cluster_links import (
    LATENCY_BETWEEN,
    LATENCY_INSIDE,
    Way,
    link_inside,
    linked,
    rates_of,
    uses_nccl,
)
from nugnn.planning.cpu_rule import CpuSheet
from nugnn.planning.datasheet import DeviceSheet, SheetError, sheet_of
from nugnn.planning.limited_profile import limited, shared
from nugnn.planning.limits import SHARED_CORES, DeviceLimits
from nugnn.planning.links import Links
from nugnn.planning.named_cpu import named_cpu, near_cpus
from nugnn.planning.profiles import DeviceKind, DeviceProfile, LinkProfile, MachineProfile, ProfileError, read_profile

_MOST_HOSTS = 4
"""That a sentence names."""
ThisMachine = Callable[[Sequence[DeviceKind | None], Sequence[DeviceLimits]], MachineProfile]
"""Gives the profile of this machine, for workers on devices of these kinds and within these limits; None is for GPUs
where there are some, else the CPU."""


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
    limits: DeviceLimits = field(default_factory=DeviceLimits)
    is_here: bool = False

    @cached_property
    def kind(self) -> str:
        """Equal for devices that are alike, wherever they are."""
        return self.profile.model_dump_json(exclude={"uuid", "spread", "note"})


@dataclass(frozen=True, eq=False, kw_only=True)
class Cluster:
    """Devices in the order of ranks, and links.

    Args:
        devices: P of them.
        links: Between them.
        notes: What had to be assumed, for people.
    """

    devices: tuple[ClusterDevice, ...]
    links: Links
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def profiles(self) -> tuple[DeviceProfile, ...]:
        return tuple(device.profile for device in self.devices)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Of each device, equal where devices are alike and have as fast a way to their peers."""
        ways = [self.links.of_rank(rank) for rank in range(len(self.devices))]
        return tuple(
            f"{device.kind} {way.seconds_per_byte:.9g} {way.staging_seconds_per_byte:.9g} {way.latency_seconds:.9g}"
            for device, way in zip(self.devices, ways, strict=True)
        )

    @property
    def device_kinds(self) -> tuple[DeviceKind, ...]:
        """How torch reaches the devices, each named once."""
        return tuple(dict.fromkeys(profile.kind for profile in self.profiles))

    def described(self, ranks: Sequence[int], *, has_count: bool = True) -> str:
        """``4 x A100 on node-a, 2 x T4 on each of old-0 and old-1``."""
        counts: dict[str, dict[str, int]] = {}
        for rank in ranks:
            device = self.devices[rank]
            of_host = counts.setdefault(device.host, {})
            of_host[device.profile.name] = of_host.get(device.profile.name, 0) + 1
        places: dict[tuple[str, int], list[str]] = {}
        for host, names in counts.items():
            for name, count in names.items():
                places.setdefault((name, count), []).append(host)
        return ", ".join(
            f"{f'{count} x ' if has_count else ''}{name} on {_hosts(hosts)}" for (name, count), hosts in places.items()
        )

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        return tuple(device.profile.memory_bytes for device in self.devices)


def read_cluster(path: Path | str, this_machine: ThisMachine | None = None, *, host: str | None = None) -> Cluster:
    """The cluster that a file describes.

    Args:
        path: Of the file. Profiles that it names are seen from its folder.
        this_machine: Asked when the file names this machine.
        host: The name of this host, where its devices alone are wanted: those that the file calls this machine, else
            those of the host of that name, else those of the only host.

    Raises:
        ClusterError: The file cannot be read; a field is wrong, which the text names by its line; a card has no data
            sheet, or a profile cannot be read or has too few devices.
    """
    path = Path(path)
    fields, root = read_cluster_fields(path)
    try:
        check_names(fields)
        return _Builder(fields, path.parent, this_machine).cluster(host)
    except ClusterError as error:
        raise ClusterError(_placed(str(error), path, root)) from error


def check_on_paper(name: str) -> None:
    """Refuse a name of which a device could not be made.

    Raises:
        SheetError: It is no card's and no CPU's.
    """
    if named_cpu(name) is None:
        _card_named(name)


def _card_named(name: str) -> DeviceSheet:
    try:
        return sheet_of(name)
    except SheetError as error:
        near = near_cpus(name)
        raise SheetError(f"{error}; CPUs near it: {', '.join(near)}" if near else str(error)) from error


def cluster_on_paper(
    sheets: Sequence[str],
    count: int,
    *,
    per_host: int,
    between: LinkFields,
) -> Cluster:
    """So many devices of data sheets, filling one host after the other.

    Args:
        sheets: Names of cards; of several, equal numbers as far as that goes, one kind after the other.
        count: P.
        per_host: Devices of a host.
        between: A host's way to the others, which its devices share; inside hosts data sheets say.

    Raises:
        ClusterError: A card has no data sheet, or there are more devices than can be planned.
    """
    names = [sheets[number * len(sheets) // count] for number in range(count)]
    hosts = [
        {"name": f"host-{first // per_host}", "devices": [{"device": name} for name in names[first : first + per_host]]}
        for first in range(0, count, per_host)
    ]
    fields = ClusterFields.model_validate(
        {"schema": SCHEMA, "hosts": hosts, "links": {"between": between.model_dump()}}, by_alias=True
    )
    check_names(fields)
    return _Builder(fields, Path(), None).cluster(None)


def cluster_of_machine(
    machine: MachineProfile,
    chosen: Sequence[DeviceProfile],
    limits: Sequence[DeviceLimits] | None = None,
    threads: Sequence[int] | None = None,
    *,
    has_nccl: bool = True,
) -> Cluster:
    """The workers of one host, each on a device of its profile; a device that is chosen more than once is shared.

    Args:
        machine: The profile.
        chosen: The device of each worker, whole.
        limits: What each may use of it.
        threads: Of each worker, which count for those that share a CPU; when None, as `shared` divides them.
        has_nccl: Whether torch has NCCL there; GPUs exchange through the host's memory where it has not.
    """
    each = [DeviceLimits()] * len(chosen) if limits is None else list(limits)
    profiles = _after_limits(chosen, each, threads)
    devices = tuple(
        ClusterDevice(host="this machine", profile=profile, limits=limit, is_here=True)
        for profile, limit in zip(profiles, each, strict=True)
    )
    is_nccl = has_nccl and uses_nccl(["this machine"] * len(chosen), profiles)
    return Cluster(
        devices=devices,
        links=linked(
            devices,
            lambda a, b: link_inside(devices[a].profile, devices[b].profile, machine.links, is_nccl=is_nccl),
            {0: machine.links},
            is_nccl=is_nccl,
        ),
    )


def _hosts(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    if len(names) > _MOST_HOSTS:
        return f"each of {counted(len(names), 'host')} from {names[0]} to {names[-1]}"
    return f"each of {', '.join(names[:-1])} and {names[-1]}"


def _placed(text: str, path: Path, root: yaml.Node) -> str:
    """``hosts.0.devices.1: ...`` with the line of that field."""
    place, colon, _ = text.partition(":")
    steps = tuple(int(step) if step.isdigit() else step for step in place.split("."))
    is_place = bool(colon) and " " not in place
    return f"{path}, line {line_of(root, steps)}: {text}" if is_place else f"{path}: {text}"


class _Builder:
    """From the fields of a file to a cluster."""

    def __init__(self, fields: ClusterFields, folder: Path, this_machine: ThisMachine | None) -> None:
        self._fields, self._folder, self._this_machine = fields, folder, this_machine
        self._machines: dict[str, MachineProfile] = {}
        self._notes: dict[str, None] = {}
        self._links_of: dict[str, tuple[LinkProfile, ...]] = {}

    def cluster(self, here: str | None) -> Cluster:
        devices: list[ClusterDevice] = []
        for number, host in enumerate(self._fields.hosts):
            found = self._devices_of(host, f"hosts.{number}")
            for name in host.names:
                devices += [ClusterDevice(host=name, profile=p, limits=x, is_here=here) for p, x, here in found]
                used = [each.device for each in host.devices if each.device in self._machines]
                self._links_of[name] = tuple(link for one in dict.fromkeys(used) for link in self._machines[one].links)
        if here is not None:
            own = self._own_host(devices, here)
            devices = [device for device in devices if device.host == own]
            self._links_of = {own: self._links_of[own]}
        groups = {host.name: set(host.names) for host in self._fields.hosts} | {
            name: {name} for each in self._fields.hosts for name in each.names
        }
        pairs = {
            frozenset((one, other)): pair
            for pair in self._fields.links.pairs
            for one in groups[pair.ends[0]]
            for other in groups[pair.ends[1]]
        }
        is_nccl = uses_nccl([device.host for device in devices], [device.profile for device in devices])

        def link(a: int, b: int) -> Way:
            one, other = devices[a], devices[b]
            fields = pairs.get(frozenset((one.host, other.host)))
            if one.host != other.host:
                return rates_of(fields or self._fields.links.between, LATENCY_BETWEEN)
            if fields is None and self._fields.links.inside is None:
                return link_inside(one.profile, other.profile, self._links_of[one.host], is_nccl=is_nccl)
            return rates_of(fields or self._fields.links.inside, LATENCY_INSIDE)

        measured = dict(enumerate(self._links_of.values()))
        named = {name for ends in pairs for name in ends}
        places = [device.host if device.host in named else None for device in devices]
        links = linked(devices, link, measured, is_nccl=is_nccl, places=places)
        return Cluster(devices=tuple(devices), links=links, notes=tuple(self._notes))

    def _own_host(self, devices: Sequence[ClusterDevice], name: str) -> str:
        named = list(self._links_of)
        here = next((device.host for device in devices if device.is_here), named[0] if len(named) == 1 else name)
        if here not in named:
            raise ClusterError(
                f"hosts: this host is {name}, and the file has {', '.join(named[:8])}; name it so in the file, or "
                f"write 'device: {THIS_MACHINE}'; or start the processes of all hosts with torchrun"
            )
        return here

    def _devices_of(self, host: HostFields, place: str) -> list[tuple[DeviceProfile, DeviceLimits, bool]]:
        whole: list[DeviceProfile] = []
        limits: list[DeviceLimits] = []
        here: list[bool] = []
        taken: dict[tuple[str, str], int] = {}
        for number, entry in enumerate(host.devices):
            at, own = f"{place}.devices.{number}", entry.limits.limits()
            for profile in self._profiles_of(entry, at, taken):
                whole.append(_changed(profile, entry))
                limits.append(own)
                try:
                    limited(whole[-1], own)  # each for itself first, so that it can be named
                except ValueError as error:
                    raise ClusterError(f"{at}.limits: {error}") from error
                here.append(entry.device == THIS_MACHINE)
        try:
            found = _after_limits(whole, limits)
            if _shares_cores(whole, found):
                self._notes.setdefault(f"{host.name}: {SHARED_CORES}")
        except ValueError as error:
            raise ClusterError(f"{place}.devices: {error}") from error
        return list(zip(found, limits, here, strict=True))

    def _profiles_of(self, entry: DeviceFields, at: str, taken: dict[tuple[str, str], int]) -> list[DeviceProfile]:
        is_named = entry.device != THIS_MACHINE and not entry.is_file
        cpu = named_cpu(entry.device, entry.cores) if is_named else None
        named = None
        if is_named:
            named = self._of_card(entry.device, at) if cpu is None else self._of_cpu(cpu, entry)
        if entry.cores is not None and cpu is None:
            raise ClusterError(f"{at}.cores: is for a CPU by its name; leave it out")
        if named is not None and entry.kind is not None:
            raise ClusterError(f"{at}.kind: is for a profile or {THIS_MACHINE!r}; leave it out")
        if named is not None:
            return [named] * entry.count
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
                f"{at}.count: {entry.device} has {counted(len(found), 'GPU')}, and {first + entry.count} are asked for"
            )
        return found[first : first + entry.count]

    def _of_cpu(self, cpu: CpuSheet, entry: DeviceFields) -> DeviceProfile:
        assumed = list(cpu.assumed)
        if entry.overrides.memory_bytes is None:
            assumed.append(f"{cpu.memory_bytes >> 30} GiB of memory (overrides: memory_bytes)")
        self._notes.setdefault(f"{cpu.name}: by rule, which may be off by tens of percent; {', '.join(assumed)}")
        return cpu.as_profile()

    def _of_card(self, name: str, at: str) -> DeviceProfile:
        try:
            sheet = _card_named(name)
        except SheetError as error:
            raise ClusterError(f"{at}.device: {error}") from error
        self._notes.setdefault(f"{sheet.name}: by its data sheet, which may be off by tens of percent")
        return sheet.as_profile()

    def _machine(self, entry: DeviceFields, at: str) -> MachineProfile:
        if entry.device not in self._machines:
            try:
                if entry.is_file:
                    self._machines[entry.device] = read_profile(self._folder / entry.device)
                elif self._this_machine is None:
                    raise ClusterError(f"{at}.device: {THIS_MACHINE!r} cannot be looked at here; name a profile's file")
                else:
                    entries = [each for host in self._fields.hosts for each in host.devices]
                    here = [each for each in entries if each.device == THIS_MACHINE for _ in range(each.count)]
                    limits = [each.limits.limits() for each in here]
                    self._machines[entry.device] = self._this_machine([each.kind for each in here], limits)
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


def _shares_cores(whole: Sequence[DeviceProfile], found: Sequence[DeviceProfile]) -> bool:
    """Whether workers on a host's CPU have more threads together than it has cores.

    Args:
        whole: The device of each worker.
        found: What each has of it.
    """
    cores = max((device.multiprocessors for device in whole if device.kind == "cpu"), default=0)
    return sum(device.multiprocessors for device in found if device.kind == "cpu") > cores


def _after_limits(
    whole: Sequence[DeviceProfile], limits: Sequence[DeviceLimits], threads: Sequence[int] | None = None
) -> list[DeviceProfile]:
    """What each worker of a host has; workers on its CPU, or on the very same GPU, share it."""
    groups: dict[tuple[str, str | None], list[int]] = {}
    for worker, profile in enumerate(whole):
        alone = None if profile.kind == "cpu" else profile.uuid or f"worker {worker}"
        groups.setdefault((profile.kind, alone), []).append(worker)
    found = list(whole)
    for workers in groups.values():
        together = [limits[worker] for worker in workers]
        own_threads = None if threads is None else [threads[worker] for worker in workers]
        divided: dict[str, tuple[DeviceProfile, ...]] = {}  # by what the device is taken to do, which overrides change
        for place, worker in enumerate(workers):
            known = whole[worker].model_dump_json()
            if known not in divided:
                divided[known] = shared(whole[worker], together, own_threads)
            found[worker] = divided[known][place]
    return found
