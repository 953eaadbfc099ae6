"""From traces and a cluster to what a step takes: the one place where a plan meets its predictor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from nugnn.planning.cluster import Cluster
from nugnn.planning.operator_times import OperatorTimes, ProfileTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import SecondsKind
from nugnn.planning.predicted_work import DeviceWork, PredictedWork
from nugnn.planning.profiles import DeviceProfile
from nugnn.planning.step_program import Passes
from nugnn.planning.trace import StepTrace
from nugnn.planning.work_model import WorkModel


@dataclass(frozen=True, eq=False, kw_only=True)
class Forecast:
    """What is expected of a step with given parts.

    Args:
        step_seconds: Until the slowest device is done.
        seconds: Of each rank by kind; they add up to ``step_seconds``.
        timeline: Of all ranks, where it was replayed.
    """

    step_seconds: float
    seconds: tuple[dict[SecondsKind, float], ...]
    timeline: Any = None


class StepModel(Protocol):
    """What a step costs: by part, for a search, and with all parts at once.

    Attributes:
        work: Of single parts.
    """

    @property
    def work(self) -> WorkModel: ...

    def forecast(self, sizes: Sequence[PartSizes], sent_rows: npt.NDArray | None) -> Forecast:
        """What a step of these parts takes.

        Args:
            sizes: Of each rank.
            sent_rows: ``(P, P)`` rows of the row's rank that the column's reads; as if nobody preferred any peer when
                None.
        """
        ...


@dataclass(frozen=True)
class WorkAlone:
    """A work model as it is: whoever is done waits for the slowest."""

    work: WorkModel

    def forecast(self, sizes: Sequence[PartSizes], sent_rows: npt.NDArray | None) -> Forecast:
        each = [self.work.seconds(rank, size) for rank, size in enumerate(sizes)]
        slowest = max(each)
        kinds: list[dict[SecondsKind, float]] = [
            {"compute": seconds, "halo": 0.0, "sync": 0.0, "wait": slowest - seconds} for seconds in each
        ]
        return Forecast(step_seconds=slowest, seconds=tuple(kinds))


def overlap_of(choice: str, cluster: Cluster) -> Passes:
    """Passes in which sums run beside exchanges on these devices; as `nugnn.comm.overlap.overlapping_passes` has it.

    GPUs of one host are taken to read each other's memory.
    """
    links = cluster.links
    if choice == "auto":
        choice = "off" if not links.is_nccl else "backward" if len(set(links.hosts)) == 1 else "on"
    if choice == "off" or links.num_ranks == 1:
        return "none"
    return "both" if choice == "on" else "backward"


def predictor_for(
    traces: Mapping[str, StepTrace],
    cluster: Cluster,
    *,
    overlap: str = "auto",
    sums_in_backward: bool = False,
    tf32: bool = False,
    is_captured: bool = False,
    times: Mapping[str, OperatorTimes] | None = None,
) -> StepModel:
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
        devices.append(_device_work(traces, device.profile, known[device.kind], is_captured=is_captured))
    work = PredictedWork(
        devices, cluster.links, overlap=overlap_of(overlap, cluster), sums_in_backward=sums_in_backward
    )
    return WorkAlone(work)


def _device_work(
    traces: Mapping[str, StepTrace], profile: DeviceProfile, times: OperatorTimes, *, is_captured: bool
) -> DeviceWork:
    from nugnn.planning.predicted_work import RUNTIME_BYTES

    trace = traces.get(profile.kind) or next(iter(traces.values()))
    is_gpu = profile.kind == "cuda"
    return DeviceWork(
        trace=trace, times=times, runtime_bytes=RUNTIME_BYTES[profile.kind], is_captured=is_gpu and is_captured
    )
