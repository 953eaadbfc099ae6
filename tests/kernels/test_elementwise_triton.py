"""Triton dropout, epilogue and losses: their laws, interpreted everywhere and run on a GPU where there is one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from .triton_laws import run_checks

CHECKS = Path(__file__).with_name("elementwise_triton_checks.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_elementwise_kernels_in_the_interpreter() -> None:
    run_checks(CHECKS, "cpu")


@pytest.mark.gpu
def test_elementwise_kernels_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run_checks(CHECKS, "cuda")
