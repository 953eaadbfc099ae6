"""What ``nugnn plan`` does: from settings, a graph or its counts, and a cluster to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch

from nugnn.config import TrainConfig
from nugnn.datasets.graph_data import GraphData
from nugnn.devices import devices_of
from nugnn.fit_options import FitOptions, checked_options
from nugnn.graph_run import build_model, fit_arguments, prepare
from nugnn.held_run import with_calibration
from nugnn.inductive import visible_in_training
from nugnn.limited import check_on_devices, checked_limits
from nugnn.machine_profiles import Need, cluster_here, profile_of_this_machine
from nugnn.own_times import times_for
from nugnn.partition.metis import SymmetricGraph
from nugnn.plan_data import graph_data_facts, looked_at_samples, subject_of_graph
from nugnn.plan_request import this_machine_for
from nugnn.plan_subject import PlanSubject, graph_subject, sample_subject
from nugnn.planned import Planned, plan_by_counts, plan_with_cut
from nugnn.planning.cluster import Cluster, read_cluster
from nugnn.planning.graph_statistics import GraphStatistics, parse_statistics
from nugnn.planning.limits import parse_limits
from nugnn.planning.loop_method import Partitioner
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.plan import SharesBy
from nugnn.planning.profiles import DeviceKind
from nugnn.sample_config import RunConfig, SampleConfig
from nugnn.sample_options import SampleOptions, sample_options

Say = Callable[[str], Any]


@dataclass(frozen=True)
class _ByCounts:
    """A graph as `build_model` needs it, without its rows."""

    num_nodes: int
    num_classes: int
    features: torch.Tensor


def plan_from_config(
    config: RunConfig,
    statistics: str | None,
    *,
    remeasures: bool = False,
    on_stage: Say = lambda _: None,
    on_note: Say = lambda _: None,
    on_download: Callable[[int, int | None], None] | None = None,
) -> Planned:
    """The plan of a run with these settings.

    Args:
        config: The settings; ``workers`` are those of the cluster's file where it names one.
        statistics: Counts of a graph in place of a data set, see `nugnn.planning.graph_statistics.parse_statistics`.
        remeasures: Whether this machine is measured anew.
        on_stage: Called with what is done next.
        on_note: Gets sentences for the user.
        on_download: As for `nugnn.graph_run.prepare`.

    Raises:
        ValueError: Settings, data or cluster do not fit; or the memories do not hold the data, with what would.
    """
    cluster = cluster_from_config(config, remeasures=remeasures, on_stage=on_stage, on_note=on_note)
    if isinstance(config, SampleConfig):
        planned = _of_samples(config, cluster, on_stage, on_download)
    elif statistics is not None:
        planned = _by_counts(config, parse_statistics(statistics), cluster, on_stage)
    else:
        planned = _of_graph(config, cluster, on_stage, on_download)
    return with_calibration(planned, on_note)


def cluster_from_config(config: RunConfig, *, remeasures: bool, on_stage: Say, on_note: Say) -> Cluster:
    """The cluster that a file describes, or the workers of this machine; one device needs no measurements."""
    need: Need = "anew" if remeasures else "measured"
    if config.cluster is not None:
        return read_cluster(Path(config.cluster), this_machine_for(need, on_stage, on_note))
    devices, said = devices_of(config.device, config.workers)
    if said:
        on_note(said)
    kinds: list[DeviceKind] = ["cuda" if device.type == "cuda" else "cpu" for device in devices]
    limits = checked_limits(config.limits, config.workers)
    if limits is not None:
        check_on_devices(limits, devices)
    machine = profile_of_this_machine(kinds, need, limits, on_stage=on_stage, on_note=on_note)
    return cluster_here(devices, limits, machine)


def _how(config: RunConfig) -> tuple[SharesBy, Sequence[float] | None]:
    if isinstance(config.shares, tuple):
        return "given", config.shares
    return cast(SharesBy, config.shares), None


def subject_by_counts(
    config: TrainConfig, counts: GraphStatistics, kinds: Sequence[DeviceKind], workers: int, *, is_nccl: bool = True
) -> PlanSubject:
    """What is planned of a graph of which only counts are known.

    Args:
        config: Model and options.
        counts: Of the graph.
        kinds: Of devices in use.
        workers: How many.
        is_nccl: As for `nugnn.plan_subject.graph_subject`.
    """
    features = torch.empty(1, counts.features, device="meta")
    torch.manual_seed(config.seed)
    model = build_model(config, _ByCounts(counts.nodes, counts.classes, features))
    known = {field.name for field in fields(FitOptions)}
    options = FitOptions(**{name: value for name, value in fit_arguments(config).items() if name in known})
    options.check_gradients(model)
    how: dict[str, Any] = {"features": counts.features, "multilabel": False, "kinds": kinds, "workers": workers}
    how["is_nccl"] = is_nccl
    return graph_subject(model, options, counts.facts(config.self_loops), **how)


def _by_counts(config: TrainConfig, counts: GraphStatistics, cluster: Cluster, on_stage: Say) -> Planned:
    on_stage("tracing a step")
    workers, is_nccl = len(cluster.devices), cluster.links.is_nccl
    subject = subject_by_counts(config, counts, cluster.device_kinds, workers, is_nccl=is_nccl)
    on_stage("weighing shares")
    shares_by, shares = _how(config)
    cluster, times, _ = _measured(config, subject, cluster, on_stage)
    return plan_by_counts(subject, cluster, shares_by=shares_by, shares=shares, halo=counts.expected_halo, times=times)


def _of_graph(
    config: TrainConfig, cluster: Cluster, on_stage: Say, on_download: Callable[[int, int | None], None] | None
) -> Planned:
    on_stage(f"reading {config.dataset}")
    data = prepare(config, on_download)
    torch.manual_seed(config.seed)
    model = build_model(config, data)
    known = {field.name for field in fields(FitOptions)}
    options = checked_options({n: x for n, x in fit_arguments(config).items() if n in known}, data)
    options.check_gradients(model)
    seen = visible_in_training(model, data) if config.inductive else data
    on_stage("tracing a step")
    subject = subject_of_graph(model, options, seen, graph_data_facts(seen), cluster)
    shares_by, shares = _how(config)
    cluster, times, symmetric = _measured(config, subject, cluster, on_stage, seen)
    return plan_with_cut(
        subject,
        cluster,
        seen,
        shares_by=shares_by,
        shares=shares,
        partitioner=cast(Partitioner, config.partitioner),
        times=times,
        symmetric=symmetric,
        on_stage=on_stage,
    )


def _of_samples(
    config: SampleConfig, cluster: Cluster, on_stage: Say, on_download: Callable[[int, int | None], None] | None
) -> Planned:
    from nugnn.sample_part import SamplePart
    from nugnn.sample_run import build_model as build_network
    from nugnn.sample_run import fit_arguments as sample_arguments
    from nugnn.sample_run import prepare as prepare_samples

    on_stage(f"reading {config.dataset}")
    data = prepare_samples(config, on_download)
    torch.manual_seed(config.seed)
    model = build_network(config, data)
    known = {field.name for field in fields(SampleOptions)}
    options = sample_options({name: x for name, x in sample_arguments(config).items() if name in known})
    options.check_gradients(model)
    assert config.batch_size is not None
    part = SamplePart(data.train, None, None, (config.batch_size,), data.metric)
    on_stage("tracing a step")
    columns, facts = looked_at_samples(part, options, data.name, data.num_classes)
    subject = sample_subject(
        model,
        options,
        facts,
        columns,
        batch=config.batch_size,
        kinds=cluster.device_kinds,
        workers=len(cluster.devices),
        is_nccl=cluster.links.is_nccl,
    )
    on_stage("weighing shares")
    shares_by, shares = _how(config)
    cluster, times, _ = _measured(config, subject, cluster, on_stage)
    return plan_by_counts(subject, cluster, shares_by=shares_by, shares=shares, times=times)


def _measured(
    config: RunConfig, subject: PlanSubject, cluster: Cluster, on_stage: Say, graph: GraphData | None = None
) -> tuple[Cluster, Mapping[str, MeasuredTimes] | None, SymmetricGraph | None]:
    """The cluster with its links, and times of the model's operators, as measured on this machine if it is that.

    The graph as partitioners see it comes along where it was cut for that.
    """
    if config.cluster is not None:
        return cluster, None, None
    limits = None if config.limits is None else parse_limits(config.limits)
    found = times_for(subject, cluster, devices_of(config.device, config.workers)[0], limits, on_stage, graph)
    return found.on(cluster), found.operators, found.symmetric
