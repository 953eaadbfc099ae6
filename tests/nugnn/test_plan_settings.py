"""What a run has other than its plan: said in words, and held against the memories as predictions count them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nugnn.datasets import load
from nugnn.fit_options import FitOptions
from nugnn.models import GNN
from nugnn.networks import MLP
from nugnn.plan_request import PlanRequest
from nugnn.plan_settings import check_memory, other_settings, settings_of
from nugnn.plan_training import TrainingPlan
from nugnn.planning.cluster import cluster_of_machine
from nugnn.planning.datasheet import cpu_sheet
from nugnn.planning.device_facts import processor_name
from nugnn.planning.links import Links
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import DataFacts, Plan, PlanError, PlannedDevice, PlannedSizes
from nugnn.planning.predicted_work import DeviceWork, PredictedWork
from nugnn.planning.profiles import DeviceKind, MachineProfile
from nugnn.planning.step_program import Passes
from nugnn.sample_options import SampleOptions
from step_traces import LinearTimes, graph_trace

SIZES = PartSizes(inner=1000, halo=300, edges=25_600, train=100, sent=200)


def plan_of(*where: tuple[str, DeviceKind, str | None], memory_bytes: int) -> Plan:
    """Equal parts, whose devices hold just so much; on devices given by host, kind and uuid."""
    own: dict[str, Any] = {"name": "some", "multiprocessors": 1, "source": "measured", "seconds": {}}
    own |= {"share": 1 / len(where), "sizes": PlannedSizes.of(SIZES), "memory_bytes": memory_bytes}
    devices = [
        PlannedDevice(host=host, kind=kind, uuid=uuid, memory_limit_bytes=memory_bytes, **own)
        for host, kind, uuid in where
    ]
    counts = {name: len(where) * getattr(SIZES, field) for name, field in (("nodes", "inner"), ("edges", "edges"))}
    facts = DataFacts(name="some", train=len(where) * SIZES.train, **counts)
    return Plan(family="graph", shares_by="even", devices=tuple(devices), step_seconds=1.0, halo="counted", data=facts)


@pytest.mark.parametrize(
    ("where", "overlap", "passes"),
    [
        ([("a", "cuda", "1"), ("a", "cuda", "2")], "auto", "some"),
        ([("a", "cuda", "1"), ("b", "cuda", "2")], "auto", "both"),
        ([("a", "cuda", "1"), ("a", "cuda", "1")], "auto", "none"),
        ([("a", "cuda", "1"), ("a", "cuda", "1")], "on", "both"),
        ([("a", "cuda", "1"), ("b", "cuda", "2")], "off", "none"),
        ([("a", "cpu", None), ("a", "cpu", None)], "on", "both"),
    ],
)
def test_parts_fit_if_and_only_if_they_are_predicted_to_under_the_overlap_of_the_run(
    where: list[tuple[str, DeviceKind, str | None]], overlap: str, passes: Passes
) -> None:
    """The plan was made with overlap off, which keeps less."""
    trace = graph_trace("gcn")
    devices = [DeviceWork(trace, LinearTimes(1e-9), kind=kind) for _, kind, _ in where]
    need = PredictedWork(devices, Links.equal(len(where), 1e9), overlap=passes).bytes(0, SIZES)
    traces = {"cuda": trace, "cpu": trace}
    check_memory(plan_of(*where, memory_bytes=need), traces, "overlap off", overlap)
    with pytest.raises(PlanError, match=r"made for overlap off, .* do not fit: worker 0 would need "):
        check_memory(plan_of(*where, memory_bytes=need - 1), traces, "overlap off", overlap)


def test_one_worker_keeps_nothing_for_exchanges() -> None:
    trace = graph_trace("gcn", ranks=1)
    own = PlannedSizes(inner=1000, edges=25_600, train=100)
    plan = plan_of(("a", "cuda", "1"), memory_bytes=1)
    need = PredictedWork([DeviceWork(trace, LinearTimes(1e-9), kind="cuda")]).bytes(0, own.sizes)
    alone = plan.devices[0].model_copy(update={"sizes": own, "memory_limit_bytes": need})
    check_memory(plan.model_copy(update={"devices": (alone,)}), {"cuda": trace}, "overlap off", "on")


def _sgd(momentum: float = 0.0, lr: float = 0.1) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def _refused(model: nn.Module) -> torch.optim.Optimizer:
    raise RuntimeError("not before training")


@pytest.mark.parametrize(
    ("planned", "run", "said"),
    [
        (FitOptions(), FitOptions(lr=0.5, weight_decay=0.0), ""),
        (FitOptions(), FitOptions(make_optimizer=_sgd()), "optimizer Adam, and this run has SGD"),
        (
            FitOptions(make_optimizer=_sgd()), FitOptions(make_optimizer=_sgd(0.9)),
            "optimizer SGD, and this run has SGD with momentum",
        ),
        (FitOptions(make_optimizer=_sgd()), FitOptions(make_optimizer=_sgd(lr=1.0)), ""),
        (FitOptions(), FitOptions(make_optimizer=_refused), ""),
        (SampleOptions(), SampleOptions(optimizer="adam"), "optimizer AdamW, and this run has Adam"),
    ],
)  # fmt: skip
def test_another_optimizer_is_said_by_what_it_keeps(
    planned: FitOptions | SampleOptions, run: FitOptions | SampleOptions, said: str
) -> None:
    model = MLP(4, 3, hidden=8)
    assert other_settings(settings_of(planned, model), settings_of(run, model)) == said


def test_a_plan_for_an_optimizer_that_keeps_less_is_held_against_the_memories_with_the_other_one() -> None:
    cpu = cpu_sheet().as_profile(2).model_copy(update={"name": processor_name()})
    cluster = cluster_of_machine(MachineProfile(devices=(cpu,)), [cpu, cpu])
    data, devices = load("digits"), [torch.device("cpu")] * 2
    model = GNN("gcn", data.num_features, data.num_classes, hidden=64)
    light = FitOptions(make_optimizer=_sgd())
    made = TrainingPlan(request=PlanRequest(shares_by="even", cluster=cluster), devices=devices, cluster=cluster)
    made.prepare_graph(model, light, data)
    made.shares_of(data, "metis", "fp32", None, lambda _: None)
    assert made.planned is not None
    plan = made.planned.plan
    full = [device.model_copy(update={"memory_limit_bytes": device.memory_bytes}) for device in plan.devices]
    request = PlanRequest(shares_by="even", plan=plan.model_copy(update={"devices": tuple(full), "cut": None}))
    TrainingPlan(request=request, devices=devices, cluster=None).prepare_graph(model, light, data)
    with pytest.raises(PlanError, match=r"made for optimizer SGD, and this run has Adam, .* do not fit"):
        TrainingPlan(request=request, devices=devices, cluster=None).prepare_graph(model, FitOptions(), data)
