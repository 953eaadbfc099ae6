"""What is alive when a training epoch on a GPU holds most: no block more than the model needs."""

import nugnn  # noqa: F401  # lets dgl import under this torch

# isort: split
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from live_bytes import BLOCK_BYTES, LiveBytes, gpu_path_on_cpu

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("benchmarks", "tests/support")),
}
PEAKS = """
import sys

import torch
import live_bytes
import quick_interpreter

quick_interpreter.install()
torch.set_num_threads(1)
live_bytes.main(sys.argv[1:])
"""
FEATURES = 112 / 256
"""Blocks of 100 input features in rows of whole sectors; likewise of their aggregate."""
SMALL = 0.25
"""Room for what has a few numbers for each node: ids, labels, degrees, losses."""
NEEDED = {
    # the first layer's output for the last gradients of weights; an activation's gradient and what comes of it
    "sage": [1, 1, 1],
    # in forward: a layer's input, which its caller holds, its aggregate, its output and the activation of that
    "gcn": [1, 1, 1, 1],
    # in backward: inputs of the second and third product, the first's output, an activation's gradient and what comes
    # of it
    "gat": [1, 1, 1, 1, 1],
}
STATISTICS = {"gat": [3 * 4 * 4 / BLOCK_BYTES] * 2}
"""Of attention in the first two layers: three float32 for each node and head, four heads."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("model", ["sage", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gcn", "gat"))])
def test_an_epoch_holds_what_its_model_needs_and_nothing_else(model: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PEAKS, "--models", model, "--json"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    kept = [FEATURES] if model == "gat" else [FEATURES, FEATURES]  # attention aggregates no input features
    for moment in ("first", "peak"):
        large = sorted(held["blocks"] for held in found[moment] if held["blocks"] > 1 / 8)
        small = sum(held["blocks"] for held in found[moment] if held["blocks"] < 1 / 32)
        medium = [held["blocks"] for held in found[moment] if 1 / 32 <= held["blocks"] <= 1 / 8]
        masks = [blocks for blocks in medium if blocks == 1 / 16]
        assert large == pytest.approx(sorted([*kept, *NEEDED[model]])), found[moment]
        assert 1 <= len(masks) <= 2  # a bit for each value of two activations
        assert [blocks for blocks in medium if blocks != 1 / 16] == STATISTICS.get(model, [])
        assert small <= SMALL
    assert sorted(held["blocks"] for held in found["kept"] if held["blocks"] > 1 / 32) == pytest.approx(kept)


LOSSES = """
import sys

import torch
from live_bytes import gpu_path_on_cpu

import gpu_epoch
import quick_interpreter
from nugnn.kernels import products

gpu_epoch._CHECK_NODES, gpu_epoch._CHECK_ARCS = 300, 2_000
products.pays = lambda dtype: True
quick_interpreter.install()
with gpu_path_on_cpu():
    assert gpu_epoch.problem_of("nugnn by id", sys.argv[1], torch.device("cpu")) is None
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_the_code_of_a_gpu_has_the_losses_of_a_plain_model_in_padded_rows(model: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LOSSES, model],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_storages_are_seen_when_they_come_and_go() -> None:
    changes = []
    with LiveBytes(7, lambda blocks, sign, held: changes.append((sign, held.shape, blocks))) as live:
        x = torch.zeros(7, 128, dtype=torch.bfloat16)
        y = x[:, :5]
        z = torch.ones(7, 256, dtype=torch.bfloat16) + 1
        torch.zeros(6, 4)
        del x
        assert live.blocks(live.held.values()) == 1.5
        del y, z
    assert not live.held and live.blocks(live.peak) == 2.5 and max(held.blocks for held in live.peak) == 1
    assert [sign for sign, *_ in changes].count("-") == 3 and changes[-1][2] == 0
    assert live.peak[0].maker.startswith("tests/benchmarks/test_live_bytes.py") and BLOCK_BYTES == 512


def test_a_gpu_s_kernels_do_not_run_on_a_cpu_without_the_interpreter() -> None:
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), gpu_path_on_cpu():
        pass
