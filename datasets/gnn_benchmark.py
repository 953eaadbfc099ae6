"""Amazon, Coauthor, Cora-Full and DBLP graphs in the ``.npz`` format of Shchur et al. and Bojchevski et al."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from nugnn.datasets._checks import check_csr
from nugnn.datasets.graph_data import GraphData, graph_from
from nugnn.datasets.npz_arrays import floats, integers, npz_arrays
from nugnn.datasets.simple_graph import simple_undirected
from nugnn.datasets.sparse import csr_matrix

NUM_TRAIN_PER_CLASS, NUM_VAL_PER_CLASS = 20, 30

KEYS = ("adj_indptr", "adj_indices", "adj_shape", "labels")

_SPARSE = ("attr_data", "attr_indices", "attr_indptr", "attr_shape")

_log = logging.getLogger("nugnn.datasets")


def read_gnn_benchmark(path: Path, name: str) -> GraphData:
    """Read ``adj_*`` and ``attr_*`` (CSR, or ``attr_matrix``) and ``labels``.

    Names of nodes, attributes and classes are pickled objects in these files; they are not read. Edges are made
    symmetric and simple, in CSR order. The files carry no split: 20 nodes per class train and 30 validate, drawn with
    seed 0, the rest test, as in the paper (its own draws are not published). A class too small for that gives half of
    its nodes to train and a quarter to validate.

    Args:
        path: The file.
        name: Name of the graph.

    Returns:
        float32 features, sparse where stored so; int64 labels.

    Raises:
        ValueError: an array is missing, holds pickled objects or does not fit the others; names file and key.

    Source: Shchur et al., "Pitfalls of Graph Neural Network Evaluation", 2018 (format and split sizes).
    """
    arrays = npz_arrays(path, KEYS, (*_SPARSE, "attr_matrix"))
    src, dst, num_nodes = _edges(path, arrays)
    labels = integers(path, arrays, "labels")
    if len(labels) != num_nodes:
        raise ValueError(f"{path}: {len(labels)} labels for {num_nodes} nodes; get the file again")
    train, val, test = split_per_class(labels)
    _log.info("%s has no published split: 20 train and 30 val nodes per class drawn with seed 0, the rest test", name)
    src, dst = simple_undirected(src, dst, num_nodes)
    return graph_from(
        path,
        name=name,
        num_nodes=num_nodes,
        src=torch.from_numpy(src),
        dst=torch.from_numpy(dst),
        features=_features(path, arrays),
        labels=torch.from_numpy(labels),
        train_nodes=torch.from_numpy(train),
        val_nodes=torch.from_numpy(val),
        test_nodes=torch.from_numpy(test),
    )


def split_per_class(labels: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Train, val and test node ids: a fixed number per class to train and validate, every other labelled node to test.

    Args:
        labels: ``(N,)`` class ids, -1 = unlabelled.
        seed: Of the draw; equal seeds give equal splits.

    >>> [len(ids) for ids in split_per_class(np.repeat([0, 1], [100, 8]))]
    [24, 32, 52]
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    train, val, test = [], [], []
    for label in np.unique(labels[labels >= 0]):
        nodes = rng.permutation(np.flatnonzero(labels == label))
        enough = len(nodes) > NUM_TRAIN_PER_CLASS + NUM_VAL_PER_CLASS
        first = NUM_TRAIN_PER_CLASS if enough else len(nodes) // 2
        second = first + (NUM_VAL_PER_CLASS if enough else len(nodes) // 4)
        train.append(nodes[:first])
        val.append(nodes[first:second])
        test.append(nodes[second:])
    none = np.empty(0, dtype=np.int64)
    first_ids, second_ids, rest = (np.sort(np.concatenate([none, *ids])) for ids in (train, val, test))
    return first_ids, second_ids, rest


def _edges(path: Path, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, int]:
    indptr, indices = integers(path, arrays, "adj_indptr"), integers(path, arrays, "adj_indices")
    num_nodes = _square(path, arrays)
    check_csr(f"{path}", "adjacency", torch.from_numpy(indptr), torch.from_numpy(indices), num_nodes, num_nodes)
    return np.repeat(np.arange(num_nodes), np.diff(indptr)), indices, num_nodes


def _square(path: Path, arrays: dict[str, np.ndarray]) -> int:
    shape = integers(path, arrays, "adj_shape").tolist()
    if len(shape) != 2 or shape[0] != shape[1] or not 0 < shape[0] < 2**31:
        raise ValueError(f"{path}: adj_shape is {shape}; expected [num_nodes, num_nodes]")
    return int(shape[0])


def _features(path: Path, arrays: dict[str, np.ndarray]) -> torch.Tensor | None:
    if "attr_matrix" in arrays:
        return torch.from_numpy(floats(path, arrays, "attr_matrix", 2))
    present = [key for key in _SPARSE if key in arrays]
    if not present:
        return None
    if len(present) < len(_SPARSE):
        raise ValueError(f"{path}: {', '.join(sorted(set(_SPARSE) - set(present)))} missing; get the file again")
    shape = integers(path, arrays, "attr_shape").tolist()
    if len(shape) != 2:
        raise ValueError(f"{path}: attr_shape is {shape}; expected [num_nodes, num_features]")
    indptr = torch.from_numpy(integers(path, arrays, "attr_indptr"))
    indices = torch.from_numpy(integers(path, arrays, "attr_indices"))
    values = torch.from_numpy(floats(path, arrays, "attr_data"))
    check_csr(f"{path}", "attributes", indptr, indices, *shape)
    if len(values) != len(indices):
        raise ValueError(f"{path}: attr_data has {len(values)} entries and attr_indices {len(indices)}")
    return csr_matrix(indptr, indices, values, (shape[0], shape[1]))
