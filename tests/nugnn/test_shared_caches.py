"""Runs that start at the same moment and share every cache: each gets the result of a run that is alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ogb_folders import write_csv_layout

NUGNN = Path(sys.executable).with_name("nugnn")
NUM_NODES = 300


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    environment = os.environ | {"NUGNN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    options = ["--dataset", "ogbn-arxiv", "--data-dir", str(folder / "data"), "--epochs", "3", "--hidden", "8"]
    options += ["--workers", "2", "--shares", "0.7,0.3", "--partition-cache", str(folder / "cache" / "partitions")]
    command = [str(NUGNN), "train", *options, "--out", str(folder / name), "--json"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_three_runs_that_share_caches_agree_with_a_fourth_that_finds_them(tmp_path: Path) -> None:
    nodes = np.arange(NUM_NODES)
    write_csv_layout(
        tmp_path / "data" / "ogbn_arxiv",
        np.concatenate([np.stack([nodes, (nodes * 7 + step) % NUM_NODES], 1) for step in (1, 2, 5)]),
        NUM_NODES,
        feat=np.stack([nodes % 5 + 0.5, nodes % 3 + 0.25], 1),
        labels=nodes % 3,
        ids=(list(range(100)), list(range(100, 200)), list(range(200, 300))),
    )
    together = [start(tmp_path, f"run-{number}") for number in range(3)]
    answers = [process.communicate(timeout=200) for process in together]
    answers.append(start(tmp_path, "alone").communicate(timeout=200))
    results = []
    for out, err in answers:
        assert out, err
        results.append(json.loads(out))
    weights = {(tmp_path / name / "model.safetensors").read_bytes() for name in ("run-0", "run-1", "run-2", "alone")}
    assert len(weights) == 1
    assert len({(result["test"], result["best_epoch"]) for result in results}) == 1
    made = [path for path in (tmp_path / "cache" / "partitions").iterdir() if path.is_dir()]
    assert len(made) == 1
