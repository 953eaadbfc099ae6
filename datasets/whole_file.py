"""A file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def whole_file(path: Path, *, is_durable: bool = False) -> Iterator[Path]:
    """The name of a file in the same folder to write to; it becomes ``path`` at the end of the block.

    Whatever interrupts it, ``path`` holds what it held before, or everything.

    Args:
        path: In a folder that exists.
        is_durable: Wait until the content is on the disk, so that ``path`` is whole after a power cut too.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        if is_durable:
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let ``write`` fill an open file that then is `whole_file` ``path``."""
    with whole_file(path) as unfinished, unfinished.open("wb") as file:
        write(file)
