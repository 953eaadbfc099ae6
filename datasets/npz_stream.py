"""Members of an ``.npz`` read block by block; ``np.load`` would inflate each of them whole, and cannot map them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nugnn._regular_file import no_file
from nugnn.datasets.unpacking import check_unpacked

_BLOCK_BYTES = 1 << 23
_DEFLATE_RATIO = 1032  # no deflate stream inflates by more


class NpzError(ValueError):
    """An ``.npz`` that cannot be read: no complete zip, damaged, or holding something else than plain arrays."""


@dataclass(frozen=True)
class NpzMember:
    """One array inside an ``.npz``, as its header describes it; nothing of its values is read yet.

    Args:
        path: The ``.npz``.
        name: Key of the array.
        shape: Of the array.
        dtype: Boolean, integer or floating, in native byte order.
        fortran_order: Whether the first axis runs fastest in the file.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool

    def blocks(self) -> Iterator[np.ndarray]:
        """The values as stored, in 1-D blocks; errors as ``npz_members``, and when the zip's checksum differs."""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(f"{self.name}.npy") as file:
                _header(file)
                step = _BLOCK_BYTES // self.dtype.itemsize * self.dtype.itemsize
                left = int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize
                while left:
                    block = file.read(min(step, left))
                    if len(block) != min(step, left):
                        raise ValueError("it ends early")
                    left -= len(block)
                    yield np.frombuffer(block, self.dtype)
                if file.read(1):  # also makes zipfile compare the checksum
                    raise ValueError("it is longer than its header says")
        except _DAMAGE as error:
            raise _damaged(self.path, self.name, error) from error

    def row_blocks(self) -> Iterator[np.ndarray]:
        """Rows of a 1-D or 2-D array in C order, as blocks of shape ``(n, *shape[1:])``."""
        if self.fortran_order and len(self.shape) > 1:
            raise NpzError(
                f"{self.path}: {self.name} is stored in Fortran order; save it again with numpy.ascontiguousarray"
            )
        width = int(np.prod(self.shape[1:], dtype=object))
        held = np.empty(0, self.dtype)
        for block in self.blocks():
            block = np.concatenate([held, block]) if len(held) else block
            whole = len(block) // width * width
            held = block[whole:]
            if whole:
                yield block[:whole].reshape(-1, *self.shape[1:])


# What zipfile, zlib and numpy raise on damaged bytes; NotImplementedError: an unknown way of compression.
_DAMAGE = (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError, KeyError)


def npz_members(path: Path) -> dict[str, NpzMember]:
    """The arrays of an ``.npz`` by name, from their headers alone.

    Raises:
        NpzError: no complete zip archive; a member is damaged, pickled, or its header promises more than is there.
        UnpacksTooFarError: they are far more than archives of this size hold.
    """
    if (problem := no_file(path)) is not None:
        if problem == "no such file":
            raise NpzError(f"{path} is missing: the download or copy is incomplete; get the file again")
        raise NpzError(f"{path}: {problem}")
    try:
        archive = zipfile.ZipFile(path)
    except _DAMAGE as error:
        raise NpzError(
            f"{path} is not a complete .npz archive of {path.stat().st_size} bytes ({error}); get the file again"
        ) from error
    members: dict[str, NpzMember] = {}
    with archive:
        check_unpacked(path, sum(info.file_size for info in archive.infolist()))
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            try:
                with archive.open(info) as file:
                    shape, fortran_order, dtype = _header(file)
                    num_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
                    if info.file_size != file.tell() + num_bytes or min(shape, default=0) < 0:
                        raise ValueError(f"its header says {dtype} {shape}, which is not its size")
                if info.file_size > _DEFLATE_RATIO * min(info.compress_size, path.stat().st_size) + 1024:
                    raise ValueError("it claims to inflate to more than it can hold")
                if dtype.kind not in "biuf" or not dtype.isnative:
                    raise ValueError(f"it is of type {dtype}; only plain numbers are read")
            except _DAMAGE as error:
                raise _damaged(path, name, error) from error
            if name in members:
                raise NpzError(f"{path} holds {name} twice; get the file again")
            members[name] = NpzMember(path, name, shape, dtype, fortran_order)
    return members


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"format version {version} of .npy is not known")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        return read(file)
    except Exception as error:  # the header is Python's text: its tokenizer and parser have errors of their own
        raise ValueError(f"its header cannot be read: {error}") from error


def _damaged(path: Path, name: str, error: BaseException) -> NpzError:
    return NpzError(f"{path}: array {name[:80]!r} is damaged ({str(error)[:200]}); get the file again")
