"""A host more never makes a plan by counts slower, and devices that are alike on one host have equal shares."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nugnn.config import TrainConfig
from nugnn.plan_run import subject_by_counts
from nugnn.plan_subject import PlanSubject
from nugnn.planned import plan_by_counts
from nugnn.planning.cluster import Cluster, _Builder
from nugnn.planning.cluster_file import ClusterFields
from nugnn.planning.graph_statistics import parse_statistics
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.left_out import notes_of_left_out
from nugnn.planning.plan import Plan
from nugnn.simulate_run import simulate

GRAPH = parse_statistics("ogbn-products")
Hosts = tuple[tuple[str, int], ...]


@functools.cache
def subject(is_split: bool) -> PlanSubject:
    config = TrainConfig(dataset="counts", model="sage")
    return subject_by_counts(config, GRAPH, ["cuda"], 2 if is_split else 1)


def cluster(hosts: Hosts, gbit: float) -> Cluster:
    fields = ClusterFields.model_validate(
        {
            "schema": "nugnn.cluster/1",
            "hosts": [
                {"name": f"node-{number}", "devices": [{"device": name, "count": count}]}
                for number, (name, count) in enumerate(hosts)
            ],
            "links": {"between": {"gbit_per_second": gbit}},
        },
        by_alias=True,
    )
    return _Builder(fields, Path(), None).cluster(None)


@functools.cache
def planned(hosts: Hosts, gbit: float) -> Plan:
    devices = cluster(hosts, gbit)
    return plan_by_counts(subject(len(devices.devices) > 1), devices, halo=GRAPH.expected_halo).plan


A100, T4 = "A100-SXM4-80GB", "T4"


@pytest.mark.parametrize("gbit", [10.0, 100.0, 3200.0])
@pytest.mark.parametrize("hosts", [((A100, 4), (A100, 4)), ((T4, 2), (A100, 4), (T4, 2)), ((A100, 4), (A100, 2))])
def test_a_host_more_never_makes_it_slower(hosts: Hosts, gbit: float) -> None:
    plan = planned(hosts, gbit)
    for left_out in range(len(hosts)):
        without = planned((*hosts[:left_out], *hosts[left_out + 1 :]), gbit)
        assert plan.step_seconds <= 1.01 * without.step_seconds + 1e-3  # at most a sum of gradients more
    by_host: dict[tuple[str, str], list[float]] = {}
    for device in plan.devices:
        by_host.setdefault((device.host, device.name), []).append(device.sizes.inner)
    assert all(max(each) - min(each) <= max(1, 0.01 * max(each)) for each in by_host.values())


def test_a_host_that_does_not_pay_is_named_with_the_time_without_it() -> None:
    alone = planned(((A100, 4),), 100.0).step_seconds
    plan = planned(((A100, 4), (A100, 4)), 100.0)
    assert (
        plan.step_seconds <= 1.01 * alone + 1e-3
        and sorted(d.share > 0.24 for d in plan.devices) == [False] * 4 + [True] * 4
    )
    assert any(
        "4 x NVIDIA A100-SXM4-80GB on node-1 would hardly be used" in n and "Without them" in n for n in plan.notes
    )
    mixed = planned(((A100, 4), (T4, 2), (T4, 2)), 100.0)
    assert mixed.step_seconds <= 1.01 * alone + 1e-3 and min(device.share for device in mixed.devices[:4]) > 0.2
    assert any("2 x Tesla T4 on each of node-1 and node-2 would hardly" in note for note in mixed.notes)


@pytest.mark.parametrize(("without", "is_shorter"), [(0.009, True), (0.0102, False)])
def test_a_note_against_a_device_of_the_plan_says_that_it_is_kept_and_what_to_do(
    without: float, is_shorter: bool
) -> None:
    devices = cluster(((A100, 3),), 1.0)
    subsets = SimpleNamespace(single_devices=lambda: [])
    (note,) = notes_of_left_out([0.5, 0.499, 0.001], 0.01, devices, cast(Any, subsets), lambda ranks: without)
    assert f"Without it an epoch would take {1000 * without:.3g} ms and with it 10 ms" in note
    assert note.endswith("plan for the other 2 alone to have the shorter epoch") == is_shorter
    assert ("This plan has all of them, as each device that was asked for gets a node at least" in note) == is_shorter
    subsets = SimpleNamespace(single_devices=lambda: [1])
    (note,) = notes_of_left_out([0.4, 0.3, 0.3], 0.01, devices, cast(Any, subsets), lambda ranks: 0.005)
    assert "alone would take 5 ms an epoch in place of 10 ms" in note and "plan for that one alone" in note


def test_hosts_are_used_where_the_links_are_fast() -> None:
    plan = planned(((A100, 4), (A100, 4)), 3200.0)
    assert min(device.share for device in plan.devices) > 0.1 and not any("hardly" in note for note in plan.notes)


def test_growth_over_a_slow_link_stays() -> None:
    config = TrainConfig(dataset="counts", model="sage")
    from nugnn.planning.cluster_file import LinkFields

    rows, _ = simulate(
        config, "ogbn-products", ["A100"], [8, 16], per_host=8, between=LinkFields(gbit_per_second=100.0)
    )
    assert rows[0].epoch_seconds and rows[1].epoch_seconds and rows[1].epoch_seconds < 1.05 * rows[0].epoch_seconds
    assert (rows[0].used, rows[1].used) == (8, 8)


def test_what_does_not_fit_names_hosts_and_groups_alike_devices() -> None:
    devices = cluster(((T4, 4), (A100, 1)), 100.0)
    papers = parse_statistics("ogbn-papers100M")
    config = TrainConfig(dataset="counts", model="sage")
    with pytest.raises(DoesNotFitError, match="4 x Tesla T4 on node-0: "):
        plan_by_counts(subject_by_counts(config, papers, ["cuda"], 2), devices, halo=papers.expected_halo)
