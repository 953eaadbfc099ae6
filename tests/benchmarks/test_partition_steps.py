"""The comparison of splits by a replayed step runs to its end on a small graph, and counts what differs."""

from __future__ import annotations

import json
from pathlib import Path

import partition_steps
import pytest


@pytest.mark.slow
def test_a_run_has_a_row_of_each_system_and_no_plan_is_slower_than_metis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = partition_steps.main(
        ["--nodes", "600", "--parts", "2", "3", "--models", "gcn", "--seed", "2", "--rows", str(path)]
    )
    assert [row["system"] for row in rows] == 2 * list(partition_steps.SYSTEMS)
    assert [json.loads(line)["step_seconds"] for line in path.read_text().splitlines()] == [
        row["step_seconds"] for row in rows
    ]
    for metis, _, plan, moved in (rows[:4], rows[4:]):
        assert plan["step_seconds"] <= metis["step_seconds"] == plan["metis_seconds"]
        assert moved["cpu_seconds"] >= plan["cpu_seconds"] > 0 and 0 < plan["least_share"] < 0.5
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == partition_steps.HEAD and all(len(line) <= 80 for line in lines[:9])
    assert lines[9].startswith("plan beside METIS: slower in 0 of 2, by 0.0% at most; faster in ")


def test_steps_are_compared_case_by_case() -> None:
    def row(graph: str, system: str, seconds: float) -> partition_steps.Row:
        return {"graph": graph, "parts": 2, "model": "gcn", "system": system, "step_seconds": seconds}

    pairs = [("a", 1.0, 1.1), ("b", 2.0, 1.5), ("c", 4.0, 4.0)]
    rows = [each for graph, one, two in pairs for each in (row(graph, "plan", one), row(graph, "plan, moves", two))]
    assert partition_steps.compared(rows, "plan, moves", "plan") == (
        "plan, moves beside plan: slower in 1 of 3, by 10.0% at most; faster in 1, by 25.0% at most; median 1.0000"
    )


def test_no_graph_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in (([], "say which graphs"), (["--graphs", "cora"], "--data-dir is needed")):
        with pytest.raises(SystemExit):
            partition_steps.main(given)
        assert said in capsys.readouterr().err
