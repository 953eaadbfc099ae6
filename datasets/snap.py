"""SNAP-style edge lists: ``source target [weight]`` per line, parted by blanks or tabs, comments after ``#``.

docs/formats/snap.md describes the format. Shape suffixes: N nodes, E edges.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nugnn.datasets.graph_data import GraphData, Metric, graph_from
from nugnn.datasets.node_ids import Ids, check_claimed_nodes, kept_ids, number_nodes, rows_of
from nugnn.datasets.number_lines import NumberLines, first_data_line
from nugnn.datasets.text_table import read_bytes

_COMMENTS = (b"#", b"%")
_MOST_CLASSES = 10**7
_COUNTS = re.compile(rb"Nodes:\s*(\d{1,18})(?:\s+Edges:\s*(\d{1,18}))?", re.I)

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
    where = str(path)
    content = _without_mark(read_bytes(path))
    start, first = first_data_line(content, 0, _COMMENTS)
    lines = _edge_lines(where, content, start, first)
    found = lines.read()
    src, dst = found["source"], found["target"]
    stem = path.name.split(".")[0]
    labels_file = _labels_file(path, stem)
    labelled = _read_labels(labels_file) if labels_file is not None else None
    edge_data = {"weight": _weights(where, lines, found["weight"])} if "weight" in found else {}
    if num_nodes is not None:
        listed, (src_rows, dst_rows) = np.arange(num_nodes), (rows_of(ids, np.arange(num_nodes)) for ids in (src, dst))
        if len(src) and min(int(src_rows.min()), int(dst_rows.min())) < 0:
            edge = int(((src_rows < 0) | (dst_rows < 0)).argmax())
            line, text = lines.line_of(edge)
            raise ValueError(f"{path}: line {line} is {text!r:.80}; allowed ids are 0 to {num_nodes - 1}")
    else:
        listed, src_rows, dst_rows = number_nodes(src, dst, None if labelled is None else labelled[0])
        listed, src_rows, dst_rows = _with_isolated(path, content[:start], listed, src, dst, src_rows, dst_rows)
    if not len(listed):
        raise ValueError(f"{path}: there is no edge in it, and so no node")
    labels = None if labelled is None or labels_file is None else _spread(labels_file, listed, *labelled)
    return graph_from(
        path,
        name=name or stem,
        num_nodes=len(listed),
        src=torch.from_numpy(src_rows),
        dst=torch.from_numpy(dst_rows),
        labels=labels,
        edge_data=edge_data,
        original_ids=kept_ids(str(path), listed),
        metric=metric,
    )


def _without_mark(content: bytes) -> bytes:
    return content[3:] if content.startswith(b"\xef\xbb\xbf") else content


def _edge_lines(where: str, content: bytes, start: int, first: bytes) -> NumberLines:
    """The edges, with a weight where the first one has it."""
    width = len(first.split())
    expected = {2: "two ids", 3: "two ids and a weight"}.get(width, "two ids and perhaps a weight")
    hint = "; a list with commas and a header is read when its name ends in .csv" if b"," in first else ""
    expected += f", the ids whole numbers from 0, as in every line{hint}"
    if first and width not in (2, 3):
        number = content.count(b"\n", 0, start) + 1
        raise ValueError(f"{where}: line {number} is {first.decode(errors='replace')!r:.80}; expected {expected}")
    columns = {"source": "id", "target": "id"} | ({"weight": "float64"} if width == 3 else {})
    return NumberLines(where, content, start, comments=_COMMENTS, columns=columns, expected=expected)


def _weights(where: str, lines: NumberLines, values: np.ndarray) -> Tensor:
    with np.errstate(over="ignore"):  # reported below
        weight = values.astype(np.float32)
    bad = ~np.isfinite(weight)
    if bad.any():
        number, text = lines.line_of(int(bad.argmax()))
        raise ValueError(f"{where}: line {number} is {text!r:.80}; the weight has to be finite and fit float32")
    return torch.from_numpy(weight)


def _with_isolated(
    path: Path,
    head: bytes,
    listed: Ids,
    src: np.ndarray,
    dst: np.ndarray,
    src_rows: np.ndarray,
    dst_rows: np.ndarray,
) -> tuple[Ids, np.ndarray, np.ndarray]:
    """Follow the comment ``# Nodes: N Edges: E`` above the first edge where there is one."""
    counts = _COUNTS.search(head)
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
    found = NumberLines(
        str(path),
        content,
        0,
        comments=_COMMENTS,
        columns={"id": "id", "label": "int64"},
        expected="a node's id and its class, whole numbers from 0, or -1 for no class",
    ).read()
    ids, labels = found["id"], found["label"]
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise ValueError(f"{path}: node {values[counts.argmax()]} has more than one line; give every node one class")
    bad = (labels < -1) | (labels >= _MOST_CLASSES)
    if bad.any():
        node = int(bad.argmax())
        raise ValueError(
            f"{path}: the class of node {ids[node]} is {labels[node]}; number the classes from 0, -1 for none"
        )
    return ids, labels


def _spread(path: Path, listed: np.ndarray, ids: np.ndarray, labels: np.ndarray) -> Tensor:
    rows = rows_of(ids, listed)
    if len(rows) and rows.min() < 0:
        raise ValueError(f"{path}: node {ids[int((rows < 0).argmax())]} is out of range for {len(listed)} nodes")
    spread = np.full(len(listed), -1, dtype=np.int64)
    spread[rows] = labels
    return torch.from_numpy(spread)
