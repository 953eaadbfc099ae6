"""What a file or folder holds, told by its content, and the reader it goes to."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from nugnn.datasets.gnn_benchmark import KEYS as GNN_BENCHMARK_KEYS
from nugnn.datasets.gnn_benchmark import read_gnn_benchmark
from nugnn.datasets.graph_data import GraphData, Metric
from nugnn.datasets.graphsaint import GRAPHSAINT_FILES, REDDIT_FILES, read_graphsaint, read_reddit
from nugnn.datasets.heterophilous import KEYS as HETEROPHILOUS_KEYS
from nugnn.datasets.heterophilous import read_heterophilous
from nugnn.datasets.npz_arrays import npz_keys
from nugnn.datasets.planetoid import PARTS, read_planetoid
from nugnn.datasets.sources import normalised

_TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".mtx", ".graph", ".edges", ".edgelist")
FILE_SUFFIXES = (".npz", *_TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in _TEXT_SUFFIXES), ".bin", ".dgl")
"""Ends of names that a file of a graph may have."""


def read_any(path: Path, name: str, metric: Metric, cache: Path | None, num_nodes: int | None = None) -> GraphData:
    """Read whatever graph a file or folder holds.

    Args:
        path: An existing file or folder.
        name: Name of the graph.
        metric: For formats that do not name one.
        cache: Folder for processed graphs of formats that are slow to read; None for none.
        num_nodes: For lists of edges alone: N, and ids are rows; None to take the ids that occur.

    Raises:
        ValueError: no format fits, its reader refuses, or ``num_nodes`` is given for data that know their own; names
            the file or folder.
    """
    if num_nodes is not None:
        return _read_edge_list(path, name, metric, num_nodes)
    return _read_folder(path, name, metric, cache) if path.is_dir() else _read_file(path, name, metric)


def _read_edge_list(path: Path, name: str, metric: Metric, num_nodes: int) -> GraphData:
    """A file that is a list of edges and nothing else; an ``edges.csv`` with its ``nodes.csv`` is more."""
    from nugnn.datasets.formats import format_of, nodes_beside, read_path

    known = None if path.is_dir() else format_of(path)
    if path.is_dir() or nodes_beside(path) or not (known and known.takes_num_nodes):
        raise ValueError(
            f"{path} says itself how many nodes it has; the number of nodes (--num-nodes) is for lists of edges alone"
        )
    return read_path(path, name=name, metric=metric, num_nodes=num_nodes)


def holds_planetoid(folder: Path, name: str) -> bool:
    """Whether some of the Planetoid files of that graph are in the folder."""
    # os.path: a name that is too long for the system is no file either
    return any(os.path.isfile(folder / f"ind.{name}.{part}") for part in PARTS)


def _read_file(path: Path, name: str, metric: Metric) -> GraphData:
    if path.suffix == ".npz":
        keys = npz_keys(path)
        if "num_nodes" not in keys and keys.issuperset(GNN_BENCHMARK_KEYS):
            return _with_metric(read_gnn_benchmark(path, name), metric)
        if keys.issuperset(HETEROPHILOUS_KEYS):
            return read_heterophilous(path, name, metric)
    return _read_other(path, name, metric)


def _read_folder(folder: Path, name: str, metric: Metric, cache: Path | None) -> GraphData:
    if (inside := _npz_named_like(folder)) is not None:
        return _read_file(inside, inside.stem, metric)
    if holds_ogb(folder):
        from nugnn.datasets.ogb import read_ogb

        return _with_metric(read_ogb(folder, normalised(name), cache), metric)
    for place in (folder, folder / "raw"):  # PyG keeps the files of Planetoid in raw/
        if graphs := {path.name.split(".")[1] for path in place.glob("ind.?*.*")}:
            return _with_metric(_read_planetoid(place, graphs, name), metric)
    if any((folder / file).is_file() for file in (GRAPHSAINT_FILES[0], GRAPHSAINT_FILES[3])):
        return _with_metric(read_graphsaint(folder, name), metric)
    if (folder / REDDIT_FILES[0]).is_file():
        return _with_metric(read_reddit(folder, name), metric)
    files = [path for path in folder.glob("*.npz") if path.is_file()]
    if len(files) == 1 and not (folder / "edges.csv").is_file():
        return _read_file(files[0], name, metric)
    return _read_other(folder, name, metric)


def _read_planetoid(folder: Path, graphs: set[str], name: str) -> GraphData:
    """The only graph there, or the one of that name."""
    graph = next((graph for graph in sorted(graphs) if len(graphs) == 1 or normalised(graph) == normalised(name)), None)
    if graph is None:
        raise ValueError(
            f"{folder} holds the Planetoid files of {', '.join(sorted(graphs))}; name one of them, with this folder as "
            "the data folder (--data-dir)"
        )
    return dataclasses.replace(read_planetoid(folder, graph), name=name)


def holds_ogb(folder: Path) -> bool:
    """Whether a folder is laid out as OGB's: ``raw/`` with the edges or arrays in it, or at least ``split/`` beside."""
    raw = folder / "raw"
    known = ("edge.csv.gz", "data.npz", "relations", "num-node-list.csv.gz")
    return raw.is_dir() and ((folder / "split").is_dir() or any((raw / file).exists() for file in known))


def _npz_named_like(folder: Path) -> Path | None:
    wanted = normalised(folder.resolve().name)
    return next((file for file in sorted(folder.glob("*.npz")) if normalised(file.stem) == wanted), None)


def _read_other(path: Path, name: str, metric: Metric) -> GraphData:
    from nugnn.datasets.formats import read_path

    return read_path(path, name=name, metric=metric)


def _with_metric(data: GraphData, metric: Metric) -> GraphData:
    return data if metric in ("auto", data.metric) else dataclasses.replace(data, metric=metric)
