"""What both layouts of OGB's raw files have in common: the split, labels, and what is refused wherever it stands.

Shape suffixes: N nodes, T tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from nugnn._regular_file import no_file
from nugnn.datasets.array_writers import ArrayWriter
from nugnn.datasets.csv_arrays import read_csv_array
from nugnn.datasets.labels import class_ids

_SPLIT_FILES = {"train": "train", "val": "valid", "test": "test"}


class OgbError(ValueError):
    """A folder that holds no data set in OGB's layout, or a damaged one; names the file."""


class OgbFiles:
    """Where the pieces of one data set lie, and what they have in common, whichever way they are stored."""

    def __init__(self, split: Path) -> None:
        self.split = split

    def sources(self) -> list[Path]:
        """All files that are read, provided that they are there."""
        raise NotImplementedError

    def check_features(self, name: str, of_nodes: int, of_edges: bool) -> None:
        """Refuse files without the features that the data set ``name`` is known to have.

        Args:
            name: For the error.
            of_nodes: How many a node has; 0 where that is not known.
            of_edges: Whether edges have some.
        """
        raise NotImplementedError

    def num_nodes(self) -> int:
        """N, as the files say."""
        raise NotImplementedError

    def write(self, arrays: ArrayWriter) -> None:
        """All that the files hold, in the names of `GraphData`'s arrays."""
        raise NotImplementedError

    def split_files(self) -> dict[str, Path]:
        return {part: self.split / f"{file}.csv.gz" for part, file in _SPLIT_FILES.items()}

    def write_splits(self, arrays: ArrayWriter, num_nodes: int) -> None:
        for part, path in self.split_files().items():
            ids = read_csv_array(path, np.int64, 1, most_rows=num_nodes)[:, 0]
            bad = (ids < 0) | (ids >= num_nodes)
            if bad.any():
                row = int(bad.argmax())
                raise OgbError(f"{path}, entry {row} is node {ids[row]}, out of range: {allowed(num_nodes)}")
            arrays.add(part, ids)


def all_there(paths: list[Path]) -> list[Path]:
    """The paths, provided that each is a file."""
    for path in paths:
        if (problem := no_file(path)) == "no such file":
            raise OgbError(f"{path} is missing: the download or copy is incomplete; get the data set again")
        if problem is not None:
            raise OgbError(f"{path}: {problem}")
    return paths


def id_type(num_nodes: int) -> type[np.signedinteger]:
    """Of ids of so many nodes."""
    return np.int32 if num_nodes < 2**31 else np.int64


def allowed(num_nodes: int) -> str:
    """Which ids there are, for errors."""
    return f"ids of {num_nodes} nodes start at 0, the largest is {num_nodes - 1}"


def at_least(count: int, what: str, path: Path, least: int) -> int:
    """The count, provided that it is no less; ``what`` and ``path`` are for the error."""
    if count < least:
        raise OgbError(f"{path} says {count} {what}; at least {least} are needed")
    return count


def check_finite(path: Path, block: np.ndarray, place: str, first_row: int) -> None:
    """Refuse values that are not finite; ``place`` is a format for row, column and value."""
    if np.isfinite(block.sum(dtype=np.float64)) or np.isfinite(block).all():
        return
    row, column = np.argwhere(~np.isfinite(block))[0].tolist()
    raise OgbError(f"{path}: {place.format(first_row + row, column, block[row, column])}; features have to be finite")


def write_labels(arrays: ArrayWriter, blocks: Iterator[np.ndarray], path: Path, num_nodes: int) -> None:
    """``label``: class ids of one column, -1 where missing, or a 0/1 matrix of several."""
    column, row = None, 0
    for block_NT in blocks:
        single = block_NT.shape[1] == 1
        if column is None:
            shape = (num_nodes,) if single else (num_nodes, block_NT.shape[1])
            column = arrays.create("label", shape, np.int64 if single else np.uint8)
        if single:
            column.append(_class_ids(path, block_NT, row))
        else:
            bad = (block_NT != 0) & (block_NT != 1)
            if bad.any():
                first, task = np.argwhere(bad)[0].tolist()
                raise OgbError(
                    f"{path}: label row {row + first}, task {task} is {block_NT[first, task]}; with several tasks "
                    "each label has to be 0 or 1, none may be missing"
                )
            column.append(block_NT.astype(np.uint8))
        row += len(block_NT)
    if column is not None:
        column.close()


def _class_ids(path: Path, block: np.ndarray, first_row: int) -> np.ndarray:
    try:
        return class_ids(torch.from_numpy(block)).numpy()
    except ValueError as error:
        raise OgbError(f"{path}, in the block from row {first_row}: {error}") from error
