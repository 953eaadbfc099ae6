"""The command line without a trainer: options to settings, messages, exit codes, what is shown."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nugnn import cli
from nugnn.config import TrainConfig
from nugnn.failure import WorkerFailed
from nugnn.options import ConfigError, flag_of, option_spec
from nugnn.progress import RunProgress

RESULT: dict[str, Any] = {
    "dataset": "digits",
    "model": "gcn",
    "workers": 2,
    "device": "cpu",
    "shares": [0.7, 0.3],
    "metric": "accuracy",
    "best_epoch": 173,
    "val": 0.9722,
    "test": 0.9694,
    "epoch_seconds": 0.00421,
    "peak_memory_bytes": [400 * 2**20, 390 * 2**20],
}


class Runs:
    """Stands where nugnn.run does: notes the settings it is called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.configs: list[TrainConfig] = []
        self.raises: BaseException | None = None
        self.notes: list[str] = []
        module = types.ModuleType("nugnn.run")
        module.run_from_config = self.run_from_config  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nugnn.run", module)

    def run_from_config(self, config: TrainConfig, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        self.configs.append(config)
        on_event({"kind": "stage", "text": "splitting the graph into 2 parts"})
        on_event({"kind": "epoch", "epoch": 1, "loss": 2.3, "val": 0.1})
        for text in self.notes:
            on_event({"kind": "note", "text": text})
        if self.raises is not None:
            raise self.raises
        return RESULT


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.delenv("NUGNN_DATA", raising=False)
    monkeypatch.delenv("NUGNN_TRACEBACK", raising=False)
    return Runs(monkeypatch)


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return int(caught.value.code or 0)


def test_options_reach_the_run(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", "--dataset", "digits", "--workers", "2", "--shares", "0.7,0.3", "--lr", "5e-3") == 0
    assert runs.configs == [TrainConfig(dataset="digits", workers=2, shares="0.7,0.3", lr=0.005)]
    out = capsys.readouterr().out
    assert "settings: --dataset digits --lr 0.005 --workers 2 --shares 0.7,0.3" in out
    assert "97.22%" in out and "4.2 ms" in out and "400 MiB, 390 MiB" in out and "173" in out
    assert "splitting the graph into 2 parts" in out and "epoch   1/200  loss 2.3000  val 0.1000" in out
    assert "weight-decay 0.0005" in out
    assert max(map(len, out[out.index("result") :].splitlines())) <= 80


def test_settings_that_are_shown_can_be_pasted(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--dataset", "digits", "--workers", "2", "--limits", "none;threads=1", "--out", "a folder"]
    assert exit_code("train", *given) == 0
    shown = shlex.split(" ".join(capsys.readouterr().out.partition("defaults:")[0].split()).removeprefix("settings: "))
    assert exit_code("train", *shown) == 0 and runs.configs[0] == runs.configs[1]


@pytest.mark.parametrize("after", [[], ["--epochs", "3"]])
def test_an_option_without_its_value_says_its_values(
    after: list[str], runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("train", "--dataset", "digits", "--rebalance", *after) == 2
    assert capsys.readouterr().err == "nugnn: error: --rebalance takes auto or off\n" and runs.configs == []


def test_notes_of_a_run_are_told(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RESULT, "notes", ["workers share cores"])
    assert exit_code("train", "--dataset", "digits") == 0
    captured = capsys.readouterr()
    assert captured.err == "note: workers share cores\n" and "share cores" not in captured.out


def test_a_note_that_was_told_on_the_way_is_not_told_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RESULT, "notes", ["told before", "new"])
    runs.notes.append("told before")
    assert exit_code("train", "--dataset", "digits") == 0
    captured = capsys.readouterr()
    assert captured.out.count("told before") == 1 and captured.err == "note: new\n"


def test_json_prints_the_result_alone(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", "--dataset", "digits", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == RESULT
    assert captured.err == ""


@pytest.mark.parametrize("entry", fields(TrainConfig), ids=lambda entry: entry.name)
def test_every_setting_has_its_option(entry: Any, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Each option takes effect or is refused by its own name; none is accepted and ignored."""
    spec, flag = option_spec(entry), flag_of(entry.name)
    value = {int: "3", float: "0.25", str: spec.choices[-1] if spec.choices else "text"}.get(spec.kind)
    value = {
        "halo_mode": "stale",
        "halo_target": "25%",
        "shares": "0.5,0.5",
        "model": "gin",
        "device": "cpu",
        "limits": "threads=3",
    }.get(entry.name, value)
    extra = [] if entry.name == "dataset" else ["--dataset", "d"]
    extra += {
        "shares": ["--workers", "2"],
        "heads": ["--model", "gat"],
        "attention_dropout": ["--model", "gat"],
        "aggregator": ["--model", "gin"],
        "decay_epochs": ["--schedule", "step"],
        "halo_feedback": ["--halo-wire", "int4"],
        **{name: ["--grad-sync", "4bit"] for name in ("grad_sync_hosts", "grad_sync_feedback", "grad_sync_exact")},
        "grad_sync_rank": ["--grad-sync", "powersgd"],
        "halo_target": ["--halo-wire", "auto"],
    }.get(entry.name, [])
    code = exit_code("train", *extra, flag, *([] if value is None else [value]))
    if not spec.landed or (spec.kind is bool and spec.later):
        assert code == 2 and runs.configs == []
        assert f"nugnn: error: {flag}" in capsys.readouterr().err
        return
    expected: Any = True if value is None else (0.5, 0.5) if entry.name == "shares" else spec.kind(value)
    assert code == 0 and getattr(runs.configs[0], entry.name) == expected


def test_recipe_then_file_then_options(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("hidden: 32\nepochs: 7\nresidual: true\n")
    exit_code("train", "--recipe", "cora-gcn", "--config", str(file), "--epochs", "9", "--no-residual")
    config = runs.configs[0]
    assert (config.dataset, config.hidden, config.epochs, config.residual) == ("cora", 32, 9, False)


def test_saved_settings_run_again(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    config = TrainConfig(dataset="digits", workers=3, shares="0.2,0.3,0.5", undirected=True, patience=4)
    file.write_text(config.to_yaml())
    exit_code("train", "--config", str(file))
    assert runs.configs == [config]


def test_data_folder_from_the_environment(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUGNN_DATA", "from-environment")
    exit_code("train", "--dataset", "d")
    exit_code("train", "--dataset", "d", "--data-dir", "from-option")
    assert [config.data_dir for config in runs.configs] == ["from-environment", "from-option"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--undirected"], True),
        (["--undirected", "True"], True),
        (["--undirected=1"], True),
        (["--undirected", "False"], False),
        (["--undirected=false"], False),
        (["--no-undirected"], False),
        (["--undirected", "0"], False),
        (["--undirected=off", "--seed", "1"], False),
        ([], False),
    ],
)
def test_cli_01_every_spelling_of_a_flag_means_what_it_says(runs: Runs, words: list[str], expected: bool) -> None:
    """cli-01."""
    assert exit_code("train", "--dataset", "d", *words) == 0
    assert runs.configs[0].undirected is expected


@pytest.mark.parametrize(
    "words", [["--undirected", "maybe"], ["--undirected=maybe"], ["--undirected="], ["--no-undirected", "false"]]
)
def test_cli_01_other_values_of_a_flag_are_refused_with_the_right_spelling(
    runs: Runs, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("train", "--dataset", "d", *words) == 2
    assert "write --undirected or --no-undirected, without a value" in capsys.readouterr().err
    assert runs.configs == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "--dataset is missing"),
        (["train", "--dataset", "d", "--lr", "x"], "--lr x is not allowed; allowed: a number above 0"),
        (
            ["train", "--dataset", "d", "--precision", "int8"],
            "--precision int8: precision by operator has not landed yet",
        ),
        (["train", "--dataset", "d", "--model", "none.py:Net"], "none.py: no such file"),
        (["train", "--dataset", "d", "--epoch", "3"], "--epoch"),
        (["train", "--recipe", "nothing"], "known: amazon-computers-gcn"),
        (["train", "--config", "none.yaml"], "none.yaml: no such file"),
        (["train", "--dataset", "d", "stray"], "stray"),
        (["check", "mlp"], "FILE.py:Class"),
        (["check", "none.py:Net"], "none.py: no such file"),
        (["plan"], "--dataset is missing"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(
    runs: Runs, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err
    assert captured.out == "" and runs.configs == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (WorkerFailed(2, "labels.csv, row 7: class 12 of 10"), 2, "labels.csv, row 7: class 12 of 10"),
        (WorkerFailed(3, "worker 1 of 3 died"), 3, "worker 1 of 3 died"),
        (ValueError("no such data set"), 2, "no such data set"),
        (FileNotFoundError(2, "No such file or directory", "a.npz"), 2, "a.npz"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_of_a_run(
    runs: Runs, error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.raises = error
    assert exit_code("train", "--dataset", "d") == code
    captured = capsys.readouterr()
    assert captured.err.strip().splitlines()[-1].startswith("nugnn: ") and words in captured.err


def test_an_error_of_ours_keeps_its_traceback(runs: Runs) -> None:
    runs.raises = AssertionError("3 rows, planned 4")
    with pytest.raises(AssertionError):
        cli.main(["train", "--dataset", "d"])


def test_tracebacks_on_request(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUGNN_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        cli.main(["train", "--dataset", "d", "--lr", "x"])


@pytest.mark.parametrize("differs", [False, True])
def test_check_shows_the_report_or_what_differs(
    differs: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "net.py"
    file.touch()

    def run_check(spec: str, data: object) -> types.SimpleNamespace:
        assert data is None
        if differs:
            raise ValueError(f"{spec}: layers.1 differs")
        return types.SimpleNamespace(num_nodes=240, num_parts=3, num_modules=5, largest_difference=2e-15)

    module = types.ModuleType("nugnn.check")
    module.run_check = run_check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nugnn.check", module)
    assert exit_code("check", f"{file}:Net") == (2 if differs else 0)
    captured = capsys.readouterr()
    if differs:
        assert captured.err == f"nugnn: error: {file}:Net: layers.1 differs\n"
    else:
        assert "3 unequal parts equal one part on a graph of 240 nodes" in captured.out and "2.0e-15" in captured.out


def run_fresh(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"], ["train", "--lr", "x"]])
def test_cli_03_help_version_and_wrong_options_load_no_heavy_package_and_no_network(arguments: list[str]) -> None:
    """cli-03; what makes them quick is what they do not import, which unlike a time does not depend on the machine."""
    result = run_fresh(f"""
import sys, socket
def refuse(*_, **__): raise SystemExit("network")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
from nugnn.cli import main
try:
    main({arguments!r})
except SystemExit as leave:
    assert leave.code in (0, None, 2), leave.code
heavy = {{"torch", "dgl", "numpy", "scipy", "numba", "pandas", "sklearn", "ogb"}} & set(sys.modules)
assert not heavy, heavy
""")
    assert result.returncode == 0, result.stderr


def test_version_names_torch_and_dgl(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["nugnn", "torch", "dgl"]


def test_table_fits_80_columns_with_many_workers() -> None:
    many = {**RESULT, "workers": 32, "shares": [1 / 32] * 32, "peak_memory_bytes": [2**30] * 32, "test": None}
    console = Console(file=io.StringIO(), width=80)
    console.print(cli.result_table(many))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("1024 MiB") == 32 and "none" in text


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, None),
        ({"wire": "fp32", "steps": 20, "sent_bytes": 2**20}, None),  # what everybody has
        ({"wire": "fp32", "steps": 20, "sent_bytes": 20 * 2**10, "choice": {}}, "fp32, chosen by auto, 1 KiB a step"),
        ({"wire": "4bit", "steps": 20, "sent_bytes": 747_520}, "4bit, 36.5 KiB a step"),
        ({"wire": "4bit", "steps": 0, "sent_bytes": 0}, "4bit"),
    ],
)
def test_the_table_says_how_gradients_travelled_where_that_was_asked_for(
    found: dict[str, Any] | None, said: str | None
) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(cli.result_table({**RESULT, "ranks": [{} if found is None else {"grad_sync": found}]}))
    rows = [line for line in console.file.getvalue().splitlines() if "gradients" in line]  # type: ignore[attr-defined]
    assert [row.strip("│ ").split("│")[1].strip() for row in rows] == ([] if said is None else [said])


def epoch(number: int) -> dict[str, Any]:
    return {"kind": "epoch", "epoch": number, "loss": 1.0, "val": math.nan}


def test_without_a_terminal_a_line_every_few_seconds_and_the_last_epoch() -> None:
    now = 0.0
    console = Console(file=io.StringIO(), width=80)
    with RunProgress(console, 100, seconds_between_lines=5.0, clock=lambda: now) as progress:
        for number in range(1, 101):
            progress.on_event(epoch(number))
            progress.on_event({"kind": "other"})
            now += 0.1
    shown = [line.split()[1].split("/")[0] for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert "val" not in console.file.getvalue()  # type: ignore[attr-defined]
    # 10 s at a line every 5 s; 0.1 is not exact in binary, so the second line may fall on epoch 51 or 52.
    assert shown in (["1", "51", "100"], ["1", "52", "100"])


def test_in_a_terminal_a_bar_that_leaves_nothing_behind() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with RunProgress(console, 3) as progress:
        progress.on_event({"kind": "stage", "text": "loading"})
        for number in (1, 2, 3):
            progress.on_event(epoch(number))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "epoch 3/3" in written
    assert written.endswith("\x1b[2K")  # the bar's line is erased


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["datasets", "prepare", "pipe"], "pipe: is a pipe, not a file"),
        (["datasets", "prepare", "pipe.txt"], "pipe.txt: is a pipe, not a file"),
        (["datasets", "prepare", "pipe.npz"], "pipe.npz: is a pipe, not a file"),
        (["datasets", "prepare", "/dev/zero"], "/dev/zero: is a device, not a file"),
        (["datasets", "prepare", f"./{LONG}.txt"], "no such file: the path is longer than the system allows"),
        (["datasets", "prepare", LONG], "unknown dataset"),
        (["datasets", "prepare", "~nobody-of-that-name/g.txt"], "no such file"),
        (["datasets", "prepare", "planetoid"], "ind.tiny.graph: is a pipe, not a file"),
        (["datasets", "prepare", "zip.zip"], "zip.zip: is a pipe, not a file"),
        (["datasets", "list", "--data-dir", "pipe"], "the data folder pipe is a pipe"),
        (["datasets", "list", "--data-dir", LONG], "does not exist"),
        (["train", "--config", "pipe"], "pipe: is a pipe, not a file"),
        (["train", "--config", "folder"], "folder: is a folder, not a file; --config takes a YAML file"),
        (["train", "--config", LONG], "no such file: the path is longer than the system allows"),
        (["check", "pipe.py:Net"], "pipe.py: is a pipe, not a file"),
        (["check", f"{LONG}.py:Net"], "no such file: the path is longer than the system allows"),
        (["evaluate", "pipe"], "pipe: no such folder"),
        (["evaluate", LONG], "File name too long"),
        (["predict", "/dev/null"], "/dev/null: no such folder"),
        (
            ["train", "--dataset", "digits", "--epochs", "1", "--out", "pipe"],
            "--out pipe cannot be written: File exists",
        ),
        (["train", "--dataset", "digits", "--epochs", "1", "--out", LONG], "File name too long"),
        (["partition", "--dataset", "digits", "--workers", "2", "--out", "pipe"], "pipe cannot be made: File exists"),
    ],
)
@pytest.mark.timeout(60)
def test_what_is_no_file_ends_in_one_line_and_is_not_waited_for(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NUGNN_DATA", raising=False)
    monkeypatch.setenv("NUGNN_CACHE", str(tmp_path / "cache"))
    for name in ("pipe", "pipe.txt", "pipe.npz", "pipe.py", "zip.zip"):
        os.mkfifo(name)
    (tmp_path / "folder").mkdir()
    (tmp_path / "planetoid").mkdir()
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        os.mkfifo(tmp_path / "planetoid" / f"ind.tiny.{part}")
    if "planetoid" in arguments:
        arguments = [*arguments[:-1], "./planetoid"]
        words = "ind.tiny.x: is a pipe, not a file"
    assert exit_code(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and len(line) < 700
