"""A measurement that is made smaller until memory suffices."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

_PHRASES = ("DefaultCPUAllocator", "can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class WrongResult(RuntimeError):  # noqa: N818 - it says what was found
    """A device computed something else than was asked: such a measurement has no time."""


def largest_that_fits(
    measure: Callable[[int], T], size: int, least: int, what: str, on_note: Callable[[str], None]
) -> T:
    """``measure(size)``, with half of the size as often as memory runs out.

    Args:
        measure: May raise `torch.OutOfMemoryError` or what a CPU's allocator raises.
        size: At first.
        least: Not below.
        what: Its name, for the note.
        on_note: Called with a sentence when the size that was measured is not ``size``.

    Raises:
        RuntimeError: Memory does not suffice for ``least`` either, or ``measure`` failed for another reason.
    """
    asked = size
    while True:
        try:
            result = measure(size)
        except (MemoryError, RuntimeError) as error:
            if not _lacks_memory(error) or size // 2 < least:
                raise
        else:
            if size != asked:
                on_note(f"{what}: memory did not suffice, measured at {size} instead of {asked}")
            return result
        # here the exception is gone, and with it the frames that held tensors
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        size //= 2


def reason(error: BaseException) -> str:
    r"""An error in one line, for a note.

    >>> reason(RuntimeError("no such kernel\nand a stack")), reason(NotImplementedError())
    ('no such kernel', 'NotImplementedError')
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:120]


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(phrase in str(error) for phrase in _PHRASES)
