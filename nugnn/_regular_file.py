"""Whether there is a file at a path, or can be: what else is there is named, and a pipe or device is never opened."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "is a folder, not a file",
    stat.S_IFIFO: "is a pipe, not a file; write what comes out of it to a file first",
    stat.S_IFSOCK: "is a socket, not a file",
    stat.S_IFCHR: "is a device, not a file",
    stat.S_IFBLK: "is a device, not a file",
}


def no_file(path: Path) -> str | None:
    """Why ``path`` is no file to read, as the end of a sentence about it; None for a regular file, or a link to one."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return "no such file: the path is longer than the system allows"
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return "a link to nothing" if path.is_symlink() else "no such file"
        return f"cannot be read: {error.strerror}"
    except ValueError:  # a zero byte in it
        return "no such file: no path holds a zero byte"
    return _KINDS.get(kind, "is no regular file") if kind != stat.S_IFREG else None


def is_folder(path: Path) -> bool:
    """Whether a folder is there; False too for a path that no system call takes."""
    try:
        return path.is_dir()
    except OSError:
        return False


def shown(path: Path) -> str:
    """The path for an error: its end alone where it would fill the screen."""
    text = str(path)
    return text if len(text) <= 400 else f"...{text[-200:]}"


def require_file(path: Path) -> None:
    """Refuse what is no regular file.

    Raises:
        ValueError: Names the path, shortened where it would fill the screen, and what is there instead.
    """
    if (problem := no_file(path)) is not None:
        raise ValueError(f"{shown(path)}: {problem}")


def require_place(path: Path, flag: str) -> None:
    """Refuse a file that could not be written, before time is spent on what goes into it.

    Args:
        path: Of the file; one that is there may be replaced.
        flag: The option that names it, for the error.

    Raises:
        ValueError: Its folder is not there or cannot be written to, or something else than a file is at the path.
    """
    if not is_folder(path.parent):
        raise ValueError(f"{flag} {shown(path)}: there is no folder {shown(path.parent)}; make it first")
    problem = no_file(path)
    if problem is not None and not problem.startswith("no such file"):
        raise ValueError(f"{flag} {shown(path)}: {problem}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{flag} {shown(path)}: the folder {shown(path.parent)} cannot be written to")
