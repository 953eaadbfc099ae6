"""A model's own operators, and its rows that travel, timed on the devices of this host, within limits, all at once."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nugnn.comm.groups import Ranks, join_ranks, leave_ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.whole_file import write_whole
from nugnn.job import NotPickledError, private_job_folder, read_job, write_job
from nugnn.launch import launch
from nugnn.limited import apply_limits, cores_on
from nugnn.machine_profiles import cache_base
from nugnn.partition.assign import NoAssignmentError
from nugnn.partition.ids import edge_arrays
from nugnn.partition.metis import SymmetricGraph, symmetric_graph
from nugnn.plan_subject import PlanSubject
from nugnn.planned import step_model
from nugnn.planning.batch_shares import split_by_shares
from nugnn.planning.cluster import Cluster
from nugnn.planning.draft import check_each_holds_a_node, usable_bytes
from nugnn.planning.draft_counts import draft_from_counts
from nugnn.planning.expected_halo import ExpectedHalo
from nugnn.planning.in_use import CoreUse, CoreUseWatch, CoreWait, said_of_others
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.links import Links
from nugnn.planning.measure_ways import Travel, measure_ways
from nugnn.planning.measured_times import MeasuredTimes, TimesError, read_times
from nugnn.planning.measured_ways import MeasuredWays, WaysError, levelled_ways, read_ways
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.predictor import ReplayedSteps
from nugnn.planning.share_curves import relaxed_sizes
from nugnn.planning.trace import StepTrace
from nugnn.planning.work_model import WorkModel
from nugnn.timed_parts import Timed, places_of, random_parts, real_parts
from nugnn.worker_cores import own_cores
from nugnn.worker_environment import num_cores
from nugnn.worker_process import WorkerContext

_SECONDS = {"cpu": 6.0, "cuda": 4.0}
_TRAVEL_SECONDS = 0.3
_AT_ONCE = 3
_WAYS = "ways.json"
_STALL_SECONDS = 300.0


class NotTimedError(ValueError):
    """A model's operators cannot be timed on this graph or by workers, though a run may be possible: says why."""


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnTimes:
    """What was measured.

    Args:
        operators: By `nugnn.planning.cluster.ClusterDevice.kind`.
        ways: Of rows that travel between the workers; None where none do.
        symmetric: The graph as partitioners see it, where it was cut into parts to time on: whoever cuts it next need
            not make that again.
    """

    operators: Mapping[str, MeasuredTimes]
    ways: MeasuredWays | None
    symmetric: SymmetricGraph | None = None

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster, whose links are those that were measured."""
        return cluster if self.ways is None else dataclasses.replace(cluster, links=self.ways.over(cluster.links))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Asked:
    """What is to be timed, and where it is kept.

    Args:
        kinds: Of each device, `nugnn.planning.cluster.ClusterDevice.kind`.
        traces: The step of each.
        seconds: Of a step on each; infinite where its memory does not hold what is timed there at once.
        random_parts: Of each device, from small to about what it will have.
        travel: Rows that travel between the workers; None where none do.
        paths: Of the operators' times of each.
        way_path: Of what travels.
    """

    kinds: Sequence[str]
    traces: Sequence[StepTrace]
    seconds: Sequence[Callable[[PartSizes], float]]
    random_parts: Sequence[Sequence[PartSizes]]
    travel: Travel | None
    paths: Sequence[Path]
    way_path: Path | None

    @staticmethod
    def of(
        subject: PlanSubject, cluster: Cluster, sizes: Sequence[PartSizes], work: WorkModel, *, of_graph: bool
    ) -> _Asked:
        """The same as for `own_times`; ``of_graph`` where its graph is at hand."""
        kinds = [device.kind for device in cluster.devices]
        traces = [subject.traces[profile.kind] for profile in cluster.profiles]
        seconds = [_seconds_if_it_fits(work, rank, usable) for rank, usable in enumerate(usable_bytes(cluster))]
        parts = [random_parts(*each) for each in zip(traces, seconds, sizes, strict=True)]
        travel = travel_of(subject, cluster.links, sizes)
        return _Asked(
            kinds=kinds,
            traces=traces,
            seconds=seconds,
            random_parts=parts,
            travel=travel,
            paths=_kept(subject, kinds, parts, of_graph=of_graph),
            way_path=None if travel is None else _kept_ways(subject, kinds, travel),
        )

    def kept(self) -> OwnTimes | None:
        """What was measured before; None where not all of it is there."""
        try:
            operators = {kind: read_times(path) for kind, path in zip(self.kinds, self.paths, strict=True)}
            return OwnTimes(operators=operators, ways=None if self.way_path is None else read_ways(self.way_path))
        except (TimesError, WaysError):
            return None


def own_times(
    subject: PlanSubject,
    cluster: Cluster,
    devices: Sequence[torch.device],
    limits: Sequence[DeviceLimits] | None,
    sizes: Sequence[PartSizes],
    work: WorkModel,
    *,
    graph: GraphData | None = None,
    on_stage: Callable[[str], Any] = lambda _: None,
) -> OwnTimes:
    """Times of the subject's operators and of its rows that travel; kept in the cache folder.

    Args:
        subject: Whose operators.
        cluster: The workers, all of this host.
        devices: Of each.
        limits: What each may use.
        sizes: Of each, about what it will have.
        work: What predicts them so far; parts are made so small that a step takes a fraction of a second.
        graph: The subject's, if it is at hand: operators are timed on parts of it, else on random ones.
        on_stage: Called with what is done next.

    Raises:
        NotTimedError: The graph cannot be cut into parts to time on, or the model not be handed to workers.
        WorkerFailed: A worker did not come to the end.
    """
    asked = _Asked.of(subject, cluster, sizes, work, of_graph=graph is not None)
    if (kept := asked.kept()) is not None:
        return kept
    kinds, travel = asked.kinds, asked.travel
    parts: Iterable[Timed] = asked.random_parts
    symmetric = None
    if graph is not None:
        on_stage("cutting the graph into parts to time the model's operators on")
        src_E, dst_E = edge_arrays(graph.src, graph.dst, graph.num_nodes)
        symmetric = symmetric_graph(graph.num_nodes, src_E, dst_E, None)
        parts = real_parts(graph, asked.traces, asked.seconds, sizes, symmetric=symmetric)
    measures = [
        measure_of(subject, profile.kind, device, "" if limits is None else str(limits[rank]))
        for rank, (profile, device) in enumerate(zip(cluster.profiles, devices, strict=True))
    ]
    job = {"measures": measures, "travel": travel, "devices": list(devices), "limits": limits}
    longest = max(_SECONDS[profile.kind] for profile in cluster.profiles)
    with private_job_folder() as folder:
        try:
            _hand_out(folder, parts)
            write_job(folder, job)
        except (NoAssignmentError, NotPickledError) as error:
            raise NotTimedError(str(error)) from error
        on_stage(f"timing the model's operators on each device of this machine for {longest:g} s, once")
        launch(folder, len(measures), module="nugnn.own_times", timeout=_STALL_SECONDS, cores=cores_on(devices, limits))
        found = [read_times(folder / f"times-{rank}.json") for rank in range(len(measures))]
        beside = [
            json.loads((folder / f"beside-{rank}.json").read_text(encoding="ascii")) for rank in range(len(found))
        ]
        ways = None if travel is None else read_ways(folder / _WAYS)
    if ways is not None:
        ways = ways.model_copy(update={"ways": levelled_ways(ways.ways, kinds)})
    threads = [profile.multiprocessors if profile.kind == "cpu" else 0 for profile in cluster.profiles]
    waits, uses = [each["wait"] for each in beside], [CoreUse.from_plain(each["use"]) for each in beside]
    if (said := said_of_others(waits, uses, threads, num_cores())) is not None:
        on_stage(f"{said}: this plan stands on it, and it is not kept")
    else:
        for path, times in zip(asked.paths, found, strict=True):
            _keep(path, times)
        if ways is not None and asked.way_path is not None:
            _keep(asked.way_path, ways)
    return OwnTimes(operators=dict(zip(kinds, found, strict=True)), ways=ways, symmetric=symmetric)


def _seconds_if_it_fits(work: WorkModel, rank: int, usable: float) -> Callable[[PartSizes], float]:
    """Of a step on a worker; infinite where its memory does not hold what is timed there at once.

    On a CPU that is the part, its pieces and what trains on each of them: about three times the largest of them.
    """
    always = work.bytes(rank, PartSizes())

    def seconds(sizes: PartSizes) -> float:
        held = always + _AT_ONCE * max(work.bytes(rank, sizes) - always, 0)
        return work.seconds(rank, sizes) if held <= usable else math.inf

    return seconds


def times_for(
    subject: PlanSubject,
    cluster: Cluster,
    devices: Sequence[torch.device],
    limits: Sequence[DeviceLimits] | None,
    on_stage: Callable[[str], Any] = lambda _: None,
    graph: GraphData | None = None,
) -> OwnTimes:
    """The same, for parts as rates alone would make them.

    Raises:
        DoesNotFitError: A limit leaves a worker no memory for a single node.
    """
    model = step_model(subject, cluster)
    check_each_holds_a_node(model.work, cluster)
    sizes = expected_sizes(subject, cluster, model)
    return own_times(subject, cluster, devices, limits, sizes, model.work, graph=graph, on_stage=on_stage)


def kept_times_for(subject: PlanSubject, cluster: Cluster, *, of_graph: bool) -> OwnTimes | None:
    """What `times_for` kept for these workers, if it did: nothing is measured.

    Args:
        subject: Whose operators.
        cluster: The workers, all of this host.
        of_graph: Whether they were to be timed on parts of the subject's graph.
    """
    model = step_model(subject, cluster)
    sizes = expected_sizes(subject, cluster, model)
    return _Asked.of(subject, cluster, sizes, model.work, of_graph=of_graph).kept()


def expected_sizes(subject: PlanSubject, cluster: Cluster, model: ReplayedSteps) -> tuple[PartSizes, ...]:
    """Of each device, as ``model`` would divide the whole by its counts; of samples, evenly."""
    count = len(cluster.devices)
    if subject.family == "samples":
        return tuple(PartSizes(batch=n) for n in split_by_shares(subject.whole.batch, [1.0] * count))
    halo = ExpectedHalo(degree=subject.whole.edges / subject.whole.inner)
    try:
        return draft_from_counts(model, subject.whole, cluster, halo=halo).sizes
    except DoesNotFitError:  # with as much halo as is expected
        return (relaxed_sizes(subject.whole, 1 / count, halo, count),) * count


def main(context: WorkerContext) -> None:
    """Entry point; `nugnn.worker_process` calls it with who this worker is."""
    work = read_job(context.job_folder)
    device: torch.device = work["devices"][context.rank]
    if work["limits"] is not None:
        apply_limits(work["limits"][context.rank], device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    context.init_process_group()
    ranks = join_ranks(context.timeout, context.pulse, device)
    measure, part = work["measures"][context.rank], read_job(_own_folder(context.job_folder, context.rank))["part"]
    places, wait, use = places_of(part), CoreWait(), CoreUseWatch(own_cores())
    waited = None

    def timed() -> MeasuredTimes:
        nonlocal waited
        wait.restart()
        use.restart()
        found: MeasuredTimes = measure(places)
        waited = wait.share
        return found

    times, ways = measured_here(ranks, timed, work["travel"])
    used = use.use
    beside = {"wait": waited, "use": None if used is None else dataclasses.asdict(used)}
    (context.job_folder / f"beside-{context.rank}.json").write_text(json.dumps(beside), encoding="ascii")
    (context.job_folder / f"times-{context.rank}.json").write_text(times.to_json(), encoding="utf-8")
    if ways is not None and context.rank == 0:
        (context.job_folder / _WAYS).write_text(ways.to_json(), encoding="utf-8")
    torch.distributed.barrier()
    leave_ranks(ranks)


def _own_folder(job_folder: Path, rank: int) -> Path:
    """Where the part that a worker times lies: others have no need of it."""
    return job_folder / f"worker-{rank}"


def _hand_out(job_folder: Path, parts: Iterable[Timed]) -> None:
    """To each worker its own; one is held at a time."""
    for rank, part in enumerate(parts):
        folder = _own_folder(job_folder, rank)
        folder.mkdir(mode=0o700)
        write_job(folder, {"part": part})


def measured_here(
    ranks: Ranks, measure: Callable[[], MeasuredTimes], travel: Travel | None
) -> tuple[MeasuredTimes, MeasuredWays | None]:
    """This rank's operators, and the ways of all ranks; a collective call, within this rank's limits.

    Args:
        ranks: Who takes part, as in a run.
        measure: Of this rank: what `measure_of` returns, at its parts.
        travel: From `travel_of`.
    """
    torch.distributed.barrier()  # all begin at once
    times = measure()
    if travel is None:
        return times, None
    ways = measure_ways(ranks, travel, seconds=_TRAVEL_SECONDS)
    via: Literal["nccl", "gloo"] = "nccl" if ranks.carries_cuda else "gloo"
    found = MeasuredWays(schema="nugnn.ways/1", via=via, num_ranks=ranks.world_size, ways=ways, versions=times.versions)
    return times, found


def measure_of(
    subject: PlanSubject, kind: str, device: torch.device, limits: str
) -> Callable[[Sequence[Any]], MeasuredTimes]:
    """What times the subject's operators on one device, within limits that are in force: ``limits`` says which.

    It takes the parts to do so on, from `nugnn.timed_parts.places_of`.
    """
    trace, seconds = subject.traces[kind], _SECONDS[kind]
    return functools.partial(subject.measure, trace, seconds=seconds, device=str(device), limits=limits)


def travel_of(subject: PlanSubject, links: Links, sizes: Sequence[PartSizes]) -> Travel | None:
    """Rows that travel in a step on parts of these sizes; None where none do."""
    widths = {
        record.sizes["row_bytes"]
        for trace in subject.traces.values()
        for record in trace.operators
        if record.kind == "exchange" and record.attrs.get("what") == "halo"
    }
    fixed = tuple(sorted(width for width in widths if isinstance(width, int)))
    if not fixed or len(sizes) == 1:
        return None
    rows = links.spread([size.sent for size in sizes], [size.halo for size in sizes])
    return Travel(rows=tuple(map(tuple, np.rint(rows).astype(int).tolist())), row_bytes=fixed)


def _kept(
    subject: PlanSubject, kinds: Sequence[str], parts: Sequence[Sequence[PartSizes]], *, of_graph: bool
) -> list[Path]:
    """Where the times of each worker are kept: by the step, the device, who else computes here, the sizes to a factor
    of two, and the graph if they are ``of_graph``.
    """
    whole, found = [_key(subject, kinds), of_graph, subject.data.content if of_graph else None], []
    for kind, sizes in zip(kinds, parts, strict=True):
        most = max((max(size.edges, size.batch) for size in sizes), default=1)
        name = hashlib.sha256(json.dumps([*whole, kind, most.bit_length()]).encode()).hexdigest()[:16]
        found.append(cache_base() / "operator-times" / f"{name}.json")
    return found


def _kept_ways(subject: PlanSubject, kinds: Sequence[str], travel: Travel) -> Path:
    """Where the ways of all workers are kept: by the step, who computes as which rank, and rows to a factor of two."""
    rows = [[count.bit_length() for count in row] for row in travel.rows]
    name = hashlib.sha256(json.dumps([_key(subject, kinds), list(kinds), rows]).encode()).hexdigest()[:16]
    return cache_base() / "operator-times" / f"ways-{name}.json"


def _key(subject: PlanSubject, kinds: Sequence[str]) -> str:
    """Of the step and who computes here.

    A trace does not say how products are rounded, which the precision does, nor whether steps run as CUDA graphs.
    """
    step = {
        "traces": {name: trace.to_json() for name, trace in subject.traces.items()},
        "precision": subject.precision,
        "is_captured": subject.is_captured,
        "beside": sorted(kinds),
    }
    return hashlib.sha256(json.dumps(step, sort_keys=True).encode()).hexdigest()


def _keep(path: Path, times: MeasuredTimes | MeasuredWays) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write(times.to_json().encode()))
    except OSError:
        return  # they are measured again
