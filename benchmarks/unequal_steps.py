"""What predicts steps of two unequal devices: a recorded step, a draft by rates, operators timed within the limits."""

from __future__ import annotations

import argparse
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch
import unequal_rank
from split_pool import Split, SplitPool
from worker_groups import Group

from nugnn.fit_options import FitOptions
from nugnn.machine_profiles import cluster_here, profile_of_this_machine
from nugnn.own_times import OwnTimes, expected_sizes, measure_of, travel_of
from nugnn.plan_subject import PlanSubject, graph_subject
from nugnn.planned import step_model
from nugnn.planning.cluster import Cluster
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import DataFacts
from nugnn.planning.predictor import ReplayedSteps
from nugnn.planning.profiles import DeviceProfile
from nugnn.planning.work_model import PackedWork


@dataclass(frozen=True)
class Draft:
    """A plan by rates alone.

    Args:
        cluster: For which.
        by_rates: What predicted it.
        sizes: Expected of each device.
        split: Parts with these shares of the nodes, being found.
    """

    cluster: Cluster
    by_rates: ReplayedSteps
    sizes: tuple[PartSizes, ...]
    split: Future[Split]


class StepModels:
    """Models of the steps of each graph, network and limit.

    Args:
        arguments: Of the benchmark.
        ranks: Which time operators.
        pool: Which splits graphs.
    """

    def __init__(self, arguments: argparse.Namespace, ranks: Group, pool: SplitPool) -> None:
        self._arguments, self._ranks, self._pool = arguments, ranks, pool
        self.facts: dict[str, DataFacts] = {}
        # on a GPU each step is recorded by a process of its own, else by this one
        self._tracing = ThreadPoolExecutor(len(arguments.models) if arguments.device == "cuda" else 1)
        self._subjects: dict[str, Future[PlanSubject]] = {}

    def close(self) -> None:
        """Begin no other recording."""
        self._tracing.shutdown(cancel_futures=True)

    def add(self, facts: DataFacts) -> None:
        """A graph; each network's step is recorded on the first one."""
        self.facts[facts.name] = facts
        for model in self._arguments.models:
            if model not in self._subjects:
                self._subjects[model] = self._tracing.submit(self._traced, model, facts)

    def subject(self, family: str, model: str) -> PlanSubject:
        """What is planned; families differ in their counts alone."""
        facts = self.facts[family]
        whole = PartSizes(inner=facts.nodes, edges=facts.edges, train=facts.train)
        return replace(self._subjects[model].result(), data=facts, whole=whole)

    def _traced(self, model: str, facts: DataFacts) -> PlanSubject:
        """The step that ranks make, recorded by a process of its own."""
        given = self._arguments
        options = FitOptions(precision=given.precision, cuda_graphs="on" if given.device == "cuda" else "off")
        network = unequal_rank.network(model, facts.features, facts.classes, given.seed)
        how: dict[str, Any] = {"features": facts.features, "multilabel": False, "kinds": [given.device], "workers": 2}
        return graph_subject(network, options, facts, **how)

    def _cluster(self, sms: int) -> Cluster:
        """Both devices, rank 1 within its limit."""
        if self._arguments.device == "cuda":
            devices, limits = [torch.device("cuda", rank) for rank in range(2)], (DeviceLimits(), DeviceLimits(sms=sms))
            return cluster_here(devices, limits, profile_of_this_machine(["cuda"], "any"))
        cluster = cluster_here([torch.device("cpu")] * 2, None, profile_of_this_machine(["cpu"] * 2, "any"))
        whole, other = cluster.devices
        slower = slowed(other.profile, unequal_rank.WHOLE / sms)
        return replace(cluster, devices=(whole, replace(other, profile=slower)))

    def draft(self, subject: PlanSubject, sms: int) -> Draft:
        """What is planned by rates alone, being cut."""
        cluster = self._cluster(sms)
        by_rates = step_model(subject, cluster)
        sizes = expected_sizes(subject, cluster, by_rates)
        return Draft(cluster, by_rates, sizes, self._pool.by_shares(subject.data.name, [size.inner for size in sizes]))

    def steps(self, subject: PlanSubject, sms: int, draft: Draft) -> tuple[ReplayedSteps, Cluster]:
        """What predicts steps under the limit that ranks keep to, measured by them on the draft's parts, and for which
        cluster: its links are measured, too.
        """
        cluster, travel = draft.cluster, travel_of(subject, draft.cluster.links, draft.sizes)
        measures = []
        for rank, profile in enumerate(cluster.profiles):
            device = torch.device("cuda", rank) if profile.kind == "cuda" else torch.device("cpu")
            measures.append(measure_of(subject, profile.kind, device, f"sms={sms}" if rank else ""))
        traces = [subject.traces[profile.kind] for profile in cluster.profiles]
        item = cloudpickle.dumps((measures, traces, PackedWork.of(draft.by_rates.work)))
        path = str(self._pool.result(draft.split).path)
        found = self._ranks.run(
            {"do": "times", "how": item, "family": subject.data.name, "path": path, "travel": travel}
        )
        kinds = [device.kind for device in cluster.devices]
        own = OwnTimes(operators=dict(zip(kinds, (times for times, _ in found), strict=True)), ways=found[0][1])
        measured = own.on(cluster)
        return step_model(subject, measured, own.operators), measured


def slowed(profile: DeviceProfile, factor: float) -> DeviceProfile:
    """A device whose rates are ``1 / factor`` of those of ``profile``."""
    rates = ("stream_bytes", "gather_bytes", "cached_gather_bytes", "pack_bytes")
    changed: dict[str, Any] = {name: getattr(profile, name) / factor for name in rates}
    flops = {form: rate / factor for form, rate in profile.gemm_flops.items()}
    return profile.model_copy(update={**changed, "gemm_flops": flops})
