"""Tensors over files on disk, read window by window so that only a window of them is ever resident.

A page that a process touches through a long-lived mapping counts as its resident memory until the system wants it
back. A window is a mapping of its own that ends after use, so a pass over all rows stays at a window's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

WINDOW_BYTES = 1 << 25


@dataclass(frozen=True)
class _Source:
    file: IO[bytes]
    """Open, so that the same bytes are read even when the file was replaced since."""
    offset: int
    version: int
    """Of the tensor when it was made: a change in place counts it up, and then the file no longer holds the values."""
    checked: bool

    def __del__(self) -> None:
        self.file.close()


# An attribute of the tensor would travel with it into torch.save and deepcopy, which an open file cannot.
_SOURCES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def map_npy(path: Path, *, checked: bool = False) -> Tensor:
    """The array of an ``.npy`` file as a tensor, nothing read yet; writing to it changes memory only, not the file.

    Args:
        path: A file of format version 1 or 2, in C order, of a type that torch knows.
        checked: Whether its values are known to pass the checks of ``GraphData``: a cache's checksum says so.

    Raises:
        ValueError: not such a file, or its length does not fit its header.
    """
    file = path.open("rb")
    try:
        shape, dtype = _read_header(file)
        offset = file.tell()
        size = path.stat().st_size - offset
        if size != dtype.itemsize * int(np.prod(shape, dtype=object)):
            raise ValueError(f"{path} holds {size} bytes, its header says {dtype} {shape}")
        if size == 0:
            file.close()
            return torch.from_numpy(np.empty(shape, dtype))
        rows = torch.from_numpy(np.memmap(file, dtype, "c", offset, shape))
    except BaseException:
        file.close()
        raise
    _SOURCES[rows] = _Source(file, offset, rows._version, checked)
    return rows


def known_checked(rows: Tensor) -> bool:
    """Whether the values were declared checked by ``map_npy`` and have not been changed through torch since."""
    source = _source(rows)
    return source is not None and source.checked


def row_windows(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A dense tensor's rows in order, as (first row, rows of the window); drop a window before asking for the next."""
    row_bytes = max(1, rows[:1].numel() * rows.element_size())
    step = max(1, WINDOW_BYTES // row_bytes)
    source = _source(rows)
    for first in range(0, len(rows), step):
        last = min(first + step, len(rows))
        yield first, rows[first:last] if source is None else _window(source, rows, first, last)


def gather_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """``rows[ids]`` of a dense tensor; of a mapped one, no more than a window and the result are resident.

    All rows in their order are the tensor itself.
    """
    if _source(rows) is None or rows.dim() == 0:
        return rows[ids]
    if len(ids) == len(rows) and _counts_up(ids):
        return rows
    order = None if len(ids) < 2 or bool((ids.diff() >= 0).all()) else torch.argsort(ids, stable=True)
    ascending = ids if order is None else ids[order]
    out = torch.empty((len(ids), *rows.shape[1:]), dtype=rows.dtype)
    for first, window in row_windows(rows):
        bounds = torch.tensor([first, first + len(window)], dtype=ascending.dtype)
        low, high = torch.searchsorted(ascending, bounds).tolist()
        if low < high:
            place = slice(low, high) if order is None else order[low:high]
            out[place] = window[ascending[low:high] - first]
        del window
    return out


def _counts_up(ids: Tensor) -> bool:
    return len(ids) == 0 or (int(ids[0]) == 0 and bool((ids.diff() == 1).all()))


def _source(rows: Tensor) -> _Source | None:
    source = _SOURCES.get(rows)
    return source if source is not None and source.version == rows._version else None


def _window(source: _Source, rows: Tensor, first: int, last: int) -> Tensor:
    shape = (last - first, *rows.shape[1:])
    dtype = rows[:0].numpy().dtype
    start = source.offset + first * rows[:1].numel() * dtype.itemsize
    return torch.from_numpy(np.memmap(source.file, dtype, "c", start, shape))


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"format version {version} of .npy is not known")
    shape, fortran_order, dtype = readers[version](file)
    if fortran_order and len(shape) > 1:
        raise ValueError("the array is in Fortran order")
    if dtype.kind not in "biuf" or not dtype.isnative:
        raise ValueError(f"the array is of type {dtype}")
    return shape, dtype
