"""Runs of `compression_accuracy.py` as lines of JSON: read, appended, and kept without their curves."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compression_cases import BASELINE, ROWS, Case
from paired_runs import Runs, check_pairs, when_reached

CURVES = ("at", "val", "train_seconds")


def read_runs(path: Path, code: str | None) -> Runs:
    """Runs in the file with the settings of today; of ``code`` alone, or of the last line's when None.

    A line that was cut off when the machine went away is passed over; how many are of other code or settings is told.
    """
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            print(f"{path}: passed over a line that is no JSON: {text[:40]!r}", file=sys.stderr)
    code = code or (lines[-1]["code"] if lines else None)
    runs: Runs = {}
    num_others = 0
    for line in lines:
        row = ROWS.get(line["row"])
        is_ours = line["code"] == code and row is not None and line["column"] in row.columns
        if is_ours:
            now = Case(line["row"], line["column"], line["seed"], "", line["epochs"]).settings
            is_ours = line["settings"] == json.loads(json.dumps(now))
        if is_ours:
            runs[line["row"], line["column"], line["seed"]] = line
        else:
            num_others += 1
    if num_others:
        print(f"{path}: left out {num_others} runs of other code than {code}, or of other settings", file=sys.stderr)
    return runs


def append(path: Path, line: Mapping[str, Any]) -> None:
    """One line more, on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_cut_off = path.exists() and path.stat().st_size > 0 and not path.read_bytes()[-1:] == b"\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if is_cut_off else "") + json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def kept_lines(runs: Runs) -> Iterator[dict[str, Any]]:
    """Every run that has its pair, with what the tables need in place of its curves."""
    for row, column, seed in sorted(runs):
        if (plain := runs.get((row, BASELINE, seed))) is not None:
            run = runs[row, column, seed]
            line = {name: value for name, value in run.items() if name not in CURVES}
            yield line | {"num_epochs": run["at"][-1], "reached": when_reached(plain, run)}


def runs_of(lines: Sequence[Mapping[str, Any]]) -> Runs:
    """Kept lines as runs, checked."""
    runs = {(line["row"], line["column"], line["seed"]): dict(line) for line in lines}
    check_pairs(runs)
    return runs
