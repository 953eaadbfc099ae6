"""Arrays of known shape filled block by block, in memory or straight into ``.npy`` files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nugnn.datasets.unpacking import available_memory_bytes

_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*")
_LARGEST_BYTES = 1 << 46


class ArrayWriter(Protocol):
    """Where a reader puts its arrays."""

    def create(self, name: str, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Column:
        """A new array to append rows to; ValueError for a name that could not be a file's, or one twice."""

    def add(self, name: str, array: np.ndarray) -> None:
        """A whole array at once."""


class Column:
    """Rows of one array, appended in order; ``close`` insists that all have come.

    Args:
        name: How errors call the array.
        shape: Of the whole array.
        dtype: Blocks are converted to it.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> None:
        self.name, self.shape, self.dtype = name, shape, np.dtype(dtype)
        self.num_written = 0

    def append(self, block: np.ndarray) -> None:
        """Add rows ``(n, *shape[1:])``; ValueError when they are more than fit or of another width."""
        if block.shape[1:] != self.shape[1:]:
            raise ValueError(f"{self.name}: rows have shape {block.shape[1:]}, expected {self.shape[1:]}")
        if self.num_written + len(block) > self.shape[0]:
            raise ValueError(f"{self.name}: more than the expected {self.shape[0]} rows")
        self._put(np.ascontiguousarray(block, self.dtype))
        self.num_written += len(block)

    def close(self) -> None:
        """Finish; ValueError when rows are missing."""
        if self.num_written != self.shape[0]:
            raise ValueError(f"{self.name}: {self.num_written} rows, expected {self.shape[0]}")

    def _put(self, block: np.ndarray) -> None:
        raise NotImplementedError


class MemoryArrays:
    """Keeps the arrays; ``tensors()`` hands them out."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def create(self, name: str, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Column:
        num_bytes = _check(name, shape, dtype, self._arrays)
        available = available_memory_bytes()
        if available is not None and num_bytes > available:  # else the process would be killed while it fills them
            raise ValueError(f"{name}: {shape} of {np.dtype(dtype)} do not fit into memory; use a cache")
        self._arrays[name] = np.empty(shape, dtype)
        return _MemoryColumn(name, self._arrays[name])

    def add(self, name: str, array: np.ndarray) -> None:
        _check(name, array.shape, array.dtype, self._arrays)
        self._arrays[name] = np.ascontiguousarray(array)

    def tensors(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in self._arrays.items()}


class _MemoryColumn(Column):
    def __init__(self, name: str, array: np.ndarray) -> None:
        super().__init__(name, array.shape, array.dtype)
        self._array = array

    def _put(self, block: np.ndarray) -> None:
        self._array[self.num_written : self.num_written + len(block)] = block


class NpyFolder:
    """Writes ``NAME.npy`` files into a folder; ``records`` says of each its type, shape, size and CRC-32.

    Blocks go through ordinary writes, so nothing written stays in this process's memory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, dict[str, Any]] = {}

    def create(self, name: str, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Column:
        _check(name, shape, dtype, self.records)
        self.records[name] = {}
        return _NpyColumn(self.folder / f"{name}.npy", name, shape, dtype, self.records[name])

    def add(self, name: str, array: np.ndarray) -> None:
        column = self.create(name, array.shape, array.dtype)
        column.append(array)
        column.close()


class _NpyColumn(Column):
    def __init__(
        self, path: Path, name: str, shape: tuple[int, ...], dtype: np.typing.DTypeLike, record: dict[str, Any]
    ) -> None:
        super().__init__(name, shape, dtype)
        self._record = record
        self._crc = 0
        self._file: IO[bytes] = path.open("wb")
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def _put(self, block: np.ndarray) -> None:
        from isal import isal_zlib

        content = block.reshape(-1).view(np.uint8).data
        self._file.write(content)
        self._crc = isal_zlib.crc32(content, self._crc)

    def close(self) -> None:
        num_bytes = self._file.tell()
        self._file.close()
        super().close()
        shape = list(self.shape)
        self._record.update(dtype=self.dtype.str, shape=shape, file_bytes=num_bytes, crc32=self._crc)


def _check(name: str, shape: tuple[int, ...], dtype: np.typing.DTypeLike, taken: dict[str, Any]) -> int:
    """The size of the array, if it may be made."""
    if not _NAME.fullmatch(name) or len(name) > 100:
        raise ValueError(f"{name!r:.120} cannot be the name of an array: letters, digits, _ . and - only")
    if name in taken:
        raise ValueError(f"array {name!r} comes twice")
    num_bytes = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    if num_bytes > _LARGEST_BYTES:
        raise ValueError(f"{name}: shape {shape} is beyond any file this program reads")
    return num_bytes
