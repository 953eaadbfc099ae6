"""Compressed sums on GPUs are those of CPUs, and those of NCCL are those of gloo, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressed_ways import WAYS
from nugnn.comm.compression.layout import Layout
from nugnn.comm.compression.link import Link
from nugnn.comm.compression.low_rank import make_compressor
from nugnn.comm.compression.reduction import Rounding, sum_encoded
from nugnn.comm.compression.settings import Compression
from nugnn.comm.compression.wire import WIRES, Wire
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.comm.replicas import fingerprint

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


@pytest.mark.parametrize("rounding", [Rounding(), Rounding(seed=3, step=5)])
@pytest.mark.parametrize("name", [name for name in WIRES if name != "1bit"])
def test_sums_are_those_of_cpus(name: str, rounding: Rounding) -> None:
    sizes = [70_000, 3, 5000, 1, 1025]
    summands = torch.randn(3, sum(sizes), generator=torch.Generator().manual_seed(0))

    def run(ranks: Ranks, device: str) -> tuple[Tensor, Tensor]:
        wires = [Wire(name if size > 5 else "fp32") for size in sizes]
        layout = Layout(sizes, wires, range(5), 3)
        values = summands[ranks.rank].to(device, copy=True)  # summed in place
        rest = torch.full_like(values, torch.nan)
        sum_encoded(values, layout, Link.of(ranks), rounding, rest=rest)
        return values.cpu(), rest.cpu()

    for a, b in zip(
        run_local_ranks(3, lambda r: run(r, "cpu")), run_local_ranks(3, lambda r: run(r, "cuda")), strict=True
    ):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("wire", ["4bit", "1bit", "adaptive", "powersgd"])
def test_ranks_on_gpus_and_cpus_end_with_the_same_bits(wire: str) -> None:
    def run(ranks: Ranks) -> list[Any]:
        device = "cuda" if ranks.rank else "cpu"
        compressor = make_compressor({"w": torch.zeros(300, 200, device=device)}, Compression(wire=wire), 2)
        link, found = Link.of(ranks), []
        for step in range(9):
            draw = torch.Generator().manual_seed(10 * step + ranks.rank)
            values = torch.randn(60_001, generator=draw).to(device)
            if step == 4 and ranks.rank:
                values[7] = torch.nan
            compressor.open()
            compressor.sum_(values, ["w"], [None], 1, link)
            found.append(values.cpu())
            compressor.settle(link)
        return [*found, compressor.bits]

    (*a, bits), (*b, others) = run_local_ranks(2, run)
    for step, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32)) or (step == 4 and x.isnan().any())
        assert bool(x.isfinite().all()) == bool(y.isfinite().all()) == (step != 4)
    assert bits == others


def test_fingerprints_are_those_of_cpus() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = torch.randn(2_500_001, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert int(fingerprint(x)) == int(fingerprint(x.cuda()))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "num_ranks", "ways"),
    [
        *(("nccl_sums.py", num_ranks, WAYS[at : at + 3]) for num_ranks in (2, 3, 4) for at in range(0, len(WAYS), 3)),
        ("host_sums.py", 4, ()),
    ],
)
def test_nccl_makes_the_bits_of_gloo(script: str, num_ranks: int, ways: tuple[int | str, ...]) -> None:
    """Ranks share GPUs where there are too few (`shared_gpus.py`)."""
    said = []
    for backend in ("nccl", "gloo"):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(num_ranks),
                "--standalone",
                str(Path(__file__).with_name(script)),
                backend,
                "cuda",
                *map(str, ways),
            ],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        said.append([line for line in done.stdout.splitlines() if line.startswith("DIGEST")])
    assert sorted(said[0]) == sorted(said[1]) and len(set(said[0])) == 1
