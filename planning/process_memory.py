"""Bytes that a worker's process takes whatever its part of the data: what libraries and their threads need."""

from __future__ import annotations

import math

RUNTIME_BYTES = {"cuda": 600 << 20, "cpu": 550 << 20}
"""Of a device's memory: a GPU's context, kernels and cuBLAS (assumed); Python, torch, DGL and compiled kernels on a
CPU, resident in training: 548 to 568 MiB with parts of a few kilobytes."""
_OWN_BYTES, _THREAD_BYTES = 480 << 20, 30 << 20
"""Of memory that the system counts against a limit, which is not all resident: 483 to 507 MiB with one thread, 577 to
594 with four; stacks of three libraries' threads."""


def limited_runtime_bytes(threads: int) -> int:
    """Of a worker on a CPU whose memory is limited, before it has any data.

    Args:
        threads: Of its operators.
    """
    return max(RUNTIME_BYTES["cpu"], _OWN_BYTES + threads * _THREAD_BYTES)


def least_fraction(fraction: float, has: float, needs: float) -> str:
    """What to give in place of a ``memory_fraction`` that is ``has`` bytes.

    >>> least_fraction(0.018, 410, 571)
    'give memory_fraction=0.026 or more'
    >>> least_fraction(0.5, 1, 3)
    'the whole device has too little'
    """
    least = math.ceil(1000 * fraction * needs / has) / 1000
    return f"give memory_fraction={least:g} or more" if least <= 1 else "the whole device has too little"
