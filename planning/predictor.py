"""From traces and a cluster to what a step takes: the one place where a plan meets its predictor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nugnn.planning.cluster import Cluster, ClusterDevice
from nugnn.planning.forecast import Forecast
from nugnn.planning.links import Links
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.operator_times import OperatorTimes, ProfileTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import SecondsKind
from nugnn.planning.predicted_work import DeviceWork, PredictedWork
from nugnn.planning.process_memory import limited_runtime_bytes
from nugnn.planning.replay import replay
from nugnn.planning.step_program import Passes, passes_of
from nugnn.planning.trace import StepTrace


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplayedSteps:
    """A step on every rank at once, replayed: who waits for whom.

    Args:
        work: Of single parts, for a search.
        devices: As ``work`` has them.
        links: Between them.
        names: Of the devices.
        overlap: As ``--overlap``.
        sums_in_backward: Whether sums of gradients travel beside backward.
    """

    work: PredictedWork
    devices: tuple[DeviceWork, ...]
    links: Links
    names: tuple[str, ...]
    overlap: str
    sums_in_backward: bool

    def forecast(self, sizes: Sequence[PartSizes], sent_rows: npt.NDArray | None = None) -> Forecast:
        """See `nugnn.planning.forecast.StepModel.forecast`."""
        steps: dict[tuple[int, PartSizes], StepTrace] = {}
        for device, size in zip(self.devices, sizes, strict=True):
            key = id(device.trace), size
            if key not in steps:
                steps[key] = device.trace.at(size)
        timeline = replay(
            [steps[id(device.trace), size] for device, size in zip(self.devices, sizes, strict=True)],
            [device.times for device in self.devices],
            self.links,
            overlap=overlap_of(self.overlap, self.links),
            sums_in_backward=self.sums_in_backward,
            captured=[device.is_captured for device in self.devices],
            rows_between=None if sent_rows is None else sent_rows.astype(np.float64),
            names=self.names,
        )
        makespan = timeline.makespan
        seconds: dict[int, dict[SecondsKind, float]] = {}  # by the events, which ranks that do the same share
        for rank, events in enumerate(timeline.events):
            if id(events) not in seconds:
                found = timeline.seconds(rank)
                kinds: dict[SecondsKind, float] = {"compute": found["compute"], "halo": found["halo"]}
                kinds["sync"] = found["sync"]
                kinds["wait"] = makespan - found["epoch"]
                seconds[id(events)] = _waiting_apart(kinds, found["wait"])
        of_ranks = tuple(seconds[id(events)] for events in timeline.events)
        return Forecast(step_seconds=makespan, seconds=of_ranks, timeline=timeline)

    def among(self, ranks: Sequence[int]) -> ReplayedSteps:
        """See `nugnn.planning.forecast.StepModel.among`; sums overlap with exchanges as on these ranks alone."""
        links = self.links.among(ranks)
        return ReplayedSteps(
            work=self.work.among(ranks, overlap_of(self.overlap, links), links),
            devices=tuple(self.devices[rank] for rank in ranks),
            links=links,
            names=tuple(self.names[rank] for rank in ranks),
            overlap=self.overlap,
            sums_in_backward=self.sums_in_backward,
        )


def _waiting_apart(kinds: dict[SecondsKind, float], waiting: float) -> dict[SecondsKind, float]:
    """With what is waited for others taken out of exchanges, of which the trainer's clock cannot tell it."""
    for kind in ("sync", "halo"):
        part = min(kinds[kind], waiting)
        kinds[kind] -= part
        kinds["wait"] += part
        waiting -= part
    kinds["compute"] -= min(kinds["compute"], waiting)
    kinds["wait"] += waiting
    return {kind: max(value, 0.0) for kind, value in kinds.items()}


def overlap_of(choice: str, links: Links) -> Passes:
    """Passes in which sums run beside exchanges on these devices: see `passes_of`."""
    passes = passes_of(choice, is_nccl=links.is_nccl, num_hosts=len(set(links.hosts)))
    return "none" if links.num_ranks == 1 else passes


def predictor_for(
    traces: Mapping[str, StepTrace],
    cluster: Cluster,
    *,
    overlap: str = "auto",
    sums_in_backward: bool = False,
    tf32: bool = False,
    is_captured: bool = False,
    times: Mapping[str, OperatorTimes] | None = None,
) -> ReplayedSteps:
    """What predicts a step of the traced model on a cluster.

    Args:
        traces: By kind of device, ``cuda`` and ``cpu``; one for both where there is no other.
        cluster: The devices and links.
        overlap: As ``--overlap``.
        sums_in_backward: Whether sums of gradients travel beside backward.
        tf32: Whether products of float32 are rounded to TF32.
        is_captured: Whether steps of GPUs run as CUDA graphs.
        times: Measured ones, by `ClusterDevice.kind`; from the device's profile where there are none.

    Raises:
        TraceError: A trace cannot be scaled.
    """
    known: dict[str, OperatorTimes] = dict(times or {})
    devices = []
    for device in cluster.devices:
        if device.kind not in known:
            known[device.kind] = ProfileTimes(device.profile, tf32=tf32)
        devices.append(_device_work(traces, device, known[device.kind], is_captured=is_captured))
    passes = overlap_of(overlap, cluster.links)
    return ReplayedSteps(
        work=PredictedWork(devices, cluster.links, overlap=passes, sums_in_backward=sums_in_backward),
        devices=tuple(devices),
        links=cluster.links,
        names=tuple(profile.name for profile in cluster.profiles),
        overlap=overlap,
        sums_in_backward=sums_in_backward,
    )


def _device_work(
    traces: Mapping[str, StepTrace], device: ClusterDevice, times: OperatorTimes, *, is_captured: bool
) -> DeviceWork:
    profile = device.profile
    trace = traces.get(profile.kind) or next(iter(traces.values()))
    is_gpu = profile.kind == "cuda"
    peaks = times.peaks if isinstance(times, MeasuredTimes) else None
    is_limited = device.limits.memory_fraction is not None and not is_gpu
    return DeviceWork(
        trace=trace,
        times=times,
        kind=profile.kind,
        is_captured=is_gpu and is_captured,
        peaks=peaks,
        runtime_bytes=limited_runtime_bytes(profile.multiprocessors) if is_limited else None,
    )
