"""The harness of the GPU benchmarks: no time without a right result, rows that come back as they went."""

import json
import math

import harness
import pytest
import torch

CPU = torch.device("cpu")
ROW = {
    "kind": "spmm",
    "system": "some-system-of-a-long-name",
    "graph": "products-like",
    "dtype": "fp32",
    "shape": "F=1",
}


def test_percentiles_are_those_of_the_sorted_calls():
    timing = harness.timing_of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    assert (timing.median_ms, timing.p20_ms, timing.p80_ms, timing.repeats) == (3.5, 2.0, 5.0, 6)


def test_a_call_is_timed_five_times_at_least_and_within_the_budget_otherwise():
    calls = []
    timing = harness.time_ms(lambda: calls.append(1), CPU, warmup=3, budget_seconds=0)
    assert timing.repeats == 5
    assert len(calls) == 8
    assert harness.time_ms(lambda: None, CPU, budget_seconds=10).repeats == 100


def test_a_wrong_result_has_no_time():
    recorder, calls = harness.Recorder(None, CPU), []
    row = recorder.measure(ROW, lambda: lambda: calls.append(1), lambda result: "row 3 is wrong")
    assert row["error"] == "wrong result: row 3 is wrong"
    assert "median_ms" not in row
    assert len(calls) == 1


def test_a_right_result_has_a_time_and_the_machine():
    row = harness.Recorder(None, CPU).measure(ROW, lambda: lambda: 7, lambda result: None if result == 7 else "not 7")
    assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
    assert row["machine"]["torch"] == torch.__version__
    assert row["machine"]["code"]
    assert row["peak_bytes"] is None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 63 GiB"), "out of memory"),
        (ImportError("No module named 'x'\nsecond line"), "ImportError: No module named 'x'"),
    ],
)
def test_what_cannot_run_is_a_row_that_says_why(error, text):
    def make():
        raise error

    row = harness.Recorder(None, CPU).measure(ROW, make, None)
    assert row["error"] == text
    assert "median_ms" not in row


def test_rows_come_back_from_their_files(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        harness.Recorder(tmp_path / "rows" / name, CPU).add(ROW | {"value": 2.5, "unit": "s", "from": name})
    harness.Recorder(tmp_path / "rows" / "a.jsonl", CPU).add(ROW)
    rows = harness.read_rows(tmp_path / "rows")
    assert [row["file"] for row in rows] == ["a.jsonl", "a.jsonl", "b.jsonl"]
    assert rows[0]["from"] == "a.jsonl"
    assert all(json.loads(line) for line in (tmp_path / "rows" / "a.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    "more",
    [
        {"median_ms": 12345.678, "p20_ms": 12345.6, "p80_ms": 23456.7, "peak_bytes": 75 << 30, "order": "planted"},
        {"error": "a long story " * 20},
        {"value": 3.0e12, "unit": "B/s"},
        {"kernels": ["k"]},
    ],
)
def test_a_line_for_people_fits_80_columns(more):
    assert len(harness.line_of(ROW | more)) <= 80


def test_a_difference_is_named_and_nan_is_one():
    exact, bound = torch.zeros(3, 2, dtype=torch.float64), torch.full((3, 1), 0.5)
    assert harness.result_differs(torch.full((3, 2), 0.5), exact, bound) is None
    wrong = torch.zeros(3, 2)
    wrong[2, 1] = 0.75
    assert "row 2, column 1 is 0.75" in harness.result_differs(wrong, exact, bound)
    wrong[1, 0] = torch.nan
    assert "row 1, column 0 is nan" in harness.result_differs(wrong, exact, bound)
    assert "shape" in harness.result_differs(torch.zeros(3, 1), exact, bound)


def test_every_script_has_its_line_in_the_readme():
    folder = harness.ROOT / "benchmarks"
    text = (folder / "README.md").read_text(encoding="utf-8")
    scripts = [path.name for path in folder.iterdir() if path.suffix in (".py", ".sh")]
    assert [name for name in scripts if f"`{name}`" not in text] == []


def test_a_machine_that_was_written_with_the_wrong_number_is_the_same_as_now(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"machine": {"card": "CPU (1 threads)"}}\n{"machine": {"card": "A100"}}\n{}\n')
    rows = harness.read_rows(tmp_path)
    assert [row.get("machine", {}).get("card") for row in rows] == ["CPU (1 thread)", "A100", None]


def test_a_loss_that_is_no_number_is_no_small_difference():
    assert harness.largest_difference([1.0, 2.2, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(0.1)
    for losses in ([1.0, math.nan, 3.0], [1.0, 2.0, math.nan], [math.nan, 2.0, 3.0]):
        assert math.isnan(harness.largest_difference(losses, [1.0, 2.0, 3.0]))
        assert math.isnan(harness.largest_difference([1.0, 2.0, 3.0], losses))
    with pytest.raises(ValueError, match="longer"):
        harness.largest_difference([1.0], [1.0, 2.0])
