"""A file is whole or not there, whatever interrupts its writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nugnn.datasets.whole_file import whole_file, write_whole


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("error", [None, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [None, b"old"])
def test_the_old_content_or_the_new(
    tmp_path: Path, before: bytes | None, error: type[BaseException] | None, is_durable: bool
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)

    def write() -> None:
        with whole_file(path, is_durable=is_durable) as unfinished:
            assert unfinished.parent == path.parent and unfinished != path
            unfinished.write_bytes(b"new")
            assert (path.read_bytes() if path.exists() else None) == before
            if error is not None:
                raise error

    if error is None:
        write()
    else:
        with pytest.raises(error):
            write()
    assert (path.read_bytes() if path.exists() else None) == (b"new" if error is None else before)
    assert set(tmp_path.iterdir()) <= {path}


def test_durable_content_reaches_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flushed = tmp_path / "file", []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_size, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with whole_file(path, is_durable=True) as unfinished:
        unfinished.write_bytes(b"12345")
    assert flushed == [(5, False)] and path.read_bytes() == b"12345"


def test_an_open_file_is_filled(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", lambda file: file.write(b"bytes"))
    assert (tmp_path / "file").read_bytes() == b"bytes"
    with pytest.raises(ValueError, match="no"):
        write_whole(tmp_path / "file", lambda file: (file.write(b"half"), int("no")))
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("file", b"bytes")]
