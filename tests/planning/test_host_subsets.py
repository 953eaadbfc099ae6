"""Sets of a cluster's devices: those that stand for each other are looked at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.cluster import Cluster, ClusterDevice
from nugnn.planning.datasheet import sheet_of
from nugnn.planning.host_subsets import HostSubsets
from nugnn.planning.links import Links


def cluster(hosts: list[list[str]]) -> Cluster:
    devices = [
        ClusterDevice(host=f"host-{number}", profile=sheet_of(name).as_profile())
        for number, names in enumerate(hosts)
        for name in names
    ]
    numbers = [number for number, names in enumerate(hosts) for _ in names]
    same = np.equal.outer(numbers, numbers)
    links = Links(np.where(same, 1e11, 1e9), np.where(same, 1e-5, 3e-5), tuple(numbers), {}, is_nccl=True)
    return Cluster(devices=tuple(devices), links=links)


HOST = st.sampled_from([["T4"], ["T4", "T4"], ["T4", "A100"], ["A100", "T4", "V100"]])


@given(st.lists(HOST, min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_sets_near_another_are_all_that_differ_in_one_host_or_one_kind_of_its_devices(hosts, random):
    subsets = HostSubsets(cluster(hosts))
    units = frozenset(unit for unit in subsets.all if random.random() < 0.6)
    near = [subsets.name(other) for other in subsets.near(units)]
    own_hosts = [frozenset(unit for unit in subsets.all if subsets._host_of[unit] == f"host-{number}")
                 for number in range(len(hosts))]  # fmt: skip
    changes = [*own_hosts, *(frozenset({unit}) for unit in subsets.all)]
    every = {other for change in changes for other in (units | change, units - change)} - {units, frozenset()}
    assert set(near) == {subsets.name(other) for other in every}


def test_of_many_alike_hosts_a_few_sets_are_near_any():
    """Four units of two sorts of host; a host or a unit of one in the set goes, one of another comes."""
    subsets = HostSubsets(cluster([["T4", "A100"], ["V100"]] * 100))
    half = frozenset(unit for unit in subsets.all if unit % 6 < 3)
    assert len(list(subsets.near(half))) <= 8
