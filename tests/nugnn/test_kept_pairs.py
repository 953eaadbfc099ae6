"""Measured runs in the cache folder: nobody's are lost, nobody else's are used, and no file there ends a run."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from nugnn import cli, kept_pairs
from nugnn.kept_pairs import MOST_OF_A_MODEL, forget_pairs, keep_pair, num_of_other_versions, pairs_folder
from nugnn.kept_pairs import kept_pairs as found_of
from nugnn.planning.run_pairs import SCHEMA, PredictionKind, RankPair, RunPair
from nugnn.prediction_versions import prediction_versions

KIND = PredictionKind(
    family="graph",
    precision="fp32",
    stands_on="rates",
    rates="0123",
    devices=(("a CPU, 1 threads", "a CPU, 1 threads"),),
    versions={"nugnn": "1", "torch": "2"},
)
OTHER = KIND.model_copy(update={"devices": (("another CPU, 1 threads",),)})
RANK = RankPair(
    device="a CPU, 1 threads",
    predicted_compute_seconds=0.01,
    measured_compute_seconds=0.02,
    predicted_exchange_seconds=0.0,
    measured_exchange_seconds=0.001,
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUGNN_CACHE", str(tmp_path / "cache"))


def pair(subject: int = 0, kind: PredictionKind = KIND, **changes: Any) -> RunPair:
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": kind,
        "subject": f"{subject:016x}",
        "name": f"model {subject} on cora",
        "predicted_seconds": 0.01,
        "measured_seconds": 0.021,
        "epochs": 5,
        "ranks": (RANK, RANK),
        "made": "2026-01-01T00:00:00Z",
    }
    return RunPair(**{**values, **changes})


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main([*arguments])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def test_what_is_kept_comes_back_and_other_kinds_do_not() -> None:
    assert found_of().pairs == () and forget_pairs() == 0
    kept = [pair(1), pair(2), pair(1, measured_seconds=0.03)]
    for each in kept:
        keep_pair(each)
    keep_pair(pair(1, OTHER))
    assert found_of(KIND).pairs == tuple(kept) and found_of(OTHER).pairs == (pair(1, OTHER),)
    assert len(found_of().pairs) == 4 and found_of().note == ""
    assert found_of(KIND.model_copy(update={"precision": "bf16"})).pairs == ()
    assert forget_pairs() == 4 and found_of().pairs == ()


def write_many(first: int) -> None:
    for number in range(first, first + 10):
        keep_pair(pair(number))


def test_processes_that_write_at_once_lose_nothing() -> None:
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_many, args=(10 * number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        found = found_of(KIND)
        assert found.ignored == () and len(found.pairs) >= seen
        seen = len(found.pairs)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert sorted(int(each.subject, 16) for each in found_of(KIND).pairs) == list(range(40))


def test_the_folder_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(MOST_OF_A_MODEL + 3):
        keep_pair(pair(1, epochs=3 + number))
    keep_pair(pair(2))
    own = [each.epochs for each in found_of(KIND).pairs if each.subject == pair(1).subject]
    assert own == list(range(6, 6 + MOST_OF_A_MODEL)) and len(found_of(KIND).pairs) == MOST_OF_A_MODEL + 1
    monkeypatch.setattr(kept_pairs, "MOST", 4)
    keep_pair(pair(3, OTHER))
    assert len(found_of().pairs) == 4 and found_of(OTHER).pairs == (pair(3, OTHER),)


def damaged(path: Path, how: str) -> None:
    content = path.read_text()
    match how:
        case "half":
            path.write_text(content[: len(content) // 2])
        case "bytes":
            path.write_bytes(bytes(range(256)))
        case "empty":
            path.write_bytes(b"")
        case "newer":
            path.write_text(content.replace(SCHEMA, "nugnn.run_pair/2"))
        case "nan":
            path.write_text(content.replace("0.021", "NaN"))
        case "zero":
            path.write_text(content.replace("0.01", "0"))
        case "huge":
            path.write_text(content.replace("0.021", "1e300"))
        case "field":
            path.write_text(json.dumps(json.loads(content) | {"speed": 1}))
        case "list":
            path.write_text("[" * 100_000)
        case "large":
            path.write_text(content + " " * (1 << 20))
        case "other kind":
            path.write_text(pair(1, OTHER).to_json())
        case "folder":
            path.unlink()
            path.mkdir()
        case "gone":
            path.unlink()
            path.symlink_to("nowhere")


DAMAGES = ("half", "bytes", "empty", "newer", "nan", "zero", "huge", "field", "list", "large", "other kind", "folder")


@pytest.mark.parametrize("how", [*DAMAGES, "gone"])
def test_what_is_no_pair_is_ignored_and_named(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken, whole = keep_pair(pair(1)), pair(2)
    keep_pair(whole)
    damaged(broken, how)
    found = found_of(KIND)
    assert found.pairs == (whole,)
    if how == "gone":  # as if another process had let go of it
        return
    assert found.ignored == (broken,) and str(broken) in found.note and "--forget" in found.note
    code, out, err = call(capsys, "calibration")
    assert (code, err) == (0, "") and "model 2 on cora" in out and str(broken) in out
    keep_pair(whole)
    assert found_of(KIND).pairs == (whole, whole)


def test_files_of_others_are_left_alone_and_a_file_in_place_of_the_folder_is_no_folder(tmp_path: Path) -> None:
    keep_pair(pair(1))
    (pairs_folder() / "notes.txt").write_text("mine")
    (pairs_folder() / "notes.json").write_text("{}")
    assert len(found_of(KIND).pairs) == 1 and found_of(KIND).note == ""
    assert found_of().ignored == (pairs_folder() / "notes.json",)
    forget_pairs()
    assert os.listdir(pairs_folder()) == ["notes.txt"]
    (pairs_folder() / "notes.txt").unlink()
    pairs_folder().rmdir()
    pairs_folder().write_text("a file")
    assert found_of().pairs == () and forget_pairs() == 0
    with pytest.raises(OSError, match="File exists"):
        keep_pair(pair(1))


def test_runs_that_differ_by_versions_alone_are_counted_apart() -> None:
    here = KIND.model_copy(update={"versions": prediction_versions()})
    assert num_of_other_versions(here) == 0
    for each in (KIND, here, OTHER, KIND.model_copy(update={"precision": "bf16"})):
        keep_pair(pair(1, each))
    keep_pair(pair(2, KIND))
    assert num_of_other_versions(here) == 2 and num_of_other_versions(KIND) == 1


def test_runs_that_no_plan_counts_come_last_and_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    here = prediction_versions()
    older = KIND.model_copy(update={"versions": here | {"prediction": "0ld"}})
    two_hosts = (("a CPU, 1 threads", "a CPU, 1 threads"),) * 2
    for number, each in enumerate((older, KIND.model_copy(update={"versions": here, "devices": two_hosts}))):
        keep_pair(pair(number, each))
    lines = call(capsys, "calibration")[1].splitlines()
    headings = [line for line in lines if not line.startswith(" ")]
    assert headings == [
        "graphs in fp32 on 2 hosts with 2 x a CPU, 1 thread each, from rates of a profile (0123)",
        "graphs in fp32 on 2 x a CPU, 1 thread, from rates of a profile (0123)",
    ]
    (note,) = (number for number, line in enumerate(lines) if "not counted" in line)
    assert lines[note - 1] == headings[1]
    assert lines[note] == f"  not counted: of prediction 0ld; plans made here are of prediction {here['prediction']}"


def test_the_command_shows_and_forgets(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "calibration") == (0, "no run with a plan was measured here yet\n", "")
    for number, measured in enumerate((0.02, 0.021, 0.022)):
        keep_pair(pair(number, measured_seconds=measured))
    keep_pair(pair(7, OTHER))
    code, out, _ = call(capsys, "calibration")
    text = " ".join(out.split())
    assert code == 0
    assert (
        "graphs in fp32 on 2 x a CPU, 1 thread, from rates of a profile (0123) not counted: of nugnn 1, torch 2" in text
    )
    assert "3 measured runs of 3 models or data sets took 2.1 x as long as predicted from rates of a profile" in text
    assert "graphs in fp32 on another CPU, 1 thread" in text and "one measured run" in text
    assert "model 1 on cora: an epoch 10 ms predicted, 21 ms measured, 2.1 x" in text
    shown = json.loads(call(capsys, "calibration", "--json")[1])
    assert [each["subject"] for each in shown] == [f"{number:016x}" for number in (0, 1, 2, 7)]
    code, _, err = call(capsys, "calibration", "--json", "--forget")
    assert code == 2 and "give one of them" in err
    code, out, _ = call(capsys, "calibration", "--forget")
    assert code == 0 and "4 files removed from" in out and found_of().pairs == ()
