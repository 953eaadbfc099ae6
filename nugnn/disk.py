"""Names the file and the space left when writing fails because a disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PHRASES = ("No space left on device", f"os error {errno.ENOSPC}", "Disk quota exceeded", f"os error {errno.EDQUOT}")
_TORCH_PHRASES = ("PytorchStreamWriter failed", "unexpected pos", "iostream error", "file write failed")
"""torch.save does not say why it could not write."""
_NEARLY_NOTHING = 16 * 2**20


class DiskFullError(OSError):
    """A file could not be written for lack of space; says which, and how much is left."""


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Around the writing of ``path`` by whatever library.

    Raises:
        DiskFullError: The disk, or the user's quota on it, is full.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFullError) or not means_full_disk(error, path):
            raise
        raise DiskFullError(full_disk_text(path)) from error


def means_full_disk(error: BaseException, folder: Path) -> bool:
    """Whether ``error`` says that there was no space left.

    Args:
        error: Of Python, or of a library that wrote a file.
        folder: Where it wrote, or a file in there: torch.save gives no reason, so the space left there decides.
    """
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in _FULL):
        return True
    text = str(error)
    if any(phrase in text for phrase in _PHRASES):
        return True
    return any(phrase in text for phrase in _TORCH_PHRASES) and free_bytes(folder) < _NEARLY_NOTHING


def full_disk_text(path: Path) -> str:
    """One sentence about the disk that ``path`` is on, and what to do."""
    place = _existing(path)
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(place)
        return (
            f"{path}: the disk is full, {usage.free / 2**20:.1f} MiB of {usage.total / 2**30:.1f} GiB are free; make "
            "space there or write to another folder"
        )
    return f"{path}: the disk is full; make space there or write to another folder"


def free_bytes(path: Path) -> int:
    """Space left on the disk that ``path`` is on, or will be; 0 when it cannot be found out."""
    try:
        return shutil.disk_usage(_existing(path)).free
    except OSError:
        return 0


def _existing(path: Path) -> Path:
    """``path`` or the nearest folder above it that is there."""
    place = Path(os.path.abspath(path))
    while not place.exists() and place != place.parent:
        place = place.parent
    return place
