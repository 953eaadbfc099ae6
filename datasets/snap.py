"""SNAP-style edge lists: ``source target [weight]`` per line, parted by blanks or tabs, comments after ``#``.

docs/formats/snap.md describes the format. Shape suffixes: N nodes, E edges.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch
from torch import Tensor

from nugnn.datasets.graph_data import GraphData, Metric
from nugnn.datasets.node_ids import Ids, check_claimed_nodes, kept_ids, number_nodes, rows_of
from nugnn.datasets.text_table import read_bytes, read_table, to_array

if TYPE_CHECKING:
    import pyarrow as pa

_COMMENT = (b"#", b"%")
_COUNTS = re.compile(rb"Nodes:\s*(\d{1,18})(?:\s+Edges:\s*(\d{1,18}))?", re.I)
_IDS = re.compile(rb"\d{1,18}")
_COLUMNS = ("source", "target", "weight")

_log = logging.getLogger("nugnn.datasets")


def read_snap(
    path: str | os.PathLike[str], *, num_nodes: int | None = None, name: str | None = None, metric: Metric = "auto"
) -> GraphData:
    """Read an edge list (``.txt``, ``.tsv``, ``.edges``, ``.edgelist``, each also ``.gz``), directed as it is written.

    The nodes are the ids that occur in it or in the file of labels, ascending. A comment ``# Nodes: N Edges: E`` above
    the first edge adds isolated nodes when every id is below N; counts that do not agree otherwise are logged.

    Args:
        path: The file. ``NAME-labels.txt`` or ``NAME-ANYTHING-labels.txt`` beside ``NAME.txt`` (``id label`` per line)
            gives the labels.
        num_nodes: N, for ids that are the rows ``0 .. N - 1`` already, isolated nodes among them.
        name: Name of the graph; default the file's name without suffixes.
        metric: As in ``GraphData``.

    Returns:
        Edges in the order of the file; a third column as ``edge_data["weight"]`` float32; ``original_ids`` unless the
        ids are the rows; labels int64, -1 for a node that the file of labels leaves out.

    Raises:
        ValueError: a line is not two ids and at most one number, an id is not a whole number from 0 (below
            ``num_nodes``), or the compressed file is damaged; names the file, the line and what it holds.
    """
    path = Path(path)
    content = _without_mark(read_bytes(path))
    has_weight, body = _body(path, content)
    columns = _COLUMNS if has_weight else _COLUMNS[:2]
    table = _parse(path, body, content, columns)
    src, dst = (_id_array(path, content, table, column) for column in columns[:2])
    stem = path.name.split(".")[0]
    labels_file = _labels_file(path, stem)
    labelled = _read_labels(labels_file) if labels_file is not None else None
    edge_data = {"weight": _weights(path, content, table)} if has_weight else {}
    if num_nodes is not None:
        listed, (src_rows, dst_rows) = np.arange(num_nodes), (rows_of(ids, np.arange(num_nodes)) for ids in (src, dst))
        if len(src) and min(int(src_rows.min()), int(dst_rows.min())) < 0:
            edge = int(((src_rows < 0) | (dst_rows < 0)).argmax())
            line, text = _edge_line(content, edge)
            raise ValueError(f"{path}: line {line} is {text!r:.80}; allowed ids are 0 to {num_nodes - 1}")
    else:
        listed, src_rows, dst_rows = number_nodes(src, dst, None if labelled is None else labelled[0])
        listed, src_rows, dst_rows = _with_isolated(path, content, listed, src, dst, src_rows, dst_rows)
    if not len(listed):
        raise ValueError(f"{path}: there is no edge in it, and so no node")
    labels = None if labelled is None or labels_file is None else _spread(labels_file, listed, *labelled)
    try:
        return GraphData(
            name=name or stem,
            num_nodes=len(listed),
            src=torch.from_numpy(src_rows),
            dst=torch.from_numpy(dst_rows),
            labels=labels,
            edge_data=edge_data,
            original_ids=kept_ids(str(path), listed),
            metric=metric,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _without_mark(content: bytes) -> bytes:
    return content[3:] if content.startswith(b"\xef\xbb\xbf") else content


def _is_data(line: bytes) -> bool:
    line = line.strip()
    return bool(line) and not line.startswith(_COMMENT)


def _body(path: Path, content: bytes) -> tuple[bool, bytes]:
    """Whether edges have a weight, and everything from the first edge on."""
    place = 0
    while place < len(content):
        end = content.find(b"\n", place)
        end = len(content) if end < 0 else end
        line = content[place:end]
        if _is_data(line):
            width = len(line.split())
            if width not in (2, 3):
                _refuse_line(path, content)
            return width == 3, content[place:]
        place = end + 1
    return False, b""


def _parse(path: Path, body: bytes, content: bytes, columns: tuple[str, ...]) -> pa.Table:
    """Fast where one tab or blank parts the columns throughout; otherwise once more with blanks made alike."""
    types = {name: "float64" if name == "weight" else "int64" for name in columns}
    delimiter = "\t" if b"\t" in body[: body.find(b"\n") if b"\n" in body else None] else " "
    try:
        return read_table(body, str(path), columns, types=types, delimiter=delimiter, header_rows=0)
    except ValueError:
        lines = [b" ".join(line.split()) for line in body.split(b"\n") if _is_data(line)]
    try:
        return read_table(b"\n".join(lines) + b"\n", str(path), columns, types=types, delimiter=" ", header_rows=0)
    except ValueError:
        _refuse_line(path, content, len(columns))


def _id_array(path: Path, content: bytes, table: pa.Table, name: str) -> np.ndarray:
    column = table[name]
    if column.null_count:
        _refuse_line(path, content, table.num_columns)
    ids = to_array(column)
    if len(ids) and ids.min() < 0:
        _refuse_line(path, content, table.num_columns)
    return ids


def _weights(path: Path, content: bytes, table: pa.Table) -> Tensor:
    with np.errstate(over="ignore"):  # reported below
        weight = to_array(table["weight"]).astype(np.float64).astype(np.float32)
    bad = ~np.isfinite(weight)
    if bad.any():
        line, text = _edge_line(content, int(bad.argmax()))
        raise ValueError(f"{path}: line {line} is {text!r:.80}; the weight has to be a finite number that fits float32")
    return torch.from_numpy(weight)


def _edge_line(content: bytes, edge: int) -> tuple[int, str]:
    """Number and text of the line of an edge."""
    data = ((number, line) for number, line in enumerate(content.split(b"\n"), 1) if _is_data(line))
    number, line = next(item for place, item in enumerate(data) if place == edge)
    return number, line.decode(errors="replace").strip()


def _refuse_line(path: Path, content: bytes, width: int | None = None) -> NoReturn:
    """Name the first line that is not as many numbers as the first edge has."""
    for number, line in enumerate(content.split(b"\n"), 1):
        if not _is_data(line):
            continue
        words = line.split()
        width = width or len(words)
        fits = len(words) == width and width in (2, 3) and all(_IDS.fullmatch(word) for word in words[:2])
        if fits and (width == 2 or _is_number(words[2])):
            continue
        hint = ""
        if b"," in line:
            hint = "; a list with commas and a header is read when its name ends in .csv"
        expected = "two ids" if width == 2 else "two ids and a weight" if width == 3 else "two ids and perhaps a weight"
        raise ValueError(
            f"{path}: line {number} is {line.decode(errors='replace').strip()!r:.80}; expected {expected}, "
            f"the ids whole numbers from 0{hint}"
        )
    raise ValueError(f"{path}: it is not a list of edges, 'source target' or 'source target weight' per line")


def _is_number(word: bytes) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _with_isolated(
    path: Path,
    content: bytes,
    listed: Ids,
    src: np.ndarray,
    dst: np.ndarray,
    src_rows: np.ndarray,
    dst_rows: np.ndarray,
) -> tuple[Ids, np.ndarray, np.ndarray]:
    """Follow the comment ``# Nodes: N Edges: E`` above the first edge where there is one."""
    head = []
    for line in content[: 2**16].split(b"\n"):
        if _is_data(line):
            break
        head.append(line)
    counts = _COUNTS.search(b"\n".join(head))
    if counts is None:
        return listed, src_rows, dst_rows
    num_nodes = int(counts[1])
    if counts[2] is not None and int(counts[2]) != len(src):
        _log.warning("%s: its comment announces %d edges, it has %d lines", path, int(counts[2]), len(src))
    if len(listed) < num_nodes and (not len(listed) or int(listed[-1]) < num_nodes):
        check_claimed_nodes(str(path), num_nodes, len(src))
        return np.arange(num_nodes), src, dst
    if len(listed) != num_nodes:
        _log.warning("%s: its comment announces %d nodes, %d ids occur", path, num_nodes, len(listed))
    return listed, src_rows, dst_rows


def _labels_file(path: Path, stem: str) -> Path | None:
    found = sorted(
        other
        for other in path.parent.glob("*labels.txt*")
        if re.fullmatch(re.escape(stem) + r"-(.+-)?labels\.txt(\.gz)?", other.name)
    )
    if len(found) > 1:
        raise ValueError(f"{path}: both {found[0].name} and {found[1].name} lie beside it; leave one")
    return found[0] if found else None


def _read_labels(path: Path) -> tuple[np.ndarray, np.ndarray]:
    content = _without_mark(read_bytes(path))
    ids, labels = [], []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not _is_data(line):
            continue
        words = line.split()
        if len(words) != 2 or not _IDS.fullmatch(words[0]) or not re.fullmatch(rb"\d{1,7}|-1", words[1]):
            raise ValueError(
                f"{path}: line {number} is {line.decode(errors='replace').strip()!r:.80}; expected a node's id and its "
                "class, whole numbers from 0, or -1 for no class"
            )
        ids.append(int(words[0]))
        labels.append(int(words[1]))
    values, counts = np.unique(np.array(ids, dtype=np.int64), return_counts=True)
    if len(values) < len(ids):
        raise ValueError(f"{path}: node {values[counts.argmax()]} has more than one line; give every node one class")
    return np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64)


def _spread(path: Path, listed: np.ndarray, ids: np.ndarray, labels: np.ndarray) -> Tensor:
    rows = rows_of(ids, listed)
    if len(rows) and rows.min() < 0:
        raise ValueError(f"{path}: node {ids[int((rows < 0).argmax())]} is out of range for {len(listed)} nodes")
    spread = np.full(len(listed), -1, dtype=np.int64)
    spread[rows] = labels
    return torch.from_numpy(spread)
