"""``cluster.yaml``: its fields, and what is wrong with one, by line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from nugnn._counted import counted
from nugnn._regular_file import no_file
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.profiles import Count, DeviceKind, Format, Positive, Seconds
from nugnn.planning.validation import in_one_line, problems_of

SCHEMA: Literal["nugnn.cluster/1"] = "nugnn.cluster/1"
THIS_MACHINE = "this machine"
MOST_DEVICES = 4096
_MOST_VALUES = 100_000
_SAY_HOW_FAST = "say how fast hosts reach each other"
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")

_Name = Annotated[str, Field(min_length=1, max_length=200)]


class ClusterError(ValueError):
    """A file is no cluster: says where and what to do."""


class _Fields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LinkFields(_Fields):
    """A link, one way while the other way is as busy.

    Args:
        gbit_per_second: As networks are named; 8 Gb/s are 1 GB/s.
        latency_us: Of an exchange without bytes, microseconds.
    """

    gbit_per_second: Positive
    latency_us: Seconds | None = None

    @property
    def bytes_per_second(self) -> float:
        return self.gbit_per_second * 1e9 / 8


class PairFields(LinkFields):
    """The link between two hosts, or inside one where both ends are the same.

    Args:
        ends: Names of hosts, or of entries whose ``count`` is more than one, for all of their hosts.
    """

    ends: tuple[_Name, _Name]


class LinksFields(_Fields):
    """How devices reach each other.

    Args:
        inside: Between two devices of a host; from profiles and data sheets when left out.
        between: A host's way to the others, which its devices share.
        pairs: Exceptions.
    """

    inside: LinkFields | None = None
    between: LinkFields | None = None
    pairs: tuple[PairFields, ...] = ()


class LimitsFields(_Fields):
    """As `nugnn.planning.limits.DeviceLimits`."""

    sms: Count | None = None
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    threads: Count | None = None

    def limits(self) -> DeviceLimits:
        return DeviceLimits(sms=self.sms, memory_fraction=self.memory_fraction, threads=self.threads)


class Overrides(_Fields):
    """Fields of the device's profile that are known better; see `nugnn.planning.profiles.DeviceProfile`."""

    memory_bytes: Count | None = None
    cache_bytes: Count | None = None
    gemm_flops: dict[Format, Positive] | None = None
    stream_bytes: Positive | None = None
    gather_bytes: Positive | None = None
    cached_gather_bytes: Positive | None = None
    pack_bytes: Positive | None = None
    launch_seconds: Seconds | None = None

    @field_validator("memory_bytes", "cache_bytes", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        """10e9 is a float to YAML."""
        return int(value) if isinstance(value, float) and value.is_integer() else value


class Factors(_Fields):
    """What was measured divided by what the profile says, for rates that are known to be off."""

    gemm_flops: Positive = 1.0
    stream_bytes: Positive = 1.0
    gather_bytes: Positive = 1.0
    cached_gather_bytes: Positive = 1.0
    pack_bytes: Positive = 1.0
    launch_seconds: Positive = 1.0


class DeviceFields(_Fields):
    """Devices of a host that are alike.

    Args:
        device: Name of a card or of a CPU in ``docs/hardware.md``; a file of ``nugnn profile``, ending in ``.json``,
            seen from the cluster's file; or ``this machine``.
        count: How many; of a CPU workers, which share it.
        cores: Of a CPU by its name, those of all sockets of its host; as many as a socket has at most when left out.
        kind: Of a profile or this machine: GPUs, or workers on the CPU; GPUs where there are some, when left out.
        overrides: Values in place of the profile's.
        factors: On the profile's values.
        limits: How much of each may be used.
    """

    device: _Name
    count: Count = 1
    cores: Count | None = None
    kind: DeviceKind | None = None
    overrides: Overrides = Overrides()
    factors: Factors = Factors()
    limits: LimitsFields = LimitsFields()

    @property
    def is_file(self) -> bool:
        return self.device.endswith(".json")


class HostFields(_Fields):
    """Hosts that are alike.

    Args:
        name: Of the host as it calls itself; with a ``count``, hosts are called ``NAME-0``, ``NAME-1`` and so on.
        count: How many.
        devices: What each has.
    """

    name: _Name
    count: Count = 1
    devices: tuple[DeviceFields, ...] = Field(min_length=1)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.count == 1 else tuple(f"{self.name}-{number}" for number in range(self.count))


class ClusterFields(_Fields):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_name: Literal["nugnn.cluster/1"] = Field(alias="schema")
    hosts: tuple[HostFields, ...] = Field(min_length=1)
    links: LinksFields = LinksFields()


def read_cluster_fields(path: Path) -> tuple[ClusterFields, yaml.Node]:
    """The fields of a file as written, checked one by one; and the file's nodes, for `line_of`.

    Raises:
        ClusterError: It cannot be read, is no YAML, or a field is missing, unknown, out of range or given twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        loaded = yaml.safe_load(text)
    except OSError as error:
        problem = no_file(path) or f"cannot be read: {error.strerror}"
        raise ClusterError(f"{path}: {problem}; --cluster takes a description of hardware, see docs/plan.md") from error
    except UnicodeDecodeError as error:
        raise ClusterError(f"{path} is no text in UTF-8") from error
    except yaml.MarkedYAMLError as error:
        raise ClusterError(f"{path}, {_not_yaml(error)}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ClusterError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if root is None or not isinstance(loaded, dict):
        raise ClusterError(f"{path}: expected 'schema: {SCHEMA}', 'hosts:' and so on; docs/plan.md has an example")
    if str(loaded.get("schema")).startswith("nugnn.plan/"):
        raise ClusterError(f"{path} is a plan: --plan takes it")
    if (twice := next(_given_twice(root, set()), None)) is not None:
        raise ClusterError(f"{path}, {twice}")
    try:
        plain = json.dumps(_plain(loaded, iter(range(_MOST_VALUES))), default=str)
    except (StopIteration, RecursionError) as error:
        raise ClusterError(f"{path}: more than {_MOST_VALUES} values, or one that holds itself") from error
    try:
        return ClusterFields.model_validate_json(plain, strict=True), root
    except ValidationError as error:
        found = [f"line {line_of(root, each.place)}: {each.text}" for each in problems_of(error, ClusterFields)]
        raise ClusterError(f"{path}, {in_one_line(found)}") from error


def _not_yaml(error: yaml.MarkedYAMLError) -> str:
    """Where and why, without the lines that the parser shows."""
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}: " if mark is not None else ""
    if "'\\t'" in str(error.problem):
        return f"{where}indent with spaces, not tabs"
    said = ", ".join(text for text in (error.context, error.problem) if text)
    return f"{where}not valid YAML: {said}"


def _given_twice(node: yaml.Node, seen: set[int], place: str = "") -> Iterator[str]:
    """Fields that stand more than once in the same mapping, by line: YAML would take the last."""
    if id(node) in seen:  # what has a name (an anchor) can stand in many places, also within itself
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for number, each in enumerate(node.value):
            yield from _given_twice(each, seen, f"{place}{number}.")
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first:
                yield f"line {line}: {place}{name} is given twice, first on line {first[name]}"
            first.setdefault(name, line)
            yield from _given_twice(value, seen, f"{place}{name}.")


def _plain(value: Any, budget: Iterator[int]) -> Any:
    """With ``8e11`` as the number that it is to people; it is text to YAML."""
    next(budget)  # names for values (anchors) can make a small file a huge one
    if isinstance(value, dict):
        return {str(key): _plain(each, budget) for key, each in list(value.items())}
    if isinstance(value, list):
        return [_plain(each, budget) for each in list(value)]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def count_devices(path: Path, host: str | None = None) -> int:
    """How many devices a file describes, without looking at any.

    Args:
        path: Of the file.
        host: The name of this host, where its devices alone count, as for `nugnn.planning.cluster.read_cluster`; of a
            file that does not have it all count, and reading it says so.

    Raises:
        ClusterError: As `read_cluster_fields`.
    """
    fields, _ = read_cluster_fields(path)
    of_host = {name: sum(device.count for device in each.devices) for each in fields.hosts for name in each.names}
    if host is not None:
        here = [each.name for each in fields.hosts if any(device.device == THIS_MACHINE for device in each.devices)]
        host = here[0] if here else next(iter(of_host)) if len(of_host) == 1 else host
    return of_host.get(host or "") or sum(of_host.values())


def names_this_machine(path: Path) -> bool:
    """Whether a file's devices are, some of them, this machine's own.

    Raises:
        ClusterError: As `read_cluster_fields`.
    """
    fields, _ = read_cluster_fields(path)
    return any(device.device == THIS_MACHINE for host in fields.hosts for device in host.devices)


def line_of(root: yaml.Node, place: tuple[int | str, ...]) -> int:
    """The line, from 1, on which what pydantic calls ``place`` stands, or the nearest that holds it."""
    node = root
    line = root.start_mark.line
    for step in place:
        found = _below(node, step)
        if found is None:
            break
        line, node = found
    return int(line) + 1


def _below(node: yaml.Node, step: int | str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return key.start_mark.line, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark.line, node.value[step]
    return None


def check_names(fields: ClusterFields) -> None:
    """Refuse names that stand for two hosts, pairs of hosts that are not there or stand there twice, and more devices
    than can be planned.

    Raises:
        ClusterError: What was found; the text begins with a field.
    """
    names = [name for host in fields.hosts for name in host.names]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        last = max(number for number, host in enumerate(fields.hosts) if twice[0] in host.names)
        raise ClusterError(f"hosts.{last}.name: {twice[0]!r} is the name of two hosts")
    known = {host.name for host in fields.hosts} | set(names)
    paired: dict[frozenset[str], int] = {}
    for number, pair in enumerate(fields.links.pairs):
        for end in pair.ends:
            if end not in known:
                raise ClusterError(f"links.pairs.{number}.ends: there is no host {end!r}")
        if (first := paired.setdefault(frozenset(pair.ends), number)) != number:
            ends = " and ".join(pair.ends)
            raise ClusterError(f"links.pairs.{number}.ends: the link of {ends} is already that of links.pairs.{first}")
    count = sum(host.count * sum(device.count for device in host.devices) for host in fields.hosts)
    if count > MOST_DEVICES:
        raise ClusterError(f"hosts: {counted(count, 'device')}, and a plan may have {MOST_DEVICES}")
    if len(names) > 1 and fields.links.between is None and not _are_all_paired(fields, names):
        if fields.links == LinksFields():  # named by the hosts that need it
            raise ClusterError(f"hosts.{len(fields.hosts) - 1}: links.between is missing: {_SAY_HOW_FAST}")
        raise ClusterError(f"links.between: is missing, {_SAY_HOW_FAST}")
    this = [host.name for host in fields.hosts if any(each.device == THIS_MACHINE for each in host.devices)]
    is_many = any(host.count > 1 for host in fields.hosts if host.name in this)
    if len(this) > 1 or is_many:
        raise ClusterError(f"hosts: only one host can be {THIS_MACHINE!r}, and it is {', '.join(this)}")


def _are_all_paired(fields: ClusterFields, names: list[str]) -> bool:
    groups = {host.name: host.names for host in fields.hosts} | {name: (name,) for name in names}
    paired = {
        frozenset((a, b)) for pair in fields.links.pairs for a in groups[pair.ends[0]] for b in groups[pair.ends[1]]
    }
    return len({pair for pair in paired if len(pair) == 2}) == math.comb(len(names), 2)
