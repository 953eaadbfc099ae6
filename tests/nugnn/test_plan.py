"""nugnn plan and planned training: what is planned is trained on, results stay the same, misuse is one sentence."""

from __future__ import annotations

import io
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console

import nugnn
from nugnn import cli, limited, machine_profiles, own_times, plan_run, plan_training
from nugnn.comm.groups import Ranks
from nugnn.config import TrainConfig
from nugnn.datasets import load
from nugnn.failure import WorkerFailed
from nugnn.fit_options import FitOptions
from nugnn.fit_plan import PLAN_FILE, request_of, use_plan
from nugnn.graph_part import GraphPart
from nugnn.graph_run import STAGES
from nugnn.graph_task import GraphTask
from nugnn.member import host_name
from nugnn.models import GNN
from nugnn.networks import MLP
from nugnn.own_times import NotTimedError
from nugnn.partition import assign, coarse, repeated_cuts
from nugnn.plan_request import PlanRequest
from nugnn.plan_subject import graph_subject, sample_subject
from nugnn.plan_tables import baselines_table, devices_table
from nugnn.plan_training import TrainingPlan
from nugnn.planned import Planned, step_model, write_plan
from nugnn.planning import draft_cut, in_use, partition_search
from nugnn.planning.cluster import cluster_of_machine
from nugnn.planning.datasheet import sheet_of
from nugnn.planning.device_facts import processor_name
from nugnn.planning.forecast import Forecast
from nugnn.planning.graph_statistics import parse_statistics
from nugnn.planning.imbalance import RebalanceRules
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.measured_times import read_times
from nugnn.planning.measured_ways import read_ways
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import DataFacts, PlanError, read_plan
from nugnn.planning.plan_parts import parts_path
from nugnn.planning.predicted_work import PredictedWork
from nugnn.planning.profiles import SCHEMA, DeviceProfile, LinkProfile, MachineProfile
from nugnn.planning.timeline import Event, Timeline
from nugnn.planning.work_model import PackedComputing, PackedWork
from nugnn.precision.storage import Storage
from nugnn.profile_run import Measured
from nugnn.rebalance import PlannedBalance
from nugnn.run import PARTS_FILE, pictures, run_from_config
from nugnn.sample_config import SampleConfig
from nugnn.sample_options import SampleOptions
from nugnn.shares import shards_on_disk, whole_shard
from nugnn.step_graphs import records_steps

pytestmark = pytest.mark.usefixtures("forked_workers")

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
MACHINE = MachineProfile(schema=SCHEMA, devices=(CPU,), links=(LINK,))
MIXED = """
schema: nugnn.cluster/1
hosts:
  - {name: new, devices: [{device: A100, count: 2}]}
  - {name: old, devices: [{device: T4, count: 2, limits: {sms: 20}}]}
links:
  between: {gbit_per_second: 100, latency_us: 10}
"""
UNEVEN = """
schema: nugnn.cluster/1
hosts:
  - name: here
    devices:
      - {device: this machine, kind: cpu, limits: {threads: 1}}
      - {device: this machine, kind: cpu, factors: {gemm_flops: 4, stream_bytes: 4, gather_bytes: 4,
                                                    cached_gather_bytes: 4, pack_bytes: 4}}
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that need not be measured, and operators that are timed for a moment."""
    monkeypatch.setitem(own_times._SECONDS, "cpu", 0.1)
    monkeypatch.setattr(in_use, "MUCH_USED", math.inf)  # whoever uses this machine while tests run
    monkeypatch.setenv("NUGNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_profiles, "profile_machine", lambda *_, **__: Measured(MACHINE, ()))


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main([*arguments])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


# nugnn plan


def own_penalty(model: torch.nn.Module) -> torch.Tensor:
    return sum(x.square().sum() for x in model.parameters())  # type: ignore[return-value]


def test_a_cluster_on_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(MIXED)
    files = {name: tmp_path / name for name in ("plan.json", "step.json")}
    code, out, err = call(
        capsys, "plan", "--graph-stats", "ogbn-products", "--model", "sage", "--hidden", "32", "--cluster",
        str(tmp_path / "c.yaml"), "--plan-out", str(files["plan.json"]), "--chrome", str(files["step.json"]),
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80 or "written to" in out
    assert "simulated: by data sheets" in out and "by bandwidth" in out and "wait" in out and "forward" in out
    plan = read_plan(files["plan.json"])
    assert [device.name for device in plan.devices] == [sheet_of(name).name for name in ("A100", "A100", "T4", "T4")]
    assert plan.devices[2].sms == 20 and plan.shares[0] > plan.shares[2]
    assert plan.step_seconds <= min(baseline.step_seconds for baseline in plan.baselines)
    assert sum(device.sizes.inner for device in plan.devices) == 2_449_029 and plan.is_simulated
    assert all(sum(d.seconds.values()) == pytest.approx(plan.step_seconds) for d in plan.devices)
    shown = json.loads(files["step.json"].read_text())["traceEvents"]
    assert {event["pid"] for event in shown} == {0, 1, 2, 3}


@pytest.mark.parametrize("width", [80, 50, 30])
def test_a_narrow_table_leaves_out_columns_not_digits(tmp_path: Path, width: int) -> None:
    (tmp_path / "c.yaml").write_text(MIXED.replace("sms: 20", "sms: 20, memory_fraction: 0.25"))
    config = TrainConfig(dataset="by-counts", workers=4, cluster=str(tmp_path / "c.yaml"), shares="even")
    plan = plan_run.plan_from_config(config, "ogbn-products").plan
    console = Console(width=width, file=io.StringIO())
    console.print(devices_table(plan, width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "sms 20, memory" in text and "0.25" in text
    assert all(f"{100 * device.share:.3g}%" in text for device in plan.devices)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text.partition("device")[2]
    assert ("columns more" in " ".join(text.split())) == (width < 80)


def test_ranks_are_no_counts_of_devices_and_long_names_are_cut_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row began with "0 AMD EPYC", as if there were none."""
    long = MIXED.replace("A100", "RTX 6000 Ada").replace("T4", "H100 PCIe")
    (tmp_path / "c.yaml").write_text(long)
    given = ("--graph-stats", "ogbn-products", "--shares", "even", "--cluster", str(tmp_path / "c.yaml"))
    code, out, err = call(capsys, "plan", *given)
    table, _, drawn = out.partition("\nbeside shares by one number")
    rows = [line.split() for line in table.splitlines()]
    assert (code, err) == (0, "") and max(map(len, table.splitlines())) <= 80
    assert [row[:2] for row in rows if row[0] in {"rank", "0"}] == [["rank", "device"], ["0", "RTX"]]
    lines = [line for line in drawn.splitlines() if line.endswith("idle")]
    assert [line[:6] for line in lines] == [f"rank {rank}" for rank in range(4)] and max(map(len, lines)) <= 80
    for rank, name in enumerate(["RTX 6000 Ada Gen…"] * 2 + ["H100 PCIe"] * 2):
        assert f"   {rank} {name} " in table and lines[rank].startswith(f"rank {rank} {name:<17} |")


def test_a_device_that_holds_a_node_leaves_all_columns_in_80(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MIXED)
    config = TrainConfig(dataset="by-counts", workers=4, cluster=str(tmp_path / "c.yaml"))
    plan = plan_run.plan_from_config(config, "ogbn-products").plan
    tiny = tuple(
        d.model_copy(update={"share": share}) for d, share in zip(plan.devices, (1e-4, 9e-5, 1e-9, 0.5), strict=True)
    )
    screen = io.StringIO()
    Console(file=screen, width=80).print(devices_table(plan.model_copy(update={"devices": tiny}), 80))
    text = screen.getvalue()
    header = next(line for line in text.splitlines() if line.startswith("rank"))
    assert "  0.01%" in text and text.count(" <0.01%") == 2 and header.count("halo") == 2  # rows, and the wait for them


def test_ideal_parts_are_called_that_and_no_plan_is_faster_or_slower_than_they(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MIXED)
    config = TrainConfig(dataset="by-counts", workers=4, cluster=str(tmp_path / "c.yaml"))
    plan = plan_run.plan_from_config(config, "ogbn-products").plan

    def printed(is_ideal: bool) -> str:
        first, *others = plan.baselines
        shown = plan.model_copy(update={"baselines": (first.model_copy(update={"is_ideal": is_ideal}), *others)})
        console = Console(width=80, file=io.StringIO())
        console.print(baselines_table(shown))
        return console.file.getvalue()  # type: ignore[attr-defined]

    assert printed(False).count("x as fast") == 3 and "ideal" not in printed(False)
    lines = printed(True).splitlines()
    even = next(line for line in lines if line.startswith("even"))
    assert "(ideal parts)" in even and "x as fast" not in even
    assert printed(True).count("x as fast") == 2 and "not cut" in lines[-1] and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "options",
    [
        {"grad_sync": "8bit"},
        {"grad_sync": "powersgd", "grad_sync_rank": "4", "grad_sync_feedback": "off"},
        {"grad_sync": "4bit", "grad_sync_exact": "layers.1.*"},
    ],
    ids=str,
)
def test_a_plan_notes_how_gradients_travel_as_the_run_does(options: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MIXED)
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", "--graph-stats", "ogbn-arxiv", "--cluster", str(tmp_path / "c.yaml"), *flags,
                  "--plan-out", str(tmp_path / "plan.json")])  # fmt: skip
    assert exit_.value.code == 0
    planned = read_plan(tmp_path / "plan.json")
    of_run = cli.gather_settings({"dataset": "ogbn-arxiv", "workers": "4", **options}, {})
    way = str(FitOptions(grad_sync=of_run.gradients).compression)
    assert planned.settings["grad_sync"] == way
    assert f"sums of gradients are predicted as if grad_sync were fp32, and not {way}" in planned.notes


def test_json_is_the_plan_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(MIXED)
    counts = "nodes=1e5,edges=2e6,features=50,classes=7,train=1e4"
    code, out, _ = call(capsys, "plan", "--graph-stats", counts, "--cluster", str(tmp_path / "c.yaml"), "--json")
    (tmp_path / "plan.json").write_text(out)
    plan = read_plan(tmp_path / "plan.json")
    assert code == 0 and plan.data.edges == 2_100_000 and plan.halo == "expected"


@pytest.mark.parametrize(
    ("asked", "large_edges", "cut_by"),
    [
        ([], 1, "clusters"),
        ([], 10**9, "metis"),
        (["--partitioner", "metis"], 1, "metis"),
        (["--shares", "even"], 1, "metis"),
        (["--shares", "flops", "--partitioner", "random"], 1, "random"),
    ],
)
def test_a_plan_names_what_cut_its_graph(
    asked: list[str],
    large_edges: int,
    cut_by: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clusters for a large graph whose shares are sought and where no partitioner is named."""
    monkeypatch.setattr("nugnn.planning.loop_method.LARGE_EDGES", large_edges)
    (tmp_path / "c.yaml").write_text(MIXED)
    cluster = str(tmp_path / "c.yaml")
    code, out, _ = call(capsys, "plan", "--dataset", "digits", "--cluster", cluster, "--json", *asked)
    assert code == 0
    assert json.loads(out)["cut"]["partitioner"] == cut_by


def test_what_does_not_fit_is_refused_with_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(MIXED)
    code, _, err = call(
        capsys, "plan", "--graph-stats", "ogbn-papers100M", "--hidden", "512", "--cluster", str(tmp_path / "c.yaml")
    )
    assert code == 2 and "the devices together hold" in err and "It would fit with" in err and "Traceback" not in err


def test_devices_that_are_alike_are_refused_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over slow links all on one device would be fastest, if it had the memory: that is no share by speed."""
    (tmp_path / "c.yaml").write_text(MIXED.replace("gbit_per_second: 100", "gbit_per_second: 10"))
    code, _, err = call(
        capsys, "plan", "--graph-stats", "ogbn-papers100M", "--hidden", "512", "--layers", "3", "--cluster",
        str(tmp_path / "c.yaml"),
    )  # fmt: skip
    assert code == 2 and "the graph does not fit" in err
    lines = [line for line in err.splitlines() if "its share by speed" in line]
    assert [line.partition(":")[0] for line in lines] == [
        "2 x NVIDIA A100-SXM4-80GB on new", "2 x Tesla T4 on old",
    ]  # fmt: skip
    assert "by speed, 0.0%" not in err and "by speed, 100.0%" not in err


def test_samples_at_hand(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(
        capsys, "plan", "--dataset", "digits-images", "--workers", "2", "--device", "cpu", "--shares", "0.75,0.25",
        "--batch-size", "32", "--json",
    )  # fmt: skip
    plan = json.loads(out)
    assert code == 0 and [device["sizes"]["batch"] for device in plan["devices"]] == [24, 8]
    assert plan["family"] == "samples" and plan["steps_per_epoch"] > 1 and plan["step_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--graph-stats", "ogbn-product"], "did you mean ogbn-products"),
        (["--graph-stats", "ogbn-arxiv", "--dataset", "digits"], "both say which graph"),
        (["--graph-stats", "ogbn-arxiv", "--undirected"], "write undirected=true into --graph-stats"),
        (["--dataset", "digits", "--cluster", "none.yaml"], "none.yaml: no such file; --cluster takes"),
        (["--dataset", "digits", "--plan-out", "no/such/plan.json"], "there is no folder no/such"),
        (["--dataset", "digits", "--epochs", "3"], "--epochs"),
        (["--dataset", "digits", "--grad-sync-rank", "3"], "--grad-sync-rank 3 has no effect on --grad-sync fp32"),
        (["--graph-stats", "ogbn-arxiv", "--device", "cpu", "--grad-sync", "4bit", "--grad-sync-exact", "haed.*"],
         "exact haed.* matches no parameter whose gradients travel"),
        (["--graph-stats", "ogbn-arxiv", "--batch-size", "7"],
         "--batch-size belongs to samples, and --graph-stats gives the counts of a graph; leave it out, or name"),
        (["--dataset", "digits", "--workers", "2", "--device", "cpu", "--shares", "auto", "--partitioner", "random"],
         "--partitioner random makes none to fit"),
    ],
)  # fmt: skip
def test_misuse_of_plan_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "plan", *arguments)
    assert code == 2 and words in err and "Traceback" not in err


def test_a_cluster_decides_the_number_of_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(MIXED)
    code, _, err = call(
        capsys, "plan", "--graph-stats", "ogbn-arxiv", "--cluster", str(tmp_path / "c.yaml"), "--workers", "3"
    )
    assert code == 2 and "has 4 devices, and --workers is 3; leave --workers out" in err


def test_a_cluster_decides_the_number_of_workers_of_a_run_too(tmp_path: Path) -> None:
    """Those of this host alone; of a file with one host, whatever its name."""
    path = tmp_path / "c.yaml"
    given = {"dataset": "digits", "cluster": str(path)}
    for text, workers in ((UNEVEN, 2), (MIXED.replace("name: old", f"name: {host_name()}"), 2), (MIXED, 4)):
        path.write_text(text)
        assert cli.gather_settings(given, {}).workers == workers
    assert cli.gather_settings({**given, "workers": "3"}, {}).workers == 3
    path.write_text(
        UNEVEN + "  - {name: there, devices: [{device: T4, count: 3}]}\nlinks: {between: {gbit_per_second: 1}}\n"
    )
    assert cli.gather_settings(given, {}).workers == 2


def test_this_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def measure(*_: Any, **__: Any) -> Measured:
        calls.append("measured")
        return Measured(MACHINE, ())

    monkeypatch.setattr(machine_profiles, "profile_machine", measure)
    config = TrainConfig(dataset="digits", workers=2, device="cpu", shares="auto")
    how: dict[str, Any] = {"on_stage": lambda _: None, "on_note": calls.append}
    first = plan_run.cluster_from_config(config, remeasures=False, **how)
    again = plan_run.cluster_from_config(config, remeasures=False, **how)
    assert first.profiles == again.profiles and first.profiles[0].gather_bytes == CPU.gather_bytes / 2
    assert calls[0] == "measured" and "kept in" in calls[1] and len(calls) == 2
    plan_run.cluster_from_config(config, remeasures=True, **how)
    assert calls.count("measured") == 2


def test_a_plan_repeats_that_others_used_the_machine_when_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once for all workers on the device; what it is called and what predictions stand on do not change by it."""
    said = "others used 48 % of it when measuring began"
    config = settings(tmp_path, "p", shares="auto", cluster=str(tmp_path / "c.yaml"))
    plans = []
    for note in (said, None):
        machine = MACHINE.model_copy(update={"devices": (CPU.model_copy(update={"note": note}),)})
        (tmp_path / "cpu.json").write_text(machine.to_json())
        (tmp_path / "c.yaml").write_text(
            "schema: nugnn.cluster/1\nhosts:\n  - {name: here, devices: [{device: cpu.json, count: 2}]}\n"
        )
        plans.append(plan_run.plan_from_config(config, None).plan)
    noted, plain = plans
    assert [text for text in noted.notes if said in text] == [f"profile of {CPU.name}: {said}"]
    assert not any(said in text for text in plain.notes)
    assert noted.rates == plain.rates is not None


def test_limits_that_contend_for_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "own_nodes", lambda: ((0, 1),))
    how: dict[str, Any] = {"remeasures": False, "on_stage": lambda _: None, "on_note": lambda _: None}
    config = TrainConfig(dataset="digits", workers=2, device="cpu", shares="auto", limits="threads=2;threads=1")
    assert any("workers share cores" in note for note in plan_run.cluster_from_config(config, **how).notes)
    config = TrainConfig(dataset="digits", workers=2, device="cpu", shares="auto", limits="threads=1;threads=1")
    assert not any("share cores" in note for note in plan_run.cluster_from_config(config, **how).notes)


def test_simulated_growth(capsys: pytest.CaptureFixture[str]) -> None:
    """More devices shorten an epoch until exchanges take it all; what does not fit says so; all is called simulated."""
    given = ("--devices", "A100", "--hidden", "16", "--per-host", "2", "--gbit-per-second", "10", "--most", "16")
    code, out, err = call(capsys, "simulate", "--graph-stats", "ogbn-products", *given)
    table = out.partition("simulated: more")[0]
    assert (code, err) == (0, "") and max(map(len, table.splitlines())) <= 80
    assert "simulated: ogbn-products on A100" in out and "simulated: more than 2 devices bring little" in out
    starred = [line.split()[0] for line in table.splitlines() if " * " in line]
    assert starred == ["4", "8", "16"] and "\n* a longer epoch than with fewer devices\n" in out
    assert out.count("note: of ") == 1 and "note: of 4, 8 and 16 devices not all are worth having: " in out
    code, out, _ = call(capsys, "simulate", "--graph-stats", "ogbn-products", *given, "--json")
    shown = json.loads(out)
    assert shown["simulated"] is True and [row["devices"] for row in shown["rows"]] == [1, 2, 4, 8, 16]
    assert all(sum(row["parts"].values()) == pytest.approx(1) for row in shown["rows"])
    assert shown["rows"][1]["epoch_seconds"] < shown["rows"][0]["epoch_seconds"]
    code, out, _ = call(capsys, "simulate", "--graph-stats", "ogbn-papers100M", "--devices", "T4", "--most", "2")
    assert code == 0 and out.count("no room") == 2 and "no cluster of these sizes holds the data" in out


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("feature-norm", "row"), ("split", "3"), ("num-nodes", "5"), ("data-dir", "here"), ("partitioner", "kaminpar"),
        ("partitioner", "metis"),
    ],
)  # fmt: skip
def test_options_about_a_graph_at_hand_are_refused_beside_counts(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--graph-stats", "nodes=100,edges=400,features=8,classes=3,train=50", "--device", "cpu")
    code, _, err = call(capsys, "plan", *given, f"--{option}", value)
    assert code == 2 and err.startswith(f"nugnn: error: --{option} needs the graph, and --graph-stats gives counts")


def test_a_machine_that_is_not_planned_for_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(MIXED)
    given = ("--graph-stats", "nodes=1e4,edges=4e4,features=8,classes=3,train=50", "--measure", "--cluster")
    code, _, err = call(capsys, "plan", *given, str(tmp_path / "c.yaml"))
    assert code == 2 and f"--measure is about this machine, which {tmp_path / 'c.yaml'} does not name" in err
    (tmp_path / "here.yaml").write_text(UNEVEN)
    code, _, err = call(capsys, "plan", *given, str(tmp_path / "here.yaml"))
    assert (code, err) == (0, "")


def test_offload_is_planned_for_gpus_that_are_not_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As if they kept what they would move, which is said; for CPUs alone it is refused, as in training."""
    given = ("--graph-stats", "ogbn-arxiv", "--hidden", "16", "--activations", "offload")
    code, out, err = call(capsys, "simulate", *given, "--devices", "A100", "--most", "2")
    assert (code, err) == (0, "") and "as if activations were keep, and not offload" in " ".join(out.split())
    (tmp_path / "c.yaml").write_text(MIXED)
    code, out, err = call(capsys, "plan", *given, "--cluster", str(tmp_path / "c.yaml"))
    assert (code, err) == (0, "") and out.count("not offload") == 1
    (tmp_path / "cpus.yaml").write_text(UNEVEN)
    code, _, err = call(capsys, "plan", *given, "--cluster", str(tmp_path / "cpus.yaml"))
    assert code == 2 and "this run computes on the CPU" in err


def test_misuse_of_simulate_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "simulate", "--graph-stats", "ogbn-products", "--devices", "T44")
    assert code == 2 and "no data sheet of 'T44'" in err
    code, _, err = call(
        capsys, "simulate", "--graph-stats", "ogbn-products", "--devices", "T4", "--gbit-per-second", "0"
    )
    assert code == 2 and "--gbit-per-second 0.0 is not allowed" in err
    code, _, err = call(capsys, "simulate", "--graph-stats", "ogbn-products", "--devices", "T4,")
    assert code == 2 and "--devices: a name is empty" in err and len(err.splitlines()) == 1
    few = "nodes=5,edges=9,features=2,classes=2,train=1"
    code, _, err = call(capsys, "simulate", "--graph-stats", few, "--devices", "T4", "--most", "8")
    assert code == 2 and "8 devices for 5 nodes" in err and "planning for" not in err


# training


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("plan", MIXED, "f is a cluster description: --cluster takes it"),
        ("plan", None, "f: no such file; make it with"),
        ("cluster", '{"schema": "nugnn.plan/1"}', "f is a plan: --plan takes it"),
        ("cluster", MIXED.replace("limits", "limit"), "line 5: .*unknown field 'limit'; did you mean 'limits'"),
    ],
)
def test_wrong_files_are_refused_before_data_are_read(
    tmp_path: Path, option: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "f").write_text(text)
    events: list[Any] = []
    with pytest.raises(ValueError, match=words):
        run_from_config(settings(tmp_path, "out", **{option: str(tmp_path / "f")}), events.append)
    assert events == []


def settings(tmp_path: Path, out: str, **changes: Any) -> TrainConfig:
    values = {"dataset": "digits", "workers": 2, "epochs": 1, "hidden": 8, "out": str(tmp_path / out), "dropout": 0.0}
    return TrainConfig(**{**values, **changes})


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_planned_run_is_any_run_and_its_plan_runs_again(tmp_path: Path) -> None:
    """Planned unevenly: losses are those of one worker; the plan's file gives the same parts, bit for bit."""
    (tmp_path / "c.yaml").write_text(UNEVEN)
    run_from_config(settings(tmp_path, "one", workers=1))
    result = run_from_config(settings(tmp_path, "auto", shares="auto", cluster=str(tmp_path / "c.yaml")))
    plan = read_plan(tmp_path / "auto" / "plan.json")
    assert plan.shares_by == "auto" and plan.halo == "counted" and plan.shares[1] > plan.shares[0]
    assert result["predicted_epoch_seconds"] == plan.epoch_seconds > 0
    assert result["shares"] == pytest.approx(plan.shares)
    assert [report["nodes"] for report in result["ranks"]] == [device.sizes.inner for device in plan.devices]
    assert [report["halo_rows"] for report in result["ranks"]] == [device.sizes.halo for device in plan.devices]
    assert result["ranks"][0]["limits"]["asked"] == "threads=1"
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)

    again = run_from_config(settings(tmp_path, "again", plan=str(tmp_path / "auto" / "plan.json")))
    assert losses(tmp_path / "again") == losses(tmp_path / "auto")
    assert parts_path(tmp_path / "again" / "plan.json").read_bytes() == (
        parts_path(tmp_path / "auto" / "plan.json").read_bytes()
    )
    assert again["predicted_epoch_seconds"] == result["predicted_epoch_seconds"]

    with pytest.raises(
        ValueError, match=r"it is for gcn with hidden 8 \([\d,]+ parameters\), and this run has gcn with hidden 9 \("
    ):
        run_from_config(settings(tmp_path, "other", hidden=9, plan=str(tmp_path / "auto" / "plan.json")))
    with pytest.raises(
        ValueError, match=r"it is for digits as it was \([\d,]+ edges\), and this run has digits as it is \("
    ):
        plan_file = str(tmp_path / "auto" / "plan.json")
        run_from_config(settings(tmp_path, "other", self_loops="remove", plan=plan_file))
    with pytest.raises(ValueError, match="is for 2 workers, and there are 3; give --workers 2"):
        run_from_config(settings(tmp_path, "other", workers=3, plan=str(tmp_path / "auto" / "plan.json")))


def test_a_plan_for_other_options_says_so_once_and_is_refused_where_it_does_not_fit(tmp_path: Path) -> None:
    how: dict[str, Any] = {"shares": "even", "device": "cpu", "layers": 4}
    write_plan(tmp_path / "plan.json", plan_run.plan_from_config(settings(tmp_path, "p", **how), None))
    narrow = plan_run.plan_from_config(settings(tmp_path, "p", **how, activations="recompute"), None)
    write_plan(tmp_path / "full.json", narrow)
    full = narrow.plan.model_dump(by_alias=True)
    for device in full["devices"]:
        device["memory_limit_bytes"] = device["memory_bytes"]
    (tmp_path / "full.json").write_text(json.dumps(full))

    def notes_of(out: str, plan: Path, **changes: Any) -> list[str]:
        events: list[Any] = []
        run_from_config(settings(tmp_path, out, plan=str(plan), layers=4, **changes), events.append)
        return [str(event) for event in events if "the plan was made for" in str(event)]

    assert notes_of("same", tmp_path / "plan.json") == []
    (note,) = notes_of("other", tmp_path / "plan.json", precision="bf16", halo_mode="stale", dropout=0.5)
    for words in ("precision fp32, and this run has bf16", "halo_mode exact, and this run has stale", "dropout"):
        assert words in note
    assert notes_of("fits", tmp_path / "full.json", activations="recompute") == []
    words = r"made for activations recompute, and this run has keep, .* do not fit: worker 0 would need .* and has "
    with pytest.raises(PlanError, match=words):
        notes_of("more", tmp_path / "full.json")


def test_a_plan_that_leaves_a_host_out_is_said_and_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its device holds a node; the run is any other."""
    (tmp_path / "cpu.json").write_text(MACHINE.to_json())
    (tmp_path / "c.yaml").write_text(
        "schema: nugnn.cluster/1\nhosts:\n  - {name: node, count: 2, devices: [{device: cpu.json}]}\n"
        "links: {between: {gbit_per_second: 0.01}}\n"
    )
    file = tmp_path / "plan.json"
    code, out, _ = call(
        capsys, "plan", "--dataset", "digits", "--hidden", "8", "--dropout", "0", "--cluster", str(tmp_path / "c.yaml"),
        "--plan-out", str(file),
    )  # fmt: skip
    plan = read_plan(file)
    counts = [device.sizes.inner for device in plan.devices]
    assert code == 0 and plan.cut is not None and min(counts) == 1
    (note,) = (note for note in plan.notes if "would hardly be used: over these links" in note)
    assert f"of 2 devices, 1 x {CPU.name} on node-" in note and "Without it an epoch" in note
    assert f"note: {note}" in " ".join(out.split())
    run_from_config(settings(tmp_path, "one", workers=1))
    result = run_from_config(settings(tmp_path, "two", plan=str(file)))
    assert [report["nodes"] for report in result["ranks"]] == counts
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


def test_alike_workers_are_not_measured_and_a_cache_finds_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_profiles, "profile_machine", None)
    cache = str(tmp_path / "parts")
    first = run_from_config(settings(tmp_path, "a", shares="auto", device="cpu", partition_cache=cache))
    second = run_from_config(settings(tmp_path, "b", shares="auto", device="cpu", partition_cache=cache))
    assert first["shares"] == second["shares"] and abs(first["shares"][0] - 0.5) < 0.05
    assert "The plan was made before." in second["notes"]
    assert (tmp_path / "a" / "plan.json").read_text() == (tmp_path / "b" / "plan.json").read_text()


def test_alike_workers_are_predicted_from_operators_that_a_plan_has_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan left its rates of the machine, too: alone they tell a step worse than operators do."""
    model = ("--hidden", "8", "--dropout", "0", "--workers", "2", "--device", "cpu")
    code, out, _ = call(capsys, "plan", "--dataset", "digits", *model, "--json")
    assert code == 0 and (planned := json.loads(out))["stands_on"] == "operators"
    monkeypatch.setattr(own_times, "launch", None)
    result = run_from_config(settings(tmp_path, "a", shares="auto", device="cpu"))
    assert result["predicted_epoch_seconds"] == planned["step_seconds"]
    assert read_plan(tmp_path / "a" / "plan.json").stands_on == "operators"
    run_from_config(settings(tmp_path, "b", shares="auto", device="cpu", hidden=9))
    assert read_plan(tmp_path / "b" / "plan.json").stands_on == "rates"


def counted(monkeypatch: pytest.MonkeyPatch, name: str, *modules: ModuleType) -> list[str]:
    """A name for each call of a function that these modules have imported."""
    real, calls = getattr(modules[0], name), list[str]()

    def wrapper(*arguments: Any) -> Any:
        calls.append(name)
        return real(*arguments)

    for module in modules:
        monkeypatch.setattr(module, name, wrapper)
    return calls


def test_operators_are_timed_on_devices_that_differ_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = counted(monkeypatch, "symmetric_graph", assign, own_times, draft_cut, partition_search)
    clusters = counted(monkeypatch, "find_clusters", coarse, repeated_cuts)
    how: dict[str, Any] = {"shares": "auto", "device": "cpu", "limits": "none;memory_fraction=0.4"}
    config = settings(tmp_path, "a", **how)
    stages: list[str] = []
    result = run_from_config(config, lambda event: stages.append(str(event.get("text"))))
    assert "timing the model's operators on each device of this machine for 0.1 s, once" in stages
    assert len(made) == len(clusters) == 1  # for the parts to time on; the plan cuts the same lists by METIS
    ways = list((tmp_path / "cache" / "operator-times").glob("ways-*.json"))
    assert len(ways) == 1 and read_ways(ways[0]).num_ranks == 2
    kept = sorted({*(tmp_path / "cache" / "operator-times").glob("*.json")} - {*ways})
    assert len(kept) == 2 and {read_times(path).limits for path in kept} == {"none", "memory_fraction=0.4"}
    stages.clear()
    again = run_from_config(settings(tmp_path, "b", **how), lambda event: stages.append(str(event.get("text"))))
    assert not any("timing" in stage for stage in stages)
    assert again["predicted_epoch_seconds"] == result["predicted_epoch_seconds"]
    memory = read_plan(tmp_path / "b" / "plan.json").devices
    assert memory[1].memory_limit_bytes < memory[0].memory_limit_bytes


@pytest.mark.parametrize("error", [WorkerFailed(3, "no worker\nits log follows"), NotTimedError("no worker")])
def test_operators_that_cannot_be_timed_leave_a_plan_from_rates(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ends(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(plan_training, "times_for", ends)
    events: list[str] = []
    config = settings(tmp_path, "a", shares="auto", device="cpu", limits="none;memory_fraction=0.4")
    result = run_from_config(config, lambda event: events.append(str(event)))
    assert len(result["shares"]) == 2
    said = "planned from rates, since the model's operators could not be timed: no worker"
    assert any(said in event for event in events) and not any("its log follows" in event for event in events)


def test_a_fault_of_ours_in_timing_operators_is_not_taken_for_a_plan_from_rates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(plan_training, "times_for", fails)
    with pytest.raises(ValueError, match="could not be broadcast"):
        run_from_config(settings(tmp_path, "a", shares="auto", device="cpu", limits="none;memory_fraction=0.4"))


def test_times_are_kept_apart_by_rounding_that_no_trace_shows(tmp_path: Path) -> None:
    counts = parse_statistics("nodes=100,edges=400,features=8,classes=3,train=50")
    fp32, tf32, bf16 = (
        plan_run.subject_by_counts(settings(tmp_path, "a", precision=precision), counts, ["cpu"], 2)
        for precision in ("fp32", "tf32", "bf16")
    )
    assert fp32.traces["cpu"].to_json() == tf32.traces["cpu"].to_json() != bf16.traces["cpu"].to_json()
    small, large = ([PartSizes(inner=50, edges=edges)] for edges in (200, 400))
    where = [
        own_times._kept(each, ["one", "other"], [small, large], of_graph=False) for each in (fp32, tf32, bf16, fp32)
    ]
    assert where[0] == where[3] and len({path for paths in where for path in paths}) == 6
    beside_another = own_times._kept(fp32, ["one", "third"], [small, large], of_graph=False)
    assert beside_another[0] != where[0][0]


def test_sparse_features_are_planned_as_they_are_trained(tmp_path: Path) -> None:
    dense = torch.zeros(50, 40)
    dense[torch.arange(50), torch.arange(50) % 40] = 1
    ring = torch.arange(50)
    data = nugnn.GraphData(
        name="ring", num_nodes=50, src=ring, dst=(ring + 1) % 50, features=dense.to_sparse_csr(), labels=ring % 3,
        num_classes=3, train_nodes=ring,
    )  # fmt: skip
    kinds = []
    for each in (data, replace(data, features=dense)):
        plan = TrainingPlan(
            request=PlanRequest(shares_by="auto"),
            devices=(torch.device("cpu"),) * 2,
            cluster=cluster_of_machine(MACHINE, [CPU, CPU]),
        )
        plan.prepare_graph(GNN("gcn", 40, 3, hidden=8), FitOptions(), each)
        assert plan._subject is not None
        kinds.append({(o.kind, o.sizes.get("stored")) for o in plan._subject.traces["cpu"].operators})
    assert ("sparse_product", "N") in kinds[0] and "sparse_product" not in dict(kinds[1])


def test_plans_are_kept_apart_by_whether_steps_are_captured(tmp_path: Path) -> None:
    counts = parse_statistics("nodes=100,edges=400,features=8,classes=3,train=50")
    request = PlanRequest(shares_by="auto", cluster=cluster_of_machine(MACHINE, [CPU, CPU]))
    keys = []
    for choice in ("on", "off", "on"):
        plan = TrainingPlan(request=request, devices=(None, None), cluster=request.cluster)
        plan._facts = counts.facts("add")
        config = settings(tmp_path, "a", device="auto", cuda_graphs=choice)
        plan._subject = plan_run.subject_by_counts(config, counts, ["cuda"], 2)
        assert plan._subject.is_captured == (choice == "on")
        keys.append(plan._key("metis"))
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize(
    ("options", "is_captured"),
    [
        ({}, True),
        ({"cuda_graphs": "off"}, False),
        ({"precision": "fp16"}, False),
        ({"grad_sync": "8bit"}, False),
        ({"grad_sync": "auto"}, True),  # predicted as if it came to fp32
        ({"grad_sync": "auto", "cuda_graphs": "on"}, False),
        ({"micro_batches": 2}, False),
        ({"regularizer": own_penalty}, False),
        ({"regularizer": own_penalty, "cuda_graphs": "on"}, True),
    ],
)
def test_steps_of_samples_are_planned_as_graphs_where_they_are_trained_so(
    options: dict[str, Any], is_captured: bool
) -> None:
    facts = DataFacts(name="some", samples=64, input_shape=(20,), classes=3)
    how: dict[str, Any] = {"batch": 16, "kinds": ["cuda"], "workers": 2}
    subject = sample_subject(MLP(20, 3, hidden=8), SampleOptions(**options), facts, [torch.zeros(20)], **how)
    assert subject.is_captured == is_captured
    over_gloo = sample_subject(
        MLP(20, 3, hidden=8), SampleOptions(**options), facts, [torch.zeros(20)], **how, is_nccl=False
    )
    assert not over_gloo.is_captured


@pytest.mark.parametrize(
    ("options", "is_captured"),
    [
        ({}, True),
        ({"cuda_graphs": "auto"}, False),  # which leaves steps alone in which rows travel
        ({"halo_wire": "int8"}, False),
        ({"halo_mode": "stale"}, False),
        ({"activations": "recompute"}, True),
        ({"precision": "fp16"}, False),
    ],
)
def test_steps_of_graphs_are_planned_as_graphs_where_training_does_not_refuse_it(
    options: dict[str, Any], is_captured: bool
) -> None:
    facts = DataFacts(name="some", nodes=100, edges=400, train=50, features=8, classes=3)
    model, chosen = GNN("gcn", 8, 3, hidden=4), FitOptions(**({"cuda_graphs": "on"} | options))
    how: dict[str, Any] = {"features": 8, "multilabel": False, "kinds": ["cuda"]}
    assert graph_subject(model, chosen, facts, **how, workers=2).is_captured == is_captured
    assert not graph_subject(model, chosen, facts, **how, workers=2, is_nccl=False).is_captured
    alone = graph_subject(model, chosen, facts, **how, workers=1, is_nccl=False)
    of_halo = not {"halo_wire", "halo_mode", "cuda_graphs"}.isdisjoint(options)
    assert alone.is_captured == (is_captured or of_halo)


@pytest.mark.parametrize(("has_nccl", "uuids"), [(True, ["a", "b"]), (True, ["a", "a"]), (False, ["a", "b"])])
def test_plans_and_training_agree_on_whether_steps_are_graphs(has_nccl: bool, uuids: list[str]) -> None:
    """Two workers on GPUs; on one GPU, or without NCCL, their sums go through the host's memory."""
    gpus = [sheet_of("A100-SXM4-40GB").as_profile().model_copy(update={"uuid": uuid}) for uuid in uuids]
    here = cluster_of_machine(MachineProfile(devices=tuple(gpus)), gpus, has_nccl=has_nccl)
    assert here.links.is_nccl == (has_nccl and len(set(uuids)) == 2)
    facts, model = DataFacts(name="some", samples=64, input_shape=(20,), classes=3), MLP(20, 3, hidden=8)
    how: dict[str, Any] = {"batch": 16, "kinds": ["cuda"], "workers": 2, "is_nccl": here.links.is_nccl}
    subject = sample_subject(model, SampleOptions(), facts, [torch.zeros(20)], **how)
    ranks = Ranks(0, 2, device=torch.device("cuda", 0), carries_cuda=here.links.is_nccl)
    family = SimpleNamespace(
        ranks=ranks,
        model=model,
        storage=Storage("fp32"),
        has_own_loss=False,
        exchanges_rows=False,
        why_not_recorded=None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nugnn.step_graphs.has_triton", lambda: True)
        assert records_steps("auto", cast(Any, family)) == subject.is_captured == here.links.is_nccl
    predicted = step_model(subject, here)
    assert [device.is_captured for device in predicted.devices] == [here.links.is_nccl] * 2


def test_nodes_move_by_the_work_that_the_plan_was_made_with(tmp_path: Path) -> None:
    data = load("digits")
    model = GNN("gcn", data.num_features, data.num_classes, hidden=8)
    how: dict[str, Any] = {"workers": 2, "shares": None, "others": (), "partitioner": "metis", "order": "none"}
    task = GraphTask(model, data, **how, options={}, check=False, cache_folder=None, inductive=False)
    for name in ("even", "planned"):
        (tmp_path / name).mkdir()
    assert task.stored(tmp_path / "even", str)[0].planned is None
    cluster = cluster_of_machine(MACHINE, [CPU, CPU], [DeviceLimits(), DeviceLimits(memory_fraction=0.4)])
    request = PlanRequest(shares_by="auto", cluster=cluster)
    task.use_plan(TrainingPlan(request=request, devices=[None] * 2, cluster=cluster))
    part = task.stored(tmp_path / "planned", str)[0]
    planned = part.planned
    assert planned is not None and planned.work is not None and isinstance(planned.whole, PackedWork)
    assert isinstance(planned.whole.work, PredictedWork) and not planned.left_out
    assert task.plan is not None and task.plan.planned is not None
    devices = task.plan.planned.plan.devices
    for rank, device in enumerate(devices):
        assert planned.work.seconds(rank, device.sizes.sizes) == pytest.approx(device.seconds["compute"], rel=0.05)
        busy = planned.whole.seconds(rank, device.sizes.sizes)
        assert busy > planned.work.seconds(rank, device.sizes.sizes), "exchanges take time"
    sent: PlannedBalance = pickle.loads(pickle.dumps(planned))
    assert isinstance(sent.work, PackedComputing) and sent.work.whole is sent.whole, "unpacked once, by a worker"
    single = GraphPart(lambda _: whole_shard(data, "none", []), None, planned)(Ranks(), model, FitOptions())
    assert single._rebalance == RebalanceRules(work=planned.work, whole=planned.whole)
    idle = devices[1].model_copy(update={"sizes": devices[1].sizes.model_copy(update={"inner": 1})})
    made = task.plan.planned
    task.plan.planned = replace(made, plan=made.plan.model_copy(update={"devices": (devices[0], idle)}))
    assert task.plan.balance().left_out == {1}
    subject = task.plan._subject
    assert subject is not None
    for name, value in (("halo_mode", "stale"), ("halo_wire", "auto")):
        task.plan._subject = replace(subject, settings=subject.settings | {name: value})
        found = task.plan.balance()
        assert found.whole is None and found.work is not None, "exchanges are predicted as others than they are"
    task.plan._subject = None
    assert task.plan.balance() == PlannedBalance(left_out=frozenset({1})), "of a plan that was read, no more is known"


@pytest.mark.parametrize("shares", ["flops", "bandwidth"])
def test_shares_by_one_number(shares: str) -> None:
    data = load("digits")
    torch.manual_seed(0)
    result = nugnn.fit(
        GNN("gcn", data.num_features, data.num_classes, hidden=8),
        data,
        workers=2,
        shares=shares,
        epochs=1,
        device="cpu",
    )
    assert result.plan is not None and result.plan.shares_by == shares
    assert result.plan.shares == pytest.approx((0.5, 0.5), abs=0.02)


@pytest.mark.parametrize("dataset", ["digits", "digits-images"])
def test_what_a_prediction_leaves_out_is_said_in_training_too(tmp_path: Path, dataset: str) -> None:
    (tmp_path / "c.yaml").write_text(UNEVEN)
    how: dict[str, Any] = {"dataset": dataset, "workers": 2, "epochs": 1, "hidden": 8, "grad_sync": "4bit"}
    how |= {"out": str(tmp_path / "out"), "shares": "auto", "cluster": str(tmp_path / "c.yaml")}
    said = ["sums of gradients are predicted as if grad_sync were fp32, and not 4bit"]
    if dataset == "digits":
        how["halo_mode"] = "stale"
        said.append("predicted as if halo_mode were exact, and not stale")
        config: Any = TrainConfig(**how)
    else:
        config = SampleConfig(**how, model="mlp", batch_size=64)
    result = run_from_config(config)
    assert set(said) <= set(result["notes"])
    assert set(said) <= set(read_plan(tmp_path / "out" / "plan.json").notes)


def test_the_predicted_step_is_drawn_above_the_measured_one_or_said_why_not() -> None:
    events = (Event("a", "spmm", "forward", "device", 0.0, 1.0),)
    measured, predicted = (Timeline((name,), (events,), (1.0,)) for name in ("measured", "predicted"))
    plan = cast(Any, SimpleNamespace(calibration=None, corrected=lambda: plan))
    forecast = Forecast(step_seconds=1.0, seconds=(), timeline=predicted)
    made = Planned(plan=plan, part=None, forecast=forecast)
    assert pictures(made, measured).count("|f") == 2
    assert pictures(None, measured).startswith("a step, measured:\n") and pictures(None, measured).count("|f") == 1
    from_a_file = replace(made, forecast=replace(forecast, timeline=None))
    shown = pictures(from_a_file, measured)
    assert shown.count("|f") == 1 and "a step, predicted: not drawn, since a plan that was made before" in shown


def test_what_a_run_replaces_are_the_files_of_a_plan() -> None:
    assert parts_path(Path(PLAN_FILE)).name == PARTS_FILE


def test_one_worker_has_a_prediction_too(tmp_path: Path) -> None:
    result = run_from_config(settings(tmp_path, "one", workers=1, shares="auto", device="cpu"))
    assert result["predicted_epoch_seconds"] > 0 and result["shares"] == [1.0]


def test_batches_are_divided_by_the_plan(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(UNEVEN)
    data = torch.utils.data.TensorDataset(torch.randn(200, 30), torch.randint(3, (200,)))
    model = torch.nn.Sequential(torch.nn.Linear(30, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    how: dict[str, Any] = {"epochs": 1, "batch_size": 64, "workers": 2, "on_note": lambda _: None}
    notes: list[str] = []
    planned = nugnn.fit(model, data, shares="auto", cluster=tmp_path / "c.yaml", **how | {"on_note": notes.append})
    assert planned.plan is not None and planned.batch_split == planned.plan.batch_split
    assert sum(planned.batch_split) == 64 and planned.batch_split[1] > planned.batch_split[0]
    assert any("batches of 64 samples are divided as the plan says" in note for note in notes)
    again = nugnn.fit(model, data, plan=planned.plan, **how)
    assert again.batch_split == planned.batch_split
    assert [epoch.loss for epoch in again.history] == [epoch.loss for epoch in planned.history]
    with pytest.raises(ValueError, match="divides batches of 64 samples, and batch_size is 32"):
        nugnn.fit(model, data, plan=planned.plan, **how | {"batch_size": 32})
    same = nugnn.fit(model, data, plan=planned.plan, batch_split=planned.batch_split, **how)
    assert same.batch_split == planned.batch_split
    with pytest.raises(ValueError, match=r"divides batches as \d+,\d+, and this run was given --batch-split 32,32"):
        nugnn.fit(model, data, plan=planned.plan, batch_split="even", **how)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shares": "fair"}, "shares 'fair' is not known; give auto, even, flops, bandwidth"),
        ({"plan": "none.json"}, r"none\.json: no such file; make it with"),
        ({"cluster": "none.yaml"}, r"none\.yaml: no such file; --cluster takes"),
        (
            {"cluster": "c.yaml", "device": "cuda"},
            "the cluster has the devices cpu,cpu, and this run was given --device cuda; leave --device out",
        ),
        ({"cluster": "c.yaml", "workers": 3}, "has 2 devices, and there are 3 workers; give --workers 2"),
        ({"shares": "auto", "partitioner": "random"}, "unknown partition method 'random'"),
        (
            {"partitioner": "scotch"},
            "partitioner 'scotch' is not known; give auto, metis, clusters, kaminpar or random",
        ),
        ({"partitioner": "scotch", "workers": 1}, "partitioner 'scotch' is not known"),
    ],
)
def test_misuse_in_python_is_one_sentence(
    arguments: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(UNEVEN)
    data = load("digits")
    with pytest.raises(ValueError, match=words):
        nugnn.fit(GNN("gcn", data.num_features, data.num_classes), data, **{"workers": 2, "epochs": 1, **arguments})


_BOTH = "and this run was given"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": "cpu"}, None),
        ({"device": "cpu,cpu"}, None),
        ({"limits": "threads=1;none"}, None),
        ({"shares": "auto"}, None),
        ({"shares": "even"}, None),
        ({"shares": "planned"}, None),
        ({"device": "cuda"}, f"the plan has the devices cpu,cpu, {_BOTH} --device cuda; leave --device out"),
        ({"limits": "threads=2;none"}, f"the plan has the limits 'threads=1;none', {_BOTH} --limits 'threads=2;none'"),
        ({"limits": "none;none"}, f"the plan has the limits 'threads=1;none', {_BOTH} --limits 'none;none'"),
        ({"shares": "flops"}, f"the plan has shares by 'auto', {_BOTH} --shares flops; leave --shares out"),
        ({"shares": "0.9,0.1"}, r"the plan has the shares 0\.\d+,0\.\d+, and this run was given --shares 0\.9,0\.1"),
    ],
)
def test_what_agrees_with_a_plan_may_be_said_again_and_what_does_not_is_refused_with_both(
    given: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(UNEVEN)
    how = {"dataset": "digits", "workers": 2, "cluster": str(tmp_path / "c.yaml"), "shares": "auto"}
    plan = plan_run.plan_from_config(TrainConfig(**how), None).plan
    if given.get("shares") == "planned":
        given = {"shares": ",".join(f"{device.share:.4f}" for device in plan.devices)}
    config = TrainConfig(dataset="digits", workers=2, plan="p.json", **given)  # nothing is refused before it is read

    def request() -> None:
        ask = request_of(config.shares, plan, None, 2, config.device, config.limits, print, print)[0]
        assert ask is not None and ask.limits == (DeviceLimits(threads=1), DeviceLimits())
        assert [each.type for each in ask.devices(config.device, 2)[0]] == ["cpu", "cpu"]

    if words is None:
        request()
    else:
        with pytest.raises(ValueError, match=words):
            request()


def test_stages_tell_a_plan_or_parts_that_are_taken_from_those_that_are_made(tmp_path: Path) -> None:
    data, stages = load("digits"), list[str]()
    part = np.arange(data.num_nodes) % 2
    for cache, given in ((None, None), (None, part), (tmp_path, None), (tmp_path, None), (tmp_path, part)):
        (tmp_path / "own").mkdir(exist_ok=True)
        shards_on_disk(data, [1, 1], "metis", "none", cache, tmp_path / "own" / "s", given, stages.append)
    assert stages == ["partition", "parts_planned", "partition", "parts_cached", "parts_planned"]
    stages.clear()
    (tmp_path / PLAN_FILE).touch()
    with_file = PlanRequest(shares_by="auto", plan=cast(Any, SimpleNamespace(devices=())))
    for request, resumed in ((with_file, None), (with_file, tmp_path), (PlanRequest(shares_by="auto"), tmp_path)):
        with pytest.raises(AttributeError):  # a task that is none: the stage is told before it is asked
            use_plan(cast(Any, None), request, [torch.device("cpu")], None, stages.append, print, resumed)
    assert stages == ["plan_read", "plan_read", "plan_resumed"]
    texts = [text.format(workers="1 worker", parts="1 part") for text in STAGES.values()]
    assert set(stages) <= STAGES.keys() and not any("{" in text or "1 workers" in text for text in texts)


def test_a_model_that_cannot_be_foreseen_is_refused_under_auto_alone(tmp_path: Path) -> None:
    data = load("digits")
    model = GNN("sage", data.num_features, data.num_classes, hidden=8, aggregator="lstm")
    with pytest.raises(ValueError, match=r"shares auto need a model whose step can be foreseen: .*Give numbers"):
        nugnn.fit(model, data, workers=2, shares="auto", epochs=1, device="cpu")
    parts = np.unique(load("digits").labels)  # the graph is as it was
    assert len(parts) == 10
