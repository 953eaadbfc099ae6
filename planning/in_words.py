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


def seconds_text(seconds: float) -> str:
    """With three digits.

    >>> seconds_text(0.0123), seconds_text(12.34), seconds_text(0.0), seconds_text(4.2e-5)
    ('12.3 ms', '12.3 s', '0', '42 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            value = seconds / size
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
    return "0" if seconds < 1e-9 else f"{seconds * 1e6:.2g} us"


def short_device(name: str, most: int = 17) -> str:
    """A device's name without its maker's, in at most so many columns.

    >>> short_device("NVIDIA A100-SXM4-80GB"), short_device("NVIDIA RTX 6000 Ada Generation")
    ('A100-SXM4-80GB', 'RTX 6000 Ada Gen…')
    """
    short = name.removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("Tesla ")
    return short if len(short) <= most else f"{short[: most - 1]}…"
