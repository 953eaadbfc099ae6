"""Profiles go to JSON and back unchanged; what is no profile is refused by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nugnn.planning.profiles import DeviceProfile, LinkProfile, MachineProfile, ProfileError, read_profile

DEVICE = DeviceProfile(
    name="a card",
    kind="cuda",
    source="measured",
    uuid="GPU-1",
    memory_bytes=1 << 34,
    cache_bytes=1 << 25,
    gemm_flops={"fp32": 1e13, "bf16": 1e14},
    stream_bytes=1e12,
    gather_bytes=8e11,
    cached_gather_bytes=3e12,
    pack_bytes=9e11,
    launch_seconds=4e-6,
    multiprocessors=80,
    spread={"gemm_flops.bf16": 0.02},
)
LINK = LinkProfile(between="host", ends=("GPU-1", "cpu"), via="copy", bytes_per_second=2e10, latency_seconds=1e-5)
MACHINE = MachineProfile(devices=(DEVICE,), links=(LINK,), versions={"torch": "2.13.0"}, made="2026-01-01T00:00:00Z")


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(MACHINE.to_json())
    assert read_profile(file) == read_profile(str(file)) == MACHINE
    assert json.loads(file.read_text())["schema"] == "nugnn.machine/1"
    file.write_text(MACHINE.to_json(), encoding="utf-8-sig")
    assert read_profile(file) == MACHINE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schema": "nugnn.machine/2"},
            r"schema is 'nugnn.machine/2', must be 'nugnn.machine/1'; make it with: nugnn profile",
        ),
        ({"devices": []}, "devices is empty: give one device at least"),
        ({"speed": 1}, "unknown field 'speed'; known: schema, devices, links, versions, made"),
        ({"devices": [{**DEVICE.model_dump(), "stream_bytes": 0}]}, "devices.0.stream_bytes is 0, must be above 0"),
        (
            {"devices": [{**DEVICE.model_dump(), "gemm_flops": {"fp33": 1}}]},
            "devices.0.gemm_flops.fp33 is 'fp33', must be 'fp64', ",
        ),
        ({"devices": [{**DEVICE.model_dump(), "gather_bytes": "4e9"}]}, "gather_bytes is '4e9', must be a number$"),
        ({"devices": [{**DEVICE.model_dump(), "gather_bytes": True}]}, "gather_bytes is true, must be a number$"),
        (
            {"devices": [{**DEVICE.model_dump(), "gemm_flops": {"fp32": 1e999}}]},
            "gemm_flops.fp32 is inf, must be finite",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(json.loads(MACHINE.to_json()) | change))
    with pytest.raises(ProfileError, match=message) as raised:
        read_profile(file)
    assert str(raised.value).startswith(str(file)) and "\n" not in str(raised.value)


def test_what_is_no_json_or_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        read_profile(file)
    file.write_text("{")
    with pytest.raises(ProfileError, match="Invalid JSON"):
        read_profile(file)
