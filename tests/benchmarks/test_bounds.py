"""The gather out of the cache adds up the rows that the indices name, on a GPU or in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
import bounds

device = torch.device(sys.argv[2])
x = torch.randn(10, 5, generator=torch.Generator().manual_seed(0)).to(device)
indices = torch.arange(32, dtype=torch.int32, device=device) * 7 % 10
for dtype in (torch.float32, torch.bfloat16):
    rows = x.to(dtype)
    sums = bounds.gather_sums(rows, indices, edges=16, unroll=8)
    exact = rows.double()[indices.long()].view(2, 16, 5)
    # 16 additions in float32: each partial sum is rounded once
    assert ((sums.double() - exact.sum(1)).abs() <= 16 * 2.0**-24 * exact.abs().sum(1)).all(), dtype
best = bounds.gather_rate(device, 5, torch.bfloat16, table_bytes=200, gathered_bytes=2_000,
                          configs=[{"edges": 64, "unroll": 8, "num_warps": 1}])
assert best["bytes_per_second"] > 0
rate, timing = bounds.copy_rate(device, 1 << 16)
assert rate == 2 * (1 << 16) / (timing.median_ms / 1e3)
for wrong in ({"edges": 64, "unroll": 8}, {"edges": 16, "unroll": 5}):
    try:
        bounds.gather_sums(x, indices, **wrong)
    except ValueError as error:
        assert "do not divide" in str(error)
    else:
        raise AssertionError(wrong)
print("right")
"""


def test_gather_adds_up_the_rows_of_its_indices():
    # the interpreter is chosen when Triton is imported, so it needs a process of its own
    device = "cuda" if torch.cuda.is_available() else "cpu"
    environment = dict(os.environ) | ({} if device == "cuda" else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(BENCHMARKS), device],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.stdout == "right\n", done.stderr
