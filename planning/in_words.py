"""Quantities as people read them."""

from __future__ import annotations


def in_bytes(count: float) -> str:
    """A number of bytes for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"
