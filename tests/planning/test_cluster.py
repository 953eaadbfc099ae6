"""A cluster file gives devices in its order and links of all pairs; what is wrong in it is named by line and field."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from nugnn.planning import derates
from nugnn.planning.cluster import Cluster, cluster_of_machine, cluster_on_paper, read_cluster
from nugnn.planning.cluster_file import ClusterError, LinkFields
from nugnn.planning.datasheet import sheet_of
from nugnn.planning.limits import SHARED_CORES, DeviceLimits
from nugnn.planning.profiles import DeviceProfile, LinkProfile, MachineProfile

GPU = sheet_of("H200").as_profile().model_copy(update={"source": "measured", "uuid": "GPU-a"})
OTHER = GPU.model_copy(update={"uuid": "GPU-b", "gather_bytes": 2e12})
CPU = GPU.model_copy(update={"name": "some CPU", "kind": "cpu", "uuid": None, "multiprocessors": 8})
LINK = LinkProfile(between="devices", via="nccl", bytes_per_second=2e11, latency_seconds=7e-6)
MACHINE = MachineProfile(devices=(GPU, OTHER, CPU), links=(LINK,))
ONE_HOST = "schema: nugnn.cluster/1\nhosts:\n  - name: a\n    devices:\n"


def cluster(folder: Path, text: str) -> Cluster:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return read_cluster(file, lambda kinds, limits: MACHINE)


def profiles(folder: Path, devices: str) -> tuple[DeviceProfile, ...]:
    return cluster(folder, ONE_HOST + devices).profiles


def test_hosts_and_devices_stand_in_the_order_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "host.json").write_text(MACHINE.to_json())
    found = cluster(
        tmp_path,
        """
schema: nugnn.cluster/1
hosts:
  - name: here
    devices: [{device: this machine, count: 2}]
  - name: old
    count: 2
    devices: [{device: T4}, {device: host.json, kind: cpu}]
links:
  between: {gbit_per_second: 8, latency_us: 20}
""",
    )
    assert tuple(device.host for device in found.devices) == ("here", "here", "old-0", "old-0", "old-1", "old-1")
    assert found.profiles[:2] == (GPU, OTHER) and found.profiles[3] == CPU
    assert found.profiles[2] == sheet_of("Tesla T4").as_profile() == found.profiles[4]
    assert [device.is_here for device in found.devices] == [True, True, False, False, False, False]
    assert any("Tesla T4: by its data sheet" in note for note in found.notes)
    assert found.kinds[2] == found.kinds[4] != found.kinds[0]
    file = tmp_path / "cluster.yaml"
    own = read_cluster(file, lambda kinds, limits: MACHINE, host="any name")
    assert own.profiles == (GPU, OTHER) and own.links.is_nccl and own.links.bytes_per_second[0, 1] == 2e11
    file.write_text(file.read_text().replace("this machine", "H100"))
    assert len(read_cluster(file, host="old-1").devices) == 2
    with pytest.raises(ClusterError, match="this host is new, and the file has here, old-0, old-1; name it so"):
        read_cluster(file, host="new")
    assert not found.links.is_nccl and found.links.stages == (True, True, True, False, True, False)


def test_links_are_symmetric_and_a_hosts_way_is_shared(tmp_path: Path) -> None:
    found = cluster(
        tmp_path,
        """
schema: nugnn.cluster/1
hosts:
  - {name: a, devices: [{device: this machine, count: 2}]}
  - {name: b, count: 3, devices: [{device: V100}]}
links:
  between: {gbit_per_second: 80}
  pairs:
    - {ends: [b-0, b-1], gbit_per_second: 800, latency_us: 1}
""",
    )
    rate, latency = found.links.bytes_per_second, found.links.latency_seconds
    assert (rate == rate.T).all() and (latency == latency.T).all()
    assert np.isinf(np.diag(rate)).all() and (np.diag(latency) == 0).all()
    assert rate[0, 1] == 2e11 and latency[0, 1] == 7e-6  # as measured
    assert rate[0, 2] == rate[2, 4] == 1e10 and rate[2, 3] == 1e11 and latency[2, 3] == 1e-6
    assert found.links.hosts == (0, 0, 1, 2, 3) and found.links.is_nccl
    assert found.links.host_bytes_per_second == {0: 1e10, 1: 1e11, 2: 1e11, 3: 1e10}
    both_out = np.zeros((5, 5))
    both_out[0, 4] = both_out[1, 4] = 1e10
    assert found.links.transfer_seconds(both_out)[0] == pytest.approx(2)  # the devices of a host share its card
    inside = cluster(tmp_path, ONE_HOST + "    - {device: V100, count: 2}\n").links
    assert inside.bytes_per_second[0, 1] == pytest.approx(0.8 * 150e9)  # NVLink, by the sheet
    given = ONE_HOST + "    - {device: V100, count: 2}\nlinks: {inside: {gbit_per_second: 16}}\n"
    assert cluster(tmp_path, given).links.bytes_per_second[0, 1] == 2e9


def test_overrides_factors_and_limits_change_the_profile(tmp_path: Path) -> None:
    text = (
        "    - device: H200\n      overrides: {memory_bytes: 10e9, gather_bytes: 1e12, gemm_flops: {fp32: 2e13}}\n"
        "      factors: {gather_bytes: 0.5, gemm_flops: 2}\n      limits: {memory_fraction: 0.5}\n"
    )
    (found,) = profiles(tmp_path, text)
    whole = sheet_of("H200").as_profile()
    assert found.memory_bytes == 5e9 and found.gather_bytes == 5e11
    assert found.gemm_flops["fp32"] == 4e13 and found.gemm_flops["bf16"] == 2 * whole.gemm_flops["bf16"]
    assert found.stream_bytes == whole.stream_bytes
    limited = cluster(tmp_path, ONE_HOST + "    - {device: H200, limits: {sms: 32}}\n").devices[0]
    assert limited.limits == DeviceLimits(sms=32) and limited.profile.gather_bytes < whole.gather_bytes / 2


def test_workers_on_a_cpu_share_it(tmp_path: Path) -> None:
    one, other = profiles(tmp_path, "    - {device: this machine, kind: cpu, count: 2}\n")
    assert one == other and one.gemm_flops["fp32"] == CPU.gemm_flops["fp32"] / 2
    few, many = profiles(
        tmp_path,
        "    - {device: this machine, kind: cpu, limits: {threads: 2}}\n"
        "    - {device: this machine, kind: cpu, limits: {threads: 6}}\n",
    )
    assert many.gather_bytes == pytest.approx(3 * few.gather_bytes)
    chosen = cluster_of_machine(MACHINE, [CPU, CPU], [DeviceLimits(threads=2), DeviceLimits(threads=6)])
    assert chosen.profiles == (few, many)


def test_entries_of_a_host_take_one_card_after_the_other(tmp_path: Path) -> None:
    text = "    - {device: this machine}\n    - {device: this machine, limits: {sms: 66}}\n"
    found = profiles(tmp_path, text)
    assert [profile.uuid for profile in found] == ["GPU-a", "GPU-b"]
    (tmp_path / "one.json").write_text(MachineProfile(devices=(GPU,)).to_json())
    assert [p.uuid for p in profiles(tmp_path, "    - {device: one.json, count: 3}\n")] == [None] * 3
    assert [p.uuid for p in profiles(tmp_path, "    - {device: one.json}\n")] == ["GPU-a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected 'schema: nugnn.cluster/1', 'hosts:'"),
        ("hosts: [", "cluster.yaml, line 1: not valid YAML: while parsing a flow node, "),
        (ONE_HOST + "    - device: T4\n\t  count: 2\n", "yaml, line 6: indent with spaces, not tabs$"),
        ("schema: nugnn.cluster/1\nhosts: []\n", "line 2: hosts is empty: give one host at least"),
        (ONE_HOST + "    - {device: T4, factor: {}}\n", "unknown field 'factor'; did you mean 'factors'. known: "),
        (
            ONE_HOST + "    - {device: T4, overrides: {memory_bytes: 16 GB}}\n",
            "memory_bytes is '16 GB', must be a whole number of bytes, such as 16000000000",
        ),
        (
            ONE_HOST
            + "    - device: T4\n      count: -1\n      a: 1\n      b: 2\nlinks: {inside: {gbit_per_second: fast}}\n",
            "line 6: .*count is -1, must be above 0; line 7: .*'a'.*; line 8: .*'b'.*; and 1 more$",
        ),
        (ONE_HOST + "    - {device: T4}\nlinks: {inside: {gbit_per_second: fast}}\n", "is 'fast', must be a number"),
        (
            ONE_HOST
            + "    - {device: T4}\n  - {name: b, devices: [{device: T4}]}\nlinks:\n  inside: {gbit_per_second: 1}\n",
            "line 7: links.between: is missing",
        ),
        (
            "schema: nugnn.cluster/2\nhosts:\n  - {name: a, devices: [{device: T4}]}\n",
            "line 1: schema is 'nugnn.cluster/2', must be 'nugnn.cluster/1'",
        ),
        (
            ONE_HOST + "    - {device: T4}\n    - {device: T4, speed: 3}\n",
            "line 6: hosts.0.devices.1: unknown field 'speed'; known: device, count, cores, kind",
        ),
        (ONE_HOST + "    - device: T4\n      count: 0\n", "line 6: hosts.0.devices.0.count is 0, must be above 0"),
        (
            ONE_HOST + "    - device: T4\n      count: yes\n",
            "line 6: hosts.0.devices.0.count is true, must be a whole number",
        ),
        (
            ONE_HOST + "    - device: T4\n      count: 2\n      count: 4\n",
            "line 7: hosts.0.devices.0.count is given twice, first on line 6",
        ),
        (ONE_HOST + "    - {device: T4}\nhosts: []\n", "line 6: hosts is given twice, first on line 2"),
        (
            ONE_HOST.replace("name: a", "name: a\n    count: 2")
            + "    - {device: T4}\nlinks:\n  between: {gbit_per_second: 9}\n  pairs:\n"
            + "  - {ends: [a-0, a-1], gbit_per_second: 1}\n  - {ends: [a-1, a-0], gbit_per_second: 2}\n",
            "line 11: links.pairs.1.ends: the link of a-1 and a-0 is already that of links.pairs.0",
        ),
        (ONE_HOST + "    - device: T44\n", "line 5: hosts.0.devices.0.device: no data sheet of 'T44'; near it: "),
        (
            ONE_HOST + "    - {device: T4, limits: {sms: 41}}\n",
            "line 5: hosts.0.devices.0.limits: sms is 41, and Tesla T4 has 40",
        ),
        (
            ONE_HOST + "    - {device: T4, limits: {memory_fraction: 1.5}}\n",
            "memory_fraction is 1.5, must be up to 1",
        ),
        (ONE_HOST + "    - {device: T4, kind: cpu}\n", "devices.0.kind: is for a profile or 'this machine'"),
        (ONE_HOST + "    - {device: gone.json}\n", "devices.0.device: .*gone.json cannot be read: No such file"),
        (ONE_HOST + "    - {device: this machine, count: 3}\n", "has 2 GPUs, and 3 are asked for"),
        (
            ONE_HOST + "    - {device: T4}\n  - {name: a, devices: [{device: T4}]}\n",
            "line 6: hosts.1.name: 'a' is the name of two hosts",
        ),
        (
            ONE_HOST + "    - {device: T4}\n  - {name: b, devices: [{device: T4}]}\n",
            "line 6: hosts.1: links.between is missing",
        ),
        (
            ONE_HOST + "    - {device: T4}\nlinks:\n  pairs:\n  - {ends: [a, c], gbit_per_second: 1}\n",
            "line 8: links.pairs.0.ends: there is no host 'c'",
        ),
        (
            ONE_HOST + "    - {device: T4}\nlinks: {inside: {gbit_per_second: .inf}}\n",
            "gbit_per_second is inf, must be finite",
        ),
        (ONE_HOST + "    - {device: T4, count: 5000}\n", "line 2: hosts: 5000 devices, and a plan may have 4096"),
        (
            ONE_HOST.replace("name: a", "name: a\n    count: 2") + "    - {device: this machine}\n"
            "links: {between: {gbit_per_second: 1}}\n",
            "only one host can be 'this machine'",
        ),
        ("a: &a [1, 2]\nb: &b [" + "*a, " * 30 + "]\nc: [" + "*b, " * 30000 + "]\n", "more than 100000 values"),
        ("schema: &a [*a]\n", "."),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as raised:
        cluster(tmp_path, text)
    assert str(raised.value).startswith(str(tmp_path / "cluster.yaml")) and "\n" not in str(raised.value)


def test_no_file_and_no_machine_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no such file; "):
        read_cluster(tmp_path / "none.yaml")
    (tmp_path / "c.yaml").write_text(ONE_HOST + "    - {device: this machine}\n")
    with pytest.raises(ClusterError, match="cannot be looked at here"):
        read_cluster(tmp_path / "c.yaml")


def test_links_of_a_machine_by_uuid() -> None:
    fast = LINK.model_copy(update={"ends": ("GPU-b", "GPU-a"), "bytes_per_second": 3e11})
    copies = LinkProfile(between="host", via="copy", bytes_per_second=2.5e10, latency_seconds=1e-5)
    machine = MachineProfile(devices=(GPU, OTHER, CPU), links=(fast, LINK, copies))
    assert cluster_of_machine(machine, [GPU, OTHER]).links.bytes_per_second[0, 1] == 3e11
    assert len(cluster_of_machine(machine, [GPU]).devices) == 1
    shared = cluster_of_machine(machine, [GPU, GPU])
    halves = shared.profiles
    assert halves[0].gather_bytes == GPU.gather_bytes / 2 and halves[0].memory_bytes == GPU.memory_bytes // 2
    assert not shared.links.is_nccl and shared.links.staging_seconds_per_byte is not None
    assert shared.links.staging_seconds_per_byte[0] == 1 / 2.5e10


def test_workers_of_a_cpu_exchange_and_add_up_as_it_was_measured() -> None:
    gloo = LinkProfile(
        between="devices", ends=("cpu", "cpu"), via="gloo", bytes_per_second=4e8, latency_seconds=2e-4,
        sum_bytes_per_second=8e8, sum_latency_seconds=1e-4,
    )  # fmt: skip
    links = cluster_of_machine(MachineProfile(devices=(CPU,), links=(gloo,)), [CPU, CPU]).links
    assert links.bytes_per_second[0, 1] == 4e8 and links.latency_seconds[0, 1] == 2e-4
    assert links.all_reduce_seconds(8e6) == pytest.approx(2 * 1e-4 + 8e6 / 8e8)
    plain = gloo.model_copy(update={"sum_bytes_per_second": None, "sum_latency_seconds": None})
    links = cluster_of_machine(MachineProfile(devices=(CPU,), links=(plain,)), [CPU, CPU]).links
    assert links.all_reduce_seconds(8e6) == pytest.approx(2 * 2e-4 + 8e6 / 4e8)


def test_a_described_cluster_has_what_was_measured_of_its_cores_and_of_rested_links(tmp_path: Path) -> None:
    gloo = LinkProfile(
        between="devices", via="gloo", bytes_per_second=4e8, latency_seconds=2e-4, burst_seconds=3e-3,
        sum_bytes_per_second=8e8, sum_latency_seconds=1e-4, sum_core_seconds_per_byte=6e-10,
    )  # fmt: skip
    (tmp_path / "cpu.json").write_text(MachineProfile(devices=(CPU,), links=(gloo,)).to_json())
    (tmp_path / "bare.json").write_text(MachineProfile(devices=(CPU,)).to_json())
    alone = "    - {device: cpu.json, count: 2}\n"
    links = cluster(tmp_path, ONE_HOST + alone).links
    assert links.burst_seconds == 3e-3 and links.core_seconds(0, 1e6) == pytest.approx(6e-4)
    # the same processor works for bytes, however fast a file says that they go; rests were not measured at that rate
    links = cluster(tmp_path, ONE_HOST + alone + "links:\n  inside: {gbit_per_second: 1}\n").links
    assert links.burst_seconds == 0.0 and links.core_seconds(0, 1e6) == pytest.approx(6e-4)
    second = "  - {name: other, devices: [{device: bare.json}]}\n"
    links = cluster(
        tmp_path, ONE_HOST + "    - {device: cpu.json}\n" + second + "links:\n  between: {gbit_per_second: 1}\n"
    ).links
    assert links.burst_seconds == 0.0  # nobody has measured a way between hosts
    assert (links.core_seconds(0, 1e6), links.core_seconds(1, 1e6)) == (pytest.approx(6e-4), 0.0)


def test_examples_of_the_page_are_clusters(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    examples = [block.partition("```")[0] for block in page.split("```yaml\n")[1:]]
    assert len(examples) == 2
    sizes = [len(cluster(tmp_path, example).devices) for example in examples]
    assert sizes == [8, 2]


def test_cpus_are_described_by_name(tmp_path: Path) -> None:
    text = "    - {device: EPYC Zen 4, cores: 192, overrides: {memory_bytes: 4e11}}\n"
    found = cluster(tmp_path, ONE_HOST + text)
    (profile,) = found.profiles
    assert (profile.kind, profile.source, profile.multiprocessors) == ("cpu", "sheet", 192)
    assert profile.memory_bytes == 400_000_000_000
    # two sockets of twelve channels of 4800 MT/s; 32 operations of a core in a clock of 2.6 GHz
    assert profile.stream_bytes == pytest.approx(2 * 12 * 4800e6 * 8 * derates.CPU_STREAM)
    assert profile.gemm_flops["fp32"] == pytest.approx(192 * 2.6e9 * 32 * derates.CPU_PRODUCT)
    (note,) = found.notes
    assert note.startswith("EPYC Zen 4: by rule, which may be off by tens of percent; 2.6 GHz, 12 channels a socket")
    assert "memory" not in note and "at most" not in note


@pytest.mark.parametrize(
    ("entries", "is_said"),
    [
        ("{device: EPYC Zen 4, cores: 4, count: 4}", False),
        ("{device: EPYC Zen 4, cores: 4, count: 5}", True),
        ("{device: EPYC Zen 4, cores: 4, count: 2, limits: {threads: 2}}", False),
        ("{device: EPYC Zen 4, cores: 4, count: 2, limits: {threads: 3}}", True),
    ],
)
def test_more_threads_than_cores_are_said_of_a_described_host_as_of_this_one(
    tmp_path: Path, entries: str, is_said: bool
) -> None:
    notes = cluster(tmp_path, ONE_HOST + f"    - {entries}\n").notes
    (name,) = re.findall(r"name: (\w+)", ONE_HOST)
    assert (f"{name}: {SHARED_CORES}" in notes) == is_said


def test_simulated_hosts_share_cores_likewise() -> None:
    between = LinkFields(gbit_per_second=10)
    few, many = (
        cluster_on_paper(["EPYC 9654"], per_host, per_host=per_host, between=between).notes for per_host in (2, 200)
    )
    assert not any(SHARED_CORES in note for note in few) and any(SHARED_CORES in note for note in many)


def test_a_cpu_has_what_a_socket_has_at_most_and_says_so(tmp_path: Path) -> None:
    found = cluster(tmp_path, ONE_HOST + "    - {device: AMD EPYC 9654 96-Core Processor}\n    - {device: T4}\n")
    assert [profile.kind for profile in found.profiles] == ["cpu", "cuda"]
    assert found.profiles[0].multiprocessors == 128 and found.profiles[0].memory_bytes == 12 * 16 * 2**30
    assert "128 cores, as many as EPYC Zen 4 has in a socket at most (cores)" in found.notes[0]
    assert "192 GiB of memory (overrides: memory_bytes)" in found.notes[0]


def test_workers_on_a_named_cpu_share_it_within_their_limits(tmp_path: Path) -> None:
    (alone,) = profiles(tmp_path, "    - {device: EPYC Zen 3, cores: 64}\n")
    one = "    - {device: EPYC Zen 3, cores: 64, "
    text = f"{one}limits: {{threads: 16}}}}\n{one}count: 2}}\n"
    found = profiles(tmp_path, text)
    assert [profile.multiprocessors for profile in found] == [16, 24, 24]
    assert sum(p.gemm_flops["fp32"] for p in found) == pytest.approx(alone.gemm_flops["fp32"])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{device: EPYC Zen 9}", "no data sheet of 'EPYC Zen 9'.*CPUs near it: EPYC Zen"),
        ("{device: EPIC Zen 4, cores: 8}", "no data sheet of 'EPIC Zen 4'.*CPUs near it: EPYC Zen 4"),
        ("{device: T4, cores: 8}", "cores: is for a CPU by its name; leave it out"),
        ("{device: this machine, cores: 8}", "cores: is for a CPU by its name"),
        ("{device: EPYC 7763, kind: cpu}", "kind: is for a profile or 'this machine'; leave it out"),
        ("{device: EPYC 7763, cores: 0}", "cores"),
        ("{device: EPYC 7763, limits: {sms: 8}}", "is a CPU; limit its threads"),
        ("{device: EPYC 7763, limits: {threads: 65}}", "threads=65: .*EPYC 7763 has 64 cores to use; give 64 or fewer"),
    ],
)
def test_what_is_wrong_with_a_named_cpu_is_said(tmp_path: Path, entry: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        profiles(tmp_path, f"    - {entry}\n")
