"""Devices of plans and clusters are found on this machine by who they are; profiles are kept by that, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nugnn import machine_profiles, profile_run
from nugnn.fit_plan import request_of
from nugnn.machine_profiles import are_devices_alike, cluster_here, kept_profile, profile_of_this_machine
from nugnn.plan_request import found_here, this_machine_for
from nugnn.planning import device_facts
from nugnn.planning.cluster import ClusterError, read_cluster
from nugnn.planning.datasheet import cpu_sheet, sheet_of
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.profiles import DeviceProfile, MachineProfile

GPUS = [("NVIDIA H200", "GPU-a"), ("NVIDIA H200", "GPU-b"), ("Tesla T4", "GPU-c")]
CUDA = [torch.device("cuda", number) for number in range(3)]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with two H200 and a T4, as torch would tell."""
    monkeypatch.setenv("NUGNN_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(device_facts, "versions", lambda *, has_gpu: {"torch": "2"})
    names = {"device_name": 0, "device_uuid": 1}
    for name, column in names.items():
        real = getattr(device_facts, name)
        monkeypatch.setattr(
            device_facts, name, lambda d, c=column, r=real: GPUS[d.index][c] if d.type == "cuda" else r(d)
        )
    memory = device_facts.memory_bytes
    monkeypatch.setattr(
        device_facts,
        "memory_bytes",
        lambda d: sheet_of(GPUS[d.index][0]).as_profile().memory_bytes if d.type == "cuda" else memory(d),
    )
    cores = device_facts.num_multiprocessors
    monkeypatch.setattr(
        device_facts,
        "num_multiprocessors",
        lambda d: sheet_of(GPUS[d.index][0]).multiprocessors if d.type == "cuda" else cores(d),
    )


def known(*devices: tuple[str, str | None]) -> Sequence[DeviceProfile]:
    return [sheet_of(name).as_profile().model_copy(update={"uuid": uuid}) for name, uuid in devices]


def test_gpus_are_found_by_uuid_or_name_one_after_the_other() -> None:
    assert found_here(known(("H200", "GPU-b"), ("H200", "GPU-a"))) == [CUDA[1], CUDA[0]]
    assert found_here(known(("T4", None), ("H200", None), ("H200", None))) == [CUDA[2], CUDA[0], CUDA[1]]
    assert found_here(known(("T4", None), ("T4", None))) == [CUDA[2]] * 2  # workers share it
    with pytest.raises(
        ValueError, match=r"worker 1 is to compute on GPU-z, and this machine has NVIDIA H200, Tesla T4"
    ):
        found_here(known(("H200", None), ("H200", "GPU-z")))
    with pytest.raises(ValueError, match="worker 0 is to compute on NVIDIA A100"):
        found_here(known(("A100", None)))


def test_alike_is_what_cannot_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("nugnn.limited.own_nodes", lambda: (tuple(range(6)),))
    assert are_devices_alike(CUDA[:2], None) and are_devices_alike([cpu] * 3, None)
    assert not are_devices_alike(CUDA[1:], None) and not are_devices_alike([CUDA[0], cpu], None)
    assert not are_devices_alike([CUDA[0], CUDA[0], CUDA[1]], None)  # two share one
    assert not are_devices_alike(CUDA[:2], [DeviceLimits(), DeviceLimits(sms=32)])
    assert are_devices_alike(CUDA[:2], [DeviceLimits(sms=32)] * 2)
    assert not are_devices_alike([cpu] * 4, None)  # two of them have two cores, two have one
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert are_devices_alike([cpu] * 4, None)


@pytest.mark.parametrize(("asked", "expected"), [(None, [3, 2]), ("2", [2, 2])])
def test_workers_on_the_cpu_are_planned_with_the_threads_that_they_will_have(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, expected: list[int]
) -> None:
    monkeypatch.setattr("nugnn.limited.own_nodes", lambda: (tuple(range(5)),))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    cpu = torch.device("cpu")
    cluster = cluster_here([cpu] * 2, None, MachineProfile(devices=(cpu_sheet().as_profile(5),)))
    assert [profile.multiprocessors for profile in cluster.profiles] == expected
    first, second = (profile.gather_bytes for profile in cluster.profiles)
    assert first / second == pytest.approx(expected[0] / expected[1])


@pytest.mark.parametrize("way", ["sheets", "measured", "file"])
@pytest.mark.parametrize(
    ("asked", "limits", "cores", "expected"),
    [
        (None, [None, None], 8, [4, 4]),
        ("4", [None, None], 8, [4, 4]),
        ("2", [None, None], 8, [2, 2]),
        ("2", [None], 8, [2]),
        ("1", [3, None], 8, [3, 1]),
        ("1", [3], 8, [3]),
        ("3", [None, None, None], 9, [3, 3, 3]),
    ],
)
def test_a_worker_is_planned_at_the_speed_of_its_threads_whoever_said_how_many(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    way: str,
    asked: str | None,
    limits: list[int | None],
    cores: int,
    expected: list[int],
) -> None:
    """Each has its cores to itself: nothing that the others do makes its products slower."""
    sheet = replace(cpu_sheet(), cores=16, threads=16)
    monkeypatch.setattr(machine_profiles, "cpu_sheet", lambda: sheet)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in ("worker_cores", "worker_environment"):
        monkeypatch.setattr(f"nugnn.{module}.own_cores", lambda: tuple(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)

    def measured(*_: Any, threads: int = 0, **__: Any) -> Any:
        machine = MachineProfile(devices=(sheet.as_profile(threads or profile_run.threads_of_cpu()),))
        return SimpleNamespace(machine=machine, notes=())

    monkeypatch.setattr(machine_profiles, "profile_machine", measured)
    each = [DeviceLimits(threads=limit) for limit in limits]
    if way == "file":
        texts = [f", limits: {{threads: {limit}}}" if limit else "" for limit in limits]
        entries = ", ".join(f"{{device: this machine{text}}}" for text in texts)
        (tmp_path / "c.yaml").write_text(f"schema: nugnn.cluster/1\nhosts: [{{name: a, devices: [{entries}]}}]\n")
        cluster = read_cluster(tmp_path / "c.yaml", this_machine_for("any", str, str))
    else:
        machine = profile_of_this_machine(["cpu"] * len(each), "any" if way == "sheets" else "anew", each)
        cluster = cluster_here([torch.device("cpu")] * len(each), each, machine)
    assert [profile.multiprocessors for profile in cluster.profiles] == expected
    alone = [sheet.as_profile(threads) for threads in expected]
    for rate in (lambda profile: profile.gemm_flops["fp32"], lambda profile: profile.cached_gather_bytes):
        assert [rate(each) for each in cluster.profiles] == pytest.approx([rate(each) for each in alone])


def test_a_limit_of_more_threads_than_cores_is_refused_whatever_the_user_has_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sheet = replace(cpu_sheet(), cores=16, threads=16)
    monkeypatch.setattr(machine_profiles, "cpu_sheet", lambda: sheet)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("nugnn.worker_environment.own_cores", lambda: tuple(range(4)))
    entry = "{device: this machine, limits: {threads: 8}}"
    (tmp_path / "c.yaml").write_text(f"schema: nugnn.cluster/1\nhosts: [{{name: a, devices: [{entry}]}}]\n")
    for asked in ("2", ""):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        with pytest.raises(ClusterError, match=r"threads=8: .* has 4 cores to use; give 4 or fewer"):
            read_cluster(tmp_path / "c.yaml", this_machine_for("any", str, str))


def test_the_only_worker_on_the_cpu_has_the_threads_that_others_on_gpus_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nugnn.limited.own_nodes", lambda: (tuple(range(6)),))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    gpus = [sheet_of("H200").as_profile().model_copy(update={"uuid": name}) for name in ("GPU-a", "GPU-b")]
    whole = replace(cpu_sheet(), cores=6, threads=6).as_profile()
    cluster = cluster_here([*CUDA[:2], torch.device("cpu")], None, MachineProfile(devices=(*gpus, whole)))
    assert cluster.profiles[2].multiprocessors == 2
    assert cluster.profiles[2].gemm_flops["fp32"] == pytest.approx(whole.gemm_flops["fp32"] / 3)


def test_sheets_are_enough_where_nothing_need_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_profiles, "profile_machine", None)
    machine = profile_of_this_machine(["cuda", "cuda"], "any")
    assert [(device.name, device.uuid) for device in machine.devices] == GPUS
    cluster = cluster_here([CUDA[2], CUDA[0]], [DeviceLimits(), DeviceLimits(sms=66)], machine)
    assert cluster.profiles[0].name == "Tesla T4" and cluster.profiles[1].multiprocessors == 66
    assert cluster.links.is_nccl
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert not cluster_here([CUDA[2], CUDA[0]], None, machine).links.is_nccl


def test_profiles_are_kept_by_devices_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept_profile("cuda", 4)
    assert kept_profile("cuda", 2) == before != kept_profile("cpu", 4) != kept_profile("cpu", 2)
    monkeypatch.setattr(device_facts, "versions", lambda *, has_gpu: {"torch": "3"})
    assert kept_profile("cuda", 4) != before
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device_facts, "versions", lambda *, has_gpu: {"torch": "2"})
    assert kept_profile("cuda", 4) != before


def test_what_a_run_is_told_is_one_thing() -> None:
    nothing: Any = (None, None, 2, "auto", None, str, str)
    assert request_of("even", *nothing) == (None, None) == request_of(None, *nothing)
    request, numbers = request_of([0.3, 0.7], *nothing)
    assert request is None and numbers == [0.3, 0.7]
    request, numbers = request_of("flops", *nothing)
    assert request is not None and request.shares_by == "flops" and numbers is None and request.limits is None


def test_shares_may_be_an_array(tmp_path: Path) -> None:
    shares = np.array([0.3, 0.7])
    request, numbers = request_of(shares, None, None, 2, "auto", None, str, str)  # type: ignore[arg-type]
    assert request is None and numbers is shares
    (tmp_path / "c.yaml").write_text(
        "schema: nugnn.cluster/1\nhosts: [{name: a, devices: [{device: T4, count: 2}]}]\n", encoding="utf-8"
    )
    request, _ = request_of(shares, None, tmp_path / "c.yaml", 2, "auto", None, str, str)  # type: ignore[arg-type]
    assert request is not None and (request.shares_by, request.shares) == ("given", (0.3, 0.7))
    with pytest.raises(ValueError, match=r"plan\.json: no such file; make it with: nugnn plan --plan-out FILE"):
        request_of(shares, tmp_path / "plan.json", None, 2, "auto", None, str, str)  # type: ignore[arg-type]
