"""Compiles the codec for an H100 and looks for fused multiply-adds, run by `test_quantize.py` in a process of its own.

An `fma` outside of the rounded division would give other bytes than a CPU has. Prints the kernels that have none.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from machine_code_checks import H100
from quantize_cases import KEY
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nugnn.kernels.philox import derived_key
from nugnn.kernels.quantize import gpu


def main() -> None:
    run = JITFunction.run

    def compile_only(function: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(function, *arguments, grid=grid, warmup=True, **options)
        fused = re.findall(r"^\s*(?:fma|mad)\.\S*f32.*$", compiled.asm["ptx"], re.MULTILINE)
        # without rounding mode PTX leaves it to the assembler whether it fuses
        loose = re.findall(r"^\s*(?:mul|add|sub)\.f32.*$", compiled.asm["ptx"], re.MULTILINE)
        if fused or loose:
            raise SystemExit(f"{function.fn.__name__}: {(fused + loose)[:4]}")
        if "encode" in function.fn.__name__:  # the interpreter's maximum passes NaN on in any case
            for which in ("min", "max"):
                if not re.search(rf"^\s*{which}\.NaN\.f32", compiled.asm["ptx"], re.MULTILINE):
                    raise SystemExit(f"{function.fn.__name__}: no {which} passes NaN on")
        print(function.fn.__name__)
        return compiled

    JITFunction.run = compile_only
    CUDABackend.make_cubin = lambda *arguments: b""
    driver.set_active(H100())
    x = torch.ones(64, 1024)
    for bits in (3, 4, 5, 6):
        for key in (None, derived_key(KEY)):
            wire = gpu.encode(x, bits, key, torch.arange(64))
        gpu.decode(torch.empty(64, 1024), wire, 1024, bits)


if __name__ == "__main__":
    main()
