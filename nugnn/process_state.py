"""What the system says about a process of ours and about the memory it lives in; Linux only, unknown elsewhere."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_NEARLY = 0.8
"""Of a limit: pieces of tens of MiB are refused there, as libraries take for their threads and their code."""
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process at one moment.

    Args:
        is_stopped: By SIGSTOP or a debugger.
        cpu_seconds: Computing time of all its threads since it began.
        transferred_bytes: What it read and wrote through system calls: files, sockets and pipes.
        resident_bytes: Memory it occupies.
        own_bytes: Memory of its own, as the system counts it against a limit.
        own_limit_bytes: That limit; None where there is none.
    """

    is_stopped: bool
    cpu_seconds: float
    transferred_bytes: int
    resident_bytes: int
    own_bytes: int = 0
    own_limit_bytes: int | None = None

    @property
    def is_at_its_limit(self) -> bool:
        """Whether it has nearly all of the memory that it may have: what it asked for next may have been too much."""
        return self.own_limit_bytes is not None and self.own_bytes >= _NEARLY * self.own_limit_bytes


def process_state(pid: int) -> ProcessState | None:
    """The state of process ``pid``; None when it has gone or the system does not say."""
    try:
        # the name in parentheses may hold anything, also spaces and parentheses
        columns = (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
        counters = dict(line.split(": ") for line in (_PROC / str(pid) / "io").read_text().splitlines())
        own = re.search(r"^VmData:\s*(\d+) kB$", (_PROC / str(pid) / "status").read_text(), re.MULTILINE)
        limit = re.search(r"^Max data size\s+(\d+) ", (_PROC / str(pid) / "limits").read_text(), re.MULTILINE)
    except (OSError, IndexError, ValueError):
        return None
    return ProcessState(
        is_stopped=columns[0] in ("T", "t"),
        cpu_seconds=(int(columns[11]) + int(columns[12])) / _TICKS,
        transferred_bytes=int(counters["rchar"]) + int(counters["wchar"]),
        resident_bytes=int(columns[21]) * _PAGE,
        own_bytes=1024 * int(own[1]) if own else 0,
        own_limit_bytes=int(limit[1]) if limit else None,
    )


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of this host, or of the control group this process is confined to.

    Args:
        used_bytes: In use now.
        limit_bytes: What there is.
        num_kills: Processes that the system has ended for lack of memory since it started.
    """

    used_bytes: int
    limit_bytes: int
    num_kills: int


def host_memory() -> HostMemory | None:
    """What is known of memory here; None when the system does not say."""
    try:
        kilobytes = {
            name: int(rest.split()[0])
            for name, rest in (line.split(":", 1) for line in (_PROC / "meminfo").read_text().splitlines())
        }
        vmstat = dict(line.split() for line in (_PROC / "vmstat").read_text().splitlines())
    except (OSError, ValueError, IndexError):
        return None
    limit = kilobytes["MemTotal"] * 1024
    used = limit - kilobytes.get("MemAvailable", 0) * 1024
    num_kills = int(vmstat.get("oom_kill", 0))
    group = _group_memory()
    if group is not None and group.limit_bytes < limit:
        used, limit = group.used_bytes, group.limit_bytes
    # both counters see a kill in the group, some systems show only one of them
    return HostMemory(used, limit, num_kills + (group.num_kills if group is not None else 0))


def _group_memory() -> HostMemory | None:
    """The memory control group of this process, of version 2 or 1."""
    try:
        lines = [line.split(":", 2) for line in (_PROC / "self" / "cgroup").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    for _, controllers, path in lines:
        inside = path.lstrip("/")
        if controllers == "memory":  # in a container the group's own path is often not visible, its root is
            names = ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control")
            folders = [_CGROUPS / "memory" / inside, _CGROUPS / "memory"]
        elif controllers == "":
            names = ("memory.current", "memory.max", "memory.events")
            folders = [_CGROUPS / inside, _CGROUPS]
        else:
            continue
        for folder in folders:
            try:
                used, limit, events = ((folder / name).read_text().strip() for name in names)
                kills = dict(line.split() for line in events.splitlines()).get("oom_kill", "0")
                return HostMemory(int(used), 2**63 if limit == "max" else int(limit), int(kills))
            except (OSError, ValueError):
                continue
    return None


def in_gib(num_bytes: int) -> str:
    """``3.2 GiB``."""
    return f"{num_bytes / 2**30:.1f} GiB"
