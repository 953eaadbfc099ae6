"""Planned runs are held against their plan and kept; later plans say what came of them, and training stays the same."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import nugnn
from nugnn import cli, machine_profiles, own_times
from nugnn import held_run as held_run_module
from nugnn.config import TrainConfig
from nugnn.datasets.samples.registry import load_samples
from nugnn.held_run import LEAST_EPOCHS, calibration_of, held_run
from nugnn.kept_pairs import keep_pair, kept_pairs, pairs_folder
from nugnn.networks import MLP
from nugnn.planning import in_use
from nugnn.planning.device_facts import processor_name
from nugnn.planning.plan import Plan, read_plan
from nugnn.planning.profiles import SCHEMA, DeviceProfile, LinkProfile, MachineProfile
from nugnn.planning.run_pairs import kind_of
from nugnn.profile_run import Measured
from nugnn.run import run_from_config
from nugnn.sample_config import SampleConfig

CPU = DeviceProfile(
    name=processor_name(),
    kind="cpu",
    source="measured",
    memory_bytes=1 << 34,
    cache_bytes=1 << 25,
    gemm_flops={"fp32": 8e11},
    stream_bytes=1e10,
    gather_bytes=8e9,
    cached_gather_bytes=2e10,
    pack_bytes=5e9,
    launch_seconds=4e-6,
    multiprocessors=2,
)
LINK = LinkProfile(between="devices", via="gloo", bytes_per_second=2e9, latency_seconds=5e-5)
REPORT = {"epoch_seconds": 0.5, "compute_seconds": 0.3, "halo_seconds": 0.1, "sync_seconds": 0.1}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that need not be measured, and operators that are timed for a moment."""
    measured = Measured(MachineProfile(schema=SCHEMA, devices=(CPU,), links=(LINK,)), ())
    monkeypatch.setitem(own_times._SECONDS, "cpu", 0.1)
    monkeypatch.setenv("NUGNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_profiles, "profile_machine", lambda *_, **__: measured)
    monkeypatch.setattr(in_use, "MUCH_USED", math.inf)  # whoever uses this machine while tests run


def settings(tmp_path: Path, out: str, **changes: Any) -> TrainConfig:
    values = {"dataset": "digits", "epochs": 3, "hidden": 8, "out": str(tmp_path / out), "device": "cpu"}
    return TrainConfig(**{**values, "shares": "auto", **changes})


def lines(out: Path) -> list[dict[str, Any]]:
    """Epochs of a run without their times."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in epoch.items() if name != "seconds"} for epoch in found]


def keep_others(ratio: float) -> None:
    """Runs of three other models that took so much longer than predicted, as the run that is kept."""
    (known,) = kept_pairs().pairs
    for number in range(3):
        measured = ratio * known.predicted_seconds * (1 + 0.01 * number)
        keep_pair(known.model_copy(update={"subject": f"{number:016x}", "measured_seconds": measured}))


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main([*arguments])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


@pytest.mark.usefixtures("forked_workers")
def test_kept_runs_change_what_is_told_and_no_bit_of_training(tmp_path: Path) -> None:
    """Two workers with nothing kept, then with enough that the factor is applied, and a broken file."""
    first = run_from_config(settings(tmp_path, "a", workers=2))
    assert first["prediction"]["not_kept"] is None and len(kept_pairs().pairs) == 1
    (pair,) = kept_pairs().pairs
    assert pair.predicted_seconds == first["predicted_epoch_seconds"] == first["prediction"]["predicted_seconds"]
    assert pair.measured_seconds == first["epoch_seconds"] and pair.kind.stands_on == "sheets"
    for rank, report in zip(pair.ranks, first["ranks"], strict=True):
        assert rank.measured_compute_seconds == report["compute_seconds"]
        assert report["core_wait"] is None or 0 <= report["core_wait"] <= 1
        assert report["core_use"] is None or len(report["core_use"]["cores"]) > 0
    plan = read_plan(tmp_path / "a" / "plan.json")
    assert plan.calibration is not None and plan.calibration.runs == 0 and plan.calibration.factor is None
    after = first["prediction"]["calibration"]
    assert (after["runs"], after["error_bar"], after["is_applied"]) == (1, None, False)
    assert after["factor"] == pytest.approx(first["epoch_seconds"] / first["predicted_epoch_seconds"])

    keep_others(50.0)
    (pairs_folder() / f"{pair.kind.key}-{pair.subject}-{1:020d}-{0:08x}.json").write_text("{")
    notes: list[str] = []
    second = run_from_config(settings(tmp_path, "b", workers=2), lambda event: notes.append(str(event.get("text"))))
    assert any("1 file is no measured run of this version of nugnn, and ignored" in note for note in notes)
    told = read_plan(tmp_path / "b" / "plan.json")
    assert told.calibration is not None and told.calibration.is_applied and told.calibration.models == 4
    assert told.step_seconds == plan.step_seconds and told.devices == plan.devices
    factor = told.calibration.factor
    assert factor == pytest.approx(50.25, abs=0.3)
    assert second["predicted_epoch_seconds"] == pytest.approx(factor * plan.epoch_seconds)
    assert second["prediction"]["error"] == pytest.approx(
        second["predicted_epoch_seconds"] / second["epoch_seconds"] - 1
    )
    assert second["prediction"]["predicted_seconds"] == plan.epoch_seconds  # what later runs are held against
    assert kept_pairs().pairs[-1].predicted_seconds == plan.epoch_seconds

    assert lines(tmp_path / "a") == lines(tmp_path / "b") and first["shares"] == second["shares"]
    for name in ("model.safetensors", "plan.parts.npy"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_run_says_how_far_its_prediction_was_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One worker, by the command line: one run, then enough of them; timed operators are another kind."""
    run = ("--dataset", "digits", "--hidden", "8", "--device", "cpu")
    train = ("train", *run, "--shares", "auto", "--epochs", "3", "--out", str(tmp_path / "out"))
    code, out, _ = call(capsys, *train)
    text = " ".join(out.split())
    assert code == 0 and re.search(r"this run: an epoch was predicted as \S+ \w+ from data sheets and took", text)
    assert "(predicted from data sheets)" in text
    assert re.search(r"epoch, predicted . \d+\.\d ms, from data sheets", text)
    assert "predictions so far: one measured run, of this model on this data, took" in text
    keep_others(40.0)
    code, out, _ = call(capsys, *train)
    text = " ".join(out.split())
    assert code == 0 and re.search(r"\(times 40\.\d x, as measured runs say; off by ", text)
    assert "5 measured runs of 4 models or data sets took" in text and "times of later plans have" in text

    code, out, _ = call(capsys, "plan", *run, "--json")  # operators are timed for that: another kind
    plan = Plan.model_validate_json(out)
    assert plan.stands_on == "operators" and plan.calibration is not None and plan.calibration.runs == 0
    code, out, _ = call(capsys, "plan", *run, "--plan-out", str(tmp_path / "plan.json"))
    assert "from operators timed here are off on these devices is not known" in " ".join(out.split())
    train = ("train", *run[:-2], "--plan", str(tmp_path / "plan.json"), "--epochs", "3")
    code, out, _ = call(capsys, *train, "--out", str(tmp_path / "planned"))
    text = " ".join(out.split())
    assert code == 0 and "as long as predicted from operators timed here" in text
    assert re.search(r"predicted as \S+ \w+ from operators timed here and took", text)
    code, out, _ = call(capsys, "plan", *run)
    assert "one measured run, of this model on this data, took" in " ".join(out.split())


def test_a_plan_by_rates_is_told_with_the_factor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(
        "schema: nugnn.cluster/1\nhosts: [{name: here, devices: [{device: this machine, kind: cpu}]}]\n"
    )
    run = ("--dataset", "digits", "--hidden", "8", "--cluster", str(tmp_path / "c.yaml"))
    before = Plan.model_validate_json(call(capsys, "plan", *run, "--json")[1])
    assert before.stands_on == "rates" and before.calibration is not None and not before.is_simulated
    config = settings(tmp_path, "a", device="auto", cluster=str(tmp_path / "c.yaml"))
    run_from_config(config)
    keep_others(3.0)
    after = Plan.model_validate_json(call(capsys, "plan", *run, "--json")[1])
    assert after.calibration is not None and after.calibration.is_applied
    assert after.step_seconds == before.step_seconds and after.shares == before.shares
    files = {name: tmp_path / f"{name}.json" for name in ("step", "plan")}
    code, out, _ = call(capsys, "plan", *run, "--chrome", str(files["step"]), "--plan-out", str(files["plan"]))
    assert (
        code == 0 and "as measured runs say; off by " in out and "times here have the factor" in " ".join(out.split())
    )
    events = json.loads(files["step"].read_text())["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last == pytest.approx(1e6 * after.corrected().step_seconds, rel=1e-3)
    assert read_plan(files["plan"]).step_seconds == before.step_seconds


@pytest.mark.usefixtures("forked_workers")
def test_runs_on_samples_are_held_against_runs_on_samples(tmp_path: Path) -> None:
    values: dict[str, Any] = {"dataset": "digits-images", "model": "mlp", "hidden": 8, "epochs": 3, "workers": 2}
    config = SampleConfig(**values, shares="auto", device="cpu", out=str(tmp_path / "a"))
    result = run_from_config(config)
    (pair,) = kept_pairs().pairs
    assert pair.kind.family == "samples" and result["prediction"]["not_kept"] is None
    assert pair.predicted_seconds == pytest.approx(read_plan(tmp_path / "a" / "plan.json").epoch_seconds)


def test_fit_gives_what_came_of_the_plan(tmp_path: Path) -> None:
    data, model = load_samples("digits-images"), MLP(64, 10, hidden=8)
    result = nugnn.fit(model, data, shares="auto", epochs=3, device="cpu")
    assert result.held is not None and result.plan is not None and result.held.not_kept is None
    assert result.held.measured_seconds == result.epoch_seconds
    assert result.held.calibration is not None and result.held.calibration.runs == 1
    assert nugnn.fit(model, data, epochs=1, device="cpu").held is None


def test_a_run_that_goes_on_is_not_kept_again(tmp_path: Path) -> None:
    run_from_config(settings(tmp_path, "a"))
    result = run_from_config(settings(tmp_path, "a", epochs=5, resume=True))
    assert "went on from a checkpoint" in result["prediction"]["not_kept"]
    assert result["prediction"]["calibration"]["runs"] == len(kept_pairs().pairs) == 1


def test_a_cache_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    result = run_from_config(settings(tmp_path, "a"))
    assert "the cache folder cannot be written" in result["prediction"]["not_kept"]
    assert result["prediction"]["calibration"]["runs"] == 0


# what is kept


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Of one worker by data sheets, of which nothing is kept."""
    run_from_config(settings(tmp_path, "planned", epochs=1))
    assert kept_pairs().pairs == ()
    return read_plan(tmp_path / "planned" / "plan.json")


def test_runs_that_are_not_what_was_predicted_are_not_kept(plan: Plan) -> None:
    planned = plan.settings

    def why(
        plan: Plan = plan,
        now: dict[str, Any] = planned,
        epochs: int = LEAST_EPOCHS,
        has_moved: bool = False,
    ) -> str:
        reports = [REPORT] * len(plan.devices)
        return held_run(plan, now, reports, epochs=epochs, has_moved=has_moved).not_kept or ""

    assert "fewer than 3 epochs" in why(epochs=2)
    assert "nodes moved" in why(has_moved=True)
    assert "another version of torch" in why(plan.model_copy(update={"versions": {"torch": "0"}}))
    assert "planned for cuda_graphs auto, and this run has off" in why(now={**planned, "cuda_graphs": "off"})
    assert "another way, by its dropout" in why(now={**planned, "printed": "0"})
    offloads = {**planned, "activations": "offload"}
    assert "as if activations were keep" in why(plan.model_copy(update={"settings": offloads}), offloads)
    assert "an epoch of 0 s, or of 0.5 s, is none" in why(plan.model_copy(update={"step_seconds": 0.0}))
    older = plan.model_copy(update={"stands_on": None})
    assert "does not say what its times stand on" in why(older) and calibration_of(older) is None
    halves = tuple(device.model_copy(update={"share": 0.5}) for device in plan.devices * 2)
    for name, value in (("halo_mode", "stale"), ("grad_sync", "8bit"), ("halo_wire", "auto")):
        changed = {"settings": {**plan.settings, name: value}}
        now = changed["settings"]
        assert f"as if {name} were" in why(plan.model_copy(update={**changed, "devices": halves}), now)
        assert name == "halo_wire" or why(plan.model_copy(update=changed), now) == ""  # one worker has no peers
    batches = {"settings": {**plan.settings, "micro_batches": 2}}
    assert "as if micro_batches were 1" in why(plan.model_copy(update=batches), batches["settings"])
    before = len(kept_pairs().pairs)
    assert why() == "" and len(kept_pairs().pairs) == before + 1


def test_a_run_beside_others_is_not_kept_and_it_is_said(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where workers have more threads than there are cores, they are what each other waits for."""
    monkeypatch.setattr(in_use, "MUCH_USED", 0.1)
    pair = plan.model_copy(
        update={"devices": tuple(device.model_copy(update={"share": 0.5}) for device in plan.devices * 2)}
    )
    waits: list[dict[str, Any]] = [{"core_wait": None}, {}, {"core_wait": 0.1}, {"core_wait": 0.234}]

    def why(wait: dict[str, Any], cores: int = 99) -> str | None:
        monkeypatch.setattr(held_run_module, "num_cores", lambda: cores)
        return held_run(pair, pair.settings, [REPORT, REPORT | wait], epochs=3, has_moved=False).not_kept

    assert [why(wait) for wait in waits[:3]] == [None] * 3
    kept = len(kept_pairs().pairs)
    said = why(waits[3])
    assert said == "worker 1 was ready and had no core for 23 % of the time"
    assert len(kept_pairs().pairs) == kept
    assert why(waits[3], cores=sum(device.multiprocessors for device in pair.devices) - 1) is None


def test_a_run_on_cores_that_others_computed_on_is_not_kept_either(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where workers have more threads than there are cores: what they wait for each other is not of others."""
    monkeypatch.setattr(in_use, "MUCH_USED", 0.1)
    monkeypatch.setattr(held_run_module, "num_cores", lambda: 1)
    two = plan.devices * 2

    def why(own: float, host: str = plan.devices[0].host) -> str | None:
        devices = (two[0].model_copy(update={"share": 0.5}), two[1].model_copy(update={"share": 0.5, "host": host}))
        report = REPORT | {"core_wait": 0.3, "core_use": {"cores": [0, 1], "busy": 0.8, "own": own}}
        pair = plan.model_copy(update={"devices": devices})
        return held_run(pair, pair.settings, [report, report], epochs=3, has_moved=False).not_kept

    assert why(0.36) is why(0.1, host="node-b") is None
    assert why(0.3) == "others computed on cores 0, 1 for 20 % of the time"


def test_runs_on_another_device_are_not_used(plan: Plan) -> None:
    held_run(plan, plan.settings, [REPORT], epochs=3, has_moved=False)
    (device,) = plan.devices
    for change in ({"name": "another CPU"}, {"multiprocessors": device.multiprocessors + 1}, {"memory_fraction": 0.5}):
        other = plan.model_copy(update={"devices": (device.model_copy(update=change),)})
        found = calibration_of(other)
        assert found is not None and found.runs == 0 and found.factor is None
    assert kind_of(plan) is not None and calibration_of(plan).runs == 1  # type: ignore[union-attr]


def test_a_run_that_took_what_was_predicted_has_factor_1_and_bar_0(plan: Plan) -> None:
    seconds = plan.epoch_seconds
    report = REPORT | {"epoch_seconds": seconds}
    for number in range(1, 4):
        held = held_run(plan, plan.settings, [report], epochs=3, has_moved=False)
        assert held.error == 0 and held.calibration is not None
        assert (held.calibration.runs, held.calibration.factor) == (number, 1.0)
        assert held.calibration.error_bar == (None if number == 1 else 0.0) and not held.calibration.is_applied
    assert torch.__version__ == kept_pairs().pairs[0].kind.versions["torch"]
