"""Downloaded files checked for completeness, and archives extracted whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from nugnn._regular_file import no_file
from nugnn.datasets.unpacking import UnpacksTooFarError, check_unpacked, limited

ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")

_CHUNK = 1 << 20
_MAX_MEMBERS = 100_000
_NOT_DATA = ("__MACOSX", ".DS_Store", "Thumbs.db")
_DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError)


class BrokenFileError(ValueError):
    """A file is not what its name says: cut off, a web page, damaged, or an archive with hostile members."""


def check_complete(path: Path, name: str | None = None) -> None:
    """Refuse a file that is empty, a web page, or a zip, npz, gzip or tar that cannot be read to its end.

    Args:
        path: The file; read once, in bounded memory.
        name: The name whose suffix says what it has to be, when ``path`` is a temporary one.

    Raises:
        BrokenFileError: with the file's name and what it is instead.
        UnpacksTooFarError: it holds far more than files of its size do.
    """
    name = (name or path.name).lower()
    head = _head(path)
    if not head or looks_like_html(head):
        raise BrokenFileError(f"{path} is not a complete {_kind(name)}: {_what_it_is(path)}; get the file again")
    try:
        if name.endswith((".zip", ".npz")):
            _check_zip(path)
        elif name.endswith((".tar", ".tar.gz", ".tgz")):
            with tarfile.open(path) as archive:
                num_bytes = 0
                for info in archive:
                    num_bytes += info.size
                    check_unpacked(path, num_bytes, is_exact=False)
                    _read_to_end(archive.extractfile(info) if info.isfile() else None)
                _check_tar_end(archive)
        elif name.endswith(".gz"):
            _check_gzip(path)
    except UnpacksTooFarError:
        raise
    except (OSError, ValueError, *_DAMAGE) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise BrokenFileError(f"{path} cannot be read: {error.strerror}; see to that first") from error
        raise BrokenFileError(
            f"{path} is not a complete {_kind(name)}: {_what_it_is(path)} ({error}); get the file again"
        ) from error


def looks_like_html(head: bytes) -> bool:
    """Whether a file that begins so is a web page, as servers send in place of a file they do not have."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:64].lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml"))


def extract(archive: Path, target: Path) -> None:
    """Extract a zip or tar into the new folder ``target``: all of it, checked, or nothing.

    A single folder that holds everything is left out of the paths. Members are written to a temporary folder beside
    ``target``, which is then renamed, so an interrupted call leaves nothing that looks like a result. The caller keeps
    two processes from extracting to one target at a time.

    Args:
        archive: ``.zip``, ``.tar``, ``.tar.gz`` or ``.tgz``.
        target: Folder to make; it must not exist, or be empty. Its parent exists.

    Raises:
        BrokenFileError: the archive is incomplete or damaged; a member has an absolute path, climbs out with ``..``,
            is a link, a device or encrypted, or appears twice.
        UnpacksTooFarError: it holds far more than archives of its size do.
        ValueError: the disk is full, or ``target`` cannot be written.
    """
    if target.is_dir() and any(target.iterdir()):
        raise ValueError(f"{target} exists already and is not empty; move it away to extract {archive.name} there")
    head = _head(archive)
    if not head or looks_like_html(head):
        raise BrokenFileError(
            f"{archive} is not a complete {_kind(archive.name)}: {_what_it_is(archive)}; get it again"
        )
    for stale in target.parent.glob(f".{target.name}.*.extracting"):
        shutil.rmtree(stale, ignore_errors=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.extracting")
    try:
        unfinished.mkdir()
        with contextlib.closing(_members(archive)) as members:
            _write_members(archive, members, unfinished)
        _drop_common_folder(unfinished)
        unfinished.replace(target)
    except BrokenFileError:
        raise
    except _DAMAGE as error:
        raise BrokenFileError(
            f"{archive} is not a complete {_kind(archive.name)}: {_what_it_is(archive)} ({error}); get the file again"
        ) from error
    except OSError as error:
        if error.errno is None:  # gzip reports damage so
            raise BrokenFileError(f"{archive} is damaged ({error}); get the file again") from error
        raise ValueError(f"{archive} cannot be extracted to {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


Member = tuple[PurePosixPath, int, IO[bytes]]


def _members(archive: Path) -> Generator[Member, None, None]:
    """Path, size and content of each regular file; anything but files and folders is refused."""
    if zipfile.is_zipfile(archive) or archive.suffix == ".zip":
        yield from _zip_members(archive)
    else:
        yield from _tar_members(archive)


def _zip_members(path: Path) -> Generator[Member, None, None]:
    with zipfile.ZipFile(path) as archive:
        _check_member_count(path, archive)
        for info in archive.infolist():
            mode = stat.S_IFMT(info.external_attr >> 16)
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise BrokenFileError(
                    f"{path}: {info.filename!r} is a link or device, which no data set needs; refused"
                )
            if info.flag_bits & 1:
                raise BrokenFileError(f"{path}: {info.filename!r} is encrypted; extract it by hand")
            name = _safe_path(path, info.orig_filename)
            if not info.is_dir():
                with archive.open(info) as content:
                    yield name, info.file_size, content


def _tar_members(path: Path) -> Generator[Member, None, None]:
    with tarfile.open(path) as archive:
        for info in archive:
            if not (info.isreg() or info.isdir()):
                raise BrokenFileError(f"{path}: {info.name!r} is a link or device, which no data set needs; refused")
            name = _safe_path(path, info.name)
            content = archive.extractfile(info)
            if info.isreg() and content is not None:
                with content:
                    yield name, info.size, content
        _check_tar_end(archive)


def _safe_path(archive: Path, name: str) -> PurePosixPath:
    """The member's path if it stays inside the target folder."""
    path = PurePosixPath(name)
    unsafe = path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or re.match("[A-Za-z]:", name)
    if unsafe or not name:
        raise BrokenFileError(f"{archive}: the member {name!r} would be written outside its folder; archive refused")
    return path


def _write_members(archive: Path, members: Iterator[Member], folder: Path) -> None:
    declared = written = 0
    seen: set[PurePosixPath] = set()
    for name, num_bytes, content in members:
        if any(part in _NOT_DATA for part in name.parts):
            continue
        if name in seen or len(seen) >= _MAX_MEMBERS:
            reason = f"holds {str(name)!r} twice" if name in seen else f"holds more than {_MAX_MEMBERS:,} files"
            raise BrokenFileError(f"{archive} {reason}; archive refused")
        seen.add(name)
        declared += num_bytes
        check_unpacked(archive, declared, is_exact=False)
        free = shutil.disk_usage(folder).free
        if num_bytes > free:
            raise ValueError(f"{archive}: {name} needs {num_bytes:,} bytes and {folder.parent} has {free:,} free")
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("xb") as file:
            while chunk := content.read(_CHUNK):
                written += len(chunk)
                if written > declared:
                    raise BrokenFileError(f"{archive} expands to more than it declares; archive refused")
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    if not seen:
        raise BrokenFileError(f"{archive} holds no files; get the file again")


def _drop_common_folder(folder: Path) -> None:
    """Move the content of a single top folder up."""
    entries = list(folder.iterdir())
    if len(entries) != 1 or not entries[0].is_dir():
        return
    inner = entries[0].rename(folder / ".moving-up")
    for entry in list(inner.iterdir()):
        entry.rename(folder / entry.name)
    inner.rmdir()


def _check_zip(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        _check_member_count(path, archive)
        check_unpacked(path, sum(info.file_size for info in archive.infolist()))
        damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged!r} is wrong")


def _check_member_count(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse a zip whose directory lists fewer members than its end record counts: zipfile would not notice."""
    with path.open("rb") as file:
        file.seek(-22 - len(archive.comment), os.SEEK_END)  # the end record: 22 bytes, then the comment
        (count,) = struct.unpack("<H", file.read(22)[10:12])
    found = len(archive.infolist())
    if count not in (found, 0xFFFF):  # 0xFFFF: the true count is in a zip64 record
        raise zipfile.BadZipFile(f"it lists {found} of {count} members")


def _check_tar_end(archive: tarfile.TarFile) -> None:
    """Refuse a tar without the zero block at its end, and read on to the checksum of a compressed one."""
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("its end is missing")
    _read_to_end(archive.fileobj)


def _check_gzip(path: Path) -> None:
    with limited(path, gzip.open(path), is_held=False) as file:
        _read_to_end(file)


def _read_to_end(file: Any) -> None:
    while file is not None and file.read(_CHUNK):
        pass


def _head(path: Path) -> bytes:
    if (problem := no_file(path)) is not None:
        raise BrokenFileError(f"{path}: {problem}")
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise BrokenFileError(f"{path} cannot be read: {error.strerror or error}") from error


def _kind(name: str) -> str:
    for suffix in (".npz", *ARCHIVE_SUFFIXES, ".gz"):
        if name.lower().endswith(suffix):
            return f"{suffix} archive" if suffix != ".gz" else ".gz file"
    return "data file"


def _what_it_is(path: Path) -> str:
    head = _head(path)
    if not head:
        return "it is empty"
    if looks_like_html(head):
        return "it is a web page, as from a failed download"
    if head[:2] in (b"PK", b"\x1f\x8b"):
        return f"it is damaged or was cut off after {path.stat().st_size:,} bytes"
    return f"it begins with {head[:8]!r}"
