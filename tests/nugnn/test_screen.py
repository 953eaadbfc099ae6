"""What commands write for people: when messages are wrapped, and that tables never cut a number."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from nugnn import cli
from nugnn.progress import RunProgress
from nugnn.screen import complain, say, screen, show_table, wrapped

PATH = "/a/folder/of/somebody/with-a-name/that-is/longer/than/narrow/terminals/config.yaml"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(stream: Any) -> list[str]:
    return str(stream.getvalue()).splitlines()


@given(text=st.text(alphabet="ab -/表\n", max_size=200), width=st.integers(1, 90))
def test_wrapping_changes_white_space_alone_and_every_line_fits_or_is_one_word(text: str, width: int) -> None:
    made = wrapped(text, width)
    assert made.split() == text.split()
    for line in made.split("\n"):
        assert cell_len(line) <= width or len(line.split()) <= 1


def test_lines_that_fit_are_left_as_they_are() -> None:
    text = "a  table\n  of   two\n\nlines"
    assert wrapped(text, 20) == text


@pytest.mark.parametrize("width", [30, 60, 80])
def test_a_terminal_gets_lines_that_fit_and_whole_paths(width: int) -> None:
    console = Console(file=Terminal(), width=width, markup=False, emoji=False, highlight=False)
    say(console, f"note: {PATH} is of another run, which had 3 workers; name another folder with --out, or resume it")
    lines = lines_of(console.file)
    assert sum(PATH in line for line in lines) == 1 and len(lines) > 1
    assert all(len(line) <= width or line.strip() in (PATH, f"note: {PATH}") for line in lines)
    assert all(line.startswith("  ") for line in lines[1:])


def test_elsewhere_a_message_is_one_line_whatever_the_environment_says_of_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    text = f"note: {'many words ' * 30}:gear: [bold]{PATH}[/] \x1b[31m".rstrip()
    complain(text)
    assert capsys.readouterr().err == f"{text}\n"


@pytest.mark.parametrize("setting", ["NO_COLOR", "TERM"])
def test_without_colours_a_terminal_gets_text_alone(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting, "dumb")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", Terminal())
    complain("note: " + "many words " * 30)
    assert "\x1b" not in sys.stderr.getvalue() and len(lines_of(sys.stderr)) > 1


COMMANDS = [
    ["train", "--dataset", "no-such-name"],
    ["train", "--dataset", "digits", "--lr", "x", "--workers", "2"],
    ["train", "--dataset", "digits", "--model", f"{PATH}.py:Net"],
    ["train", "--config", PATH],
    ["check", "mlp"],
    ["partition", "--dataset", "digits", "--workers", "2", "--shares", "0.5,0.6", "--out", "x"],
    ["plan", "--dataset", "digits", "--graph-stats", "nodes=1"],
    ["simulate", "--graph-stats", "nodes=x", "--devices", "A100"],
    ["profile", "--limits", "sms=1"],
    ["evaluate", PATH],
    ["predict", "run", "--out", f"{PATH}.txt"],
    ["calibration", "--forget", "--json"],
    ["datasets", "info", "no-such-name"],
    ["datasets", "prepare", "no-such-name"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(arguments[:2]))
def test_refusals_of_every_command_fit_a_narrow_terminal_and_are_one_line_elsewhere(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NUGNN_DATA", raising=False)
    monkeypatch.setenv("NUGNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "44")
    with pytest.raises(SystemExit):
        cli.main(arguments)
    piped = capsys.readouterr().err
    assert piped.startswith("nugnn: error: ") and piped.count("\n") == 1
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(SystemExit):
        cli.main(arguments)
    lines = lines_of(sys.stderr)
    assert " ".join(lines).split() == piped.split()
    assert all(len(line) <= 44 or len(line.split()) == 1 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["train", "--dataset", "digits", "--plan", "no.json"],
            "no.json: no such file; make it with: nugnn plan --plan-",
        ),
        (
            ["plan", "--dataset", "digits", "--cluster", "no.yaml"],
            "no.yaml: no such file; --cluster takes a description",
        ),
        (
            ["simulate", "--graph-stats", "ogbn-products", "--devices", "FOO"],
            "error: --devices: no data sheet of 'FOO'",
        ),
        (["predict", "run", "--out", "no/classes.csv"], "--out no/classes.csv: there is no folder no; make it first"),
        (
            ["train", "--dataset", "./g.csv"],
            "g: the graph has no labels, so there is nothing to train for; give labels",
        ),
        (
            ["check", "net.py:Net", "--dataset", "digits-images"],
            "it was called as model(x) on samples; a model of graphs",
        ),
    ],
)
def test_refusals_say_what_to_do(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NUGNN_DATA", raising=False)
    (tmp_path / "g.csv").write_text("src,dst\n0,1\n")
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, in_features, num_classes):\n"
        "        super().__init__()\n    def forward(self, graph, x):\n        return x\n"
    )
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_text_in_brackets_is_no_markup_in_tables_and_progress() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, markup=False, emoji=False)
    with RunProgress(console, 3) as progress:
        progress.on_event({"kind": "stage", "text": "reading data[/x] :gear:"})
    table = Table("name", title="run[1]")
    table.add_row("[bold]a:gear:")
    show_table(console, table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "data[/x] :gear:" in shown and "[bold]a:gear:" in shown and "run[1]" in shown


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100])
def test_the_list_of_data_sets_never_cuts_a_number(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments in (["datasets", "list", "--json"], ["datasets", "list"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        out = capsys.readouterr().out
        if "--json" in arguments:
            entries = json.loads(out)
    assert "…" not in out
    numbers = set(re.findall(r"[\d,]+,\d{3}\b", out))
    counts = [entry[name] for entry in entries for name in ("nodes", "edges", "features")]
    assert numbers <= {f"{count:,}" for count in counts if count}
    assert "111,059,956" in numbers and ("1,615,685,872" in numbers) == (columns >= 60)
    assert "amazon-computers" in out
    assert columns < 40 or max(map(len, out.partition("by hand:")[0].splitlines())) <= columns


@pytest.mark.parametrize("width", [24, 40, 60, 80])
def test_numbers_of_a_table_stay_whole_and_what_is_left_out_is_said(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    table = Table("a name", title="of numbers")
    for name in ("first", "second", "third"):
        table.add_column(name, justify="right")
    table.add_row("some words that can be folded anywhere", "12,345.6 ms", "123,456,789", "1")
    show_table(console, table, least_first=("third", "first"))
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "123,456,789" in out and ("12,345.6 ms" in out) == ("first" not in out.partition("left out")[2])
    assert ("left out" in out) == (width < 60) and "…" not in out


@pytest.mark.parametrize(
    "command", ["train", "plan", "simulate", "profile", "partition", "check", "evaluate", "predict"]
)
def test_help_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and (
        command != "train" or "2bit, 1bit, adaptive, powersgd" in " ".join(out.split())
    )


def test_screens_are_as_wide_as_the_terminal_80_columns_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    for columns in ("30", "80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        widths.append(screen().width)
    assert widths == [30, 80, 80]
