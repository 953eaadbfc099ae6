"""The comparison of splits runs to its end on a small graph, and the kept page is what the kept rows say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import partition_fit
import partition_large
import pytest
from harness import read_rows


def test_the_page_is_what_the_kept_rows_say() -> None:
    text = partition_fit.page(read_rows(partition_fit.KEPT), read_rows(partition_fit.KEPT_LARGE))
    assert text == partition_fit.PAGE.read_text(encoding="utf-8")
    blocks = text.split("```")[1::2]
    assert all(len(line) <= 80 for block in blocks for line in block.splitlines())


def test_kept_rows_are_of_all_systems_and_the_loop_is_never_worse() -> None:
    rows = partition_fit.latest(read_rows(partition_fit.KEPT))
    assert not [row for row in rows if "error" in row]
    assert len({row["graph"] for row in rows}) >= 9
    assert {row["parts"] for row in rows} == {2, 4, 8, 16}
    assert {row["system"] for row in rows} == set(partition_fit.SYSTEMS)
    for other in ("METIS", "METIS nodes"):
        ratios = partition_fit.ratios_to(rows, "loop", other)
        assert len(ratios) == len(rows) / len(partition_fit.SYSTEMS)
        assert max(ratios) <= 1
    for row in rows:
        assert row["makespan"] >= row["bound"] * (1 - 1e-9)
        assert len(row["share_ratios"]) == len(row["part_seconds"]) == row["parts"]
        assert min(row["inner"]) >= 1 and sum(row["inner"]) == row["num_nodes"]


def test_a_run_writes_rows_that_a_page_is_made_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    indices = np.sort(rng.integers(0, 300, (300, 8)), axis=1)
    (tmp_path / "made").mkdir()
    np.savez(
        tmp_path / "made" / "made.npz",
        num_nodes=300,
        adj_indptr=np.arange(0, 2401, 8),
        adj_indices=indices.ravel().astype(np.int32),
        train_idx=np.arange(30),
    )
    arguments = ["--data-dir", str(tmp_path), "--graphs", "made", "--scale", "0", "--parts", "3"]
    partition_fit.main([*arguments, "--systems", "random", "METIS", "loop", "--out", str(tmp_path / "rows")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == partition_fit.HEAD and all(len(line) <= 80 for line in lines)
    rows = [json.loads(line) for line in (tmp_path / "rows" / "partition_fit.jsonl").read_text().splitlines()]
    assert [row["system"] for row in rows] == ["random", "METIS", "loop"]
    assert rows[2]["makespan"] <= rows[1]["makespan"]
    assert rows[2]["rounds"][0] == ["work", pytest.approx(rows[1]["makespan"]), rows[2]["rounds"][0][2]]
    page = ["--report", "--rows", str(tmp_path / "rows"), "--page", str(tmp_path / "page.md")]
    partition_fit.main([*page, "--rows-large", str(tmp_path / "none")])
    text = (tmp_path / "page.md").read_text()
    assert "## Every part: loop" in text and "## Large graphs" not in text


def test_large_graphs_are_measured_beside_what_they_got_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--large", "6000", "--parts", "2", "--out", str(tmp_path)]
    partition_fit.main(run)
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
    rows = [json.loads(line) for line in (tmp_path / "partition_large.jsonl").read_text().splitlines()]
    assert [row["system"] for row in rows] == list(partition_large.SYSTEMS) and not [r for r in rows if "error" in r]
    for row in rows:
        names = [name for name, _, _ in row["rounds"]]
        assert ("moves" in names) == ("loop" in row["system"])
        assert row["makespan"] == pytest.approx(min(makespan for _, makespan, _ in row["rounds"]))
    section = "\n".join(partition_large.section(rows))
    assert all(partition_large.line(row)[:50] in section for row in rows)


def test_kept_rows_of_large_graphs_hold_the_law() -> None:
    rows = partition_fit.latest(read_rows(partition_fit.KEPT_LARGE))
    assert {(row["parts"], row["system"]) for row in rows} == {(p, s) for p in (2, 8) for s in partition_large.SYSTEMS}
    for row in rows:
        starts = [makespan for name, makespan, _ in row["rounds"] if name not in ("targets", "moves")]
        assert row["makespan"] <= min(starts) * (1 + 1e-12)


def test_what_is_worst_is_so_either_way() -> None:
    assert partition_fit.worst([1.0, 1.1, 0.8]) == 0.8
    assert partition_fit.worst([1.0, 1.5, 0.8]) == 1.5
    assert partition_fit.worst([1.0, 0.0]) == 0.0


def test_the_bound_is_that_of_devices_that_share_the_whole_graph() -> None:
    work, slowdowns = partition_fit.device_work(4, 3)
    assert len(slowdowns) == 4 and all(1 <= f <= 10 for f in slowdowns)
    assert partition_fit.device_work(4, 3)[1] == slowdowns != partition_fit.device_work(4, 4)[1]
    ids = np.arange(100)
    alone = partition_fit.bound_of(work, (100, ids, ids, ids[:0]), 1)
    assert alone == pytest.approx(work.seconds_of[0].inner * 100 + work.seconds_of[0].edges * 100)


def test_a_run_without_data_or_rows_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--data-dir is needed"):
        partition_fit.main([])
    with pytest.raises(SystemExit, match="no rows in"):
        partition_fit.main(["--report", "--rows", str(tmp_path)])
