"""OGB's node data sets from their raw files, without the ``ogb`` package; docs/formats/ogb.md describes the layout.

Shape suffixes: N nodes, E stored edges, F features, T tasks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nugnn._regular_file import no_file
from nugnn.datasets.array_writers import ArrayWriter
from nugnn.datasets.cache import cached_graph
from nugnn.datasets.csv_arrays import CsvError, csv_blocks, csv_lines, read_csv_array
from nugnn.datasets.graph_data import GraphData, Metric
from nugnn.datasets.labels import class_ids
from nugnn.datasets.npz_stream import NpzMember, npz_members
from nugnn.datasets.sources import PUBLISHED, normalised

_log = logging.getLogger("nugnn.datasets")

_SHORTEST_EDGE_LINE, _SHORTEST_LABEL_LINE, _GZIP_RATIO = 4, 2, 1032
_MOST_GRAPHS = 100_000  # of a data set for predictions of graphs, which the error is going to count
_SPLIT_FILES = {"train": "train", "val": "valid", "test": "test"}


@dataclass(frozen=True)
class OgbSettings:
    """What OGB's master table says of a data set; the files themselves don't.

    Args:
        inverse_edges: Whether each stored edge stands for both directions.
        split: Folder under ``split/``; None takes the only one there is.
        metric: As in ``GraphData``.
        node_type: Of a heterogeneous data set, the node type to keep.
        relation: Of a heterogeneous data set, the relation to keep, from that node type to itself.
    """

    inverse_edges: bool = False
    split: str | None = None
    metric: Metric = "auto"
    node_type: str | None = None
    relation: str | None = None


SETTINGS: Mapping[str, OgbSettings] = {
    "ogbn-arxiv": OgbSettings(split="time"),
    "ogbn-products": OgbSettings(inverse_edges=True, split="sales_ranking"),
    "ogbn-proteins": OgbSettings(inverse_edges=True, split="species", metric="roc_auc"),
    "ogbn-mag": OgbSettings(split="time", node_type="paper", relation="cites"),
    "ogbn-papers100m": OgbSettings(split="time"),
}

_WITH_EDGE_FEATURES = ("ogbn-proteins",)
_LACKS = (
    "{path} is missing: {name} has {what}, so the download or copy is incomplete; get the data set again. Another "
    "graph in this layout needs a folder of another name"
)


class OgbError(ValueError):
    """A folder that holds no data set in OGB's layout, or a damaged one; names the file."""


def read_ogb(
    folder: str | os.PathLike[str], name: str | None = None, cache: str | os.PathLike[str] | None = None
) -> GraphData:
    """Read a folder in the layout of OGB's node data sets: CSV, binary, or ogbn-mag's heterogeneous one.

    Node ids are int32 when N allows it. Features written as integers become float32. Each class label that is missing
    (empty or NaN) becomes -1. With inverse edges, as ``SETTINGS`` says by name, edge e becomes edges 2e and 2e + 1, and
    its data are there twice. A name that is not in ``SETTINGS`` has no inverse edges, and its split is the only folder
    under ``split/``. ``split_dict.pt`` and ``processed/`` are pickles of other readers and are not opened.

    Args:
        folder: The data set's folder, with ``raw/`` and ``split/`` in it.
        name: Of the data set, in any case, with ``-`` or ``_``; None takes the folder's.
        cache: Folder for processed graphs, see ``nugnn.datasets.cache``; arrays are then memory-mapped, and preparing
            needs memory for a few blocks, whatever the size. None reads into memory.

    Returns:
        ``features`` float32 ``(N, F)`` (a binary file's own floating type), ``labels`` int64 ``(N,)`` or, with several
        tasks, uint8 ``(N, T)``; ``node_data`` has the files ``node_*`` as int64 or float32 ``(N, columns)``;
        ``edge_data`` has ``feat`` and the files ``edge_*``.

    Raises:
        ValueError: a file is missing, cut, damaged, or contradicts another; it names the file and the line. Missing are
            also features that the data set of that name is known to have.
    """
    folder = Path(folder)
    name = normalised(folder.name if name is None else name)
    for suffix in ("-dgl", "-pyg"):
        name = name.removesuffix(suffix)
    settings = SETTINGS.get(name, OgbSettings())
    raw = folder / "raw"
    if not raw.is_dir():
        raise OgbError(f"{folder} has no folder raw/: it holds no data set in OGB's layout; see docs/formats/ogb.md")
    if name not in SETTINGS:
        _log.info("%s is no data set that OGB publishes: edges are taken as stored, in one direction", name)
    features = (PUBLISHED[name].num_features, name in _WITH_EDGE_FEATURES) if name in SETTINGS else (0, False)
    build: Callable[[ArrayWriter], None]
    if (raw / "data.npz").exists():
        binary = _BinaryFiles(raw, _split_folder(folder, settings.split))
        binary.check_features(name, *features)
        sources, num_nodes, build = binary.sources(), binary.num_nodes(), binary.write
    else:
        files = _csv_files(folder, name, settings)
        files.check_features(name, *features)
        sources, num_nodes, build = files.sources(), files.num_nodes(), files.write

    def write(arrays: ArrayWriter) -> dict[str, Any]:
        build(arrays)
        return {"name": name, "num_nodes": num_nodes, "metric": settings.metric}

    options = {"reader": "ogb", "version": 1, "name": name, **asdict(settings)}
    try:
        return cached_graph(cache, sources, options, write)
    except ValueError as error:
        if str(folder) in str(error) or (cache is not None and str(cache) in str(error)):
            raise
        raise OgbError(f"{folder}: {error}") from error


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
    dtype = _id_type(num_nodes)
    src, dst = (arrays.create(name, (num_edges * (2 if inverse else 1),), dtype) for name in ("src", "dst"))
    row = 0
    for block in _counted(csv_blocks(path, dtype, 2), path, num_edges, counted_in):
        _check_edge_ids(path, block, row, num_nodes)
        src.append(block.reshape(-1) if inverse else block[:, 0])
        dst.append(block[:, ::-1].reshape(-1) if inverse else block[:, 1])
        row += len(block)
    src.close()
    dst.close()


class _Files:
    """Where the pieces of one data set lie, and what they have in common, whichever way they are stored."""

    def __init__(self, split: Path) -> None:
        self.split = split

    def split_files(self) -> dict[str, Path]:
        return {part: self.split / f"{file}.csv.gz" for part, file in _SPLIT_FILES.items()}

    def write_splits(self, arrays: ArrayWriter, num_nodes: int) -> None:
        for part, path in self.split_files().items():
            ids = read_csv_array(path, np.int64, 1, most_rows=num_nodes)[:, 0]
            bad = (ids < 0) | (ids >= num_nodes)
            if bad.any():
                row = int(bad.argmax())
                raise OgbError(f"{path}, entry {row} is node {ids[row]}, out of range: {_allowed(num_nodes)}")
            arrays.add(part, ids)


class _CsvFiles(_Files):
    """The CSV layout; ``edges`` and ``nodes`` are the folders of the relation and the node type."""

    def __init__(
        self, *, edges: Path, nodes: Path, labels: Path, split: Path, count: Callable[[], int], counted_in: Path
    ) -> None:
        super().__init__(split)
        self.edge, self.labels = edges / "edge.csv.gz", labels / "node-label.csv.gz"
        self.edge_count = edges / "num-edge-list.csv.gz"
        self.count, self.counted_in = count, counted_in
        self.inverse = False
        self.feat = nodes / "node-feat.csv.gz"
        self.edge_feat = edges / "edge-feat.csv.gz"
        self.node_files = {path.name.removesuffix(".csv.gz"): path for path in sorted(nodes.glob("node_*.csv.gz"))}
        if (nodes / "species.csv.gz").exists():  # as ogbn-proteins is packed
            self.node_files.setdefault("node_species", nodes / "species.csv.gz")
        self.edge_files = {path.name.removesuffix(".csv.gz"): path for path in sorted(edges.glob("edge_*.csv.gz"))}

    def sources(self) -> list[Path]:
        needed = [self.edge, self.edge_count, self.counted_in, self.labels, *self.split_files().values()]
        optional = [path for path in (self.feat, self.edge_feat) if path.exists() or path.is_symlink()]
        return _all_there([*needed, *optional, *self.node_files.values(), *self.edge_files.values()])

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
        _write_labels(arrays, _counted(blocks, self.labels, num_nodes, self.counted_in), self.labels, num_nodes)
        self.write_splits(arrays, num_nodes)


class _BinaryFiles(_Files):
    """The binary layout of ogbn-papers100M: ``raw/data.npz`` and ``raw/node-label.npz``."""

    def __init__(self, raw: Path, split: Path) -> None:
        super().__init__(split)
        self.path, self.label_path = raw / "data.npz", raw / "node-label.npz"
        self.members = npz_members(self.path)
        for name in ("edge_index", "num_nodes_list", "num_edges_list"):
            if name not in self.members:
                raise OgbError(f"{self.path} lacks {name}; it holds {', '.join(self.members) or 'nothing'}")
        for name in self.members:
            if not name.startswith(("node_", "edge_", "num_nodes_list", "num_edges_list")):
                raise OgbError(f"{self.path}: unknown array {name!r}; names begin with node_ or edge_")

    def sources(self) -> list[Path]:
        return _all_there([self.path, self.label_path, *self.split_files().values()])

    def check_features(self, name: str, of_nodes: int, of_edges: bool) -> None:
        for array, wanted in (("node_feat", of_nodes), ("edge_feat", of_edges)):
            if wanted and array not in self.members:
                raise OgbError(
                    f"{self.path} lacks {array}, which {name} has; get the file again. Another graph in this layout "
                    "needs a folder of another name"
                )

    def num_nodes(self) -> int:
        return self._single("num_nodes_list", "nodes", least=1)

    def _single(self, name: str, what: str, least: int) -> int:
        member = self.members[name]
        if member.dtype.kind not in "iu" or int(np.prod(member.shape, dtype=object)) != 1:
            raise OgbError(
                f"{self.path}: {name} is {member.dtype} {member.shape}; expected one number of {what}: node data sets "
                "have one graph"
            )
        return _at_least(int(next(member.blocks())[0]), what, self.path, least)

    def write(self, arrays: ArrayWriter) -> None:
        num_nodes, num_edges = self.num_nodes(), self._single("num_edges_list", "edges", least=0)
        self._write_edges(arrays, num_nodes, num_edges)
        for name, member in self.members.items():
            if name in ("edge_index", "num_nodes_list", "num_edges_list"):
                continue
            target = {"node_feat": "feat", "edge_feat": "edge_data.feat"}.get(name, f"{name[:4]}_data.{name}")
            self._write_rows(arrays, target, member, num_nodes if name.startswith("node_") else num_edges)
        members = npz_members(self.label_path)
        if "node_label" not in members:
            raise OgbError(f"{self.label_path} lacks node_label; it holds {', '.join(members) or 'nothing'}")
        member = members["node_label"]
        if len(member.shape) not in (1, 2) or member.shape[0] != num_nodes or 0 in member.shape:
            raise OgbError(f"{self.label_path}: node_label has shape {member.shape}; expected ({num_nodes}, tasks)")
        columns = member.shape[1] if len(member.shape) == 2 else 1
        blocks = (block.reshape(-1, columns).astype(np.float64) for block in member.row_blocks())
        _write_labels(arrays, blocks, self.label_path, num_nodes)
        self.write_splits(arrays, num_nodes)

    def _write_edges(self, arrays: ArrayWriter, num_nodes: int, num_edges: int) -> None:
        member, dtype = self.members["edge_index"], _id_type(num_nodes)
        if member.dtype.kind not in "iu" or member.shape != (2, num_edges):
            raise OgbError(
                f"{self.path}: edge_index is {member.dtype} {member.shape}; expected integers of shape "
                f"(2, {num_edges}), as num_edges_list says"
            )
        ends = [arrays.create(name, (num_edges,), dtype) for name in ("src", "dst")]
        place = 0
        for block in member.blocks():
            _check_binary_ids(self.path, block, place, num_nodes, num_edges, member.fortran_order)
            ids = block.astype(dtype)
            if member.fortran_order:  # source and target of an edge side by side
                first = place % 2
                ends[0].append(ids[first::2])
                ends[1].append(ids[1 - first :: 2])
            else:  # all sources, then all targets
                split = min(max(0, num_edges - place), len(ids))
                ends[0].append(ids[:split])
                ends[1].append(ids[split:])
            place += len(ids)
        for end in ends:
            end.close()

    def _write_rows(self, arrays: ArrayWriter, target: str, member: NpzMember, num_rows: int) -> None:
        if not member.shape or member.shape[0] != num_rows:
            raise OgbError(f"{self.path}: {member.name} has shape {member.shape}; expected {num_rows} rows")
        if target == "feat" and len(member.shape) != 2:
            raise OgbError(f"{self.path}: node_feat has shape {member.shape}; expected (nodes, features)")
        integers_to_float = target.endswith("feat") and member.dtype.kind != "f"
        column = arrays.create(target, member.shape, np.float32 if integers_to_float else member.dtype)
        row = 0
        for block in member.row_blocks():
            if target == "feat":
                _check_finite(self.path, block, "node_feat, row {}, column {} is {}", row)
            column.append(block)
            row += len(block)
        column.close()


def _csv_files(folder: Path, name: str, settings: OgbSettings) -> _CsvFiles:
    raw = folder / "raw"
    split = _split_folder(folder, settings.split)
    if not (raw / "relations").is_dir():
        counted_in = raw / "num-node-list.csv.gz"
        files = _CsvFiles(
            edges=raw,
            nodes=raw,
            labels=raw,
            split=split,
            count=lambda: _single_count(counted_in, "nodes", least=1),
            counted_in=counted_in,
        )
        files.inverse = settings.inverse_edges
        return files
    kind = settings.node_type
    if kind is None:
        raise OgbError(
            f"{raw / 'relations'}: {name} is a heterogeneous data set; of these only ogbn-mag is read, as the graph "
            "of its papers"
        )
    triplet = f"{kind}___{settings.relation}___{kind}"
    _log.info("%s is read as a homogeneous graph: its %s nodes and the relation %s alone", name, kind, triplet)
    counted_in = raw / "num-node-dict.csv.gz"
    return _CsvFiles(
        edges=raw / "relations" / triplet,
        nodes=raw / "node-feat" / kind,
        labels=raw / "node-label" / kind,
        split=split / kind,
        count=lambda: _count_of_type(counted_in, kind),
        counted_in=counted_in,
    )


def _all_there(paths: list[Path]) -> list[Path]:
    """The paths, provided that each is a file."""
    for path in paths:
        if (problem := no_file(path)) == "no such file":
            raise OgbError(f"{path} is missing: the download or copy is incomplete; get the data set again")
        if problem is not None:
            raise OgbError(f"{path}: {problem}")
    return paths


def _split_folder(folder: Path, wanted: str | None) -> Path:
    """The split to use; the only one there is when the name does not say which."""
    parent = folder / "split"
    found = sorted(path.name for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
    if wanted is None and len(found) == 1:
        return parent / found[0]
    if wanted is None or wanted not in found:
        raise OgbError(
            f"{parent} holds {', '.join(found) or 'no split'}; expected "
            + (f"{wanted}/ with train.csv.gz, valid.csv.gz and test.csv.gz" if wanted else "one folder")
        )
    return parent / wanted


def _id_type(num_nodes: int) -> type[np.signedinteger]:
    return np.int32 if num_nodes < 2**31 else np.int64


def _allowed(num_nodes: int) -> str:
    return f"ids of {num_nodes} nodes start at 0, the largest is {num_nodes - 1}"


def _single_count(path: Path, what: str, least: int) -> int:
    counts = read_csv_array(path, np.int64, 1, most_rows=_MOST_GRAPHS)[:, 0]
    if len(counts) != 1:
        raise OgbError(f"{path} lists {len(counts)} graphs; a node data set has one")
    return _at_least(int(counts[0]), what, path, least)


def _count_of_type(path: Path, kind: str) -> int:
    """From a table with node types as header and one line of counts."""
    lines = list(csv_lines(path))
    if len(lines) != 2 or len(lines[0]) != len(lines[1]) or kind not in lines[0]:
        raise OgbError(f"{path} is not a header of node types, {kind!r} among them, and one line with their counts")
    text = lines[1][lines[0].index(kind)]
    if not text.isdecimal() or len(text) > 18:
        raise OgbError(f"{path}: the count of {kind} is {text[:40]!r}; expected a whole number")
    return _at_least(int(text), "nodes", path, 1)


def _at_least(count: int, what: str, path: Path, least: int) -> int:
    if count < least:
        raise OgbError(f"{path} says {count} {what}; at least {least} are needed")
    return count


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
        f"{_allowed(num_nodes)}"
    )


def _check_binary_ids(
    path: Path, ids: np.ndarray, first: int, num_nodes: int, num_edges: int, side_by_side: bool
) -> None:
    if len(ids) == 0 or (ids.min() >= 0 and ids.max() < num_nodes):
        return
    bad = int(((ids < 0) | (ids >= num_nodes)).argmax())
    end, edge = (first + bad) % 2, (first + bad) // 2
    if not side_by_side:
        end, edge = divmod(first + bad, num_edges)
    raise OgbError(
        f"{path}: edge_index, the {('source', 'target')[end]} of edge row {edge} is {ids[bad]}, out of range: "
        f"{_allowed(num_nodes)}"
    )


def _check_finite(path: Path, block: np.ndarray, place: str, first_row: int) -> None:
    if np.isfinite(block.sum(dtype=np.float64)) or np.isfinite(block).all():
        return
    row, column = np.argwhere(~np.isfinite(block))[0].tolist()
    raise OgbError(f"{path}: {place.format(first_row + row, column, block[row, column])}; features have to be finite")


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
            _check_finite(path, block, "row {}, column {} is {}", row)
        if column is None:
            column = arrays.create(name, (num_rows * copies, block.shape[1]), kind)
        column.append(block if copies == 1 else np.repeat(block, copies, axis=0))
        row += len(block)
    if column is None:
        column = arrays.create(name, (0, 1), kind)
    column.close()


def _write_labels(arrays: ArrayWriter, blocks: Iterator[np.ndarray], path: Path, num_nodes: int) -> None:
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
