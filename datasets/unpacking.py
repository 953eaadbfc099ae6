"""How far a compressed file may unpack: one rule for all readers and archives, by its size and the memory there is.

Compressed numbers are a half to a tenth of what they were; of zeros deflate makes a thousandth. A file is refused that
goes beyond all of these: a hundred times its size, 1 GiB, and a quarter of the memory now available. So what is honest
loads however large it is, and so does anything that is small beside the machine. What has to be in memory as a whole
also has to fit: text in a third of it (once in pieces, once in one, and the numbers read from it), arrays in all of it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, BinaryIO

_ALWAYS_BYTES = 1 << 30
_MOST_TIMES = 100
_MEMORY_PART = 4
_TEXT_PART = 3

_MEMINFO = Path("/proc/meminfo")
_GROUPS = (  # version 2 and version 1: folder, limit, use, and the entry of memory.stat for pages of files
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


class UnpacksTooFarError(ValueError):
    """A compressed file holds far more than files of its size do, or more than there is memory for."""


def allowed_bytes(path: Path) -> int:
    """What the file at ``path`` may unpack to."""
    return max(_ALWAYS_BYTES, _MOST_TIMES * path.stat().st_size, (available_memory_bytes() or 0) // _MEMORY_PART)


def check_unpacked(path: Path, num_bytes: int, *, is_exact: bool = True) -> None:
    """Refuse a file that unpacks further than the rule allows.

    Args:
        path: The packed file.
        num_bytes: What it says that it unpacks to, or what came out of it.
        is_exact: False while more may follow.

    Raises:
        UnpacksTooFarError: Names the file, both sizes, and what to do.
    """
    if num_bytes > (allowed := allowed_bytes(path)):
        raise UnpacksTooFarError(_too_far(path, num_bytes, is_exact, allowed))


def check_fits_memory(path: Path, num_bytes: int, *, is_text: bool = False) -> None:
    """Refuse a file whose content, unpacked, has to be in memory and has no room there.

    Args:
        path: The file.
        num_bytes: Of its content.
        is_text: Whether numbers have to be read from it beside it.

    Raises:
        UnpacksTooFarError: Names the file, both sizes, and what to do.
    """
    available = available_memory_bytes()
    if available is not None and num_bytes > available // (_TEXT_PART if is_text else 1):
        raise UnpacksTooFarError(_too_large(path, num_bytes, True, is_text, available))


def limited(path: Path, file: IO[bytes] | io.BufferedIOBase, *, is_held: bool) -> BinaryIO:
    """``file``, the unpacked content of ``path``, that refuses to yield more than the rule allows.

    Args:
        path: The packed file.
        file: To read from; closed with the result.
        is_held: Whether all of it is going to be in memory, rather than a block at a time.

    Raises:
        UnpacksTooFarError: From the result's ``read``.
    """
    return io.BufferedReader(_Limited(path, file, is_held), 1 << 20)


class _Limited(io.RawIOBase):
    def __init__(self, path: Path, file: IO[bytes] | io.BufferedIOBase, is_held: bool) -> None:
        self._path, self._file = path, file
        self._allowed = allowed_bytes(path)
        available = available_memory_bytes() if is_held else None
        self._available = 1 << 63 if available is None else available
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed has any buffer
        block = self._file.read(len(buffer))
        buffer[: len(block)] = block
        self._num_bytes += len(block)
        if self._num_bytes > self._allowed:
            raise UnpacksTooFarError(_too_far(self._path, self._allowed, False, self._allowed))
        if self._num_bytes > (most := self._available // _TEXT_PART):
            raise UnpacksTooFarError(_too_large(self._path, most, False, True, self._available))
        return len(block)

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            super().close()


def _too_far(path: Path, num_bytes: int, is_exact: bool, allowed: int) -> str:
    more = "" if is_exact else "more than "
    return (
        f"{path} unpacks to {more}{num_bytes:,} bytes from {path.stat().st_size:,}, as a decompression bomb does; "
        f"allowed are {allowed:,}. If that is right, unpack it by hand, or save it uncompressed, and load that"
    )


def _too_large(path: Path, num_bytes: int, is_exact: bool, is_text: bool, available: int) -> str:
    unpacks = "holds" if is_exact else "unpacks to more than"
    beside = f", and reading it takes {_TEXT_PART} times its size" if is_text else ""
    return (
        f"{path} ({path.stat().st_size:,} bytes) {unpacks} {num_bytes:,} bytes, which have to be in memory{beside}; "
        f"{available:,} bytes of memory are available. Use a machine with more, or make the file smaller"
    )


def available_memory_bytes() -> int | None:
    """Memory and swap that can be taken now, by this machine's count or this control group's; None if unknown."""
    try:
        kilobytes = {
            name: int(rest.split()[0])
            for name, rest in (line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        }
        available = (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0)) * 1024
    except (OSError, ValueError, IndexError, KeyError):
        return None
    for folder, limit_file, used_file, file_pages in _GROUPS:
        try:
            limit, used = ((folder / name).read_text(encoding="ascii").strip() for name in (limit_file, used_file))
            pages = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            if limit != "max":  # pages of files count as used, and are given back when asked for
                available = min(available, max(0, int(limit) - int(used) + int(pages[file_pages])))
        except (OSError, ValueError, KeyError):
            continue  # another version, or no group at all
    return available
