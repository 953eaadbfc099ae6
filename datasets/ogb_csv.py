"""OGB's CSV layout: one gzipped table for each piece of a graph, and a folder for each type of a heterogeneous one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nugnn.datasets.array_writers import ArrayWriter
from nugnn.datasets.csv_arrays import CsvError, csv_blocks, csv_lines, read_csv_array
from nugnn.datasets.ogb_files import (
    OgbError,
    OgbFiles,
    all_there,
    allowed,
    at_least,
    check_finite,
    id_type,
    write_labels,
)

_log = logging.getLogger("nugnn.datasets")

_SHORTEST_EDGE_LINE, _SHORTEST_LABEL_LINE, _GZIP_RATIO = 4, 2, 1032
_MOST_GRAPHS = 100_000  # of a data set for predictions of graphs, which the error is going to count
_LACKS = (
    "{path} is missing: {name} has {what}, so the download or copy is incomplete; get the data set again. Another "
    "graph in this layout needs a folder of another name"
)


class CsvFiles(OgbFiles):
    """The CSV layout; ``edges`` and ``nodes`` are the folders of the relation and the node type."""

    def __init__(
        self,
        *,
        edges: Path,
        nodes: Path,
        labels: Path,
        split: Path,
        count: Callable[[], int],
        counted_in: Path,
        inverse: bool = False,
    ) -> None:
        super().__init__(split)
        self.edge, self.labels = edges / "edge.csv.gz", labels / "node-label.csv.gz"
        self.edge_count = edges / "num-edge-list.csv.gz"
        self.count, self.counted_in = count, counted_in
        self.inverse = inverse
        self.feat = nodes / "node-feat.csv.gz"
        self.edge_feat = edges / "edge-feat.csv.gz"
        self.node_files = {path.name.removesuffix(".csv.gz"): path for path in sorted(nodes.glob("node_*.csv.gz"))}
        if (nodes / "species.csv.gz").exists():  # as ogbn-proteins is packed
            self.node_files.setdefault("node_species", nodes / "species.csv.gz")
        self.edge_files = {path.name.removesuffix(".csv.gz"): path for path in sorted(edges.glob("edge_*.csv.gz"))}

    def sources(self) -> list[Path]:
        needed = [self.edge, self.edge_count, self.counted_in, self.labels, *self.split_files().values()]
        optional = [path for path in (self.feat, self.edge_feat) if path.exists() or path.is_symlink()]
        return all_there([*needed, *optional, *self.node_files.values(), *self.edge_files.values()])

    def check_features(self, name: str, of_nodes: int, of_edges: bool) -> None:
        if of_nodes and not self.feat.exists():
            raise OgbError(_LACKS.format(path=self.feat, name=name, what=f"{of_nodes} features of each node"))
        if of_edges and not self.edge_feat.exists():
            raise OgbError(_LACKS.format(path=self.edge_feat, name=name, what="features of each edge"))

    def num_nodes(self) -> int:
        num_nodes = self.count()
        _plausible(num_nodes, "nodes", self.counted_in, self.labels, _SHORTEST_LABEL_LINE)
        return num_nodes

    def write(self, arrays: ArrayWriter) -> None:
        num_nodes = self.num_nodes()
        num_edges = _single_count(self.edge_count, "edges", least=0)
        _plausible(num_edges, "edges", self.edge_count, self.edge, _SHORTEST_EDGE_LINE)
        copies = 2 if self.inverse else 1
        write_edges(arrays, self.edge, num_nodes, num_edges, inverse=self.inverse, counted_in=self.edge_count)
        if self.feat.exists():
            _write_table(arrays, "feat", self.feat, num_nodes, self.counted_in, np.float32)
        if self.edge_feat.exists():
            _write_table(arrays, "edge_data.feat", self.edge_feat, num_edges, self.edge_count, np.float32, copies)
        for name, path in self.node_files.items():
            _write_table(arrays, f"node_data.{name}", path, num_nodes, self.counted_in, None)
        for name, path in self.edge_files.items():
            _write_table(arrays, f"edge_data.{name}", path, num_edges, self.edge_count, None, copies)
        blocks = csv_blocks(self.labels, np.float64, missing=True)
        write_labels(arrays, _counted(blocks, self.labels, num_nodes, self.counted_in), self.labels, num_nodes)
        self.write_splits(arrays, num_nodes)


def csv_files(
    raw: Path, split: Path, name: str, *, inverse: bool, node_type: str | None, relation: str | None
) -> CsvFiles:
    """The files of the data set ``name``.

    Args:
        raw: Its folder ``raw/``.
        split: Folder of its split.
        name: For errors.
        inverse: Whether each stored edge stands for both directions; not of a heterogeneous data set.
        node_type: Of a heterogeneous data set, the node type to keep.
        relation: Likewise, the relation to keep, from that node type to itself.

    Raises:
        OgbError: It is heterogeneous, and no node type is given.
    """
    if not (raw / "relations").is_dir():
        counted_in = raw / "num-node-list.csv.gz"
        return CsvFiles(
            edges=raw,
            nodes=raw,
            labels=raw,
            split=split,
            count=lambda: _single_count(counted_in, "nodes", least=1),
            counted_in=counted_in,
            inverse=inverse,
        )
    if node_type is None:
        raise OgbError(
            f"{raw / 'relations'}: {name} is a heterogeneous data set; of these only ogbn-mag is read, as the graph "
            "of its papers"
        )
    triplet = f"{node_type}___{relation}___{node_type}"
    _log.info("%s is read as a homogeneous graph: its %s nodes and the relation %s alone", name, node_type, triplet)
    counted_in = raw / "num-node-dict.csv.gz"
    return CsvFiles(
        edges=raw / "relations" / triplet,
        nodes=raw / "node-feat" / node_type,
        labels=raw / "node-label" / node_type,
        split=split / node_type,
        count=lambda: _count_of_type(counted_in, node_type),
        counted_in=counted_in,
    )


def write_edges(
    arrays: ArrayWriter, path: Path, num_nodes: int, num_edges: int, *, inverse: bool, counted_in: Path
) -> None:
    """Arrays ``src`` and ``dst`` from a CSV file of edges.

    Args:
        arrays: Where they go; int32 if N allows it, of ``num_edges``, with inverse edges twice as many.
        path: ``edge.csv.gz``, one edge a line.
        num_nodes: N; every id has to lie in ``[0, N)``.
        num_edges: How many lines the file has to have.
        inverse: Whether each edge is followed by its reverse.
        counted_in: File that says so, for errors.

    Raises:
        ValueError: names the file and the first line that is wrong.
    """
    dtype = id_type(num_nodes)
    src, dst = (arrays.create(name, (num_edges * (2 if inverse else 1),), dtype) for name in ("src", "dst"))
    row = 0
    for block in _counted(csv_blocks(path, dtype, 2), path, num_edges, counted_in):
        _check_edge_ids(path, block, row, num_nodes)
        src.append(block.reshape(-1) if inverse else block[:, 0])
        dst.append(block[:, ::-1].reshape(-1) if inverse else block[:, 1])
        row += len(block)
    src.close()
    dst.close()


def _single_count(path: Path, what: str, least: int) -> int:
    counts = read_csv_array(path, np.int64, 1, most_rows=_MOST_GRAPHS)[:, 0]
    if len(counts) != 1:
        raise OgbError(f"{path} lists {len(counts)} graphs; a node data set has one")
    return at_least(int(counts[0]), what, path, least)


def _count_of_type(path: Path, kind: str) -> int:
    """From a table with node types as header and one line of counts."""
    lines = list(csv_lines(path))
    if len(lines) != 2 or len(lines[0]) != len(lines[1]) or kind not in lines[0]:
        raise OgbError(f"{path} is not a header of node types, {kind!r} among them, and one line with their counts")
    text = lines[1][lines[0].index(kind)]
    if not text.isdecimal() or len(text) > 18:
        raise OgbError(f"{path}: the count of {kind} is {text[:40]!r}; expected a whole number")
    return at_least(int(text), "nodes", path, 1)


def _plausible(count: int, what: str, listed_in: Path, path: Path, shortest_line: int) -> None:
    """Refuse a count that no file of that size can hold, before memory or disk is set aside for it."""
    if path.exists() and count > path.stat().st_size * _GZIP_RATIO // shortest_line + 1:
        raise OgbError(f"{listed_in} says {count} {what}, more than {path} can hold; get both files again")


def _counted(blocks: Iterator[np.ndarray], path: Path, num_rows: int, listed_in: Path) -> Iterator[np.ndarray]:
    """The blocks, provided that they have ``num_rows`` rows together."""
    seen = 0
    for block in blocks:
        seen += len(block)
        if seen > num_rows:
            break
        yield block
    if seen != num_rows:
        found = f"more than {num_rows}" if seen > num_rows else str(seen)
        raise OgbError(f"{path} has {found} lines, {listed_in} says {num_rows}; get both files again")


def _check_edge_ids(path: Path, edges: np.ndarray, first_row: int, num_nodes: int) -> None:
    if len(edges) == 0 or (edges.min() >= 0 and edges.max() < num_nodes):
        return
    bad = (edges < 0) | (edges >= num_nodes)
    row = int(bad.any(axis=1).argmax())
    u, v = edges[row].tolist()
    raise OgbError(
        f"{path}, edge row {first_row + row} is {u} -> {v}: id {u if bad[row, 0] else v} is out of range: "
        f"{allowed(num_nodes)}"
    )


def _write_table(
    arrays: ArrayWriter,
    name: str,
    path: Path,
    num_rows: int,
    listed_in: Path,
    dtype: type[np.float32] | None,
    copies: int = 1,
) -> None:
    """One CSV file as an array, each row ``copies`` times; without a type int64 if all values are integers."""
    if dtype is None:
        try:
            for _ in csv_blocks(path, np.int64):
                pass
            kind: np.dtype[Any] = np.dtype(np.int64)
        except CsvError:  # reading as floats says whether that is wrong too
            kind = np.dtype(np.float32)
    else:
        kind = np.dtype(dtype)
    column, row = None, 0
    for block in _counted(csv_blocks(path, kind), path, num_rows, listed_in):
        if kind.kind == "f":
            check_finite(path, block, "row {}, column {} is {}", row)
        if column is None:
            column = arrays.create(name, (num_rows * copies, block.shape[1]), kind)
        column.append(block if copies == 1 else np.repeat(block, copies, axis=0))
        row += len(block)
    if column is None:
        column = arrays.create(name, (0, 1), kind)
    column.close()
