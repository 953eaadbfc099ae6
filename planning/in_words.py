"""Quantities as people read them."""

from __future__ import annotations


def in_bytes(count: float) -> str:
    """Bytes of memory, in powers of two."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


def download_bytes(count: int | None) -> str:
    """Bytes of a file, in powers of ten as downloads count them; nothing where they are not known.

    >>> download_bytes(81_000_000)
    '81.0 MB'
    """
    if count is None:
        return ""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
