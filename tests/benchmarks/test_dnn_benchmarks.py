"""The benchmarks of samples run to their end at tiny sizes, and say what they measured."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import dnn_accuracy
import dnn_throughput
import pytest
import torch

import nugnn
from nugnn.cli import gather_settings
from nugnn.networks import MLP
from nugnn.precision.storage import Storage

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_both_loops_have_the_same_losses_and_a_speed() -> None:
    args = argparse.Namespace(steps=2, rounds=1, device="cpu", group=None, how="off")
    case = dnn_throughput.Case("mlp", lambda: MLP(6, 3, dropout=0.5), lambda n: torch.rand(n, 6), 3, 8)
    row = dnn_throughput.measure(case, case.data(16), "fp32", "-", nugnn.init(), args)
    assert row["loss_ours"] == pytest.approx(row["loss_plain"], rel=1e-5)
    assert row["ours"] > 0 and row["ratio_least"] == row["ratio"] == row["ours"] / row["plain"]
    assert row["precision"] == "fp32" and "ratio" in dnn_throughput._line(row)


def test_both_loops_round_alike() -> None:
    def now() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = now()
    for precision in dnn_throughput.LOSS_RTOL:
        with dnn_throughput.rounding(precision):
            theirs = now()
        with Storage(precision).casts(torch.nn.Identity(), torch.device("cpu")):
            assert now() == theirs
    assert now() == before


def test_the_page_says_what_fell_short() -> None:
    run = {"test": 0.5, "seconds": 10.0, "batch_split": [43, 21], "machine": "2 cores", "jobs": 1}
    run["num_samples"] = {"train": 5401, "val": 599, "test": 2000}
    runs = {f"{name} {seed}": run for name in dnn_accuracy.ROWS for seed in range(2)}
    runs |= {f"{name} logistic regression": {"words": 0.4, "pairs": 0.8} for name in ("trec6", "sst2")}
    page = dnn_accuracy.page(runs, 2)
    assert "| 5,401 / 599 / 2,000: " in page
    assert "two workers with 43 and 21 samples of each batch, on 2 cores" in page
    assert "| 50.0 ± 0.0 | 97 % | no, 47.0 points short | 10 |" in page
    assert "logistic regression: 40.0 (words), 80.0 (pairs) | no, 30.0 points short" in page


def test_each_row_is_a_command_with_settings_that_fit() -> None:
    for row in dnn_accuracy.ROWS.values():
        words = row.options.split()
        given = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
        assert gather_settings(given, {}).dataset == given["dataset"]


@pytest.mark.slow
def test_digits_train_on_two_uneven_workers(tmp_path: Path) -> None:
    options = ["--only=digits", "--seeds=1", f"--data-dir={tmp_path}", f"--json={tmp_path / 'r'}", "--jobs=1"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    subprocess.run([sys.executable, str(BENCHMARKS / "dnn_accuracy.py"), *options], env=environment, check=True)
    run = json.loads((tmp_path / "r").read_text())["digits 0"]
    assert run["test"] > 0.95 and run["batch_split"] == [43, 21]
