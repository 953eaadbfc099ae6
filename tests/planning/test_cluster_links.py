"""Links of a cluster: a pair's own measurement first, then one for all, then sheets; the memory of hosts between."""

from __future__ import annotations

import numpy as np
import pytest

from nugnn.planning.cluster import ClusterDevice, cluster_of_machine
from nugnn.planning.cluster_links import LOOPBACK, Way, link_inside, linked
from nugnn.planning.datasheet import sheet_of
from nugnn.planning.links import Links, Sums
from nugnn.planning.profiles import DeviceProfile, LinkProfile, MachineProfile

GPU = sheet_of("H200").as_profile().model_copy(update={"source": "measured", "uuid": "GPU-a"})
OTHER, THIRD = (GPU.model_copy(update={"uuid": uuid}) for uuid in ("GPU-b", "GPU-c"))
CPU = GPU.model_copy(update={"name": "some CPU", "kind": "cpu", "uuid": None, "multiprocessors": 8})
NVLINK = LinkProfile(between="devices", via="nccl", bytes_per_second=2e11, latency_seconds=2e-5)


def _copies(uuid: str, rate: float) -> LinkProfile:
    return LinkProfile(between="host", ends=(uuid, "cpu"), via="copy", bytes_per_second=rate, latency_seconds=1e-5)


def _links(chosen: list[DeviceProfile], *links: LinkProfile) -> Links:
    return cluster_of_machine(MachineProfile(devices=(GPU, OTHER, THIRD, CPU), links=links), chosen).links


def test_cpus_and_gpus_of_one_run_meet_in_the_memory_of_the_host() -> None:
    mixed = _links([GPU, CPU], NVLINK, _copies("GPU-b", 5e9), _copies("GPU-a", 1e10))
    assert not mixed.is_nccl and mixed.stages == (True, False)
    seconds = mixed.exchange_seconds(np.array([[0.0, 1.5e9], [0.0, 0.0]]))
    wire = 1.5e9 / LOOPBACK.bytes_per_second + LOOPBACK.latency_seconds  # NCCL's link is not theirs
    assert seconds == pytest.approx([wire + 0.15, wire])
    gloo = LinkProfile(between="devices", via="gloo", bytes_per_second=3e9, latency_seconds=0.0)
    assert _links([GPU, CPU], NVLINK, gloo).bytes_per_second[0, 1] == 3e9  # as it was measured for all pairs


def test_copies_go_by_the_sheet_where_nobody_has_measured_them() -> None:
    by_sheet = _links([GPU, CPU]).staging_seconds_per_byte
    assert by_sheet is not None and by_sheet.tolist() == [1 / sheet_of("H200").host_link().bytes_per_second, 0.0]
    unknown = _links([GPU.model_copy(update={"name": "no card"}), CPU]).staging_seconds_per_byte
    assert unknown is not None and unknown.tolist() == [1e-10, 0.0]


def test_a_device_s_own_copies_go_before_those_for_all() -> None:
    for_all = LinkProfile(between="host", via="copy", bytes_per_second=2e9, latency_seconds=1e-5)
    links = _links([GPU, OTHER, CPU], for_all, _copies("GPU-a", 1e10))
    assert links.staging_seconds_per_byte is not None
    assert links.staging_seconds_per_byte.tolist() == [1e-10, 5e-10, 0.0]


def test_a_gpu_that_nobody_has_seen_is_no_cpu() -> None:
    unseen = GPU.model_copy(update={"uuid": None, "source": "datasheet"})
    of_cpus = LinkProfile(between="devices", ends=("cpu", "cpu"), via="gloo", bytes_per_second=9e8, latency_seconds=0.0)
    assert link_inside(unseen, unseen, [of_cpus], is_nccl=False).bytes_per_second == LOOPBACK.bytes_per_second
    assert link_inside(CPU, CPU, [of_cpus], is_nccl=False).bytes_per_second == 9e8


def test_a_pairs_own_link_goes_before_one_for_all() -> None:
    own = LinkProfile(
        between="devices", ends=("GPU-a", "GPU-b"), via="nccl", bytes_per_second=1e10, latency_seconds=1e-5
    )
    links = _links([OTHER, GPU, THIRD], NVLINK, own)
    assert (links.bytes_per_second[0, 1], links.latency_seconds[0, 1]) == (1e10, 1e-5)
    assert (links.bytes_per_second[0, 2], links.latency_seconds[0, 2]) == (2e11, 2e-5)
    assert links.is_nccl and not any(links.stages)
    of_others = LinkProfile(
        between="devices", ends=("GPU-a", "cpu"), via="gloo", bytes_per_second=7e8, latency_seconds=0.0
    )
    of_cpus = of_others.model_copy(update={"ends": ("cpu", "cpu"), "bytes_per_second": 9e8})
    assert _links([CPU, CPU], of_others, of_cpus).bytes_per_second[0, 1] == 9e8


def test_gpus_without_a_link_go_as_the_slower_sheet_says() -> None:
    a100, t4 = (sheet_of(name).as_profile() for name in ("A100-SXM4-40GB", "Tesla T4"))
    quick = link_inside(a100, a100, [], is_nccl=True).bytes_per_second
    slow = sheet_of("Tesla T4").host_link().bytes_per_second
    for pair in ((a100, t4), (t4, a100), (t4, t4)):
        assert link_inside(*pair, [], is_nccl=True).bytes_per_second == slow < quick


def test_sums_and_cores_are_known_of_the_hosts_where_they_were_measured() -> None:
    gloo = LinkProfile(
        between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=1e-4,
        sum_bytes_per_second=4e9, sum_latency_seconds=1e-5, sum_core_seconds_per_byte=5e-10, burst_seconds=2e-3,
    )  # fmt: skip
    bare = LinkProfile(between="devices", via="gloo", bytes_per_second=2e9, latency_seconds=1e-4)
    measured = {0: [gloo], 1: [bare]}
    devices = [ClusterDevice(host=host, profile=CPU) for host in ("a", "a", "b", "b")]

    def link(one: int, other: int) -> Way:
        if devices[one].host != devices[other].host:
            return Way(1e8, 3e-5)
        return link_inside(CPU, CPU, measured[0 if devices[one].host == "a" else 1], is_nccl=False)

    links = linked(devices, link, measured, is_nccl=False)
    assert links.hosts == (0, 0, 1, 1) and links.host_bytes_per_second == {0: 1e8, 1: 1e8}
    assert links.bytes_per_second[[0, 2, 0], [1, 3, 2]].tolist() == [1e9, 2e9, 1e8]
    assert links.sums_inside == {0: Sums(4e9, 1e-5, None, 5e-10)} and links.core_seconds_per_byte == {0: 5e-10}
    assert links.burst_seconds == 0.0  # ways of which nobody has measured it
    assert links.among([0, 1]).all_reduce_seconds(1e6) == pytest.approx(2 * (1e-5 + 1e6 / 2 / 4e9))
    one_host = linked(devices[:2], link, measured, is_nccl=False)
    assert one_host.burst_seconds == 2e-3


def test_cpus_of_one_link_are_connected_as_its_host() -> None:
    """By a profile of one machine, and by its link alone."""
    gloo = LinkProfile(
        between="devices", ends=("cpu", "cpu"), via="gloo", bytes_per_second=4e8, latency_seconds=2e-4,
        sum_bytes_per_second=8e8, sum_latency_seconds=1e-4, few_seconds=1e-5, sum_core_seconds_per_byte=6e-10,
        burst_seconds=3e-3,
    )  # fmt: skip
    links, alike = _links([CPU] * 3, gloo), Links.of_host(3, gloo)
    sent = np.random.default_rng(0).uniform(0, 1e8, (3, 3))
    assert links.exchange_seconds(sent).tolist() == alike.exchange_seconds(sent).tolist()
    for num_bytes in (1e3, 1e7):
        assert links.all_reduce_seconds(num_bytes) == alike.all_reduce_seconds(num_bytes)
        assert links.passing_seconds(num_bytes) == alike.passing_seconds(num_bytes)
        assert links.core_seconds(1, num_bytes) == alike.core_seconds(1, num_bytes)
    assert links.of_rank(1) == alike.of_rank(1) and links.burst_seconds == alike.burst_seconds


@pytest.mark.parametrize("has_slow_pair", [False, True])
def test_places_say_which_ways_between_hosts_are_the_same_and_a_link_is_asked_once_for_them(has_slow_pair):
    names = [f"host-{number // 2}" for number in range(24)]
    cards = [sheet_of("T4" if number % 2 else "A100-SXM4-80GB").as_profile() for number in range(24)]
    devices = [ClusterDevice(host=name, profile=card) for name, card in zip(names, cards, strict=True)]
    slow = {"host-3", "host-7"} if has_slow_pair else set()
    asked = []

    def link(one: int, other: int) -> Way:
        ends = {devices[one].host, devices[other].host}
        asked.append(ends)
        if len(ends) == 1:
            return link_inside(devices[one].profile, devices[other].profile, [], is_nccl=True)
        return Way(1e8, 1e-3) if ends == slow else Way(1e9, 3e-5)

    each = linked(devices, link, {}, is_nccl=True)
    asked.clear()
    places = [name if name in slow else None for name in names]
    by_place = linked(devices, link, {}, is_nccl=True, places=places)
    assert (by_place.bytes_per_second == each.bytes_per_second).all()
    assert (by_place.latency_seconds == each.latency_seconds).all()
    assert by_place.host_bytes_per_second == each.host_bytes_per_second == dict.fromkeys(range(12), 1e9)
    assert sum(len(ends) == 2 for ends in asked) == (4 if has_slow_pair else 1)
