"""What a device is: name, uuid, memory, caches and cores, as torch and the system say."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
from pathlib import Path

import torch

from nugnn.kernels.green_context import usable_multiprocessors

_CPUS = Path("/sys/devices/system/cpu")
_UNKNOWN_CACHE_BYTES = 32 << 20
"""Of a system that does not say: no smaller than that of most processors, so that what shall not fit does not."""
_UNKNOWN_MEMORY_BYTES = 4 << 30


def device_name(device: torch.device) -> str:
    """Of the product, such as ``NVIDIA H200`` or ``AMD EPYC 7763 64-Core Processor``."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    return processor_name()


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Of this machine."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        found = None
    name = found.group(1) if found else platform.processor() or platform.machine()
    return " ".join(name.split()) or "unknown CPU"


def device_uuid(device: torch.device) -> str | None:
    """Who a GPU is, wherever it is plugged in, as ``nvidia-smi -L`` spells it; None for a CPU."""
    if device.type != "cuda":
        return None
    return spelled_uuid(str(torch.cuda.get_device_properties(device).uuid))


def spelled_uuid(uuid: str) -> str | None:
    """With its prefix, which torch leaves out; None where a driver gives zeros.

    >>> spelled_uuid("5d3a0b6e-0000-4000-8000-000000000001")
    'GPU-5d3a0b6e-0000-4000-8000-000000000001'
    >>> spelled_uuid("MIG-5d3a0b6e-0000-4000-8000-000000000001")
    'MIG-5d3a0b6e-0000-4000-8000-000000000001'
    """
    if not uuid.strip("0-"):
        return None
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def memory_bytes(device: torch.device) -> int:
    """For tensors: the device's, of a CPU the host's, or the part of it that this process is limited to."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        return int(whole * torch.cuda.get_per_process_memory_fraction(device))
    return min(_system_value("SC_PHYS_PAGES") * _system_value("SC_PAGE_SIZE") or _UNKNOWN_MEMORY_BYTES, _data_limit())


def _data_limit() -> int:
    """Bytes of memory of its own that the system lets this process have, enormous where it sets no limit."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return 2**63 if limit == resource.RLIM_INFINITY else limit


def data_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Memory of its own that this process has, as the system counts it for RLIMIT_DATA; 0 where it does not say."""
    try:
        found = re.search(r"^VmData:\s*(\d+) kB$", status.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(found.group(1)) if found else 0


def free_bytes(device: torch.device, meminfo: Path = Path("/proc/meminfo")) -> int:
    """What nobody uses now, or the system's file cache alone."""
    if device.type == "cuda":
        left = memory_bytes(device) - torch.cuda.memory_allocated(device)
        return max(0, min(torch.cuda.mem_get_info(device)[0], left))
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", meminfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    unused = 1024 * int(found.group(1)) if found else memory_bytes(device) // 4
    return max(0, min(unused, _data_limit() - data_bytes()))


def cache_bytes(device: torch.device) -> int:
    """The L2 of a GPU; of a CPU its last cache, one of them where each group of cores has its own."""
    if device.type == "cuda":
        size = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
        return size or _UNKNOWN_CACHE_BYTES
    return last_cache_bytes() or _system_value("SC_LEVEL3_CACHE_SIZE") or _UNKNOWN_CACHE_BYTES


def last_cache_bytes(cpus: Path = _CPUS) -> int:
    """Of the first core's caches that of the highest level; 0 where the system does not say."""
    largest = (0, 0)
    for folder in cpus.glob("cpu0/cache/index*"):
        try:
            level, size = int((folder / "level").read_text()), (folder / "size").read_text().strip()
            factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
            largest = max(largest, (level, int(size.rstrip("KMG")) * factor))
        except (OSError, ValueError):
            continue
    return largest[1]


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU, those that this process may use; threads that torch uses of a CPU."""
    if device.type == "cuda":
        return usable_multiprocessors(device)
    return torch.get_num_threads()


def versions(*, has_gpu: bool) -> dict[str, str]:
    """``torch``, ``cuda``, ``driver``, ``triton`` and ``nugnn``, as far as there are such."""
    known: dict[str, str | None] = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": None}
    if has_gpu:
        known["driver"] = _driver()
    for name in ("triton", "nugnn"):
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            known[name] = None
    return {name: version for name, version in known.items() if version}


def _driver() -> str | None:
    """The same for all GPUs of a machine."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.strip().splitlines()[0] if output.strip() else None


def _system_value(name: str) -> int:
    """0 where the system does not know it."""
    try:
        return max(0, os.sysconf(name))
    except (AttributeError, OSError, ValueError):
        return 0
