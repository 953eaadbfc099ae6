"""Runs the laws of a file of Triton checks: in the interpreter, or on a GPU, in a process of its own.

A check file is a script whose functions `check_...` raise where a law does not hold; Triton decides when a kernel is
defined whether it is interpreted, hence the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEVICE = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in ("cpu", "cuda") else "cpu"


def run_checks(script: Path, device: str) -> None:
    """From a test: fails with the output of the script unless all its laws hold."""
    result = subprocess.run(
        [sys.executable, str(script), device],
        env={**os.environ, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.rstrip().endswith("all hold"), result.stdout + result.stderr


def run_laws(namespace: dict[str, Any]) -> None:
    """From a check file: run its laws; whatever a kernel's caller allocates starts as NaN."""
    if DEVICE == "cpu":
        torch.set_num_threads(1)
        _allow_loops_over_loaded_bounds()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name, law in list(namespace.items()):
        if name.startswith("check_"):
            begin = time.perf_counter()
            law()
            print(f"{name} {time.perf_counter() - begin:.1f} s", flush=True)
    print("all hold")


def is_rounded(half: Tensor, wide: Tensor) -> bool:
    """Whether ``half`` is ``wide`` rounded once; the interpreter cuts bfloat16 off where a GPU rounds to nearest."""
    cut = torch.finfo(half.dtype).eps if DEVICE == "cpu" and half.dtype == torch.bfloat16 else 0.0
    return torch.equal(half, wide.to(half.dtype)) or bool(((half.float() - wide).abs() <= cut * wide.abs()).all())


def _allow_loops_over_loaded_bounds() -> None:
    """Triton's interpreter keeps a scalar as an array of one element, of which NumPy makes no integer since 2.4."""
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
