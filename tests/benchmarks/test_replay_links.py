"""Steps of two ranks over slow links: drawn parts fit each other, rows and their errors, and one tiny run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lab_ranks
import pytest
import replay_links
import replay_pairs
import torch
from harness import read_rows
from hypothesis import given
from hypothesis import strategies as st

from nugnn.partition.check import check_shards
from nugnn.planning.part_sizes import PartSizes

ROOT = Path(__file__).resolve().parents[2]


@st.composite
def sizes(draw: Any) -> PartSizes:
    inner = draw(st.integers(1, 60))
    halo, sent = draw(st.integers(0, 80)), draw(st.integers(0, inner))
    edges = max(inner, halo) + draw(st.integers(0, 100))
    return PartSizes(inner=inner, halo=halo, edges=edges, train=draw(st.integers(0, inner)), sent=sent)


@given(sizes(), sizes())
def test_parts_are_two_of_one_graph(one: PartSizes, other: PartSizes) -> None:
    agreed = replay_pairs.agreed((one, other))
    shards = replay_pairs.two_parts(agreed)
    check_shards(list(shards))
    for shard, own in zip(shards, agreed, strict=True):
        assert (shard.num_inner, shard.num_halo, shard.num_edges) == (own.inner, own.halo, own.edges)
        assert (len(shard.send_rows), len(shard.train_rows)) == (own.sent, own.train)


def test_configurations_follow_from_the_seed_alone() -> None:
    cases = replay_pairs.cases_of(8, 4, 3, 1.0)
    assert cases == replay_pairs.cases_of(8, 4, 3, 1.0) != replay_pairs.cases_of(8, 4, 4, 1.0)
    assert [case.family for case in cases] == ["samples"] * 8 + ["graph"] * 4
    with_formats = replay_pairs.cases_of(8, 4, 3, 1.0, 2)
    assert [*with_formats[:8], *with_formats[10:]] == cases and with_formats[8:10] == replay_pairs.cases_of(
        0, 0, 3, 1.0, 2
    )
    assert [replay_links.about(case)["family"] for case in with_formats[7:11]] == ["samples", "mixed", "mixed", "graph"]
    assert all(len(case.case.tests) == 2 for case in with_formats[8:10])
    assert all(len(case.tests) == 2 and case.tests[0] != case.tests[1] for case in cases)  # one for each rank, uneven


def test_operators_are_timed_where_batch_norm_has_rows() -> None:
    (case,) = replay_pairs.cases_of(1, 0, 4, 0.05)
    assert case.kind == "mlp"  # whose hidden layers are normed over the batch
    pair = replay_pairs.Pair.of(case)
    pair.timed[0].ladder = [PartSizes(batch=batch) for batch in (1, 2, 4, 8)]
    assert [[place.sizes.batch for place in each] for each in pair.places()] == [[2, 4, 8]]


def _runs(step: list[list[float]], halo: float, sync: float) -> list[dict[str, list[float]]]:
    return [{"step": each, "halo": [halo] * len(each), "sync": [sync] * len(each)} for each in step]


def test_a_step_takes_what_its_slowest_rank_takes() -> None:
    told = replay_links.told(_runs([[1.0, 2.0, 4.0], [3.0, 1.0, 1.0]], 0.25, 0.25))
    assert told["measured_seconds"] == 3.0 and (told["p20_seconds"], told["p80_seconds"]) == (2.0, 4.0)
    assert told["measured_comm"] == pytest.approx(0.5 * (1 + 1 / 2 + 1 / 4 + 1 / 3 + 1 + 1) / 6)
    assert told["steps"] == 3


def _row(family: str, rate: float | None, predicted: float, **more: Any) -> dict[str, Any]:
    row = {"case": "transformer width=256 layers=3 fp32", "family": family, "rate": rate, "number": 0}
    row |= {"predicted_seconds": predicted, "measured_seconds": 1.0, "p20_seconds": 0.9, "p80_seconds": 1.1}
    return row | {"predicted_comm": 0.4, "measured_comm": 0.5} | more


def test_errors_by_family_and_rate_and_what_failed() -> None:
    rows = [_row("samples", 1.0, 1.1), _row("samples", 1.0, 0.7), _row("samples", None, 2.0), _row("graph", 1.0, 1.0)]
    rows.append({"case": "gcn", "family": "graph", "rate": 1.0, "number": 1, "error": "out of memory"})
    said = "\n".join(replay_links.summary(rows))
    assert "samples 1 Gb/s      2 steps: mean absolute error 20.0% (largest 30.0%), mean -10.0%" in said
    assert "samples no limit    1 steps: mean absolute error 100.0%" in said
    assert "samples all rates   2 steps: mean absolute error 20.0%" in said
    assert "graph   1 Gb/s      1 steps: mean absolute error 0.0% (largest 0.0%), mean +0.0%; 1 failed" in said
    assert all(len(replay_links.line(row)) <= 80 for row in rows)
    assert len(replay_links.HEADING) <= 80


def test_a_table_for_a_page() -> None:
    rows = [_row("samples", 1.0, 1.1), _row("samples", 3.0, 0.7), _row("samples", None, 2.0), _row("graph", 1.0, 1.0)]
    rows += [_row("graph", 3.0, 0.9), _row("graph", None, 1.0)]
    rows.append({"case": "gcn", "family": "graph", "rate": 1.0, "number": 1, "error": "out of memory"})
    of_samples, of_graphs, of_all = replay_links.report(rows).splitlines()[2:]
    assert of_samples == "| samples | 1 | 2 | 0 | 10.0 % | 30.0 % | **20.0 %**, 30.0 % | 100.0 % |"
    assert of_graphs == "| graph | 2 | 2 | 1 | 0.0 % | 10.0 % | **5.0 %**, 10.0 % | 0.0 % |"
    assert of_all.startswith("| all | 2 | 4 | 1 | 5.0 % | 20.0 % | **12.5 %**, 30.0 %")


def test_the_page_says_what_the_kept_rows_say() -> None:
    rows = read_rows(ROOT / "benchmarks/rows/replay_links/cpu.jsonl")
    assert {row["family"] for row in rows} == {"samples", "mixed", "graph"}
    assert replay_links.report(rows) in (ROOT / "docs/replayer.md").read_text(encoding="utf-8")


def test_what_a_rank_that_failed_has_not_reported_is_known() -> None:
    cases = replay_pairs.cases_of(2, 1, 0, 0.1)
    rows = [{"number": 0, "rate": None}, {"number": 0, "rate": 1.0}, {"number": 1, "rate": None}]
    left = [(row["number"], row["rate"], row["family"]) for row in replay_links.missing(cases, [None, 1.0], rows)]
    assert left == [(1, 1.0, "samples"), (2, None, "graph"), (2, 1.0, "graph")]


@pytest.mark.slow
def test_a_tiny_run_predicts_steps_of_all_families(
    lab_here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "rows.jsonl"
    arguments = "--samples 1 --mixed 1 --graphs 1 --rates 0.3 --rounds 2 --scale 0.1 --link-seconds 0.3 --seed 1"
    assert replay_links.main([*arguments.split(), f"--rows={found}"]) == 0
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    assert [(row["family"], row["rate"]) for row in rows] == [
        ("samples", None), ("samples", 0.3), ("mixed", None), ("mixed", 0.3), ("graph", None), ("graph", 0.3),
    ]  # fmt: skip
    for row in rows:
        assert "error" not in row and row["steps"] == 4
        assert row["p20_seconds"] <= row["measured_seconds"] <= row["p80_seconds"]
        assert 0.2 < row["predicted_seconds"] / row["measured_seconds"] < 5  # other processes may be at work
        assert 0 < row["predicted_comm"] < 1 and 0 < row["measured_comm"] < 1
        assert row["seed"] == 1 and row["machine"]["torch"] == torch.__version__
    assert rows[1]["link_bytes_per_second"] < 0.3e9 / 8 * 1.2  # what a full bucket lets pass besides
    assert "graph   0.3 Gb/s    1 steps: mean absolute error" in capsys.readouterr().out


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lab_ranks, "why_not", lambda: "network namespaces take root")
    assert replay_links.main([]) == 2
    assert capsys.readouterr().err == "replay_links.py: network namespaces take root\n"
