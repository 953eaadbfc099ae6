"""What a run has other than its plan: said in words, and held against the memories as predictions count them."""

from __future__ import annotations

from typing import Any

import pytest
from step_traces import LinearTimes, graph_trace

from nugnn.plan_settings import check_memory
from nugnn.planning.links import Links
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import DataFacts, Plan, PlanError, PlannedDevice, PlannedSizes
from nugnn.planning.predicted_work import DeviceWork, PredictedWork
from nugnn.planning.profiles import DeviceKind
from nugnn.planning.step_program import Passes

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
    return Plan(
        family="graph", shares_by="even", devices=tuple(devices), step_seconds=1.0, halo="counted", data=facts
    )


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
    with pytest.raises(PlanError, match="made for overlap off, .* do not fit: worker 0 would need "):
        check_memory(plan_of(*where, memory_bytes=need - 1), traces, "overlap off", overlap)


def test_one_worker_keeps_nothing_for_exchanges() -> None:
    trace = graph_trace("gcn", ranks=1)
    own = PlannedSizes(inner=1000, edges=25_600, train=100)
    plan = plan_of(("a", "cuda", "1"), memory_bytes=1)
    need = PredictedWork([DeviceWork(trace, LinearTimes(1e-9), kind="cuda")]).bytes(0, own.sizes)
    alone = plan.devices[0].model_copy(update={"sizes": own, "memory_limit_bytes": need})
    check_memory(plan.model_copy(update={"devices": (alone,)}), {"cuda": trace}, "overlap off", "on")
