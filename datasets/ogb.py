"""OGB's node data sets from their raw files, without the ``ogb`` package; docs/formats/ogb.md describes the layout.

Shape suffixes: N nodes, E stored edges, F features, T tasks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nugnn.datasets.array_writers import ArrayWriter
from nugnn.datasets.cache import cached_graph
from nugnn.datasets.graph_data import GraphData, Metric
from nugnn.datasets.ogb_binary import BinaryFiles
from nugnn.datasets.ogb_csv import csv_files
from nugnn.datasets.ogb_files import OgbError, OgbFiles
from nugnn.datasets.sources import PUBLISHED, normalised

_log = logging.getLogger("nugnn.datasets")


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
    split = _split_folder(folder, settings.split)
    files: OgbFiles
    if (raw / "data.npz").exists():
        files = BinaryFiles(raw, split)
    else:
        kept = {"node_type": settings.node_type, "relation": settings.relation}
        files = csv_files(raw, split, name, inverse=settings.inverse_edges, **kept)
    files.check_features(name, *features)
    sources, num_nodes = files.sources(), files.num_nodes()

    def write(arrays: ArrayWriter) -> dict[str, Any]:
        files.write(arrays)
        return {"name": name, "num_nodes": num_nodes, "metric": settings.metric}

    options = {"reader": "ogb", "version": 1, "name": name, **asdict(settings)}
    try:
        return cached_graph(cache, sources, options, write)
    except ValueError as error:
        if str(folder) in str(error) or (cache is not None and str(cache) in str(error)):
            raise
        raise OgbError(f"{folder}: {error}") from error


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
