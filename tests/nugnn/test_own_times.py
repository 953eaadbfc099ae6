"""Operators and rows that travel, timed by workers within their limits; kept, and measured anew if broken."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nugnn import own_times
from nugnn.datasets.graph_data import GraphData
from nugnn.fit_options import FitOptions
from nugnn.models import GNN
from nugnn.own_times import NotTimedError, OwnTimes, travel_of
from nugnn.partition.balance import Balance
from nugnn.plan_subject import PlanSubject, graph_subject
from nugnn.planned import plan_by_counts, step_model
from nugnn.planning import in_use
from nugnn.planning.cluster import Cluster, cluster_of_machine
from nugnn.planning.in_use import CoreUse
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import DataFacts
from nugnn.planning.profiles import SCHEMA, DeviceProfile, MachineProfile
from nugnn.planning.trace import StepTrace
from nugnn.timed_parts import real_parts
from nugnn.traced_step import sizes_of

CPU = DeviceProfile(
    name="a CPU", kind="cpu", source="measured", memory_bytes=1 << 34, cache_bytes=1 << 25, gemm_flops={"fp32": 8e11},
    stream_bytes=1e10, gather_bytes=8e9, cached_gather_bytes=2e10, pack_bytes=5e9, launch_seconds=4e-6,
    multiprocessors=2,
)  # fmt: skip


def some_graph() -> GraphData:
    draw = torch.Generator().manual_seed(0)
    src, dst = torch.randint(12_000, (2, 60_000), generator=draw)
    labels, features = torch.randint(4, (12_000,), generator=draw), torch.randn(12_000, 12, generator=draw)
    how: dict[str, Any] = {"features": features, "labels": labels, "num_classes": 4}
    return GraphData(name="at hand", num_nodes=12_000, src=src, dst=dst, train_nodes=torch.arange(1000), **how)


LIMITS = (DeviceLimits(threads=1), DeviceLimits(threads=1, memory_fraction=0.4))
SIZES = (PartSizes(inner=9000, edges=45_000, halo=9000, sent=9000, train=500),) * 2


def subject() -> PlanSubject:
    torch.manual_seed(0)
    facts = DataFacts(name="some", nodes=12_000, edges=60_000, train=1000, features=12, classes=4)
    model = GNN("gcn", 12, 4, hidden=16, layers=3)
    return graph_subject(model, FitOptions(), facts, features=12, multilabel=False, kinds=["cpu"], workers=2)


def cluster() -> Cluster:
    return cluster_of_machine(MachineProfile(schema=SCHEMA, devices=(CPU,)), [CPU, CPU], LIMITS)


_SLOW, _FAST = (0.02, 5e-8), (1e-4, 1e-9)
"""Latency, and seconds of a byte."""


def with_slow_rows(given: PlanSubject, slow: DeviceLimits) -> PlanSubject:
    """The worker with these limits takes longer with rows that have come."""
    measure, limits = given.measure, str(slow)

    def slowed(trace: StepTrace, parts: Sequence[PartSizes], **how: Any) -> MeasuredTimes:
        from exchange_time import let_exchanges_take

        latency, of_byte = _SLOW if how["limits"] == limits else _FAST
        let_exchanges_take(lambda num_bytes: latency + of_byte * num_bytes)  # as long as this worker lives
        return measure(trace, parts, **how)

    return replace(given, measure=slowed)


def measured(given: PlanSubject) -> OwnTimes:
    here = cluster()
    work = step_model(given, here).work
    return own_times.own_times(given, here, [torch.device("cpu")] * 2, LIMITS, SIZES, work)


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(own_times._SECONDS, "cpu", 0.1)
    monkeypatch.setattr(in_use, "MUCH_USED", math.inf)  # whoever uses this machine while tests run
    monkeypatch.setenv("NUGNN_CACHE", str(tmp_path))


def with_noted_parts(given: PlanSubject) -> PlanSubject:
    """Times say of what parts they are."""
    measure = given.measure

    def noted(trace: StepTrace, parts: Sequence[Any], **how: Any) -> MeasuredTimes:
        (said,) = {f"{part.node_data['feat'].shape[1]} columns of {part.name}" for part in parts}
        times = measure(trace, parts, **how)
        return times.model_copy(update={"versions": times.versions | {"parts": said}})

    return replace(given, measure=noted)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("cores", "words"), [(4, r"worker \d was ready and had no core for"), (1, "others computed on core 0 for 70 %")]
)
def test_times_that_were_measured_beside_others_are_used_and_not_kept(
    cores: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On one core threads wait for each other: who else computes there is all that speaks against times."""
    monkeypatch.setattr(in_use, "MUCH_USED", -1.0)
    monkeypatch.setattr(own_times, "num_cores", lambda: cores)

    def found_use(plain: dict[str, Any] | None) -> CoreUse:
        assert plain is None or {**plain} == asdict(CoreUse(**plain))  # None where it took no time
        return CoreUse(cores=(0,), busy=0.9, own=0.1)

    monkeypatch.setattr(own_times, "CoreUse", SimpleNamespace(from_plain=found_use))
    given, here, said = subject(), cluster(), list[str]()
    work = step_model(given, here).work
    found = own_times.own_times(given, here, [torch.device("cpu")] * 2, LIMITS, SIZES, work, on_stage=said.append)
    assert found.ways is not None and len(found.operators) == 2
    assert re.match(words, said[-1]) and said[-1].endswith(": this plan stands on it, and it is not kept")
    assert not list((tmp_path / "operator-times").glob("*"))


class Launched(Exception):  # noqa: N818 - stands for workers
    """Workers would have been started."""


def refuse(*_: Any, **__: Any) -> None:
    raise Launched


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_takes_longer_with_rows_has_a_slower_way_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = with_slow_rows(subject(), LIMITS[1])
    found, before = measured(given), cluster()
    links = found.on(before).links
    for ends, (latency, of_byte) in {(0, 1): _FAST, (1, 0): _SLOW}.items():
        assert links.latency_seconds[ends] == pytest.approx(latency, rel=0.01)
        assert links.bytes_per_second[ends] == pytest.approx(1 / of_byte, rel=0.1)
    by_profile, by_ways = (step_model(given, each, found.operators).work for each in (before, found.on(before)))
    longer = [by_ways.seconds(rank, SIZES[rank]) - by_profile.seconds(rank, SIZES[rank]) for rank in range(2)]
    assert longer[1] > longer[0] + 4 * 0.01  # of exchanges in a step there are four at least
    monkeypatch.setattr(own_times, "launch", refuse)
    again = measured(given)
    assert again.ways == found.ways and again.operators == found.operators
    (kept,) = (tmp_path / "operator-times").glob("ways-*.json")
    kept.write_text(kept.read_text()[:-30])
    with pytest.raises(Launched):
        measured(given)


def test_what_a_memory_does_not_hold_is_not_timed_there() -> None:
    """Pieces are trained on side by side: a part that would fit alone is timed by a piece of it."""
    each = cluster()
    work = step_model(subject(), each).work
    always, whole = work.bytes(0, PartSizes()), work.bytes(0, SIZES[0])
    assert own_times._seconds_if_it_fits(work, 0, whole)(SIZES[0]) == math.inf
    assert own_times._seconds_if_it_fits(work, 0, always + 3 * (whole - always))(SIZES[0]) < math.inf


@pytest.mark.parametrize(("threads", "least"), [(1, 0.036), (6, 0.043)])
def test_limits_below_what_a_worker_needs_are_refused_before_anything_is_timed(
    threads: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """550 MiB of 16 GiB hold the process of a worker with one thread, but not with six, and the least part."""
    monkeypatch.setattr(own_times, "own_times", lambda *_, **__: "timed")
    machine = MachineProfile(schema=SCHEMA, devices=(CPU.model_copy(update={"multiprocessors": 8}),))

    def limited_to(fraction: float) -> Cluster:
        limits = [DeviceLimits(), DeviceLimits(memory_fraction=fraction, threads=threads)]
        return cluster_of_machine(machine, machine.devices * 2, limits)

    small, enough = limited_to(0.035), limited_to(least)
    words = f"worker 1 may use .* give memory_fraction={least} or more"
    with pytest.raises(DoesNotFitError, match=words):
        own_times.times_for(subject(), small, [], None)
    with pytest.raises(DoesNotFitError, match=words):
        plan_by_counts(subject(), small)
    assert own_times.times_for(subject(), enough, [], None) == "timed"  # type: ignore[comparison-overlap]
    assert plan_by_counts(subject(), enough).plan.devices[1].sizes.inner > 0


def test_ways_are_kept_apart_by_who_takes_part_as_which_rank() -> None:
    given = subject()
    travel = travel_of(given, cluster().links, SIZES)
    assert travel is not None
    paths = [own_times._kept_ways(given, kinds, travel) for kinds in (["one", "other"], ["other", "one"], ["one"] * 2)]
    assert len(set(paths)) == 3 and own_times._kept_ways(given, ["one", "other"], travel) == paths[0]
    more = travel_of(given, cluster().links, (replace(SIZES[0], sent=40_000, halo=40_000),) * 2)
    assert more is not None and own_times._kept_ways(given, ["one", "other"], more) != paths[0]


def test_times_of_steps_that_are_recorded_are_kept_apart() -> None:
    """Those of others do not say what the host takes for a CUDA graph."""
    singly, kinds = subject(), ["one", "other"]
    paths = [
        own_times._kept(each, kinds, [[size] for size in SIZES], of_graph=False)
        for each in (singly, replace(singly, is_captured=True), subject())
    ]
    assert paths[0] == paths[2] and not set(paths[0]) & set(paths[1])


@pytest.mark.usefixtures("forked_workers")
def test_operators_of_a_graph_at_hand_are_timed_on_parts_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given, here, graph = subject(), cluster(), some_graph()
    work = step_model(given, here).work
    how: dict[str, Any] = {"work": work, "graph": graph}
    devices = [torch.device("cpu")] * 2
    found = own_times.own_times(with_noted_parts(given), here, devices, LIMITS, SIZES, **how)
    assert {kind: times.versions["parts"] for kind, times in found.operators.items()} == dict.fromkeys(
        [device.kind for device in here.devices], f"12 columns of {graph.name}"
    )
    shards = [part.shard for part in real_parts(graph, [given.traces["cpu"]] * 2, [lambda _: 0.0] * 2, SIZES)]
    for times in found.operators.values():
        assert all(not times.fallbacks(given.traces["cpu"].at(sizes_of(shard))) for shard in shards)
    monkeypatch.setattr(own_times, "launch", refuse)
    assert own_times.own_times(given, here, devices, LIMITS, SIZES, **how).operators == found.operators
    with pytest.raises(Launched):  # random parts are something else
        own_times.own_times(given, here, devices, LIMITS, SIZES, work)


@pytest.mark.parametrize("fault", ["cut", "model"])
def test_what_keeps_operators_from_being_timed_is_said(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    given, here = subject(), cluster()
    how: dict[str, Any] = {"work": step_model(given, here).work, "graph": some_graph()}
    monkeypatch.setattr(own_times, "launch", refuse)
    if fault == "cut":
        monkeypatch.setattr(Balance, "violations", lambda *_: ["part 1 has 3 nodes"])
        said = "no assignment within tolerance 0.1 was found: part 1 has 3 nodes"
    else:
        lock = threading.Lock()
        given = replace(given, measure=lambda *_, **__: lock)
        said = "measures cannot be handed to the worker processes: cannot pickle '_thread.lock'"
    with pytest.raises(NotTimedError, match=said):
        own_times.own_times(given, here, [torch.device("cpu")] * 2, LIMITS, SIZES, **how)


def test_what_travels_is_what_the_step_sends() -> None:
    given, links = subject(), cluster().links
    travel = travel_of(given, links, (replace(SIZES[0], sent=700, halo=500), replace(SIZES[1], sent=500, halo=700)))
    assert travel is not None and travel.rows == ((0, 700), (500, 0))
    assert travel.row_bytes == (16, 48, 64)  # classes, features and hidden values in float32
    assert travel_of(given, links, SIZES[:1]) is None
