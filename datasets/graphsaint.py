"""Reddit, Yelp and Flickr as the DGL and GraphSAINT projects publish them: scipy matrices, arrays and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nugnn._regular_file import no_file
from nugnn.datasets._checks import check_csr
from nugnn.datasets.archive import BrokenFileError
from nugnn.datasets.graph_data import GraphData, graph_from
from nugnn.datasets.npz_arrays import floats, integers, npz_arrays

GRAPHSAINT_FILES = ("adj_full.npz", "feats.npy", "class_map.json", "role.json")
REDDIT_FILES = ("reddit_graph.npz", "reddit_data.npz")

_TRAIN, _VAL, _TEST = 1, 2, 3


def read_graphsaint(folder: Path, name: str) -> GraphData:
    """Read ``adj_full.npz``, ``feats.npy``, ``class_map.json`` and ``role.json``.

    Args:
        folder: Holds the four files.
        name: Name of the graph.

    Returns:
        Every stored arc, row to column, in CSR order; float32 features as stored, not standardised; int64 labels, or
        uint8 0/1 where the map lists a vector per node.

    Raises:
        ValueError: a file is missing, damaged, or does not fit the others; names it.
    """
    adjacency, features, class_map, role = (folder / file for file in GRAPHSAINT_FILES)
    src, dst, num_nodes = _scipy_edges(adjacency)
    labels = _labels(class_map, _json(class_map), num_nodes)
    roles = _json(role)
    train, val, test = (_node_ids(role, roles, key, num_nodes) for key in ("tr", "va", "te"))
    return _graph(folder, name, src, dst, num_nodes, _npy(features), labels, (train, val, test))


def read_reddit(folder: Path, name: str) -> GraphData:
    """Read ``reddit_graph.npz`` and ``reddit_data.npz`` (``feature``, ``label``, ``node_types``: 1, 2, 3 = the split).

    Args:
        folder: Holds the two files.
        name: Name of the graph.

    Returns:
        Every stored arc, row to column, in the stored order; float32 features; int64 labels.

    Raises:
        ValueError: a file is missing, damaged, or does not fit the other; names it.
    """
    graph, rest = (folder / file for file in REDDIT_FILES)
    src, dst, num_nodes = _scipy_edges(graph)
    arrays = npz_arrays(rest, ("feature", "label", "node_types"))
    types = integers(rest, arrays, "node_types")
    if len(types) != num_nodes:
        raise ValueError(f"{rest}: node_types lists {len(types)} nodes, {graph.name} {num_nodes}; get both again")
    split = tuple(torch.from_numpy(np.flatnonzero(types == kind)) for kind in (_TRAIN, _VAL, _TEST))
    labels = torch.from_numpy(integers(rest, arrays, "label"))
    return _graph(folder, name, src, dst, num_nodes, floats(rest, arrays, "feature", 2), labels, split)


def _graph(
    folder: Path,
    name: str,
    src: np.ndarray,
    dst: np.ndarray,
    num_nodes: int,
    features: np.ndarray,
    labels: torch.Tensor,
    split: tuple[torch.Tensor, ...],
) -> GraphData:
    train, val, test = split
    return graph_from(
        folder,
        name=name,
        num_nodes=num_nodes,
        src=torch.from_numpy(src),
        dst=torch.from_numpy(dst),
        features=torch.from_numpy(features),
        labels=labels,
        train_nodes=train,
        val_nodes=val,
        test_nodes=test,
    )


def _scipy_edges(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows and columns of a matrix that ``scipy.sparse.save_npz`` wrote; the stored values are not read."""
    arrays = npz_arrays(path, ("format", "shape"), ("row", "col", "indptr", "indices"))
    shape = integers(path, arrays, "shape").tolist()
    if len(shape) != 2 or shape[0] != shape[1] or not 0 < shape[0] < 2**31:
        raise ValueError(f"{path}: the matrix is {shape}; expected [num_nodes, num_nodes]")
    num_nodes = int(shape[0])
    kind = arrays["format"].item() if arrays["format"].size == 1 else None
    kind = kind.decode("latin1") if isinstance(kind, bytes) else kind
    if kind == "coo" and {"row", "col"} <= arrays.keys():
        return integers(path, arrays, "row"), integers(path, arrays, "col"), num_nodes
    if kind == "csr" and {"indptr", "indices"} <= arrays.keys():
        indptr, indices = integers(path, arrays, "indptr"), integers(path, arrays, "indices")
        check_csr(f"{path}", "adjacency", torch.from_numpy(indptr), torch.from_numpy(indices), num_nodes, num_nodes)
        return np.repeat(np.arange(num_nodes), np.diff(indptr)), indices, num_nodes
    raise ValueError(f"{path}: a matrix of format {kind!r}; expected csr with indptr, indices or coo with row, col")


def _require(path: Path) -> None:
    if (problem := no_file(path)) is not None:
        raise ValueError(
            f"{path} is missing; get the file again" if problem == "no such file" else f"{path}: {problem}"
        )


def _npy(path: Path) -> np.ndarray:
    _require(path)
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # damaged in any of many ways, or pickled objects
        raise BrokenFileError(f"{path} is no complete .npy file of numbers ({error}); get the file again") from error
    return floats(path, {"the array": array}, "the array", 2)


def _json(path: Path) -> dict[str, Any]:
    _require(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenFileError(f"{path} is no complete JSON file ({error}); get the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object with one entry per key")
    return content


def _labels(path: Path, class_map: dict[str, Any], num_nodes: int) -> torch.Tensor:
    """Class ids, -1 for nodes that the map leaves out; or a 0/1 matrix with a row of zeros for those."""
    try:
        nodes = np.array([int(key) for key in class_map], dtype=np.int64)
        values = np.array(list(class_map.values()))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: node ids or classes are not whole numbers ({error})") from None
    if len(nodes) == 0 or not 0 <= nodes.min() <= nodes.max() < num_nodes:
        raise ValueError(f"{path}: lists {len(nodes)} nodes, not all in 0 to {num_nodes - 1}; get the file again")
    if values.dtype.kind not in "iu" or values.ndim not in (1, 2):
        raise ValueError(f"{path}: classes are {values.dtype} {values.shape[1:]}; expected an integer or 0/1 list each")
    if values.ndim == 1:
        labels = np.full(num_nodes, -1, dtype=np.int64)
        labels[nodes] = values
        return torch.from_numpy(labels)
    if values.size and not 0 <= values.min() <= values.max() <= 1:
        raise ValueError(f"{path}: class vectors hold other values than 0 and 1")
    matrix = np.zeros((num_nodes, values.shape[1]), dtype=np.uint8)
    matrix[nodes] = values
    return torch.from_numpy(matrix)


def _node_ids(path: Path, roles: dict[str, Any], key: str, num_nodes: int) -> torch.Tensor:
    ids = roles.get(key)
    if not isinstance(ids, list) or not all(type(node) is int and 0 <= node < num_nodes for node in ids):
        raise ValueError(f"{path}: {key!r} is no list of node ids from 0 to {num_nodes - 1}; get the file again")
    return torch.tensor(ids, dtype=torch.int64)
