"""What a worker of ``nugnn profile`` does: measure its device, then its links, and leave both in the job folder.

GPUs are measured beside each other, as a run uses them. The CPU has all its threads while the others wait, and copies
to the host go one GPU after the other, so that each has the links to itself.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nugnn.comm.groups import Ranks, gather_texts, join_ranks, leave_ranks
from nugnn.datasets.whole_file import write_whole
from nugnn.job import read_job
from nugnn.limited import apply_limits
from nugnn.planning.device_facts import device_uuid
from nugnn.planning.fitting import reason
from nugnn.planning.in_use import CoreUse, CoreUseWatch, said_of_others
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.links import Sums
from nugnn.planning.measure import measure_device
from nugnn.planning.measure_links import Exchange, measure_copies, measure_exchanges, measure_sums
from nugnn.planning.profiles import DeviceProfile, LinkProfile
from nugnn.worker_cores import own_cores
from nugnn.worker_environment import num_cores
from nugnn.worker_process import WorkerContext

LINKS = "links.json"


def device_file(rank: int) -> str:
    """Name of the file in which a worker leaves what it measured on its own."""
    return f"device-{rank}.json"


def main(context: WorkerContext) -> None:
    """Entry point; `nugnn.worker_process` calls it with who this worker is."""
    work = read_job(context.job_folder)
    device: torch.device = work["devices"][context.rank]
    seconds: dict[str, float] = work["seconds"]
    notes: list[str] = []
    devices: list[DeviceProfile] = []
    copies: list[LinkProfile] = []
    context.init_process_group()
    limits: DeviceLimits = work["limits"][context.rank] if work["limits"] is not None else DeviceLimits()
    threads = limits.threads or work["threads"]
    if not limits.is_none:
        apply_limits(limits, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        devices.append(_measured(device, seconds["gpu"], None, context, notes))
    _meet(context)
    if context.rank == 0 and work["with_cpu"]:
        torch.set_num_threads(threads)
        devices.append(_measured(torch.device("cpu"), seconds["cpu"], work["usable_bytes"], context, notes))
    context.emit(kind="stage", text="links")
    for turn in range(context.world_size):
        _meet(context)
        if turn == context.rank and device.type == "cuda":
            copies += _copies(device, seconds["copies"], notes)
    found: dict[str, Any] = {
        "name": device_uuid(device) or str(device),
        "devices": [each.model_dump() for each in devices],
        "copies": [each.model_dump() for each in copies],
        "notes": notes,
    }
    _leave(context.job_folder / device_file(context.rank), found)
    _meet(context)
    ranks = join_ranks(context.timeout, context.pulse, device)
    exchanges: tuple[Exchange, ...] = ()
    sums: Sums | None = None
    use = CoreUseWatch(own_cores())
    if seconds["exchanges"]:
        each = seconds["exchanges"] / (1 if ranks.carries_cuda else 2)
        exchanges, sums = measure_exchanges(ranks, seconds=each), measure_sums(ranks, seconds=each)
    beside = _beside(use.use, ranks)
    if context.rank == 0:
        plain = [asdict(exchange) for exchange in exchanges]
        found_sums = None if sums is None else asdict(sums)
        links = {"exchanges": plain, "sums": found_sums, "is_nccl": ranks.carries_cuda, "beside": beside}
        _leave(context.job_folder / LINKS, links)
    _meet(context)
    leave_ranks(ranks)


def _beside(use: CoreUse | None, ranks: Ranks) -> str | None:
    """Whether others computed on the ranks' cores while links were measured, in words; None for NCCL's."""
    if ranks.carries_cuda:
        return None
    texts = gather_texts(ranks, json.dumps(None if use is None else asdict(use)))
    uses = [CoreUse.from_plain(json.loads(text)) for text in texts]
    said = said_of_others([], uses, [1] * len(uses), num_cores())
    return None if said is None else f"{said} while links were measured"


def _measured(
    device: torch.device, seconds: float, usable_bytes: int | None, context: WorkerContext, notes: list[str]
) -> DeviceProfile:
    return measure_device(
        device,
        seconds=seconds,
        usable_bytes=usable_bytes,
        on_stage=lambda text: context.emit(kind="stage", text=f"{device.type}: {text}"),
        on_note=lambda text: notes.append(f"{device_uuid(device) or device}: {text}"),
    )


def _copies(device: torch.device, seconds: float, notes: list[str]) -> list[LinkProfile]:
    """None where memory cannot be pinned, or for another reason that leaves the device as it was measured."""
    name = device_uuid(device) or str(device)
    try:
        rate, latency = measure_copies(device, seconds=seconds, on_note=lambda text: notes.append(f"{name}: {text}"))
    except RuntimeError as error:
        notes.append(f"{name}: copies to the host could not be measured: {reason(error)}")
        return []
    return [LinkProfile(between="host", ends=(name, "cpu"), via="copy", bytes_per_second=rate, latency_seconds=latency)]


def _meet(context: WorkerContext) -> None:
    with context.pulse.waiting("measurements of other workers"):
        dist.barrier()


def _leave(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content)
    write_whole(path, lambda file: file.write(text.encode()))
