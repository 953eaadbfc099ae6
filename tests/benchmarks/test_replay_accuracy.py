"""Predicted steps beside trained ones, small: rows are whole, memory is right, seconds are of the right size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import replay_accuracy
import replay_cases
from harness import read_rows

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_predicts_steps_of_both_families(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_file = tmp_path / "rows.jsonl"
    arguments = "--count 1 --tests 2 --rounds 3 --nodes 1500 --edges 12000 --parts 2 --batch-scale 0.02 --clock thread"
    rows = replay_accuracy.main([*arguments.split(), "--seed", "4", "--label", "threads=1", "--rows", str(rows_file)])
    assert [json.loads(line) for line in rows_file.read_text().splitlines()] == rows
    assert [row["family"] for row in rows] == ["graph", "graph", "samples", "samples"]
    for row in rows:
        assert 0.4 < row["predicted_seconds"] / row["measured_seconds"] < 2.5  # other processes may be at work
        assert row["predicted_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.02)
        assert row["label"] == "threads=1" and not row["is_captured"]
        assert len(row["ladder"]) > 1 and all(each["laps_seconds"] > 0 for each in row["ladder"])
    text = capsys.readouterr().out
    assert "graph: 1 configurations, 2 steps: mean absolute error" in text and "peak memory" in text


def test_configurations_follow_from_the_seed_alone() -> None:
    sizes = replay_cases.Sizes(1000, 9000, 1, 2, True, {"mlp": 64, "cnn": 32, "transformer": 32})

    def drawn(seed: int) -> list[replay_cases.Case]:
        return replay_cases.drawn(8, seed, ["graph", "samples"], ["fp32", "bf16"], sizes)

    assert drawn(0) == drawn(0) != drawn(1)
    assert {case.kind for case in replay_cases.drawn(40, 0, ["graph", "samples"], ["fp32"], sizes)} == {
        "gcn", "sage", "gat", "gin", "mlp", "cnn", "transformer",
    }  # fmt: skip


def test_a_real_graph_is_predicted_on_its_own_structure(tmp_path: Path) -> None:
    arguments = "--count 1 --tests 1 --rounds 3 --family graph --graph products-like:1000:8000 --no-memory"
    (row,) = replay_accuracy.main([*arguments.split(), "--clock", "thread", "--seed", "1"])
    assert "error" not in row and row["sizes"]["inner"] < 1000
    assert 0.4 < row["predicted_seconds"] / row["measured_seconds"] < 2.5


def test_errors_with_the_factor_of_the_others_leave_the_own_configuration_out() -> None:
    rows = [
        {"family": "graph", "case": case, "measured_seconds": measured, "predicted_seconds": 1.0}
        for case, measured in (("a", 2.0), ("b", 4.0), ("b", 4.0))
    ]
    # errors: 1/2, 3/4, 3/4; with the factor of the others: 4/2 - 1, and 2/4 - 1 twice
    text = "graph: 2 configurations, 3 steps: mean absolute error 66.7% (largest 75.0%), 66.7% with the factor of the"
    assert replay_accuracy.summary(rows) == f"{text} others"


def test_the_page_says_what_the_kept_rows_say() -> None:
    page = (ROOT / "docs/replayer.md").read_text(encoding="utf-8")
    groups: dict[tuple[str, str], list[dict[str, object]]] = {}
    for row in read_rows(ROOT / "benchmarks/rows/replay_cpu"):
        groups.setdefault((row["file"], row["graph"]), []).append(row)
    said = " ".join(replay_accuracy.summary(rows) for rows in groups.values())
    found = re.findall(r"(\d+) configurations, (\d+) steps: mean absolute error ([\d.]+)% \(largest ([\d.]+)%\)", said)
    assert len(found) == 6
    for configurations, steps, mean, largest in found:
        assert f"| {configurations} | {steps} | {mean} % | {largest} % |" in page
