"""A model's own operators timed on the devices of this host, within their limits, all at the same time as in a run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nugnn.datasets.whole_file import write_whole
from nugnn.job import private_job_folder, read_job, write_job
from nugnn.launch import launch
from nugnn.limited import apply_limits, cores_of
from nugnn.machine_profiles import cache_base
from nugnn.measured_step import ladder
from nugnn.plan_subject import PlanSubject
from nugnn.planned import step_model
from nugnn.planning.batch_shares import split_by_shares
from nugnn.planning.cluster import Cluster
from nugnn.planning.draft_counts import draft_from_counts
from nugnn.planning.expected_halo import ExpectedHalo
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.measured_times import MeasuredTimes, TimesError, read_times
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.share_curves import relaxed_sizes
from nugnn.planning.work_model import WorkModel
from nugnn.worker_process import WorkerContext

_STEP_SECONDS = {"cpu": 0.25, "cuda": 0.05}
"""Predicted, of the largest step that is timed: larger parts follow from smaller ones."""
_SECONDS = {"cpu": 6.0, "cuda": 4.0}
_STALL_SECONDS = 300.0


def own_times(
    subject: PlanSubject,
    cluster: Cluster,
    devices: Sequence[torch.device],
    limits: Sequence[DeviceLimits] | None,
    sizes: Sequence[PartSizes],
    work: WorkModel,
    *,
    on_stage: Callable[[str], Any] = lambda _: None,
) -> Mapping[str, MeasuredTimes]:
    """Times of the subject's operators by `nugnn.planning.cluster.ClusterDevice.kind`; kept in the cache folder.

    Args:
        subject: Whose operators.
        cluster: The workers, all of this host.
        devices: Of each.
        limits: What each may use.
        sizes: Of each, about what it will have.
        work: What predicts them so far; parts are made so small that a step takes a fraction of a second.
        on_stage: Called with what is done next.

    Raises:
        WorkerFailed: A worker did not come to the end.
    """
    kinds = [device.kind for device in cluster.devices]
    parts = [_timed(subject, cluster, work, rank, size) for rank, size in enumerate(sizes)]
    paths = _kept(subject, kinds, parts)
    try:
        return {kind: read_times(path) for kind, path in zip(kinds, paths, strict=True)}
    except TimesError:
        pass  # not all are there
    longest = max(_SECONDS[profile.kind] for profile in cluster.profiles)
    on_stage(f"timing the model's operators on each device of this machine, {longest:g} s, once")
    measures = [
        functools.partial(
            subject.measure,
            subject.traces[profile.kind],
            part,
            seconds=_SECONDS[profile.kind],
            device=str(device),
            limits="" if limits is None else str(limits[rank]),
        )
        for rank, (profile, part, device) in enumerate(zip(cluster.profiles, parts, devices, strict=True))
    ]
    with private_job_folder() as folder:
        write_job(folder, {"measures": measures, "devices": list(devices), "limits": limits})
        launch(folder, len(measures), module="nugnn.own_times", timeout=_STALL_SECONDS, cores=cores_of(limits))
        found = [read_times(folder / f"times-{rank}.json") for rank in range(len(measures))]
    for path, times in zip(paths, found, strict=True):
        _keep(path, times)
    return dict(zip(kinds, found, strict=True))


def times_for(
    subject: PlanSubject,
    cluster: Cluster,
    devices: Sequence[torch.device],
    limits: Sequence[DeviceLimits] | None,
    on_stage: Callable[[str], Any] = lambda _: None,
) -> Mapping[str, MeasuredTimes]:
    """The same, for parts as rates alone would make them."""
    model, count = step_model(subject, cluster), len(cluster.devices)
    if subject.family == "samples":
        sizes = tuple(PartSizes(batch=n) for n in split_by_shares(subject.whole.batch, [1.0] * count))
    else:
        halo = ExpectedHalo()
        try:
            sizes = draft_from_counts(model, subject.whole, cluster, halo=halo).sizes
        except DoesNotFitError:  # with as much halo as is expected
            sizes = (relaxed_sizes(subject.whole, 1 / count, halo, alone=count == 1),) * count
    return own_times(subject, cluster, devices, limits, sizes, model.work, on_stage=on_stage)


def main(context: WorkerContext) -> None:
    """Entry point; `nugnn.worker_process` calls it with who this worker is."""
    work = read_job(context.job_folder)
    device: torch.device = work["devices"][context.rank]
    if work["limits"] is not None:
        apply_limits(work["limits"][context.rank], device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    context.init_process_group()  # all begin at once
    torch.distributed.barrier()
    times: MeasuredTimes = work["measures"][context.rank]()
    (context.job_folder / f"times-{context.rank}.json").write_text(times.to_json(), encoding="utf-8")
    torch.distributed.barrier()


def _timed(subject: PlanSubject, cluster: Cluster, work: WorkModel, rank: int, sizes: PartSizes) -> list[PartSizes]:
    """Where operators are timed: sizes up to those of the worker, or to a step of a fraction of a second."""
    kind = cluster.profiles[rank].kind
    share, most = 1.0, sizes
    while work.seconds(rank, most) > _STEP_SECONDS[kind] and share > 1e-3:
        share /= 2
        most = _scaled(sizes, share)
    return ladder(most, subject.traces[kind])


def _scaled(sizes: PartSizes, share: float) -> PartSizes:
    """All counts in proportion, as far as a part can have them."""
    counts = {field.name: round(share * getattr(sizes, field.name)) for field in dataclasses.fields(sizes)}
    counts["edges"] = max(counts["edges"], counts["inner"], counts["halo"])
    counts["train"] = min(max(counts["train"], min(sizes.train, 1)), counts["inner"])
    counts["sent"] = min(counts["sent"], counts["inner"])
    return PartSizes(**{name: max(count, 1) if getattr(sizes, name) else 0 for name, count in counts.items()})


def _kept(subject: PlanSubject, kinds: Sequence[str], parts: Sequence[Sequence[PartSizes]]) -> list[Path]:
    """Where the times of each worker are kept: by the step, the device, who else computes here, and the sizes to a
    factor of two. A trace does not say how products are rounded: the precision does.
    """
    step = {
        "traces": {name: trace.to_json() for name, trace in subject.traces.items()},
        "precision": subject.precision,
        "beside": sorted(kinds),
    }
    whole = hashlib.sha256(json.dumps(step, sort_keys=True).encode()).hexdigest()
    found = []
    for kind, sizes in zip(kinds, parts, strict=True):
        most = max((max(size.edges, size.batch) for size in sizes), default=1)
        name = hashlib.sha256(json.dumps([whole, kind, most.bit_length()]).encode()).hexdigest()[:16]
        found.append(cache_base() / "operator-times" / f"{name}.json")
    return found


def _keep(path: Path, times: MeasuredTimes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write(times.to_json().encode()))
    except OSError:
        return  # they are measured again
