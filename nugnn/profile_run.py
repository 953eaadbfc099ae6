"""``nugnn profile`` without its screen: this machine measured by worker processes, as one `MachineProfile`.

Workers are those of a training run, with its memory settings and its gloo and NCCL, so that what is measured is what a
run will find: one for each GPU, or two for the CPU, whose exchanges then go over loopback.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from nugnn._counted import counted
from nugnn.devices import devices_of
from nugnn.failure import WorkerFailed
from nugnn.job import private_job_folder, write_job
from nugnn.launch import launch
from nugnn.limited import check_on_devices, cores_of
from nugnn.planning import device_facts
from nugnn.planning.in_use import said_of_use, used_of_cores, used_of_gpus
from nugnn.planning.limits import DeviceLimits, parse_limits
from nugnn.planning.links import Sums
from nugnn.planning.measure_links import Exchange, as_links
from nugnn.planning.profiles import SCHEMA, DeviceProfile, LinkProfile, MachineProfile
from nugnn.process_state import host_memory
from nugnn.profile_worker import LINKS, device_file
from nugnn.worker_cores import asked_threads, own_cores, users_environment
from nugnn.worker_environment import num_cores

_CPU = torch.device("cpu")
_STALL_SECONDS = 120.0
_DEVICES_PART = 0.7
"""Of the seconds; the rest is for links."""


@dataclass(frozen=True)
class Measured:
    """A machine, and what has to be said about how it was measured.

    Args:
        machine: Its profile.
        notes: Sentences for the user: what was left out, or measured smaller.
    """

    machine: MachineProfile
    notes: tuple[str, ...]


def profile_machine(
    device: str,
    *,
    seconds: float,
    on_stage: Callable[[str], None],
    usable_bytes: int | None = None,
    limits: str | None = None,
    threads: int | None = None,
) -> Measured:
    """Measure the devices of this machine and the links between them.

    Args:
        device: ``auto``: GPUs, if any, and the CPU; ``cpu`` or ``cuda``: those alone.
        seconds: Of timed calls in all; starting processes and compiling kernels come on top.
        on_stage: Called with what is measured next.
        usable_bytes: Of the CPU's memory; what the system or a control group allows when None.
        limits: What may be used of each device, one for all or one for each GPU, see `nugnn.planning.limits`; the
            profile is then of the limited device.
        threads: Of the CPU, where no limit says how many; those of a single process when None.

    Raises:
        ValueError: There is no GPU, and ``device`` asks for one; or ``limits`` does not fit the devices.
        WorkerFailed: A worker did not come to the end of its device.
    """
    gpus = _gpus(device)
    with_cpu = device != "cuda"
    memory = host_memory()
    workers = gpus if gpus else [_CPU] * 2
    limited = None if limits is None else limits_of_devices(limits, device, len(gpus))
    work = {
        "devices": workers,
        "with_cpu": with_cpu,
        "threads": threads or threads_of_cpu(),
        "limits": limited,
        "usable_bytes": usable_bytes or (memory.limit_bytes if memory is not None else None),
        "seconds": seconds_of_parts(seconds, len(gpus), with_cpu=with_cpu),
    }
    used = used_of_gpus() if gpus else {}
    if with_cpu and (of_cores := used_of_cores(own_cores())) is not None:
        used["cpu"] = of_cores
    lost = ""
    with private_job_folder() as folder:
        write_job(folder, work)
        try:
            launch(
                folder,
                len(workers),
                module="nugnn.profile_worker",
                timeout=_STALL_SECONDS,
                on_event=lambda event: on_stage(event["text"]),
                cores=cores_of(limited),
            )
        except WorkerFailed as failed:
            # devices that were measured are not thrown away for a link that is not there
            if not all((folder / device_file(rank)).exists() for rank in range(len(workers))):
                raise
            lost = f"links between devices could not be measured: {failed.message.splitlines()[0]}"
        found = [_read(folder / device_file(rank)) for rank in range(len(workers))]
        nothing: dict[str, Any] = {"exchanges": [], "sums": None, "is_nccl": False, "beside": None}
        links = _read(folder / LINKS) if not lost else nothing
    return Measured(
        _merged(found, links, used),
        tuple(note for each in found for note in each["notes"]) + ((lost,) if lost else ()),
    )


def limits_of_devices(text: str, device: str, num_gpus: int) -> tuple[DeviceLimits, ...]:
    """The limits of each worker of a profile.

    Args:
        text: As `nugnn.planning.limits.parse_limits` takes it.
        device: ``cpu`` or ``cuda``: what is measured.
        num_gpus: GPUs of this machine, of which each has a worker; a CPU is measured by the first of two.

    Raises:
        ValueError: It is not understood, or names what does not change what is measured.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"limits {text!r} are of one kind of device: say which, cpu or cuda")
    limits = parse_limits(text)
    most = num_gpus if device == "cuda" else 1
    if len(limits) not in (1, most):
        raise ValueError(f"limits {text!r}: {len(limits)} for {counted(most, 'device')}; give one, or one for each GPU")
    for each in limits:
        if device == "cuda" and each.threads is not None:
            raise ValueError(f"limits {text!r}: threads has no effect on what is measured of a GPU; leave it out")
    every = limits * (most if len(limits) == 1 else 1)
    if device == "cpu":
        every = (*every, DeviceLimits())
    check_on_devices(every[:most], [torch.device("cuda", n) for n in range(most)] if device == "cuda" else [_CPU])
    return every


def seconds_of_parts(seconds: float, num_gpus: int, *, with_cpu: bool) -> dict[str, float]:
    """How long each worker may time its GPU, the CPU, copies to the host, exchanges and sums: together ``seconds``.

    GPUs are measured at once, copies one after the other.

    >>> seconds_of_parts(20.0, 0, with_cpu=True)
    {'gpu': 0.0, 'cpu': 14.0, 'copies': 0.0, 'exchanges': 6.0}
    >>> seconds_of_parts(20.0, 4, with_cpu=True)
    {'gpu': 7.0, 'cpu': 7.0, 'copies': 0.75, 'exchanges': 3.0}
    """
    devices, links = _DEVICES_PART * seconds, (1 - _DEVICES_PART) * seconds
    each = devices / ((num_gpus > 0) + with_cpu)
    if num_gpus == 0:
        parts = {"gpu": 0.0, "cpu": each, "copies": 0.0, "exchanges": links}
    else:
        copies = links if num_gpus == 1 else links / 2
        exchanges = links - copies
        parts = {"gpu": each, "cpu": each * with_cpu, "copies": copies / num_gpus, "exchanges": exchanges}
    return {name: round(value, 6) for name, value in parts.items()}


def _gpus(device: str) -> list[torch.device]:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return []
    if device == "cuda":
        devices_of("cuda", 1)  # says why there is none
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def threads_of_cpu() -> int:
    """As torch would count them in a process of its own."""
    return asked_threads(users_environment(os.environ)) or num_cores()


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _noted(device: DeviceProfile, used: Mapping[str, float], of_links: str | None) -> DeviceProfile:
    """With what others had of it before, by uuid or ``cpu``, and meanwhile, and how much its rates varied, in words.

    Links of CPUs are carried by their cores.
    """
    is_cpu = device.kind == "cpu"
    others = used.get("cpu" if is_cpu else device.uuid or "")
    note = said_of_use(others, device.spread, device.note, of_links if is_cpu else None)
    return device.model_copy(update={"note": note})


def _merged(found: list[dict[str, Any]], links: dict[str, Any], used: Mapping[str, float]) -> MachineProfile:
    devices = [
        _noted(DeviceProfile.model_validate(device), used, links["beside"])
        for each in found
        for device in each["devices"]
    ]
    devices.sort(key=lambda device: (device.kind == "cpu", device.uuid or ""))
    copies = [LinkProfile.model_validate(link) for each in found for link in each["copies"]]
    exchanges = [
        Exchange((one["ends"][0], one["ends"][1]), one["bytes_per_second"], one["latency_seconds"])
        for one in links["exchanges"]
    ]
    names = [each["name"] for each in found]
    sums = None if links["sums"] is None else Sums(**links["sums"])
    between = as_links(exchanges, names, is_nccl=links["is_nccl"], sums=sums)
    return MachineProfile(
        schema=SCHEMA,
        devices=tuple(devices),
        links=(*sorted(copies, key=lambda link: link.ends), *between),
        versions=device_facts.versions(has_gpu=any(device.kind == "cuda" for device in devices)),
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
