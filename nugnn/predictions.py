"""Predictions as files, a row for each node in the graph's own order."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from nugnn._regular_file import no_file
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.whole_file import write_whole


def predicted_classes(logits: Tensor, data: GraphData) -> Tensor:
    """``(n,)`` int64 class of each node; ``(n, C)`` uint8 zeros and ones when a node may have several labels."""
    if data.labels is not None and data.labels.dim() == 2:
        return (logits > 0).to(torch.uint8)
    return logits.argmax(1)


def write_predictions(path: Path, values: Tensor, data: GraphData) -> None:
    """Write ``values``, a row for each node of ``data``; appears in one piece.

    Args:
        path: ``.npy``: the array; beside it, where the graph has ids of its own, ``NAME.ids.npy`` with the id of each
            row. ``.csv``: column ``node`` (the graph's own id, else the row number), then ``class`` or one column for
            each class.
        values: ``(n,)`` or ``(n, C)``.
        data: The graph.

    Raises:
        ValueError: The file cannot be written.
    """
    for file in (path, path.with_suffix(".ids.npy")):
        if file.exists() and (problem := no_file(file)) is not None:  # a device, even, would be replaced by the file
            raise ValueError(f"{path} cannot be written: {file} {problem}")
    ids = getattr(data, "original_ids", None)
    try:
        if path.suffix == ".csv":
            write_whole(path, lambda file: _write_csv(file, values, ids))
            return
        write_whole(path, lambda file: np.save(file, values.numpy()))
        if ids is not None:
            write_whole(path.with_suffix(".ids.npy"), lambda file: np.save(file, ids))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from error


def _write_csv(file: IO[bytes], values: Tensor, ids: Any) -> None:
    text = _Encoded(file)
    writer = csv.writer(text, lineterminator="\n")
    names = ["class"] if values.dim() == 1 else [f"class_{number}" for number in range(values.shape[1])]
    writer.writerow(["node", *names])
    for node, row in zip(range(len(values)) if ids is None else ids.tolist(), _rows(values), strict=True):
        writer.writerow([node, *row])


def _rows(values: Tensor) -> Iterator[list[float]]:
    for row in values:
        yield [row.item()] if row.dim() == 0 else row.tolist()


class _Encoded:
    """The text side of a binary file; ``csv`` wants ``write`` alone."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(text.encode())
