"""Small folders in OGB's layouts, written plainly: with gzip and text, not with the code under test."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np


def write_gz(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def lines(table: np.ndarray) -> str:
    return "".join(",".join(map(str, np.atleast_1d(row).tolist())) + "\n" for row in table)


def write_csv_layout(
    folder: Path,
    edges: np.ndarray,
    num_nodes: int,
    *,
    feat: np.ndarray | str | None = None,
    labels: np.ndarray | str | None = None,
    split: str = "time",
    ids: tuple[list[int], list[int], list[int]] = ([0], [1], [2]),
    further: dict[str, np.ndarray | str] | None = None,
) -> Path:
    """A homogeneous CSV data set; text is written as it is given. Features are a column of halves, none for ``""``."""
    tables = {"edge": edges, "num-node-list": np.array([num_nodes]), "num-edge-list": np.array([len(edges)])}
    tables |= {"node-label": np.arange(num_nodes) % 2 if labels is None else labels}
    feat = np.full((num_nodes, 1), 0.5) if feat is None else feat
    tables |= {} if isinstance(feat, str) and not feat else {"node-feat": feat}
    for name, table in (tables | (further or {})).items():
        write_gz(folder / "raw" / f"{name}.csv.gz", table if isinstance(table, str) else lines(table))
    for part, nodes in zip(("train", "valid", "test"), ids, strict=True):
        write_gz(folder / "split" / split / f"{part}.csv.gz", lines(np.array(nodes)))
    return folder


def write_binary_layout(folder: Path, *, fortran: bool = False, compressed: bool = False, **changes: object) -> Path:
    """ogbn-papers100M's layout: five nodes, four edges; ``changes`` replace arrays of data.npz, None drops one."""
    edges = np.array([[0, 1, 2, 4], [1, 2, 3, 0]])
    arrays: dict[str, object] = {
        "edge_index": np.asfortranarray(edges) if fortran else edges,
        "num_nodes_list": np.array([5]),
        "num_edges_list": np.array([4]),
        "node_feat": np.arange(15, dtype=np.float32).reshape(5, 3),
        "node_year": np.arange(2010, 2015).reshape(5, 1),
        "edge_kind": np.arange(4),
    }
    arrays = {name: array for name, array in (arrays | changes).items() if array is not None}
    (folder / "raw").mkdir(parents=True)
    save = np.savez_compressed if compressed else np.savez
    save(folder / "raw" / "data.npz", **arrays)  # type: ignore[arg-type]
    save(folder / "raw" / "node-label.npz", node_label=np.array([[0], [1], [np.nan], [1], [0]], np.float32))
    for part, node in (("train", 0), ("valid", 1), ("test", 3)):
        write_gz(folder / "split" / "time" / f"{part}.csv.gz", f"{node}\n")
    return folder


def write_mag_layout(folder: Path) -> Path:
    """ogbn-mag's layout: four papers and three authors; papers cite papers, authors write them."""
    raw = folder / "raw"
    write_gz(raw / "num-node-dict.csv.gz", "author,paper\n3,4\n")
    write_gz(raw / "triplet-type-list.csv.gz", "author,writes,paper\npaper,cites,paper\n")
    cites, writes = raw / "relations" / "paper___cites___paper", raw / "relations" / "author___writes___paper"
    write_gz(cites / "edge.csv.gz", "0,1\n1,2\n3,0\n")
    write_gz(cites / "num-edge-list.csv.gz", "3\n")
    write_gz(cites / "edge_reltype.csv.gz", "1\n1\n1\n")
    write_gz(writes / "edge.csv.gz", "0,3\n")
    write_gz(writes / "num-edge-list.csv.gz", "1\n")
    write_gz(raw / "node-feat" / "paper" / "node-feat.csv.gz", "0.5,1.0\n1.5,2.0\n2.5,3.0\n3.5,4.0\n")
    write_gz(raw / "node-feat" / "paper" / "node_year.csv.gz", "2016\n2017\n2018\n2019\n")
    write_gz(raw / "node-label" / "paper" / "node-label.csv.gz", "0\n1\n0\n2\n")
    for part, text in (("train", "0\n1\n"), ("valid", "2\n"), ("test", "3\n")):
        write_gz(folder / "split" / "time" / "paper" / f"{part}.csv.gz", text)
    return folder
