"""Plans made: a subject and a cluster to a `nugnn.planning.plan.Plan`, its parts and the forecast behind it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nugnn.datasets.whole_file import write_whole
from nugnn.partition.metis import SymmetricGraph
from nugnn.plan_subject import PlanSubject
from nugnn.planning.calibration import StandsOn
from nugnn.planning.cluster import Cluster
from nugnn.planning.draft import Draft, check_each_holds_a_node, usable_bytes
from nugnn.planning.draft_batch import draft_of_batch
from nugnn.planning.draft_counts import draft_from_counts
from nugnn.planning.draft_cut import draft_with_cut
from nugnn.planning.expected_halo import ExpectedHalo
from nugnn.planning.forecast import Forecast
from nugnn.planning.loop_method import Partitioner, loop_method
from nugnn.planning.operator_times import OperatorTimes
from nugnn.planning.plan import SCHEMA, CutFacts, Plan, PlannedDevice, PlannedSizes, SharesBy
from nugnn.planning.plan_parts import digest, parts_bytes, parts_path
from nugnn.planning.predictor import ReplayedSteps, predictor_for
from nugnn.prediction_versions import prediction_versions


@dataclass(frozen=True, eq=False, kw_only=True)
class Planned:
    """A plan, and what of it is no JSON.

    Args:
        plan: The plan.
        part: ``(N,)`` int32 part of each node, where the graph was cut.
        forecast: Of a step.
        left_out: Those of the plan's notes on devices that an epoch would hardly be longer without.
    """

    plan: Plan
    part: npt.NDArray[np.int32] | None
    forecast: Forecast
    left_out: tuple[str, ...] = ()

    def corrected(self) -> Planned:
        """As it is told: see `nugnn.planning.plan.Plan.corrected`."""
        told = self.plan.corrected()
        if told is self.plan or self.plan.calibration is None:
            return self
        factor, known = self.plan.calibration.applied_factor, self.forecast
        forecast = Forecast(
            step_seconds=factor * known.step_seconds,
            seconds=tuple({kind: factor * x for kind, x in each.items()} for each in known.seconds),
            timeline=None if known.timeline is None else known.timeline.stretched(factor),
        )
        return replace(self, plan=told, forecast=forecast)


_USUAL = ExpectedHalo()
Times = Mapping[str, OperatorTimes]
"""Measured times of operators by `nugnn.planning.cluster.ClusterDevice.kind`."""


def step_model(subject: PlanSubject, cluster: Cluster, times: Times | None = None) -> ReplayedSteps:
    """What predicts the subject's steps on a cluster, by ``times`` or from rates alone."""
    return predictor_for(
        subject.traces,
        cluster,
        overlap=subject.overlap,
        sums_in_backward=subject.family == "samples",
        tf32=subject.precision == "tf32",
        is_captured=subject.is_captured,
        times=times,
    )


def plan_by_counts(
    subject: PlanSubject,
    cluster: Cluster,
    *,
    shares_by: SharesBy = "auto",
    shares: Sequence[float] | None = None,
    halo: ExpectedHalo = _USUAL,
    times: Times | None = None,
) -> Planned:
    """A plan of samples, or of a graph of which only counts are known.

    Args:
        subject: What is planned.
        cluster: For what.
        shares_by: ``auto``, a baseline, or ``given``.
        shares: For ``given``.
        halo: Halo rows expected of a graph's parts.
        times: Of the model's own operators, where they were measured.

    Raises:
        DoesNotFitError: The memories do not hold it; says what would do.
        ValueError: There are more devices than nodes or samples.
    """
    model = step_model(subject, cluster, times)
    check_each_holds_a_node(model.work, cluster)
    how: dict[str, Any] = {"shares_by": shares_by, "shares": shares, "precision": subject.precision}
    if subject.family == "samples":
        draft = draft_of_batch(model, subject.whole.batch, cluster, **how)
    else:
        draft = draft_from_counts(model, subject.whole, cluster, halo=halo, **how)
        assumed = f"halo rows are assumed, {halo.of_two:g} for each node of two equal parts"
        assumed += ": say halo=X where you know better"
        draft = replace(draft, notes=(*draft.notes, *([assumed] if len(cluster.devices) > 1 else [])))
    return _planned(subject, cluster, draft, None, times)


def plan_with_cut(
    subject: PlanSubject,
    cluster: Cluster,
    graph: Any,
    *,
    shares_by: SharesBy = "auto",
    shares: Sequence[float] | None = None,
    partitioner: Partitioner = "auto",
    seed: int = 0,
    times: Times | None = None,
    symmetric: SymmetricGraph | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Planned:
    """A plan of a graph at hand, with its cut.

    Args:
        subject: What is planned.
        cluster: For what.
        graph: `nugnn.datasets.graph_data.GraphData`.
        shares_by: ``auto``, a baseline, or ``given``.
        shares: For ``given``.
        partitioner: What cuts, see `nugnn.planning.loop_method.loop_method`.
        seed: Of it.
        times: Of the model's own operators, where they were measured.
        symmetric: The graph as partitioners see it, for callers that have it.
        on_stage: Called with what is done next.

    Raises:
        DoesNotFitError: The memories do not hold it; says what would do.
        ValueError: There are more devices than nodes.
    """
    model = step_model(subject, cluster, times)
    check_each_holds_a_node(model.work, cluster)
    method = loop_method(partitioner, graph.num_edges, shares_by)
    draft = draft_with_cut(
        model,
        graph.num_nodes,
        graph.src,
        graph.dst,
        graph.train_nodes,
        cluster,
        shares_by=shares_by,
        shares=shares,
        partitioner=method,
        precision=subject.precision,
        seed=seed,
        halo=ExpectedHalo(degree=graph.num_edges / graph.num_nodes),
        row_bytes=subject.row_bytes,
        symmetric=symmetric,
        on_stage=on_stage,
    )
    assert draft.part is not None
    cut = CutFacts(partitioner=method, seed=seed, sha256=digest(parts_bytes(draft.part)))
    return _planned(subject, cluster, draft, cut, times)


def write_plan(path: Path, planned: Planned) -> None:
    """The plan's file and, where the graph was cut, its parts beside it.

    Raises:
        OSError: The folder cannot be written.
    """
    if planned.part is not None:
        content = parts_bytes(planned.part)
        write_whole(parts_path(path), lambda file: file.write(content))
    write_whole(path, lambda file: file.write(planned.plan.to_json().encode()))


def _planned(
    subject: PlanSubject, cluster: Cluster, draft: Draft, cut: CutFacts | None, times: Times | None
) -> Planned:
    forecast = draft.forecast
    stands_on, rates = _basis(cluster, times)
    shares, usable = draft.shares, usable_bytes(cluster)
    devices = []
    for rank, (device, size) in enumerate(zip(cluster.devices, draft.sizes, strict=True)):
        profile, limits = device.profile, device.limits
        devices.append(
            PlannedDevice(
                host=device.host,
                name=profile.name,
                kind=profile.kind,
                uuid=profile.uuid,
                multiprocessors=profile.multiprocessors,
                source=profile.source,
                sms=limits.sms,
                memory_fraction=limits.memory_fraction,
                threads=limits.threads,
                share=shares[rank],
                sizes=PlannedSizes.of(size),
                seconds=forecast.seconds[rank],
                memory_bytes=draft.bytes[rank],
                memory_limit_bytes=int(usable[rank]),
            )
        )
    plan = Plan(
        schema=SCHEMA,
        family=subject.family,
        shares_by=draft.shares_by,
        devices=tuple(devices),
        step_seconds=forecast.step_seconds,
        steps_per_epoch=subject.steps_per_epoch,
        baselines=draft.baselines,
        halo=draft.halo,
        data=subject.data,
        model=subject.model,
        settings=subject.settings,
        cut=cut,
        notes=tuple(dict.fromkeys([*_notes_of_profiles(cluster), *cluster.notes, *subject.notes, *draft.notes])),
        stands_on=stands_on,
        rates=rates,
        versions=prediction_versions(),
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    return Planned(plan=plan, part=draft.part, forecast=forecast, left_out=draft.left_out)


def _notes_of_profiles(cluster: Cluster) -> list[str]:
    """What speaks against the rates of devices that were measured; alike ones say it in the same words."""
    return [f"profile of {profile.name}: {profile.note}" for profile in cluster.profiles if profile.note is not None]


def _basis(cluster: Cluster, times: Times | None) -> tuple[StandsOn, str | None]:
    """What predictions for a cluster stand on, and a digest of its rates and links where it is these."""
    if times and all(device.kind in times for device in cluster.devices):
        return "operators", None
    rates = [profile.model_dump(mode="json", exclude={"memory_bytes", "note"}) for profile in cluster.profiles]
    links = cluster.links
    digest = hashlib.sha256(json.dumps([rates, links.is_nccl], sort_keys=True).encode())
    for table in (links.bytes_per_second, links.latency_seconds):
        digest.update(np.ascontiguousarray(table, np.float64).data)
    is_on_paper = any(profile.source == "sheet" for profile in cluster.profiles)
    return "sheets" if is_on_paper else "rates", digest.hexdigest()[:16]
