"""Finds in PTX what LLVM has been seen to compile wrongly.

Two neighbouring 32-bit values are shifted as one vector, ``shl nuw nsw <2 x i32> %v, <i32 31, i32 3>``, when the first
result is wanted nowhere. It may then be poison, and the promise ``nuw`` is void for it, but NVPTX builds the 64-bit
register of both as if it held: it shifts the first value in 64 bits, whose upper bits run into the second half.

    mul.wide.u32  %rd1, %r1, 2147483648;    // the first value << 31, in 64 bits
    shl.b64       %rd3, %rd2, 35;           // the second value << 3, in the upper half
    or.b64        %rd4, %rd1, %rd3;         // the upper half is now wrong
    mov.b64       {_, %r2}, %rd4;           // or shr.u64 ..., 32
"""

from __future__ import annotations

import re

_OR = re.compile(r"\bor\.b64\s+(%rd\d+), (%rd\d+), (%rd\d+);")
_MULTIPLIED = re.compile(r"\bmul\.wide\.u32\s+(%rd\d+), %r\d+, (\d+);")
_SHIFTED = re.compile(r"\bshl\.b64\s+(%rd\d+), %rd\d+, (\d+);")
_UPPER_HALF = re.compile(r"\bmov\.b64\s+\{(?:_|%r\d+), %r\d+\}, (%rd\d+);|\bshr\.u64\s+%rd\d+, (%rd\d+), 32;")


def leaks(ptx: str) -> list[str]:
    """Instructions that join a 32-bit value in the upper half with another one that runs into it."""
    shifts = {register: int(count) for register, count in _SHIFTED.findall(ptx)}
    upper = {register for register, count in shifts.items() if count >= 32}
    running_over = {register for register, factor in _MULTIPLIED.findall(ptx) if int(factor) > 1}
    running_over |= {register for register, count in shifts.items() if 0 < count < 32}
    read = {register for pair in _UPPER_HALF.findall(ptx) for register in pair}
    return [
        found[0]
        for found in _OR.finditer(ptx)
        if found[1] in read
        and ({found[2], found[3]} & upper)
        and ({found[2], found[3]} & running_over)
    ]  # fmt: skip
