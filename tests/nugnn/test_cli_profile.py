"""nugnn profile: what is measured comes back from its file, tables fit the screen, and wrong input is one sentence."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from nugnn import cli, cli_profile, profile_run
from nugnn.failure import WorkerFailed
from nugnn.planning import datasheet
from nugnn.planning.profiles import SCHEMA, DeviceProfile, LinkProfile, MachineProfile, read_profile
from nugnn.profile_run import Measured, profile_machine
from nugnn.profile_worker import LINKS, device_file

GPU = DeviceProfile(
    name="NVIDIA GeForce RTX 9999 Ti SUPER Laptop GPU",
    kind="cuda",
    source="measured",
    uuid="GPU-5d3a0b6e-1234-4000-8000-000000000001",
    memory_bytes=150_754_820_096,
    cache_bytes=52_428_800,
    gemm_flops={"fp32": 49.81e12, "bf16": 698.2e12, "fp8": 1234.5e12},
    stream_bytes=4.1e12,
    gather_bytes=3.3e12,
    cached_gather_bytes=999.6e9,
    pack_bytes=2.2e12,
    launch_seconds=4.25e-6,
    multiprocessors=132,
    spread={"gemm_flops.fp32": 0.0123, "gemm_flops.bf16": 1.0, "stream_bytes": 0.5},
)
CPU = GPU.model_copy(
    update={"name": "Some CPU", "kind": "cpu", "uuid": None, "gemm_flops": {"fp32": 5e11}, "spread": {}}
)
IN_USE = "others used 48 % of it when measuring began; its rates may be too low, measure again when it is idle"
PAPER = GPU.model_copy(
    update={"source": "sheet", "gemm_flops": {"fp32": 67e12, "bf16": 989e12}, "launch_seconds": 0.0, "spread": {}}
)
LINKS_FOUND = (
    LinkProfile(
        between="host", ends=(GPU.uuid or "", "cpu"), via="copy", bytes_per_second=4.9e10, latency_seconds=1.2e-5
    ),
    LinkProfile(between="devices", via="nccl", bytes_per_second=2.65e11, latency_seconds=2e-5),
)
MACHINE = MachineProfile(schema=SCHEMA, devices=(GPU, CPU), links=LINKS_FOUND, made="2026-01-01T00:00:00Z")


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else uses the machine that tests run on."""
    monkeypatch.setattr(profile_run, "used_of_cores", lambda _: 0.01)
    monkeypatch.setattr(profile_run, "used_of_gpus", dict)


@pytest.fixture(autouse=True)
def sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that knows the GPU above and no other; CPUs go by the rule."""

    def sheet_of(name: str) -> Any:
        if name != GPU.name:
            raise datasheet.SheetError(name)
        return types.SimpleNamespace(as_profile=lambda: PAPER)

    monkeypatch.setattr(datasheet, "sheet_of", sheet_of)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["profile", *arguments])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def measured_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = CPU.model_copy(update={"note": IN_USE})
    machine = MACHINE.model_copy(update={"devices": (GPU, noted)})
    monkeypatch.setattr(profile_run, "profile_machine", lambda *_, **__: Measured(machine, ("GPU-5d3a: a note",)))


# -- a whole profile ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_workers")
def test_this_machine_is_measured_and_comes_back_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = functools.partial(profile_machine, usable_bytes=1 << 29)  # features of 32 MiB
    monkeypatch.setattr(profile_run, "profile_machine", quick)
    file = tmp_path / "machine.json"
    code, out, err = call(capsys, "--device", "cpu", "--seconds", "1", "--out", str(file), "--json")
    assert (code, err) == (0, "") and out == file.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]
    machine = read_profile(file)
    assert json.loads(machine.to_json()) == json.loads(out)
    (device,) = machine.devices
    assert (device.kind, device.source, device.uuid) == ("cpu", "measured", None)
    (link,) = machine.links
    assert (link.between, link.via, link.ends) == ("devices", "gloo", ("cpu", "cpu"))
    assert link.sum_bytes_per_second is not None and link.sum_latency_seconds is not None
    assert 1e6 < link.bytes_per_second < 1e12 and 0 < link.latency_seconds < 1
    assert machine.versions["torch"] == torch.__version__ and machine.made is not None


def test_a_link_that_fails_leaves_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(folder: Path, num_workers: int, **_: Any) -> None:
        for rank in range(num_workers):
            devices = [CPU.model_dump()] if rank == 0 else []
            found = {"name": "cpu", "devices": devices, "copies": [], "notes": [f"note {rank}"]}
            (folder / device_file(rank)).write_text(json.dumps(found))
        raise WorkerFailed(3, "worker 1: NCCL error\nsee its log")

    monkeypatch.setattr(profile_run, "launch", launch)
    measured = profile_machine("cpu", seconds=1.0, on_stage=print)
    assert measured.machine.devices == (CPU,) and measured.machine.links == ()
    lost = "links between devices could not be measured: worker 1: NCCL error"
    assert measured.notes == ("note 0", "note 1", lost)


def test_what_others_use_is_kept_with_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU and the CPU are each noted by their own load; spread counts besides, whatever was seen before."""
    said_of_links: str | None = None

    def launch(folder: Path, num_workers: int, **_: Any) -> None:
        for rank in range(num_workers):
            gpu = GPU.model_copy(update={"uuid": f"GPU-{rank}", "spread": {"stream_bytes": 0.3 * rank}})
            devices = [gpu.model_dump(), *([CPU.model_dump()] if rank == 0 else [])]
            found = {"name": gpu.uuid, "devices": devices, "copies": [], "notes": []}
            (folder / device_file(rank)).write_text(json.dumps(found))
        (folder / LINKS).write_text(
            json.dumps({"exchanges": [], "sums": None, "is_nccl": True, "beside": said_of_links})
        )

    monkeypatch.setattr(profile_run, "launch", launch)
    monkeypatch.setattr(profile_run, "_gpus", lambda _: [torch.device("cuda", n) for n in range(2)])

    def notes(cores: float | None, gpus: dict[str, float]) -> list[str | None]:
        monkeypatch.setattr(profile_run, "used_of_cores", lambda _: cores)
        monkeypatch.setattr(profile_run, "used_of_gpus", lambda: gpus)
        machine = profile_machine("auto", seconds=1.0, on_stage=print).machine
        return [device.note for device in machine.devices]

    varied = "rates varied by up to 30 % from call to call; its rates may be too low, measure again when it is idle"
    assert notes(0.48, {"GPU-0": 0.02, "GPU-1": 0.0}) == [None, varied, IN_USE]
    assert notes(None, {"GPU-0": 0.48}) == [IN_USE, varied, None]
    assert notes(0.05, {}) == [None, varied, None]
    said_of_links = "others computed on core 1 for 40 % of the time while links were measured"
    too_low = "its rates may be too low, measure again when it is idle"
    assert notes(0.05, {}) == [None, varied, f"{said_of_links}; {too_low}"]  # cores carry what gloo sends


def test_a_device_that_fails_ends_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(folder: Path, num_workers: int, **_: Any) -> None:
        raise WorkerFailed(3, "worker 0: out of memory")

    monkeypatch.setattr(profile_run, "launch", launch)
    with pytest.raises(WorkerFailed, match="out of memory"):
        profile_machine("cpu", seconds=1.0, on_stage=print)


def test_devices_come_in_the_order_of_their_uuids_then_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(folder: Path, num_workers: int, **_: Any) -> None:
        for rank in range(num_workers):
            gpu = GPU.model_copy(update={"uuid": f"GPU-{9 - rank}"})
            devices = [gpu.model_dump(), *([CPU.model_dump()] if rank == 0 else [])]
            copy = LINKS_FOUND[0].model_copy(update={"ends": (gpu.uuid, "cpu")}).model_dump()
            found = {"name": gpu.uuid, "devices": devices, "copies": [copy], "notes": []}
            (folder / device_file(rank)).write_text(json.dumps(found))
        exchange = {"ends": [0, 1], "bytes_per_second": 1e11, "latency_seconds": 1e-5}
        (folder / LINKS).write_text(
            json.dumps({"exchanges": [exchange], "sums": None, "is_nccl": True, "beside": None})
        )

    monkeypatch.setattr(profile_run, "launch", launch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    machine = profile_machine("auto", seconds=1.0, on_stage=print).machine
    assert [device.uuid for device in machine.devices] == ["GPU-8", "GPU-9", None]
    assert [(link.via, link.ends) for link in machine.links] == [
        ("copy", ("GPU-8", "cpu")),
        ("copy", ("GPU-9", "cpu")),
        ("nccl", ("GPU-9", "GPU-8")),
    ]


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_tables_fit_the_screen_and_show_how_far_the_sheet_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_instead(monkeypatch)
    code, out, _ = call(capsys, "--out", str(tmp_path / "m.json"))
    lines = [line for line in out.splitlines() if not line.startswith(("written to ", "note: "))]
    assert code == 0 and max(map(len, lines)) <= 80 and "…" not in out
    rows = {words[1]: words for line in out.splitlines() if (words := [w.strip() for w in line.split("│")])[1:]}
    assert rows["products, bf16"][2:6] == ["698 TFLOP/s", "100%", "989 TFLOP/s", "0.71"]
    assert rows["products, fp8"][2:6] == ["1.23 PFLOP/s", "", "", ""]  # the sheet has none
    assert rows["host"][2:6] == ["GPU-5d3a0b6e - cpu", "copy", "49 GB/s", "12 µs"]
    assert rows["devices"][2:5] == ["every two", "nccl", "265 GB/s"]
    assert str(GPU.uuid) in out and "note: GPU-5d3a: a note" in out
    assert "no data sheet" not in out
    text = " ".join(out.split())
    assert f"note: {CPU.name}: others used 48 % of it when measuring began; its rates may be too low" in text


def test_a_card_without_a_sheet_is_said_to_have_none() -> None:
    other = GPU.model_copy(update={"name": "Another card", "spread": {}})
    screen = io.StringIO()
    notes = cli_profile.show(MACHINE.model_copy(update={"devices": (other,)}), Console(file=screen, width=80))
    assert notes == ["no data sheet of Another card is known, so that nothing stands beside its measurements"]


def test_a_table_without_a_sheet_has_no_ratios() -> None:
    screen = io.StringIO()
    Console(file=screen, width=80).print(cli_profile.device_table(CPU, None))
    row = next(line for line in screen.getvalue().splitlines() if "picking rows" in line)
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["2.2 TB/s", "", "", ""]


def test_json_prints_nothing_else(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured_instead(monkeypatch)
    code, out, err = call(capsys, "--json")
    assert (code, err) == (0, "") and out.startswith('{\n  "schema"') and IN_USE in out


# -- wrong input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "--device tpu is not allowed; allowed: auto, cpu, cuda"),
        (("--seconds", "0.1"), "--seconds 0.1 is not allowed; allowed: 0.5 to 600"),
        (("--seconds", "nan"), "--seconds nan is not allowed"),
        (("--out", "missing/m.json"), "there is no folder missing; make it first"),
        (("--out", "."), "is a folder, not a file"),
    ],
)
def test_wrong_input_is_one_sentence_before_anything_is_measured(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile_run, "profile_machine", None)
    code, out, err = call(capsys, *arguments)
    assert code == 2 and out == "" and message in err and len(err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_a_gpu_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "--device", "cuda", "--json")
    assert code == 2 and "there is no GPU to use" in err and len(err.splitlines()) == 1


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_instead(monkeypatch)

    def refuse(path: Path, write: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nugnn.datasets.whole_file.write_whole", refuse)
    code, _, err = call(capsys, "--out", str(tmp_path / "m.json"), "--json")
    assert code == 2 and "cannot be written: No space left on device" in err and not list(tmp_path.iterdir())


def test_options_are_checked_before_torch_is_loaded() -> None:
    program = (
        "import sys\nfrom nugnn import cli\n"
        "try:\n    cli.main(['profile', '--device', 'tpu'])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


# -- on GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpus_and_their_links_are_measured() -> None:
    machine = profile_machine("cuda", seconds=6.0, on_stage=print).machine
    assert {device.kind for device in machine.devices} == {"cuda"}
    assert len(machine.devices) == torch.cuda.device_count() == len({device.uuid for device in machine.devices})
    assert sum(link.via == "copy" for link in machine.links) == len(machine.devices)
    assert any(link.via == "nccl" for link in machine.links) == (len(machine.devices) > 1)
