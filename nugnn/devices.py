"""Which device each worker computes on."""

from __future__ import annotations

import os

import torch

from nugnn._counted import counted
from nugnn.planning.device_facts import device_uuid


def devices_of(device: str, workers: int) -> tuple[list[torch.device], str]:
    """The device of each of ``workers`` processes of this host, and a sentence for the user, empty when it is plain.

    Args:
        device: ``cpu``; ``cuda``: GPUs in turn; ``auto``: a GPU for each worker where there are enough, the CPU
            otherwise; or a list with one entry for each worker, such as ``cuda:0,cpu``. A GPU may also be named by its
            uuid (``GPU-...``, as ``nvidia-smi -L`` and ``nugnn profile`` spell it), which no other numbering changes.
        workers: Number of processes.

    Raises:
        ValueError: There is no such device here, or the list has another length.
    """
    entries = device.split(",")
    if len(entries) > 1:
        if len(entries) != workers:
            raise ValueError(
                f"device {device}: {counted(len(entries), 'device')} for {counted(workers, 'worker')}; give one "
                f"for each"
            )
        return [_checked(entry) for entry in entries], ""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return [torch.device("cpu")] * workers, ""
    num_gpus = torch.cuda.device_count()
    if device == "auto" and workers > num_gpus:
        text = (
            f"{counted(workers, 'worker')} for {counted(num_gpus, 'GPU')}: computing on the CPU; --device cuda "
            f"would share the GPUs"
        )
        return [torch.device("cpu")] * workers, text
    if device in ("auto", "cuda"):
        _checked("cuda:0")
        is_shared = workers > num_gpus
        note = (
            f"{counted(workers, 'worker')} share {counted(num_gpus, 'GPU')}: rows travel through the host"
            if is_shared
            else ""
        )
        return [torch.device("cuda", worker % num_gpus) for worker in range(workers)], note
    return [_checked(device)] * workers, ""


def own_device(device: str) -> torch.device:
    """The device of this process, by its number on its host when ``torchrun`` started it; see `devices_of`.

    Raises:
        ValueError: There is no such device here.
    """
    local_rank, local_size = (int(os.environ.get(name, default)) for name, default in (_RANK, _SIZE))
    return devices_of(device, max(local_size, local_rank + 1))[0][local_rank]


_RANK, _SIZE = ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")


def _with_uuid(uuid: str) -> torch.device:
    """The GPU of this host that has it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = {device_uuid(device): device for device in (torch.device("cuda", index) for index in range(count))}
    if uuid not in here:
        known = ", ".join(str(name) for name in here) or "none"
        raise ValueError(f"device {uuid}: this host has no such GPU; it has {known}")
    return here[uuid]


def _checked(entry: str) -> torch.device:
    if entry.startswith(("GPU-", "MIG-")):
        return _with_uuid(entry)
    try:
        device = torch.device(entry)
    except RuntimeError:
        raise ValueError(f"device {entry!r} is not known; use cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device {entry!r}: nuGNN computes on cpu and cuda devices")
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU and driver"
        raise ValueError(f"device {entry}: there is no GPU to use: {why} (torch {torch.__version__}); use --device cpu")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ValueError(f"device {entry}: this host has {counted(torch.cuda.device_count(), 'GPU')}")
    return torch.device("cuda", index)
