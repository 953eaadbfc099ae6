"""CPUs by rule: cores x clock x width of the multiply-add units, and channels x transfers of the memory.

There are too many products for a table, so a small one by micro-architecture (``cpu_families.yaml``) has what
``/proc/cpuinfo`` does not say. What a process may use counts, not what the machine has: its affinity, its cgroup's
quota and memory. Whatever was not found and had to be assumed is said in :attr:`CpuSheet.assumed`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from nugnn._counted import counted
from nugnn.planning import derates
from nugnn.planning.profiles import Count, DeviceProfile, Format, Positive

_WIDTHS = (("avx512f", 1024), ("avx2", 512), ("avx", 256), ("sse2", 128), ("sve", 512), ("asimd", 256))
"""Flag and the bits that a core at best multiplies and adds in a clock with it; the first that is there counts."""
_AMX_BF16_PER_CLOCK = 1024


class CpuFamily(BaseModel):
    """What ``/proc/cpuinfo`` does not say of a micro-architecture, and by what in it the family is known.

    Args:
        title: For people.
        vendor, family, models: Of x86.
        implementer, parts: Of ARM.
        fma_bits: Width of all multiply-add units of a core together.
        channels, mega_transfers: Of the memory of one socket, as far as the platform goes.
        ghz: Of all cores at once.
        cores: The most of a socket.
        l3_mib_per_core: Of the last level of cache.
        source: Address of the document.
        note: Where members of the family differ.
        products: Names of its members, a regular expression; see `nugnn.planning.named_cpu`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    vendor: Literal["GenuineIntel", "AuthenticAMD"] | None = None
    family: int | None = None
    models: tuple[int, ...] = ()
    implementer: int | None = None
    parts: tuple[int, ...] = ()
    fma_bits: Literal[256, 512, 1024]
    channels: Count
    mega_transfers: Count
    ghz: Positive
    cores: Count
    l3_mib_per_core: Positive
    source: str
    note: str = ""
    products: str = ""

    def includes(self, processor: Mapping[str, str]) -> bool:
        """Whether a block of ``/proc/cpuinfo`` is of this family."""
        if self.vendor:
            known_by = (self.vendor, self.family)
            is_so = (processor.get("vendor_id"), _number(processor.get("cpu family"))) == known_by
            return is_so and _number(processor.get("model")) in self.models
        is_so = _number(processor.get("CPU implementer")) == self.implementer
        return is_so and _number(processor.get("CPU part")) in self.parts


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuSheet:
    """The part of a machine's CPUs that this process may use, by rule."""

    name: str
    family: CpuFamily
    threads: int
    cores: int
    sockets: int
    clock_hz: float
    flops: dict[Format, float]
    """Peak of dense products."""
    bandwidth_bytes: float
    """Bytes a second of all channels of all sockets in use."""
    memory_bytes: int
    cache_bytes: int
    """The last level, all of its pieces together."""
    assumed: tuple[str, ...]

    def as_profile(self, threads: int | None = None) -> DeviceProfile:
        """What these cores sustain, estimated: every peak times its derate.

        Args:
            threads: So many in use, fewer than there are; all of them when None.
        """
        threads = self.threads if threads is None else min(threads, self.threads)
        cores = min(self.cores, threads)
        # Few cores do not fill many channels.
        stream = min(self.bandwidth_bytes * derates.CPU_STREAM, cores * derates.CPU_CORE_BYTES)
        in_cache = cores * self.clock_hz * derates.CPU_CACHED_BYTES_PER_CLOCK
        matrix_unit = self.flops.get("bf16", 0) > 4 * self.flops["fp32"]
        derate = {"bf16": derates.CPU_AMX_PRODUCT if matrix_unit else derates.CPU_PRODUCT}
        return DeviceProfile(
            name=self.name,
            kind="cpu",
            source="sheet",
            memory_bytes=self.memory_bytes,
            cache_bytes=self.cache_bytes,
            gemm_flops={
                form: peak * cores / self.cores * derate.get(form, derates.CPU_PRODUCT)
                for form, peak in self.flops.items()
            },
            stream_bytes=stream,
            gather_bytes=stream * derates.CPU_GATHER,
            cached_gather_bytes=in_cache,
            pack_bytes=stream * derates.CPU_PACK,
            launch_seconds=derates.CPU_LAUNCH_SECONDS,
            multiprocessors=threads,
        )


def cpu_sheet() -> CpuSheet:
    """This machine's CPUs, as far as this process may use them."""
    everything = range(os.cpu_count() or 1)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else everything
    return read_cpu_sheet(Path("/"), allowed)


def read_cpu_sheet(root: Path, allowed: Collection[int]) -> CpuSheet:
    """The CPUs of a machine whose ``/proc`` and ``/sys`` lie below ``root``.

    Args:
        root: ``/``, or a copy of the files of another machine.
        allowed: Numbers of the processors that may be used.

    Source: Intel 64 and IA-32 Architectures Optimization Reference Manual (operations in a clock by instruction set;
        1024 in bfloat16 for AMX); Arm Neoverse V1 and N1 Software Optimization Guides.
    """
    assumed: list[str] = []
    processors = _processors(_text(root / "proc/cpuinfo"), allowed)
    first = processors[0] if processors else {}
    if not processors:
        assumed.append("/proc/cpuinfo says nothing of the processors")
    flags = set((first.get("flags") or first.get("Features") or "").split())
    family = _family(first, assumed)
    threads, share = _threads(root, max(1, len(allowed)), assumed)
    cores, sockets = _cores_and_sockets(processors, len(allowed), family, assumed)
    cores = max(1, round(cores * share))
    clock_hz = _clock(root, processors, family, assumed)
    return CpuSheet(
        name=first.get("model name") or family.title,
        family=family,
        threads=threads,
        cores=cores,
        sockets=sockets,
        clock_hz=clock_hz,
        flops={form: cores * clock_hz * per_clock for form, per_clock in flops_per_clock(flags, family).items()},
        bandwidth_bytes=sockets * family.channels * family.mega_transfers * 1e6 * 8,
        memory_bytes=_memory(root, assumed),
        cache_bytes=_cache(root, allowed, cores, family, assumed),
        assumed=tuple(assumed),
    )


def flops_per_clock(flags: Collection[str], family: CpuFamily) -> dict[Format, float]:
    """Operations of a core in a clock by format, a multiplication and an addition being two.

    The instruction set that is there bounds them (a virtual machine may hide AVX-512), and so do the family's units.
    """
    widest = next((bits for flag, bits in _WIDTHS if flag in flags), 128)
    fp32 = min(widest, family.fma_bits) / 32 * 2
    peaks: dict[Format, float] = {"fp64": fp32 / 2, "fp32": fp32}
    if "amx_bf16" in flags:
        peaks["bf16"] = _AMX_BF16_PER_CLOCK
    elif "avx512_bf16" in flags or "bf16" in flags:
        peaks["bf16"] = 2 * fp32
    return peaks


@lru_cache(maxsize=1)
def families() -> tuple[CpuFamily, ...]:
    """All families of ``cpu_families.yaml``."""
    text = (resources.files("nugnn.planning") / "cpu_families.yaml").read_text(encoding="utf-8")
    loaded = yaml.safe_load(text)
    sources = loaded["sources"]
    return tuple(
        CpuFamily.model_validate({**row, "source": sources[row["source"]]["url"]}) for row in loaded["families"]
    )


def cpu_markdown_table() -> str:
    """All families as the table of ``docs/hardware.md``."""
    lines = [
        "| family | fp32 operations in a clock | channels | MT/s | GB/s a socket | source |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for family in families():
        title = f"{family.title} ({family.note})" if family.note else family.title
        bandwidth = family.channels * family.mega_transfers * 8 / 1e3
        lines.append(
            f"| {title} | {family.fma_bits // 16} | {family.channels} | {family.mega_transfers} | {bandwidth:.0f} | "
            f"<{family.source}> |"
        )
    return "\n".join(lines) + "\n"


_UNKNOWN = CpuFamily(
    title="unknown CPU", fma_bits=512, channels=2, mega_transfers=3200, ghz=2.5, cores=16, l3_mib_per_core=2, source=""
)
"""What is assumed of any other: little."""


def _text(path: Path) -> str:
    """A file's text, empty where there is none: containers hide parts of /sys."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _processors(cpuinfo: str, allowed: Collection[int]) -> list[dict[str, str]]:
    """The blocks of /proc/cpuinfo whose processors may be used; all of them if none is."""
    blocks = []
    for block in cpuinfo.strip().split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        fields = {key.strip(): value.strip() for key, colon, value in pairs if colon}
        if "processor" in fields:
            blocks.append(fields)
    mine = [fields for fields in blocks if fields["processor"].isdigit() and int(fields["processor"]) in allowed]
    return mine or blocks


def _family(first: Mapping[str, str], assumed: list[str]) -> CpuFamily:
    """The micro-architecture of a processor."""
    for family in families():
        if family.includes(first):
            memory = f"{counted(family.channels, 'channel')} of {family.mega_transfers} MT/s"
            assumed.append(f"{memory}, as {family.title} has at best" + (f" ({family.note})" if family.note else ""))
            return family
    assumed.append("micro-architecture not in the table: two memory channels of 3200 MT/s, two 256-bit units")
    return _UNKNOWN


def _number(text: str | None) -> int | None:
    try:
        return int(text or "", 0)
    except ValueError:
        return None


def _threads(root: Path, allowed: int, assumed: list[str]) -> tuple[int, float]:
    """Threads in use, and the share of the allowed ones that a cgroup's quota leaves."""
    quota = _text(root / "sys/fs/cgroup/cpu.max").split()
    if len(quota) != 2:  # the first version of cgroups
        quota = [_text(root / f"sys/fs/cgroup/cpu/cpu.cfs_{what}_us").strip() for what in ("quota", "period")]
    if all(part.isdigit() and int(part) > 0 for part in quota):
        cpus = int(quota[0]) / int(quota[1])
        if cpus < allowed:
            assumed.append(f"a cgroup's quota of {cpus:g} of {allowed} processors")
            return max(1, round(cpus)), cpus / allowed
    return allowed, 1.0


def _cores_and_sockets(
    processors: list[dict[str, str]], allowed: int, family: CpuFamily, assumed: list[str]
) -> tuple[int, int]:
    """Cores behind the allowed processors, and the sockets that they are in."""
    places = {(fields.get("physical id"), fields["core id"]) for fields in processors if "core id" in fields}
    sockets = {fields["physical id"] for fields in processors if "physical id" in fields}
    if places and sockets:
        if "hypervisor" in (processors[0].get("flags") or "").split():
            assumed.append("a virtual machine: its cores may be threads that share a core with others")
        return len(places), len(sockets)
    by_count = max(1, -(-allowed // family.cores))
    assumed.append(f"a core for each of {allowed} processors, {by_count} socket(s): not said in /proc/cpuinfo")
    return max(1, allowed), by_count


def _clock(root: Path, processors: list[dict[str, str]], family: CpuFamily, assumed: list[str]) -> float:
    """Of all cores at once, hertz: from the name, else from the kernel, else the family's."""
    named = re.search(r"@\s*([0-9.]+)\s*GHz", processors[0].get("model name", "") if processors else "")
    if named:
        return float(named.group(1)) * 1e9
    for file in ("base_frequency", "cpuinfo_max_freq"):
        number = next((int(processor["processor"]) for processor in processors), 0)
        kilohertz = _text(root / f"sys/devices/system/cpu/cpu{number}/cpufreq/{file}").strip()
        if kilohertz.isdigit():
            if file == "cpuinfo_max_freq":
                assumed.append("the largest clock of one core, for all cores")
            return int(kilohertz) * 1e3
    megahertz = [float(fields["cpu MHz"]) for fields in processors if "cpu MHz" in fields]
    if megahertz:
        assumed.append(f"a clock of {max(megahertz):.0f} MHz, the largest that a core has now")
        return max(megahertz) * 1e6
    assumed.append(f"a clock of {family.ghz:g} GHz, as {family.title} has")
    return family.ghz * 1e9


def _memory(root: Path, assumed: list[str]) -> int:
    """The machine's memory, or less where a cgroup bounds it."""
    total = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    if not total:
        assumed.append("8 GiB of memory: /proc/meminfo says nothing")
    size = int(total.group(1)) * 1024 if total else 8 << 30
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _text(root / "sys/fs/cgroup" / file).strip()
        if limit.isdigit() and 0 < int(limit) < size:
            assumed.append(f"a cgroup's limit of {int(limit) / 2**30:.1f} GiB of memory")
            return int(limit)
    return size


def _cache(root: Path, allowed: Collection[int], cores: int, family: CpuFamily, assumed: list[str]) -> int:
    """Bytes of the last level of cache, all pieces that the allowed processors use together."""
    pieces: dict[tuple[int, str], int] = {}
    for processor in allowed:
        for index in (root / f"sys/devices/system/cpu/cpu{processor}/cache").glob("index*"):
            level, size = _text(index / "level").strip(), _text(index / "size").strip()
            number = re.fullmatch(r"(\d+)([KM])", size)
            if level.isdigit() and number:
                scale = {"K": 1 << 10, "M": 1 << 20}[number.group(2)]
                shared = _text(index / "shared_cpu_list").strip() or str(processor)
                pieces[int(level), shared] = int(number.group(1)) * scale
    if pieces:
        last = max(level for level, _ in pieces)
        return sum(size for (level, _), size in pieces.items() if level == last)
    assumed.append(f"{family.l3_mib_per_core:g} MiB of last-level cache a core: not said in /sys")
    return round(cores * family.l3_mib_per_core * 2**20)
