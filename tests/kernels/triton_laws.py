"""Runs the laws of a file of Triton checks: in the interpreter, or on a GPU, in a process of its own.

A check file is a script whose functions `check_...` raise where a law does not hold; Triton decides when a kernel is
defined whether it is interpreted, hence the process. On a GPU most of the time goes into compiling, so laws run side by
side there, each in a process; one with a parameter ``share`` gets 0 to `NUM_SHARES` - 1 in turn and takes every
eighth of its cases.
"""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in ("cpu", "cuda") else "cpu"
NUM_SHARES = 8


def run_checks(script: Path, device: str, law: str | None = None) -> None:
    """From a test: fails with the output of the script unless its law ``check_LAW`` holds, or all its laws."""
    output, returncode = _output_of(script, device, *(() if law is None else (f"check_{law}", "0")))
    held = f"check_{law} 0: " in output if law else output.rstrip().endswith("all hold")
    assert held and returncode == 0, output


def check_law_of_all(script: Path, law: str) -> None:
    """From the test of one law of many: all run in one process, interpreted, the first time that one is asked for."""
    output, _ = _output_of_all(script)
    begin = output.find(f"== check_{law} 0\n")
    assert begin >= 0, output  # the process ended before
    own = output[begin : output.find("\n== ", begin) + 1 or None]
    assert f"check_{law} 0: " in own, own


@functools.cache
def _output_of_all(script: Path) -> tuple[str, int]:
    return _output_of(script, "cpu", "each")


def _output_of(script: Path, device: str, *arguments: str) -> tuple[str, int]:
    result = subprocess.run(
        [sys.executable, str(script), device, *arguments],
        env={**os.environ, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return result.stdout, result.returncode


def run_laws(namespace: dict[str, Any]) -> None:
    """From a check file: run its laws; whatever a kernel's caller allocates starts as NaN."""
    if DEVICE == "cpu":
        torch.set_num_threads(1)
        quicken_the_interpreter()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    jobs = [
        (name, str(share))
        for name, law in namespace.items()
        if name.startswith("check_")
        for share in (range(NUM_SHARES) if inspect.signature(law).parameters else (0,))
    ]
    if len(sys.argv) == 4:
        _run_law(namespace, sys.argv[2], sys.argv[3])
    elif sys.argv[2:] == ["each"]:
        for name, share in jobs:
            print(f"== {name} {share}", flush=True)
            try:
                _run_law(namespace, name, share)
            except Exception:
                traceback.print_exc(file=sys.stdout)
    elif DEVICE == "cpu":
        for name, share in jobs:
            _run_law(namespace, name, share)
        print("all hold")
    else:
        with ThreadPoolExecutor(max(1, min(12, (os.cpu_count() or 1) - 2))) as pool:
            results = list(pool.map(lambda job: _in_a_process(namespace["__file__"], *job), jobs))
        print("".join(result.stdout + result.stderr for result in results))
        print("some do not hold" if any(result.returncode for result in results) else "all hold")


def _run_law(namespace: dict[str, Any], name: str, share: str) -> None:
    begin, law = time.perf_counter(), namespace[name]
    law(*([int(share)] if inspect.signature(law).parameters else []))
    print(f"{name} {share}: {time.perf_counter() - begin:.1f} s", flush=True)


def _in_a_process(script: str, name: str, share: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, script, DEVICE, name, share]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def is_rounded(half: Tensor, wide: Tensor) -> bool:
    """Whether ``half`` is ``wide`` rounded once; the interpreter cuts bfloat16 off where a GPU rounds to nearest."""
    cut = torch.finfo(half.dtype).eps if DEVICE == "cpu" and half.dtype == torch.bfloat16 else 0.0
    return torch.equal(half, wide.to(half.dtype)) or bool(((half.float() - wide).abs() <= cut * wide.abs()).all())


class Copies(TorchDispatchMode):
    """Counts copies of floating matrices while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_matrix = isinstance(out, Tensor) and out.dim() > 1 and out.is_floating_point()
        self.count += is_matrix and any(word in str(func) for word in ("clone", "copy", "pad", "cat"))
        return out


def quicken_the_interpreter() -> None:
    """For a check file that is interpreted: `quick_interpreter`."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
    import quick_interpreter

    quick_interpreter.install()
