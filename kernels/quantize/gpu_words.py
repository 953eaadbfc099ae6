"""Levels of neighbouring values become words of 32 bits, and come out of them again, in Triton.

Neighbouring levels, as many as fit 32 bits and are a power of 2, make a **string**, one behind the other: 32, 16, 8, 8,
4, 4, 4 and 4 of 1 to 8 bits. Of 1, 2, 4 or 8 bits it is a word. Of 3, 5, 6 or 7 it is shorter; 32 values, a **group**,
fill ``bits`` words there, and each word is cut out of two or three strings, which neighbouring threads hold.

A row on the wire is written and read in units of 4, 2 or 1 byte, the largest of which all rows consist. Import this
module only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


def values_of_string(bits: int) -> int:
    """Levels that fit 32 bits, a power of 2.

    >>> [values_of_string(bits) for bits in range(1, 9)]
    [32, 16, 8, 8, 4, 4, 4, 4]
    """
    return 1 << (32 // bits).bit_length() - 1


def strings_of_group(bits: int) -> int:
    """Strings that fill whole words together.

    >>> [strings_of_group(bits) for bits in range(1, 9)]
    [1, 1, 4, 1, 8, 8, 8, 1]
    """
    lanes = values_of_string(bits)
    return 1 if lanes * bits == 32 else 32 // lanes


@triton.jit
def _words_of(strings, size: tl.constexpr, in_group: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words ``(rows, groups, in_group)`` of ``strings (rows, .)`` of ``size`` bits; ``bits`` of each group count."""
    groups: tl.constexpr = strings.shape[1] // in_group
    strings = tl.reshape(strings, [strings.shape[0], groups, in_group])
    bit = tl.arange(0, in_group) * 32
    string = tl.minimum(bit // size, in_group - 1)
    skipped = bit - string * size
    words = _strings_at(strings, string) >> skipped[None, None, :]
    for after in tl.static_range(1, 3 if size == 20 else 2):
        place = after * size - skipped
        following = _strings_at(strings, tl.minimum(string + after, in_group - 1))
        words |= tl.where((place < 32)[None, None, :], following << (place & 31)[None, None, :], 0)
    return words


@triton.jit
def _strings_at(strings, place):  # type: ignore[no-untyped-def]
    return tl.gather(strings, tl.broadcast_to(place[None, None, :], strings.shape), 2)


@triton.jit
def store_strings(  # type: ignore[no-untyped-def]
    wire, row, in_row, first, strings,
    bits: tl.constexpr, lanes: tl.constexpr, in_group: tl.constexpr, units_of_row: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    """Store ``strings (rows, .)``, the first of which is the row's string ``first``, the start of a group."""
    if in_group == 1:
        word = 2 + first + tl.arange(0, strings.shape[1])
        store_words(wire, row[:, None], in_row[:, None], word[None, :], strings, units_of_row, parts)
    else:
        words = _words_of(strings, lanes * bits, in_group)
        in_words = tl.arange(0, in_group)
        group = first // in_group + tl.arange(0, words.shape[1])
        word = 2 + group[:, None] * bits + in_words[None, :]
        kept = in_row[:, None, None] & (in_words < bits)[None, None, :]
        store_words(wire, row[:, None, None], kept, word[None, :, :], words, units_of_row, parts)


@triton.jit
def store_words(wire, row, kept, word, value, units_of_row: tl.constexpr, parts: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the ``parts`` units of ``value``, 32 bits, at ``word`` of ``row``, as far as rows have units."""
    if parts == 1:
        to = wire + (row * units_of_row + word)
        tl.store(to, value.to(tl.uint32, bitcast=True), mask=kept & (word < units_of_row))
    else:
        part = tl.arange(0, parts)
        unit = tl.expand_dims(word * parts, -1) + part
        to = wire + (tl.expand_dims(row * units_of_row, -1) + unit)
        value = tl.expand_dims(value.to(tl.uint32, bitcast=True), -1) >> part * (32 // parts)
        tl.store(to, value.to(wire.dtype.element_ty), mask=tl.expand_dims(kept, -1) & (unit < units_of_row))


@triton.jit
def load_word(wire, row, in_row, word: tl.constexpr, units_of_row: tl.constexpr, parts: tl.constexpr):  # type: ignore[no-untyped-def]
    """32 bits, uint32 ``(rows,)``, at ``word`` of each row."""
    at = wire + (row * units_of_row + word * parts)
    value = tl.load(at, mask=in_row, other=0).to(tl.uint32)
    for part in tl.static_range(1, parts):
        value |= tl.load(at + part, mask=in_row, other=0).to(tl.uint32) << part * (32 // parts)
    return value


@triton.jit
def load_strings(  # type: ignore[no-untyped-def]
    wire, row, in_row, string, num_strings: tl.constexpr, size: tl.constexpr, units_of_row: tl.constexpr,
    parts: tl.constexpr,
):  # fmt: skip
    """Strings ``(rows, .)``, int32, of ``size`` bits and others above them; zeros where there are none."""
    unit_bits: tl.constexpr = 32 // parts
    is_aligned: tl.constexpr = size % unit_bits == 0
    there = in_row[:, None] & (string < num_strings)[None, :]
    if is_aligned:
        unit = 2 * parts + string * (size // unit_bits)
        skipped = string * 0
    else:
        unit = 2 * parts + string * size // unit_bits
        skipped = string * size % unit_bits
    at = wire + (row[:, None] * units_of_row + unit[None, :])
    value = tl.load(at, mask=there, other=0).to(tl.uint32)
    if not is_aligned:
        value = value >> skipped[None, :]
    # a string begins at a multiple of 4 bits
    for after in tl.static_range(1, (size + unit_bits - 1 + (0 if is_aligned else unit_bits - 4)) // unit_bits):
        place = after * unit_bits - skipped
        reaches = there & ((place < size) & (unit + after < units_of_row))[None, :]
        value |= tl.load(at + after, mask=reaches, other=0).to(tl.uint32) << (place & 31)[None, :]
    return value.to(tl.int32, bitcast=True)
