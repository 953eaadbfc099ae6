"""What a worker may use of its device: checked before workers start, put in force in each of them."""

from __future__ import annotations

import mmap
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from nugnn._counted import counted
from nugnn.kernels.green_context import limit_multiprocessors, usable_multiprocessors
from nugnn.planning import device_facts
from nugnn.planning.in_words import in_bytes
from nugnn.planning.limits import SHARED_CORES, DeviceLimits, format_limits, parse_limits
from nugnn.planning.process_memory import least_fraction, limited_runtime_bytes
from nugnn.process_state import host_memory
from nugnn.worker_cores import (
    WorkerCores,
    asked_threads,
    divide_cores,
    equal_cores,
    fair_threads,
    given_cores,
    own_nodes,
    users_environment,
)

Limits: TypeAlias = str | Sequence[DeviceLimits | str | None]
"""As a user gives them: ``"sms=132;sms=32"``, or one for each worker."""


def checked_limits(limits: Limits | None, workers: int) -> tuple[DeviceLimits, ...] | None:
    """One for each worker; None where no worker is limited.

    Raises:
        ValueError: There are more or fewer than workers, or one is not understood.
        TypeError: One is neither text nor `DeviceLimits`.
    """
    if limits is None:
        return None
    given = parse_limits(limits) if isinstance(limits, str) else tuple(map(_one, limits))
    if len(given) != workers:
        raise ValueError(
            f"limits {format_limits(given)!r}: {len(given)} for {counted(workers, 'worker')}; give one for each"
        )
    return None if all(each.is_none for each in given) else given


def _one(limits: DeviceLimits | str | None) -> DeviceLimits:
    if isinstance(limits, str):
        return DeviceLimits.parse(limits)
    if limits is not None and not isinstance(limits, DeviceLimits):
        raise TypeError(
            f"limits of a worker are {limits!r}; give nugnn.DeviceLimits(...), text such as 'sms=32', or None"
        )
    return limits or DeviceLimits()


def check_on_devices(limits: Sequence[DeviceLimits], devices: Sequence[torch.device]) -> None:
    """Refuse limits that workers of this host cannot keep, before any is started.

    Raises:
        ValueError: Multiprocessors of a CPU, more memory than there is or less than a worker needs before it has any
            data, or more threads than cores.
    """
    parts: dict[torch.device, list[float]] = defaultdict(list)
    for worker, (each, device) in enumerate(zip(limits, devices, strict=True)):
        if each.sms is not None and device.type != "cuda":
            raise ValueError(
                f"limits of worker {worker}: sms={each.sms}, but it computes on the CPU, which has no multiprocessors; "
                "give threads, or a GPU"
            )
        if each.memory_fraction is not None:
            parts[device].append(each.memory_fraction)
    for device, fractions in parts.items():
        if sum(fractions) > 1 + 1e-9:
            raise ValueError(
                f"limits: memory_fraction of the workers on {device} adds up to {sum(fractions):g}; there is 1 of it"
            )
    divide_cores([each.threads for each in limits], own_nodes())
    host = host_memory()
    for worker, (each, device, threads) in enumerate(zip(limits, devices, threads_on(devices, limits), strict=True)):
        if host is None or device.type != "cpu" or each.memory_fraction is None:
            continue
        room, need = each.memory_fraction * host.limit_bytes, limited_runtime_bytes(threads)
        if room < need:
            raise ValueError(
                f"limits of worker {worker}: memory_fraction={each.memory_fraction:g} of {in_bytes(host.limit_bytes)} "
                f"is {in_bytes(room)}, and a worker takes {in_bytes(need)} before it has any data; "
                f"{least_fraction(each.memory_fraction, room, need)}"
            )


def cores_of(limits: Sequence[DeviceLimits] | None) -> tuple[WorkerCores, ...] | None:
    """Threads and cores of the workers of this host; None where none is limited in them."""
    if limits is None or all(each.threads is None for each in limits):
        return None
    return divide_cores([each.threads for each in limits], own_nodes())


def cores_on(devices: Sequence[torch.device], limits: Sequence[DeviceLimits] | None) -> tuple[WorkerCores, ...] | None:
    """As `cores_of`; where none is limited in them and all compute on CPUs, as `nugnn.worker_cores.equal_cores` says.

    Args:
        devices: Of the workers of this host.
        limits: Likewise.
    """
    if (limited := cores_of(limits)) is not None or any(device.type != "cpu" for device in devices):
        return limited
    return equal_cores(len(devices), own_nodes(), users_environment(os.environ))


def threads_on(devices: Sequence[torch.device], limits: Sequence[DeviceLimits] | None) -> tuple[int, ...]:
    """Threads that each worker of this host will have, as `nugnn.launch` gives them; see `cores_on`."""
    asked = asked_threads(users_environment(os.environ))
    if (placed := cores_on(devices, limits)) is None:
        fair = fair_threads(len(devices), sum(map(len, own_nodes())))
        return fair if asked is None else (asked,) * len(devices)
    return tuple(each.threads if each.is_limited or asked is None else asked for each in placed)


def apply_limits(limits: DeviceLimits, device: torch.device) -> dict[str, Any]:
    """Put ``limits`` in force in this process and thread, before it makes tensors on ``device``.

    The number of threads is set here for torch and numba; OpenMP of other libraries takes it from the environment that
    the process was started with, as the cores, see `nugnn.worker_cores`.

    Returns:
        What holds from now on, for reports: ``asked`` as text, and those of ``multiprocessors``, ``memory_bytes``,
        ``threads`` and ``cores`` that were limited.

    Raises:
        ValueError: The device has less, or it cannot be limited in this way.
    """
    holds: dict[str, Any] = {"asked": str(limits)}
    if limits.threads is not None:
        torch.set_num_threads(limits.threads)
        holds["threads"] = torch.get_num_threads()
        if (cores := given_cores()) is not None:
            holds["cores"] = list(cores)
    if limits.memory_fraction is not None:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(limits.memory_fraction, device)
        else:
            _limit_host_memory(limits.memory_fraction)
        holds["memory_bytes"] = device_facts.memory_bytes(device)
    if limits.sms is not None:
        if device.type != "cuda":
            raise ValueError(f"sms={limits.sms}: a CPU has no multiprocessors; give threads")
        limit_multiprocessors(device, limits.sms)
        holds["multiprocessors"] = usable_multiprocessors(device)
    return holds


def said_of(limits: Sequence[DeviceLimits] | None, reports: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences about limits that hold in another way than they were asked for.

    Args:
        limits: Of all workers.
        reports: Of all workers, with what `apply_limits` gave under ``limits``.
    """
    said: list[str] = []
    shares_cores = False
    for worker, (each, report) in enumerate(zip(limits or (), reports, strict=False)):
        holds = report.get("limits", {})
        shares_cores |= "threads" in holds and "cores" not in holds
        granted = holds.get("multiprocessors", each.sms)
        if granted != each.sms:
            said.append(
                f"worker {worker} has {counted(granted, 'multiprocessor')} where {each.sms} were asked for: the "
                f"GPU sets them "
                "apart in groups"
            )
    return [*said, *[SHARED_CORES] * shares_cores]


def said_of_cores(limits: Sequence[DeviceLimits] | None) -> list[str]:
    """A sentence where workers of this host will have more threads than it has cores."""
    if all(each.cores is not None for each in cores_of(limits) or ()):
        return []
    return [SHARED_CORES]


def _limit_host_memory(fraction: float) -> None:
    """Let the system refuse this process memory of its own beyond a part of the host's.

    Raises:
        ValueError: The process has more already, or the system does not hold such limits.
    """
    host = host_memory()
    if sys.platform != "linux" or host is None:
        raise ValueError("memory_fraction of a CPU takes Linux, which limits a process's memory; leave it out")
    limit, held = int(fraction * host.limit_bytes), device_facts.data_bytes()
    if limit <= held:
        raise ValueError(
            f"memory_fraction={fraction:g} of {in_bytes(host.limit_bytes)} is {in_bytes(limit)}, and the worker holds "
            f"{in_bytes(held)} before it has any data; give more"
        )
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if most != resource.RLIM_INFINITY and limit > most:
        raise ValueError(
            f"memory_fraction={fraction:g} is {in_bytes(limit)}, but the system lets this process have {in_bytes(most)}"
        )
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    try:
        mmap.mmap(-1, limit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ValueError):
        return
    raise ValueError("memory_fraction: this system lets a process have more memory than its limit; leave it out")
