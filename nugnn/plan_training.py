"""The plan of a training run on its way: prepared before workers start, made with the cut, kept for a resumed run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from nugnn._counted import counted
from nugnn.datasets.graph_data import GraphData
from nugnn.earlier_plan import PlannedRun, kept_plan, plan_for
from nugnn.failure import WorkerFailed
from nugnn.fit_options import FitOptions
from nugnn.fit_plan import PLAN_FILE
from nugnn.machine_profiles import are_devices_alike
from nugnn.own_times import NotTimedError, kept_times_for, times_for
from nugnn.partition.cache import tool_versions
from nugnn.partition.metis import SymmetricGraph
from nugnn.plan_data import graph_data_facts, looked_at_samples, subject_of_graph, subject_of_graph_on
from nugnn.plan_request import PlanRequest
from nugnn.plan_settings import settings_of
from nugnn.plan_subject import PlanSubject, sample_subject
from nugnn.planned import Planned, plan_by_counts, plan_with_cut, step_model, write_plan
from nugnn.planning.baselines import baseline_shares
from nugnn.planning.batch_shares import split_by_shares
from nugnn.planning.cluster import Cluster
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.loop_method import Partitioner
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.plan import DataFacts, PlanError, read_plan
from nugnn.planning.profiles import DeviceKind
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import TraceError
from nugnn.planning.work_model import PackedComputing, PackedWork
from nugnn.rebalance import PlannedBalance
from nugnn.sample_options import SampleOptions
from nugnn.sample_part import SamplePart

Parts = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, kw_only=True)
class Shares:
    """What a graph is cut by: parts that are there already, or shares of nodes."""

    shares: tuple[float, ...]
    part: Parts | None = None
    notes: tuple[str, ...] = ()


@dataclass(eq=False, kw_only=True)
class TrainingPlan:
    """What was asked for, on these devices; `planned` is there once it is made.

    Args:
        request: What was asked for.
        devices: Of the workers; None for those of other hosts.
        cluster: The same for predictions; None where the plan comes from a file.
        limits: What each may use.
        times_operators: Whether the model's operators and exchanges may be timed on the devices, which takes seconds.
        on_stage: Called with what is done next.
        kept: A plan that an interrupted run left, used if it still fits.
        on_note: Gets sentences for the user.
    """

    request: PlanRequest
    devices: Sequence[torch.device | None]
    cluster: Cluster | None
    limits: Sequence[DeviceLimits] | None = None
    times_operators: bool = False
    on_stage: Callable[[str], Any] = lambda _: None
    kept: Path | None = None
    on_note: Callable[[str], Any] = lambda _: None
    planned: Planned | None = None
    _subject: PlanSubject | None = None
    _times: Mapping[str, MeasuredTimes] | None = None
    _symmetric: SymmetricGraph | None = None
    _from_file: Planned | None = None
    _facts: DataFacts | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the prediction leaves out of what the run will do."""
        return () if self._subject is None else self._subject.notes

    # Before workers start

    def prepare_graph(self, model: nn.Module, options: FitOptions, data: GraphData) -> None:
        """Look at model and graph; the cut comes later.

        Raises:
            PlanError: The plan is of something else.
            TraceError: The model cannot be foreseen, and ``auto`` needs that.
        """
        facts = self._facts = graph_data_facts(data)
        kinds, workers = self._planned_kinds(), len(self.devices)

        def trace() -> Mapping[str, StepTrace]:
            return subject_of_graph_on(model, options, data, facts, kinds, workers).traces

        settings = settings_of(options, model)
        run = PlannedRun(facts=facts, model=model, settings=settings, devices=self.devices, trace=trace)
        if self._found_plan(run):
            return
        assert self.cluster is not None
        try:
            self._subject = subject_of_graph(model, options, data, facts, self.cluster)
        except Exception as error:  # whatever a model says to random data
            self._not_foreseen(error)
            return
        self._measure(self._subject, data)

    def prepare_samples(
        self, model: nn.Module, options: SampleOptions, part: SamplePart, name: str, num_classes: int
    ) -> tuple[int, ...]:
        """Samples of each worker in a full batch.

        Args:
            model: To be trained.
            options: How.
            part: The samples, and the batch in any division.
            name: Of the data.
            num_classes: Of the labels; 0 where it is not known.

        Raises:
            PlanError: The plan is of something else.
            TraceError: The model cannot be foreseen, and ``auto`` needs that.
            DoesNotFitError: No division of the batch fits the memories.
        """
        batch = sum(part.sizes)
        sample, facts = looked_at_samples(part, options, name, num_classes)
        kinds, workers = self._planned_kinds(), len(self.devices)
        how: dict[str, Any] = {"batch": batch, "kinds": kinds, "workers": workers}

        def trace() -> Mapping[str, StepTrace]:
            return sample_subject(model, options, facts, sample, **how).traces

        settings = settings_of(options, model)
        run = PlannedRun(facts=facts, model=model, settings=settings, devices=self.devices, trace=trace)
        if self._found_plan(run):
            assert self._from_file is not None
            plan = self._from_file.plan
            if sum(plan.batch_split) != batch:
                raise PlanError(
                    f"the plan divides batches of {counted(sum(plan.batch_split), 'sample')}, and batch_size is {batch}"
                )
            if options.batch_split != "auto" and tuple(part.sizes) != plan.batch_split:
                own, said = (",".join(map(str, sizes)) for sizes in (plan.batch_split, part.sizes))
                raise PlanError(
                    f"the plan divides batches as {own}, and this run was given --batch-split {said}; leave "
                    "--batch-split out to use the plan's"
                )
            self.planned = self._from_file
            return plan.batch_split
        assert self.cluster is not None
        try:
            subject = self._subject = sample_subject(
                model,
                options,
                facts,
                sample,
                batch=batch,
                kinds=self.cluster.device_kinds,
                workers=len(self.devices),
                is_nccl=self.cluster.links.is_nccl,
            )
        except Exception as error:  # whatever a model says to random data
            self._not_foreseen(error)
            return split_by_shares(batch, self._plain_shares(options.precision))
        request = self.request
        self._measure(subject)
        self.planned = plan_by_counts(
            subject, self.cluster, shares_by=request.shares_by, shares=request.shares, times=self._times
        )
        return self.planned.plan.batch_split

    # With the graph

    def shares_of(
        self,
        data: GraphData,
        partitioner: str,
        precision: str,
        cache_folder: Path | None,
        on_stage: Callable[[str], Any],
    ) -> Shares:
        """What the graph is to be cut by; makes the plan.

        Args:
            data: The graph that was prepared for.
            partitioner: What cuts.
            precision: Of the run.
            cache_folder: Where plans are kept and found again, with partitions; nowhere when None.
            on_stage: Called with what is done next.

        Raises:
            DoesNotFitError: The memories do not hold the graph.
        """
        if self._from_file is not None:
            found = self.planned = self._from_file
            notes = () if found.part is None else ("Parts are those of the plan.",)
            return Shares(shares=found.plan.shares, part=found.part, notes=notes)
        if self._subject is None:
            return Shares(shares=self._plain_shares(precision))
        assert self.cluster is not None
        request, kept = self.request, None
        symmetric, self._symmetric = self._symmetric, None  # large, and of no use once the graph is cut
        if cache_folder is not None:
            kept = cache_folder / "plans" / self._key(partitioner) / PLAN_FILE
            if (made := kept_plan(kept)) is not None:
                self.planned = made
                on_stage("plan_cached")
                return Shares(shares=made.plan.shares, part=made.part, notes=("The plan was made before.",))
        self.planned = plan_with_cut(
            self._subject,
            self.cluster,
            data,
            shares_by=request.shares_by,
            shares=request.shares,
            partitioner=cast(Partitioner, partitioner),
            times=self._times,
            symmetric=symmetric,
            on_stage=on_stage,
        )
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_plan(kept, self.planned)
        return Shares(shares=self.planned.plan.shares, part=self.planned.part)

    def balance(self) -> PlannedBalance:
        """What it knows of moves of nodes: models where the model's step is foreseen, devices that have one node.

        Exchanges in approximate modes are predicted as if they were exact, so that they do not count for moves.
        """
        left_out = frozenset[int]()
        if self.planned is not None and self.planned.plan.shares_by == "auto":
            nodes = [device.sizes.inner for device in self.planned.plan.devices]
            left_out = frozenset(rank for rank, count in enumerate(nodes) if count <= 1 < max(nodes))
        if self._subject is None or self.cluster is None:
            return PlannedBalance(left_out=left_out)
        whole = PackedWork.of(step_model(self._subject, self.cluster, self._times).work)
        settings = self._subject.settings
        is_exact = settings["halo_mode"] == "exact" and settings["halo_wire"] != "auto"
        return PlannedBalance(work=PackedComputing(whole), whole=whole if is_exact else None, left_out=left_out)

    def keep(self, folder: Path) -> None:
        """For a resumed run."""
        if self.planned is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_plan(folder / PLAN_FILE, self.planned)

    # How

    def _measure(self, subject: PlanSubject, graph: GraphData | None = None) -> None:
        """The model's operators and its rows that travel, on this host's own devices; of alike ones what is kept."""
        assert self.cluster is not None
        devices = [device for device in self.devices if device is not None]
        if not self.times_operators or self.request.shares_by != "auto":
            return
        if are_devices_alike(devices, self.limits):
            if (kept := kept_times_for(subject, self.cluster, of_graph=graph is not None)) is not None:
                self._times, self.cluster = kept.operators, kept.on(self.cluster)
            return
        try:
            found = times_for(subject, self.cluster, devices, self.limits, self.on_stage, graph)
        except (WorkerFailed, NotTimedError) as error:  # rates can do without; what is wrong with the run comes later
            what = (str(error).splitlines() or [""])[0]
            self.on_note(f"planned from rates, since the model's operators could not be timed: {what}")
            return
        self._times, self._symmetric, self.cluster = found.operators, found.symmetric, found.on(self.cluster)

    def _planned_kinds(self) -> tuple[DeviceKind, ...]:
        plan = self.request.plan
        kinds = [device.kind for device in plan.devices] if plan is not None else [d.type for d in self.devices if d]
        return tuple(dict.fromkeys(cast(DeviceKind, kind) for kind in kinds))

    def _found_plan(self, run: PlannedRun) -> bool:
        """Whether there is a plan for ``run`` already, of a file or of the run that is resumed."""
        if self.request.plan is not None:
            self._from_file = plan_for(run, self.request.plan, self.request.plan_path, self.on_note)
            return True
        if self.kept is None or not self.kept.is_file():
            return False
        try:
            self._from_file = plan_for(run, read_plan(self.kept), self.kept, self.on_note)
        except PlanError as error:
            self.on_note(f"planned anew: {error}")
            return False
        return True

    def _not_foreseen(self, error: Exception) -> None:
        if self.request.shares_by == "auto":
            raise TraceError(
                f"shares auto need a model whose step can be foreseen: {error}. Give numbers, or even, flops or "
                "bandwidth"
            ) from error
        self.on_note(f"no prediction: {error}")

    def _plain_shares(self, precision: str) -> tuple[float, ...]:
        assert self.cluster is not None
        if self.request.shares is not None:
            return self.request.shares
        return baseline_shares(self.request.shares_by, self.cluster.profiles, precision)

    def _key(self, partitioner: str) -> str:
        """Over all that the cut depends on."""
        assert self.cluster is not None and self._subject is not None and self._facts is not None
        links = self.cluster.links
        on = {
            "data": self._facts.model_dump(),
            "traces": {kind: trace.to_json() for kind, trace in self._subject.traces.items()},
            "subject": [self._subject.settings, self._subject.precision, self._subject.overlap],
            "devices": [device.profile.model_dump_json() for device in self.cluster.devices],
            "links": [links.bytes_per_second.tolist(), links.latency_seconds.tolist(), links.hosts, links.is_nccl],
            "sums": {host: astuple(sums) for host, sums in links.sums_inside.items()},
            "shares": [self.request.shares_by, self.request.shares],
            "times": None if self._times is None else {kind: x.to_json() for kind, x in self._times.items()},
            "versions": tool_versions("kaminpar" if partitioner == "kaminpar" else "metis"),
            "partitioner": partitioner,
        }
        return hashlib.sha256(json.dumps(on, sort_keys=True).encode()).hexdigest()
