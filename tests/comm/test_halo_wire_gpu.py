"""Compressed halo rows of GPUs, padded ones too, are the bytes and values of CPUs."""

from __future__ import annotations

import pytest
import torch

from nugnn.comm.halo_feedback import HaloFeedback
from nugnn.comm.halo_wire import WIRES, HaloWire
from nugnn.kernels.padded import from_buffer
from nugnn.kernels.philox import RandomKey

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", WIRES[1:])
def test_bytes_and_values_are_those_of_cpus(name: str, dtype: torch.dtype) -> None:
    wire, key = HaloWire(name), RandomKey(1, 2, 3)
    rows = torch.randn(300, 37, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows *= torch.logspace(-30, 30, 300, dtype=torch.float64)[:, None]
    rows = rows.to(dtype)
    rows[7, 3] = torch.inf
    ids = torch.arange(300) * 12_345_678_901
    here, there = wire.encode(rows, key, ids), wire.encode(rows.cuda(), key, ids.cuda())
    assert torch.equal(here, there.cpu())
    out = torch.empty(300, 37, dtype=dtype)
    wire.decode(here, out)
    padded = torch.empty(300, 40, dtype=dtype, device="cuda")
    wire.decode(there, from_buffer(padded, 37))
    assert torch.equal(out.nan_to_num(nan=3.0), padded[:, :37].cpu().nan_to_num(nan=3.0))


def test_what_is_owed_is_what_cpus_owe() -> None:
    rows = torch.randn(50, 37, generator=torch.Generator().manual_seed(0))
    send_rows = torch.arange(50).flip(0)
    here, there = HaloFeedback(50, send_rows), HaloFeedback(50, send_rows.cuda())
    for _ in range(3):
        coded = here.encode("a", rows, HaloWire("int2")), there.encode("a", rows.cuda(), HaloWire("int2"))
        assert torch.equal(coded[0], coded[1].cpu())
        here.settle()
        there.settle()
    assert torch.equal(here.rows()["a"], there.rows()["a"].cpu())
