"""Kernels compiled for a GPU that is not here: none has the mistakes that LLVM makes with two values in one vector."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .machine_code import leaks, undefined_reads

SCRIPT = Path(__file__).with_name("machine_code_checks.py")
KERNELS = Path(__file__).parents[2] / "kernels"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def search(cases: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as Triton has one driver; with a cache of its own, as what is kept ends at PTX."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), cases],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_triton
def test_typical_kernels_are_not_compiled_wrongly_and_one_that_is_is_found(tmp_path: Path) -> None:
    result = search("quick", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_kernel_is_compiled_wrongly(tmp_path: Path) -> None:
    result = search("wide", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    folders = {path: path.relative_to(KERNELS).with_suffix("").parts for path in KERNELS.rglob("gpu*.py")}
    started = {
        ".".join(["nugnn", "kernels", *parts, name])
        for path, parts in folders.items()
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    never = {"nugnn.kernels.philox.gpu._probe_offset_kernel"}  # of a test
    assert started - never <= set(result.stdout.split())


WRONG = """
    mul.wide.u32 \t%rd21, %r2, 2147483648;
    cvt.u64.u32 \t%rd22, %r3;
    shl.b64 \t%rd23, %rd22, 35;
    or.b64 \t%rd24, %rd21, %rd23;
    mov.b64 \t{_, %r37}, %rd24;
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mul.wide.u32 \t%rd21, %r2, 2147483648", "cvt.u64.u32 \t%rd21, %r2"),  # stays in its half
        ("shl.b64 \t%rd23, %rd22, 35", "shl.b64 \t%rd23, %rd22, 3"),  # an address: no halves
        ("mov.b64 \t{_, %r37}, %rd24", "ld.global.b32 \t%r37, [%rd24]"),
    ],
)
def test_only_a_value_that_runs_into_a_half_that_is_read_is_wrong(old: str, new: str) -> None:
    assert leaks(WRONG) == ["or.b64 \t%rd24, %rd21, %rd23;"]
    assert leaks(WRONG.replace("mov.b64 \t{_, %r37}, %rd24", "shr.u64 \t%rd40, %rd24, 32"))
    assert leaks(WRONG.replace(old, new)) == []


UNDEFINED = """{
    mov.u32 \t%r1, %tid.x;
    cvt.u16.u32 \t%rs20, %r1;
    mov.b32 \t%r30, {%rs20, %rs21};
    shr.u32 \t%r44, %r30, 3;
    cvt.u64.u32 \t%rd37, %r44;
    ld.global.b8 \t%rs1, [%rd37];
    ret;
}"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%rs20, %rs21", "%rs20, %rs20"),
        ("shr.u32 \t%r44, %r30, 3", "and.b32 \t%r44, %r30, 65535"),
        ("shr.u32 \t%r44, %r30, 3", "mov.b32 \t{%rs22, _}, %r30;\n    cvt.u32.u16 \t%r44, %rs22"),
        ("{%rs20, %rs21};\n    shr.u32 \t%r44, %r30, 3", "{%rs21, %rs20};\n    shr.u32 \t%r44, %r30, 16"),
    ],
)
def test_only_bits_that_nothing_has_set_are_undefined(old: str, new: str) -> None:
    assert undefined_reads(UNDEFINED) == ["cvt.u64.u32 \t%rd37, %r44"]
    assert undefined_reads(UNDEFINED.replace("shr.u32 \t%r44, %r30, 3", "add.s32 \t%r44, %r30, 8"))
    assert old in UNDEFINED and undefined_reads(UNDEFINED.replace(old, new)) == []
