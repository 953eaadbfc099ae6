"""From a path to a graph: which reader a file or folder belongs to."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nugnn.datasets.csv_folder import read_csv_folder, read_edges_csv
from nugnn.datasets.dgl_graphs import read_dgl_graph
from nugnn.datasets.dgl_parts import read_dgl_parts
from nugnn.datasets.graph_data import GraphData, Metric
from nugnn.datasets.matrix_market import read_matrix_market
from nugnn.datasets.metis_file import read_metis
from nugnn.datasets.npz import read_npz
from nugnn.datasets.snap import read_snap


@dataclass(frozen=True)
class Format:
    """One format: how people call it, the ends of file names it goes by, its reader, and its page of docs/formats/."""

    name: str
    suffixes: tuple[str, ...]
    read: Callable[..., GraphData]
    page: str
    takes_num_nodes: bool = False


def _read_edges_or_folder(path: str | os.PathLike[str], *, num_nodes: int | None = None, **options: Any) -> GraphData:
    """``edges.csv`` with a ``nodes.csv`` beside it is the folder; any other file is a list of edges alone."""
    path = Path(path)
    if num_nodes is None and nodes_beside(path):
        return read_csv_folder(path.parent, **options)
    return read_edges_csv(path, num_nodes=num_nodes, **options)


def nodes_beside(path: Path) -> bool:
    """Whether a file is the ``edges.csv`` of a folder that has a ``nodes.csv``."""
    beside = (path.with_name(f"nodes.csv{end}") for end in ("", ".gz"))
    return path.name in ("edges.csv", "edges.csv.gz") and any(file.is_file() for file in beside)


def _read_parts(path: str | os.PathLike[str], **options: Any) -> GraphData:
    return read_dgl_parts(path, **options)[0]


FORMATS: tuple[Format, ...] = (
    Format("npz", (".npz",), read_npz, "npz.md"),
    Format("CSV", (".csv", ".csv.gz"), _read_edges_or_folder, "csv.md", takes_num_nodes=True),
    Format("METIS", (".graph", ".graph.gz"), read_metis, "metis.md"),
    Format("Matrix Market", (".mtx", ".mtx.gz"), read_matrix_market, "matrix-market.md"),
    Format(
        "SNAP edge list",
        tuple(f"{suffix}{end}" for suffix in (".txt", ".tsv", ".edges", ".edgelist") for end in ("", ".gz")),
        read_snap,
        "snap.md",
        takes_num_nodes=True,
    ),
    Format("DGL graph", (".bin", ".dgl"), read_dgl_graph, "dgl.md"),
    Format("DGL partition", (".json",), _read_parts, "dgl.md"),
)
"""Formats of files; a folder with ``edges.csv`` is CSV too."""


def format_of(path: str | os.PathLike[str]) -> Format | None:
    """The format that a file's name ends in, or that a folder holds (CSV); None when no reader knows it."""
    path = Path(path)
    if path.is_dir():
        return FORMATS[1] if any((path / name).is_file() for name in ("edges.csv", "edges.csv.gz")) else None
    name = path.name.lower()
    return next((known for known in FORMATS if name.endswith(known.suffixes)), None)


def read_path(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    metric: Metric = "auto",
    num_nodes: int | None = None,
) -> GraphData:
    """Read a graph from a file or folder in the format that its name tells.

    Args:
        path: A file with one of the suffixes of ``FORMATS``; or a folder with ``edges.csv``, or ``NAME.npz`` in NAME.
        name: Name of the graph; default that of the file or folder.
        metric: As in ``GraphData``.
        num_nodes: For lists of edges alone (CSV, SNAP): N, and ids are rows.

    Raises:
        ValueError: nothing there, no format known by that name, ``num_nodes`` for a format that knows its own, or what
            the reader refuses; names the file.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    found = format_of(path)
    if found is None:
        inside = path / f"{path.resolve().name}.npz"
        if path.is_dir() and inside.is_file():
            found, path = FORMATS[0], inside
    if found is None:
        known = ", ".join(f"{known.name} ({' '.join(known.suffixes)})" for known in FORMATS)
        what = "this folder holds no edges.csv" if path.is_dir() else f"no format goes by the name {path.name!r}"
        raise ValueError(f"{path}: {what}; nugnn reads {known}, and a folder with edges.csv")
    options: dict[str, Any] = {"name": name, "metric": metric}
    if num_nodes is not None:
        if not found.takes_num_nodes or path.is_dir():
            raise ValueError(f"{path}: the number of nodes is in the file; {found.name} takes no num_nodes")
        if num_nodes < 1:
            raise ValueError(f"{path}: num_nodes is {num_nodes}; an empty graph cannot be trained or partitioned")
        options["num_nodes"] = num_nodes
    if path.is_dir():
        return read_csv_folder(path, **options)
    return found.read(path, **options)
