"""With a cut, a graph is shared among hosts that pay: all over a fast network, one over a slow one; never slower."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.partition import coarse, repeated_cuts
from nugnn.partition.balance import Balance
from nugnn.partition.metis import SymmetricGraph
from nugnn.planning import draft_cut
from nugnn.planning.cluster import Cluster, ClusterDevice
from nugnn.planning.cut_among_sets import with_a_node_for_each
from nugnn.planning.datasheet import sheet_of
from nugnn.planning.draft import USABLE, Draft, usable_bytes
from nugnn.planning.draft_counts import draft_from_counts
from nugnn.planning.draft_cut import draft_with_cut
from nugnn.planning.expected_halo import ExpectedHalo
from nugnn.planning.links import Links
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.predictor import ReplayedSteps, predictor_for
from nugnn.planning.work_model import count_sizes
from step_traces import LinearTimes, graph_trace

NUM_NODES, NUM_EDGES = 1200, 12_000
OF_BYTE = {"A100": 1e-8, "T4": 3e-8}
"""Seconds for each byte that an operator makes: an epoch on one A100 takes a tenth of a second or so."""
FAST, SLOW = 1e11, 1e5
Hosts = tuple[tuple[str, int], ...]


@functools.cache
def graph() -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Neighbours that lie near each other, but for every tenth."""
    rng = np.random.default_rng(0)
    dst = rng.integers(0, NUM_NODES, NUM_EDGES)
    near = (dst + rng.integers(-20, 21, NUM_EDGES)).clip(0, NUM_NODES - 1)
    src = np.where(rng.random(NUM_EDGES) < 0.9, near, rng.integers(0, NUM_NODES, NUM_EDGES))
    return NUM_NODES, src, dst, rng.permutation(NUM_NODES)[:120]


def cluster(hosts: Hosts, between: float, memory_bytes: int | None = None) -> Cluster:
    """Some devices of one card on each host; bytes a second between hosts."""
    devices, numbers = [], []
    for number, (name, count) in enumerate(hosts):
        profile = sheet_of(name).as_profile()
        if memory_bytes is not None:
            profile = profile.model_copy(update={"memory_bytes": memory_bytes})
        devices += [ClusterDevice(host=f"host-{number}", profile=profile)] * count
        numbers += [number] * count
    same = np.equal.outer(numbers, numbers)
    links = Links(np.where(same, FAST, between), np.where(same, 1e-6, 1e-5), tuple(numbers), {}, is_nccl=True)
    return Cluster(devices=tuple(devices), links=links)


def steps(devices: Cluster) -> ReplayedSteps:
    times = {
        device.kind: LinearTimes(next(s for name, s in OF_BYTE.items() if name in device.profile.name), 1e-6)
        for device in devices.devices
    }
    trace = graph_trace("sage", ranks=2)
    return predictor_for({"cuda": trace}, devices, times=times)


def planned(devices: Cluster) -> Draft:
    return draft_with_cut(steps(devices), *graph(), devices, halo=ExpectedHalo(), row_bytes=64.0)


def held_by_host(draft: Draft, devices: Cluster) -> dict[str, int]:
    held: dict[str, int] = {}
    for device, size in zip(devices.devices, draft.sizes, strict=True):
        held[device.host] = held.get(device.host, 0) + size.inner
    return held


ALIKE: Hosts = (("A100", 2), ("A100", 2))
UNEQUAL: Hosts = (("T4", 2), ("A100", 2))


@pytest.mark.parametrize("hosts", [ALIKE, UNEQUAL])
def test_all_hosts_are_used_where_the_network_is_fast(hosts: Hosts) -> None:
    devices = cluster(hosts, FAST)
    draft = planned(devices)
    assert min(size.inner for size in draft.sizes) > 0.1 * NUM_NODES
    assert not any("hardly be used" in note for note in draft.notes)


@pytest.mark.parametrize("hosts", [ALIKE, UNEQUAL, (("A100", 1), ("A100", 1), ("A100", 1))])
def test_one_host_is_used_where_the_network_is_slow(hosts: Hosts) -> None:
    devices = cluster(hosts, SLOW)
    draft = planned(devices)
    held = held_by_host(draft, devices)
    fast = "host-1" if hosts == UNEQUAL else max(held, key=lambda host: held[host])
    counts = {host: sum(device.host == host for device in devices.devices) for host in held}
    assert all(nodes == counts[host] for host, nodes in held.items() if host != fast), "a node for each other device"
    inner = [s.inner for d, s in zip(devices.devices, draft.sizes, strict=True) if d.host == fast]
    assert min(inner) > 0.3 * NUM_NODES
    notes = [note for note in draft.notes if "would hardly be used: over these links" in note]
    assert len(notes) == 1 and "Without " in notes[0] and f"of {len(devices.devices)} devices, " in notes[0]
    # said as of counts
    whole = PartSizes(NUM_NODES, NUM_EDGES, 0, 0, 120)
    by_counts = draft_from_counts(steps(devices), whole, devices, halo=ExpectedHalo())
    start = notes[0].partition(". Without")[0]
    if hosts == UNEQUAL:
        assert any(note.startswith(start) for note in by_counts.notes)
    assert draft.part is not None
    _, src, dst, train = graph()
    assert draft.sizes == count_sizes(src, dst, draft.part, len(devices.devices), train)


@pytest.mark.parametrize("between", [SLOW, 1e7, 1e9])
@pytest.mark.parametrize("hosts", [ALIKE, UNEQUAL, (("A100", 2), ("A100", 1))])
def test_never_slower_than_the_cut_over_all(hosts: Hosts, between: float, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = cluster(hosts, between)
    draft = planned(devices)
    monkeypatch.setattr(draft_cut, "best_among_sets", lambda graph, over_all, *args, **how: over_all)
    over_all = planned(devices)
    assert draft.forecast.step_seconds <= over_all.forecast.step_seconds
    if between == SLOW and hosts == ALIKE:
        assert draft.forecast.step_seconds < 0.9 * over_all.forecast.step_seconds
    assert draft.baselines == over_all.baselines
    fitting = [each.step_seconds for each in draft.baselines if each.fits]
    if hosts == UNEQUAL:
        assert draft.forecast.step_seconds <= min(fitting)


def test_a_set_whose_memory_does_not_hold_the_graph_is_left() -> None:
    half, quarter = (
        PartSizes(NUM_NODES // parts, NUM_EDGES // parts, halo, halo, 120 // parts)
        for parts, halo in ((2, 0), (4, 300))
    )
    of_half, of_quarter = (steps(cluster(ALIKE, SLOW)).work.bytes(0, sizes) for sizes in (half, quarter))
    assert of_quarter < of_half
    tight = cluster(ALIKE, SLOW, memory_bytes=int((of_quarter + of_half) / 2 / USABLE))
    draft = planned(tight)
    assert all(held <= limit for held, limit in zip(draft.bytes, usable_bytes(tight), strict=True))
    assert min(held_by_host(draft, tight).values()) > 2


def test_clusters_that_were_found_serve_the_sets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    finds: list[Balance] = []

    def find(graph: SymmetricGraph, balance: Balance, seed: int) -> coarse.Hierarchy:
        finds.append(balance)
        return coarse.find_clusters(graph, balance, seed)

    monkeypatch.setattr(repeated_cuts, "find_clusters", find)
    monkeypatch.setattr(coarse, "_FEWEST_CLUSTERS", 60)
    monkeypatch.setattr(draft_cut, "_FEW_EDGES", 0)  # as of a large graph: alike devices have one cut
    devices = cluster((("A100", 2), ("A100", 2), ("A100", 2)), SLOW)
    stages: list[str] = []
    draft = draft_with_cut(
        steps(devices), *graph(), devices, partitioner="clusters", halo=ExpectedHalo(), row_bytes=64.0,
        on_stage=stages.append,
    )  # fmt: skip
    assert max(held_by_host(draft, devices).values()) == NUM_NODES - 4
    assert sum(stage.startswith("cutting the graph: among") for stage in stages) >= 1
    assert len(finds) == 1


@given(st.lists(st.integers(0, 5), min_size=6, max_size=40), st.integers(1, 6), st.integers(0, 10**6))
def test_parts_without_nodes_get_one_each_and_no_other_loses_its_last(parts: list[int], used: int, seed: int) -> None:
    part = np.array(parts, np.int32) % used
    degrees = np.random.default_rng(seed).integers(0, 4, len(part))
    made = with_a_node_for_each(part, 6, degrees)
    before, after = (np.bincount(each, minlength=6) for each in (part, made))
    assert (after[before == 0] == 1).all() and (after >= 1).all()
    moved = np.flatnonzero(made != part)
    assert len(moved) == (before == 0).sum() and (before[made[moved]] == 0).all()
    order = np.sort(degrees)
    assert (degrees[moved] <= order[5]).all(), "of the six nodes of fewest edges"
