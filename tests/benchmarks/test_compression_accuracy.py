"""Accuracy over paired seeds: what runs in which order, pairs that are pairs, and a file one can go on from."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compression_accuracy as accuracy
import pytest
import worker_groups
from compression_accuracy import Queue
from compression_cases import BASELINE, COLUMNS, ROWS, TARGETS, Case, Row, in_order
from compression_lines import CURVES, read_runs, runs_of
from compression_run import merged
from compression_tables import cost_table, difference_table
from paired_runs import paired_interval

from rank_pool import RankPool

FOLDER = Path(accuracy.__file__).parent
DATA = Path(os.environ.get("NUGNN_DATA") or FOLDER.parent.parent / "shared" / "data")


def test_seeds_are_begun_whole_and_rows_keep_pace() -> None:
    pieces = in_order(list(ROWS), None, None)
    for name, row in ROWS.items():
        mine = [piece for piece in pieces if piece[0][0] == name]
        assert [piece[0][2] for piece in mine] == list(range(row.seeds))
        assert all([column for _, column, _ in piece] == list(row.columns) for piece in mine)
    done = dict.fromkeys(ROWS, 0)
    for piece in pieces:
        done[piece[0][0]] += 1
        parts = [done[name] / row.seeds for name, row in ROWS.items()]
        assert max(parts) - min(parts) <= max(1 / row.seeds for row in ROWS.values()) + 1e-9
    for column in TARGETS:
        assert any(column in row.columns and row.seeds >= 30 for row in ROWS.values())


def test_after_the_limit_no_seed_is_begun_and_begun_ones_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(accuracy.time, "monotonic", lambda: now)
    pieces = [[Case("cora", column, seed, "") for column in (BASELINE, "int4 halo")] for seed in range(3)]
    queue = Queue(pieces, 10)
    first = queue.next()
    now = 11.0
    assert [first, queue.next(), queue.next()] == [*pieces[0], None] and queue.left_out == 2


def a_run(test: float = 0.8, val: tuple[float, ...] = (0.5, 0.8), **more: Any) -> dict[str, Any]:
    seconds = [0.5 * (place + 1) for place in range(len(val))]
    run = {"test": test, "val": list(val), "at": list(range(1, len(val) + 1)), "train_seconds": seconds}
    run |= {"initial": "a", "first_loss": 1.0, "parameters": 10, "steps": 2, "best_epoch": 1, "last_test": test}
    run |= {"part": {"nodes": 5, "edges": 9, "halo_rows": 2}, "gradient_bytes": 100, "halo_bytes": 50}
    return run | {"seconds": 1.0, "processor_seconds": 1.0} | more


def in_this_process(outcome_of: Callable[[Case], Any], stop_after: int | None = None) -> Callable[..., None]:
    """In place of `worker_groups.run_in_groups`."""

    def run(work: Any, next_item: Any, on_end: Any, *, groups: int, size: int) -> None:
        count = 0
        while count != stop_after and (case := next_item()) is not None:
            on_end(case, outcome_of(case))
            count += 1

    return run


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """``call(outcome_of, stop_after)``: the benchmark with runs that are made up, and the lines of its file."""
    monkeypatch.setattr(accuracy, "code_version", lambda: "here")

    def called(outcome_of: Callable[[Case], Any], stop_after: int | None = None, *more: str) -> Any:
        monkeypatch.setattr(accuracy, "run_in_groups", in_this_process(outcome_of, stop_after))
        where = [f"--data-dir={tmp_path}", f"--json={tmp_path / 'runs.jsonl'}"]
        options = ["--only=cora-random", "--seeds=2", *where]
        code = accuracy.main([*options, *more])
        path = tmp_path / "runs.jsonl"
        texts = path.read_text().splitlines() if path.exists() else []
        return code, [json.loads(text) for text in texts if text.endswith("}")]

    return called


def made_up(case: Case) -> list[dict[str, Any]]:
    return [a_run(0.8 - 0.01 * case.seed * (case.column != BASELINE), initial=f"of seed {case.seed}") for _ in range(2)]


def test_it_goes_on_where_it_stopped(call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Case] = []

    def noted(case: Case) -> list[dict[str, Any]]:
        asked.append(case)
        return made_up(case)

    _, lines = call(noted, 5)
    assert len(lines) == 5
    path = tmp_path / "runs.jsonl"
    text = path.read_text()
    path.write_text(text[:-30])  # the machine went away while the last line was written
    code, lines = call(noted)
    assert code == 0 and "passed over" in capsys.readouterr().err
    wanted = {(column, seed) for column in COLUMNS for seed in range(2)}
    assert {(line["column"], line["seed"]) for line in lines} == wanted and len(lines) == len(wanted)
    assert len(asked) == len(wanted) + 1  # the line that was cut off ran twice
    call(noted)
    assert len(asked) == len(wanted) + 1  # nothing is left to do
    assert lines[-1]["halo_bytes"] == 100  # of both workers


def test_runs_of_other_code_or_settings_are_not_gone_on_from(
    call: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, lines = call(made_up)
    monkeypatch.setattr(accuracy, "code_version", lambda: "changed")
    assert len(call(made_up)[1]) == 2 * len(lines)
    row = ROWS["cora-random"]
    changed = Row(row.title, {**row.settings, "hidden": 8}, row.seeds, row.seconds, row.columns)
    monkeypatch.setitem(ROWS, "cora-random", changed)
    capsys.readouterr()
    assert len(call(made_up)[1]) == 3 * len(lines)
    assert f"left out {2 * len(lines)} runs of other code than changed, or of other settings" in capsys.readouterr().err


def test_the_table_has_the_difference_in_points(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    call(made_up)
    told = capsys.readouterr().out
    low, high = paired_interval([0.0, -1.0]).low, paired_interval([0.0, -1.0]).high
    assert f"-0.50 [{low:+.2f}, {high:+.2f}]" in told
    assert f"int4 halo, Cora, GCN, random parts: -0.50 [{low:+.2f}, {high:+.2f}] points over 2 seeds, open ±0.5" in told


def test_what_is_kept_makes_the_tables_that_the_runs_make(call: Any, tmp_path: Path) -> None:
    def outcome(case: Case) -> list[dict[str, Any]]:
        slow = (0.1, 0.1) if case.column == "stale" and case.seed else (0.5, 0.8)
        return [run | {"val": list(slow)} for run in made_up(case)]

    call(outcome)
    path, kept = tmp_path / "runs.jsonl", tmp_path / "kept.jsonl"
    assert accuracy.main([f"--json={path}", f"--keep={kept}"]) == 0
    runs = read_runs(path, "here")
    lines = [json.loads(text) for text in kept.read_text().splitlines()]
    assert len(lines) == len(runs) and not any(name in line for line in lines for name in CURVES)
    again = runs_of(lines)
    assert difference_table(again) == difference_table(runs)
    costs = cost_table(again)
    assert costs == cost_table(runs)
    told = {line[1]: line[2:8] for line in costs[1:]}
    assert told["stale"] == ["2", "-", "-", "1", "-", "-"]  # the median of one that did and one that never does
    assert told["int4 halo"] == ["2", "2", "1.00", "", "1", "1.00"]
    assert told[BASELINE] == ["2", "2", "", "", "1", ""]


def test_more_seeds_of_some_columns_stand_beside_the_fp32_runs_of_theirs(call: Any, tmp_path: Path) -> None:
    def outcome(case: Case) -> list[dict[str, Any]]:  # later seeds are slower, with or without compression
        return [run | {"val": [0.1] * (2 * case.seed) + [0.8] * (9 - 2 * case.seed), "at": list(range(1, 10)),
                       "train_seconds": list(range(1, 10))} for run in made_up(case)]  # fmt: skip

    call(outcome)
    _, lines = call(outcome, None, "--seeds=4", "--column=int4 halo")
    assert len(lines) == 2 * len(COLUMNS) + 2 * 2
    kept = tmp_path / "of" / "kept.jsonl"
    assert accuracy.main([f"--json={tmp_path / 'runs.jsonl'}", f"--keep={kept}"]) == 0
    runs = runs_of([json.loads(text) for text in kept.read_text().splitlines()])
    assert len(runs) == len(lines)
    table = {line[1]: line[2:] for line in difference_table(runs)[1:]}
    assert [table[name][0] for name in (BASELINE, "int4 halo", "stale")] == ["4", "4", "2"]
    means = {name: float(table[name][2].split()[0]) for name in ("int4 halo", "stale")}
    assert means == {"int4 halo": -1.5, "stale": -0.5}  # of four seeds and of two, each a point worse than the last
    costs = {line[1]: line[2:5] for line in cost_table(runs)[1:]}
    assert costs[BASELINE] == ["4", "4", ""] and costs["int4 halo"] == ["4", "4", "1.00"]
    assert costs["stale"] == ["2", "2", "1.00"]  # 2 epochs beside 4 of all fp32 runs, and beside 2 of their own


def test_a_run_that_fails_is_told_and_left_for_the_next_time(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def outcome(case: Case) -> Any:
        is_bad = case.column == "int2 halo" and case.seed == 1
        return worker_groups.WorkFailed("rank 1: FloatingPointError") if is_bad else made_up(case)

    code, lines = call(outcome)
    assert code == 1 and "cora-random int2 halo 1: rank 1: FloatingPointError" in capsys.readouterr().err
    assert len(lines) == 2 * len(COLUMNS) - 1
    code, lines = call(made_up)
    assert code == 0 and len(lines) == 2 * len(COLUMNS)


def test_ranks_that_end_with_other_results_are_a_failure(call: Any) -> None:
    assert call(lambda case: [a_run(0.8), a_run(0.7)], 1) == (1, [])


def test_runs_that_began_otherwise_are_no_pair(call: Any) -> None:
    with pytest.raises(ValueError, match=r"cora-random, int4 halo, seed 0: initial differs"):
        call(lambda case: [a_run(initial="b" if case.column == "int4 halo" else "a")] * 2)


def _trained(ranks: Any, folder: str, cases: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """On a rank of the test pool, whose processes do not know the folder of the benchmarks."""
    import sys

    sys.path.append(folder)
    import compression_cases as here
    from compression_run import train

    graph = {"recipe": "digits-gcn", "hidden": 64, "epochs": 2, "partitioner": "random"}
    samples = {"dataset": "digits-images", "epochs": 1, "hidden": 8}
    here.ROWS["graph"] = here.Row("", graph, 1, 1, here.COLUMNS)
    here.ROWS["samples"] = here.Row("", samples, 1, 1, here.COLUMNS)
    return [train(ranks, here.Case(*case, ".")) for case in cases]


def test_runs_differ_in_what_travels_alone(ranks: RankPool) -> None:
    columns = [*COLUMNS, BASELINE, "int4 halo"]
    cases = [("graph", column, 3) for column in columns] + [("samples", "4bit gradients", 0)]
    cases += [("samples", BASELINE, 0)]
    found = ranks.run(2, _trained, str(FOLDER), cases)
    runs = [merged(Case(*case, "."), [each[n] for each in found]) for n, case in enumerate(cases)]
    graph, samples = dict(zip(columns, runs, strict=False)), runs[-2:]
    for run in runs[:-2]:
        assert (run["initial"], run["part"], run["steps"]) == (runs[0]["initial"], runs[0]["part"], 2)
    # the same run again, after all others, is the same to the last bit
    for name, again in ((BASELINE, runs[-4]), ("int4 halo", runs[-3])):
        assert (again["val"], again["test"], again["first_loss"]) == tuple(
            graph[name][key] for key in ("val", "test", "first_loss")
        )
    plain = graph[BASELINE]
    for name, run in graph.items():  # gradients come after the first loss, and halo rows before it
        column = COLUMNS[name]
        is_exact_at_first = "halo_wire" not in column and column.get("halo_mode") in (None, "stale")
        assert (run["first_loss"] == plain["first_loss"]) == is_exact_at_first, name
    losses = {name: graph[name]["first_loss"] for name in COLUMNS if COLUMNS[name].get("halo_wire") == "int2"}
    assert (
        losses["int2 halo, feedback"] == losses["int2 halo, to nearest"] != losses["int2 halo"]
    )  # nothing is owed yet
    assert graph["int2 halo"]["halo_bytes"] < graph["int4 halo"]["halo_bytes"] < plain["halo_bytes"] / 2
    assert graph["4bit gradients"]["gradient_bytes"] < plain["gradient_bytes"] / 2
    num_values = plain["parameters"] + 4  # a flag for each tensor
    assert plain["gradient_bytes"] == 2 * 4 * num_values * plain["steps"]  # both ranks, each half and half
    assert samples[0]["initial"] == samples[1]["initial"] and samples[0]["steps"] == samples[1]["steps"] > 2
    assert samples[0]["gradient_bytes"] < samples[1]["gradient_bytes"] / 2 and samples[0]["halo_bytes"] == 0


WORK = """
import os
import torch

def work(ranks, item):
    if item == "fails" and ranks.rank == 1:
        raise ValueError("no")
    if item == "dies" and ranks.rank == 1:
        os._exit(3)
    ranks.sum_(torch.ones(1))
    return os.getpid(), item
"""


@pytest.mark.slow
def test_a_group_that_fails_is_started_afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "work_of_groups.py").write_text(WORK)  # spawned processes find it by its name
    monkeypatch.syspath_prepend(tmp_path)
    work = importlib.import_module("work_of_groups").work
    items = iter(["a", "b", "fails", "c", "dies", "d"])
    found: dict[str, Any] = {}
    worker_groups.run_in_groups(work, lambda: next(items, None), found.__setitem__, groups=1, size=2)
    assert [type(each) for each in found.values()].count(worker_groups.WorkFailed) == 2
    assert "ValueError: no" in str(found["fails"]) and "died" in str(found["dies"])
    processes = [[pid for pid, _ in found[name]] for name in "abcd"]
    assert processes[0] == processes[1] and len({*processes[0], *processes[2], *processes[3]}) == 6


@pytest.mark.slow
def test_cora_trains_from_the_command_line(tmp_path: Path) -> None:
    if not (DATA / "cora" / "cora.npz").exists():
        pytest.skip(f"cora/cora.npz is not under {DATA}; name a folder of public graphs with NUGNN_DATA")
    options = ["--only", "cora", "--seeds", "1", "--epochs", "2", "--column", "int4 halo", "--jobs", "2"]
    assert accuracy.main([*options, "--data-dir", str(DATA), "--json", str(tmp_path / "runs.jsonl")]) == 0
    lines = (tmp_path / "runs.short.jsonl").read_text().splitlines()
    assert {json.loads(line)["column"] for line in lines} == {BASELINE, "int4 halo"}
