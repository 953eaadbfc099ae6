"""Finds in PTX two things that LLVM has been seen to compile wrongly.

**Leaks.** Two neighbouring 32-bit values are shifted as one vector, ``shl nuw nsw <2 x i32> %v, <i32 31, i32 3>``, when
the first result is wanted nowhere. It may then be poison, and the promise ``nuw`` is void for it, but NVPTX builds the
64-bit register of both as if it held: it shifts the first value in 64 bits, whose upper bits run into the second half.

    mul.wide.u32  %rd1, %r1, 2147483648;    // the first value << 31, in 64 bits
    shl.b64       %rd3, %rd2, 35;           // the second value << 3, in the upper half
    or.b64        %rd4, %rd1, %rd3;         // the upper half is now wrong
    mov.b64       {_, %r2}, %rd4;           // or shr.u64 ..., 32

**Undefined reads.** Of a vector of two 16-bit values one is wanted, and its neighbour, which nothing sets, is not cut
off:

    mov.b32       %r30, {%rs20, %rs21};     // %rs21 is set nowhere
    shr.u32       %r44, %r30, 3;            // its bits come down
    cvt.u64.u32   %rd37, %r44;              // and are part of an address
"""

from __future__ import annotations

import functools
import operator
import re

_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*)\s+(.+?)\s*$")
_REGISTER = re.compile(r"%(?:rs|rd|r|p)\d+")
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


def undefined_reads(ptx: str) -> list[str]:
    """Instructions that calculate with bits of a 16- or 32-bit register that nothing has set.

    Bits are followed through halves, masks and shifts by constants, in the order of the text; whatever else reads them
    is named.
    """
    found = []
    instructions = [
        (match[1], _operands(match[2]), line.strip())
        for line in re.split(r"[;\n]", re.sub(r"//.*", "", ptx[ptx.index("{") + 1 :]))
        if (match := _INSTRUCTION.match(line)) is not None and not match[1].startswith("ret")
    ]
    is_set = {reg for name, operands, _ in instructions if _sets(name) for reg in _REGISTER.findall(operands[0])}
    unset: dict[str, int] = {}

    def bits_of(register: str) -> int:
        whole = 0xFFFF if register.startswith("%rs") else 0xFFFFFFFF if register.startswith("%r") else 0
        return 0 if register.startswith("%rd") else unset.get(register, 0 if register in is_set else whole)

    for name, operands, line in instructions:
        read = operands[1:] if _sets(name) else operands
        bits = [bits_of(register) for operand in read for register in _REGISTER.findall(operand)]
        if not any(bits):
            unset |= dict.fromkeys(_REGISTER.findall(operands[0]) if _sets(name) else (), 0)
            continue
        passed = _passed_on(name, operands, bits)
        if passed is None:
            found.append(line)
        else:
            unset |= passed
    return found


def _sets(name: str) -> bool:
    return not name.startswith(("st.", "red.", "bar", "bra"))


def _operands(text: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text)]


def _passed_on(name: str, operands: list[str], bits: list[int]) -> dict[str, int] | None:
    """Which bits of what the instruction sets are not set; None where that is not followed."""
    target, *read = operands
    constant = int(read[-1], 0) if re.fullmatch(r"-?\d+", read[-1]) else None
    if name == "mov.b32" and read[0].startswith("{"):
        return {target: bits[0] | bits[1] << 16}
    if name == "mov.b32" and target.startswith("{"):
        halves = enumerate(part.strip() for part in target.strip("{}").split(","))
        return {half: bits[0] >> 16 * place & 0xFFFF for place, half in halves if half != "_"}
    if name.startswith("and.b") and constant is not None:
        return {target: bits[0] & constant}
    if name.startswith("shl.b") and constant is not None:
        return {target: bits[0] << constant & 0xFFFFFFFF}
    if re.match(r"shr\.[usb]", name) and constant is not None:
        return {target: bits[0] >> constant}
    if name.startswith(("or.b", "xor.b", "mov.b", "cvt.u32.u16", "cvt.u16.u32")):
        joined = functools.reduce(operator.or_, bits)
        return {target: joined & 0xFFFF if target.startswith("%rs") else joined}
    return None
