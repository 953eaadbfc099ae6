"""What this machine's devices can do: measured once and kept, or by data sheets where that is enough."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from nugnn.datasets.cache_location import cache_folder
from nugnn.datasets.whole_file import write_whole
from nugnn.limited import said_of_cores, threads_on
from nugnn.planning import device_facts
from nugnn.planning.cluster import Cluster, cluster_of_machine
from nugnn.planning.datasheet import SheetError, cpu_sheet, sheet_of
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.profiles import SCHEMA, DeviceKind, DeviceProfile, MachineProfile, ProfileError, read_profile
from nugnn.process_state import host_memory
from nugnn.profile_run import profile_machine
from nugnn.worker_cores import asked_threads, users_environment
from nugnn.worker_environment import num_cores

Need = Literal["anew", "measured", "any"]

_SECONDS = {"cpu": 6.0, "cuda": 10.0}
"""Of measurements, when nobody asked for them by name."""
_CPU = torch.device("cpu")


def profile_of_this_machine(
    kinds: Sequence[DeviceKind],
    need: Need,
    limits: Sequence[DeviceLimits] | None = None,
    *,
    on_stage: Callable[[str], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
    seconds: float | None = None,
) -> MachineProfile:
    """The devices of these kinds, and their links; of the CPU as many threads as its workers have together.

    Args:
        kinds: Of the device of each worker of this host; GPUs are all that there are.
        need: ``measured``: measure what was not measured before; ``anew``: that, too; ``any``: data sheets will do.
        limits: Of each worker; none when None.
        on_stage: Called with what is done next.
        on_note: Gets a sentence where the machine was measured; of sheets tables of predictions tell.
        seconds: Of measurements; some, when None.

    Raises:
        ValueError: There is no GPU, and one is asked for.
        WorkerFailed: A worker did not come to the end of its device.
    """
    wanted: Literal["auto", "cpu", "cuda"] = "auto" if len(set(kinds)) > 1 else kinds[0]
    threads = _threads_together(kinds, limits)
    path = kept_profile(wanted, threads)
    if need != "anew":
        with contextlib.suppress(ProfileError):  # none yet, or one that an interrupted run left
            return read_profile(path)
    if need == "any" and (by_sheets := _by_sheets(wanted, threads)) is not None:
        return by_sheets
    text = {"cpu": "the CPU", "cuda": "GPUs", "auto": "GPUs and the CPU"}[wanted]
    on_stage(f"measuring {text}, once")
    measured = profile_machine(
        wanted,
        seconds=seconds or sum(_SECONDS[kind] for kind in set(kinds)),
        on_stage=lambda what: on_stage(f"measuring {what}"),
        threads=threads,
    )
    for note in measured.notes:
        on_note(note)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write(measured.machine.to_json().encode()))
        on_note(f"{text} measured; kept in {path} for later plans")
    except OSError as error:
        on_note(f"{text} measured, but not kept: {path.parent} cannot be written ({error.strerror or error})")
    return measured.machine


def _threads_together(kinds: Sequence[DeviceKind], limits: Sequence[DeviceLimits] | None) -> int:
    """Of the workers on the CPU, as `nugnn.limited.threads_on` has them.

    All cores where ``OMP_NUM_THREADS`` says nothing: what is measured then serves any number of workers, and limits
    make less of it. Where it says something, workers that have their cores to themselves would else be planned as if
    they divided the threads of one.
    """
    asked = asked_threads(users_environment(os.environ))
    if asked is None:
        return num_cores()
    each = [DeviceLimits()] * len(kinds) if limits is None else limits
    own = [limit.threads or asked for kind, limit in zip(kinds, each, strict=True) if kind == "cpu"] or [asked]
    return min(sum(own), max(num_cores(), asked))  # a limit beyond that is refused


def kept_profile(wanted: Literal["auto", "cpu", "cuda"], threads: int) -> Path:
    """Where a profile of this machine is kept: by who its devices are, and by what they were measured with.

    Args:
        wanted: Which devices are in it.
        threads: Of the CPU.
    """
    has_gpu = wanted != "cpu" and torch.cuda.is_available()
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] if has_gpu else []
    devices = [*gpus, *([_CPU] if wanted != "cuda" else [])]
    who = sorted(
        [
            device_facts.device_name(device),
            device_facts.device_uuid(device) or "",
            str(device_facts.num_multiprocessors(device) if device.type == "cuda" else threads),
        ]
        for device in devices
    )
    key = {"schema": SCHEMA, "wanted": wanted, "devices": who, "versions": device_facts.versions(has_gpu=has_gpu)}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_base() / "machine-profiles" / f"{name}.json"


def cache_base() -> Path:
    """The folder beside that of data sets, or ``$NUGNN_CACHE`` itself."""
    folder = cache_folder()
    return folder if os.environ.get("NUGNN_CACHE") else folder.parent


def cluster_here(
    devices: Sequence[torch.device],
    limits: Sequence[DeviceLimits] | None,
    machine: MachineProfile,
) -> Cluster:
    """The workers of this host, one on each of ``devices``.

    Args:
        devices: Of the workers.
        limits: What each may use; all of it when None.
        machine: Its profile.

    Raises:
        ValueError: The profile lacks a device, or a worker is to have more threads than there are cores.
    """
    profiles = [_profile_in(machine, device) for device in devices]
    threads, has_nccl = threads_on(devices, limits), dist.is_nccl_available()
    cluster = cluster_of_machine(machine, profiles, limits, threads, has_nccl=has_nccl)
    return replace(cluster, notes=(*cluster.notes, *said_of_cores(limits)))


def are_devices_alike(devices: Sequence[torch.device], limits: Sequence[DeviceLimits] | None) -> bool:
    """Whether workers cannot be told apart by what they compute on, so that nothing need be measured."""
    if limits is not None and len(set(limits)) > 1:
        return False
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        return len(set(threads_on(devices, limits))) == 1
    if len(kinds) > 1:
        return False
    uses = [devices.count(device) for device in devices]
    facts = {
        (device_facts.device_name(d), device_facts.memory_bytes(d), device_facts.num_multiprocessors(d))
        for d in devices
    }
    return len(facts) == 1 and len(set(uses)) == 1


def _profile_in(machine: MachineProfile, device: torch.device) -> DeviceProfile:
    same_kind = [profile for profile in machine.devices if profile.kind == device.type]
    if device.type == "cuda":
        uuid, name = device_facts.device_uuid(device), device_facts.device_name(device)
        same_kind = [profile for profile in same_kind if profile.uuid == uuid] or [
            profile for profile in same_kind if profile.uuid is None and profile.name == name
        ]
    if not same_kind:
        raise ValueError(f"the profile of this machine has no {device}; measure it with nugnn profile")
    return same_kind[0]


def _by_sheets(wanted: Literal["auto", "cpu", "cuda"], threads: int) -> MachineProfile | None:
    """None where a GPU has no sheet."""
    found: list[DeviceProfile] = []
    if wanted != "cpu" and torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            device = torch.device("cuda", number)
            try:
                sheet = sheet_of(device_facts.device_name(device)).as_profile()
            except SheetError:
                return None
            own = {"uuid": device_facts.device_uuid(device), "memory_bytes": device_facts.memory_bytes(device)}
            found.append(sheet.model_copy(update=own))
    if wanted != "cuda":
        profile = cpu_sheet().as_profile(threads)
        memory = host_memory()
        usable = profile.memory_bytes if memory is None else memory.limit_bytes
        found.append(profile.model_copy(update={"memory_bytes": usable}))
    return MachineProfile(schema=SCHEMA, devices=tuple(found)) if found else None
