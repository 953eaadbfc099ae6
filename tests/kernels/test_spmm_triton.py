"""The Triton aggregation: its laws, interpreted everywhere and run on a GPU where there is one; sums with scales."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from nugnn.kernels import spmm as spmm_module
from nugnn.kernels.spmm import spmm_sum
from nugnn.kernels.spmm.reference import spmm_reference
from nugnn.kernels.structure import Structure

from .conftest import MakeStructure
from .triton_laws import run_checks

CHECKS = Path(__file__).with_name("spmm_triton_checks.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_aggregation_in_the_interpreter() -> None:
    run_checks(CHECKS, "cpu")


@pytest.mark.gpu
def test_triton_aggregation_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run_checks(CHECKS, "cuda")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_scaled_sums_are_one_sum_rounded_once(
    make_structure: MakeStructure, dtype: torch.dtype, weighted: bool
) -> None:
    structure = make_structure(8)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(structure.num_src, 2, 3, generator=generator).to(dtype).requires_grad_()
    w = torch.rand(structure.num_edges, 2, 1, generator=generator).to(dtype).requires_grad_() if weighted else None
    src, dst = torch.rand(structure.num_src, generator=generator), 1 / structure.in_degrees.clamp(min=1)
    out = spmm_sum(structure, x, w, src, dst)
    wide = x.double() * src.double().view(-1, 1, 1)
    op = "mul" if weighted else "copy_lhs"
    exact = spmm_reference(structure, op, "sum", wide, w.double() if weighted else None) * dst.double().view(-1, 1, 1)
    mass = spmm_reference(structure, op, "sum", wide.abs(), w.double() if weighted else None)
    mass = mass * dst.double().view(-1, 1, 1)
    # the scales' own type is float32: the sum can not be better than their products
    unit = torch.finfo(torch.float32).eps / 2
    bound = (structure.in_degrees.view(-1, 1, 1) + 4) * unit * mass * 1.01 + exact.abs() * torch.finfo(dtype).eps / 2
    assert out.dtype == dtype and ((out.double() - exact).abs() <= bound * 1.01).all()
    grads = torch.autograd.grad(out.sum(), [x, w] if weighted else [x])
    assert all(grad.dtype == dtype and grad.isfinite().all() for grad in grads)


def test_wrong_scales_are_refused() -> None:
    structure = Structure(3, torch.tensor([0, 2]), torch.tensor([0, 1]))
    x = torch.ones(3, 2)
    for scales, match in (
        ((torch.ones(2), None), r"src_scale.*\(2,\).*\(3,\)"),
        ((None, torch.ones(3)), "dst_scale"),
        ((torch.ones(3, dtype=torch.int64), None), "floating"),
        ((torch.ones(3, requires_grad=True), None), "requires a gradient"),
    ):
        with pytest.raises(ValueError, match=match):
            spmm_sum(structure, x, None, *scales)
    with pytest.raises(ValueError, match="int64"):
        spmm_sum(structure, x.long())


def test_without_triton_the_plain_definition_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spmm_module._has_triton.cache_clear()
    with caplog.at_level("WARNING"):
        assert not spmm_module._has_triton() and not spmm_module._has_triton()
    assert len(caplog.records) == 1 and "Triton is not installed" in caplog.text
    spmm_module._has_triton.cache_clear()
