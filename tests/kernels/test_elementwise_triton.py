"""Triton dropout, epilogue and losses: their laws, interpreted everywhere and run on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).with_name("elementwise_triton_checks.py")


def run_checks(device: str, **environment: str) -> None:
    result = subprocess.run(
        [sys.executable, str(CHECKS), device],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.rstrip().endswith("all hold"), result.stdout + result.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_elementwise_kernels_in_the_interpreter() -> None:
    run_checks("cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_elementwise_kernels_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run_checks("cuda")
