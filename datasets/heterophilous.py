"""Graphs in the ``.npz`` format of Platonov et al.: Roman-empire, Tolokers, Squirrel and their kin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from nugnn.datasets.graph_data import GraphData, Metric, Split, graph_from
from nugnn.datasets.npz_arrays import floats, integers, npz_arrays
from nugnn.datasets.simple_graph import simple_undirected

KEYS = ("edges", "node_features", "node_labels", "train_masks", "val_masks", "test_masks")


def read_heterophilous(path: Path, name: str, metric: Metric = "auto") -> GraphData:
    """Read edges, features, labels and the ten published splits; split 0 is in use.

    Args:
        path: The file: ``edges`` (E, 2), each undirected edge once or twice; ``node_features`` (N, F); ``node_labels``
            (N,); ``train_masks``, ``val_masks``, ``test_masks`` bool (S, N).
        name: Name of the graph.
        metric: As in ``GraphData``; the file does not name it.

    Returns:
        float32 dense features; arcs symmetric and simple, in CSR order.

    Raises:
        ValueError: an array is missing, holds pickled objects or does not fit the others; names file and key.
    """
    arrays = npz_arrays(path, KEYS)
    edges, labels = integers(path, arrays, "edges", 2), integers(path, arrays, "node_labels")
    num_nodes = len(labels)
    if edges.shape[1] != 2 or (edges.size and not 0 <= edges.min() <= edges.max() < num_nodes):
        raise ValueError(f"{path}: edges is {edges.shape} with ids out of range for {num_nodes} nodes, or no (E, 2)")
    src, dst = simple_undirected(edges[:, 0], edges[:, 1], num_nodes)
    splits = _splits(path, arrays, num_nodes)
    train, val, test = splits[0]
    return graph_from(
        path,
        name=name,
        num_nodes=num_nodes,
        src=torch.from_numpy(src),
        dst=torch.from_numpy(dst),
        features=torch.from_numpy(floats(path, arrays, "node_features", 2)),
        labels=torch.from_numpy(labels),
        train_nodes=train,
        val_nodes=val,
        test_nodes=test,
        splits=splits if len(splits) > 1 else (),
        metric=metric,
    )


def _splits(path: Path, arrays: dict[str, np.ndarray], num_nodes: int) -> tuple[Split, ...]:
    masks = [arrays[key] for key in KEYS[3:]]
    if any(mask.dtype != np.bool_ or mask.ndim != 2 or mask.shape != masks[0].shape for mask in masks):
        given = ", ".join(f"{mask.dtype} {mask.shape}" for mask in masks)
        raise ValueError(f"{path}: the split masks are {given}; expected three bool arrays of one shape (S, N)")
    if masks[0].shape[1] != num_nodes or len(masks[0]) == 0:
        raise ValueError(f"{path}: the split masks have shape {masks[0].shape}; expected (splits, {num_nodes})")
    rows = zip(*masks, strict=True)
    triples = [tuple(torch.from_numpy(np.flatnonzero(mask)) for mask in triple) for triple in rows]
    return tuple((train, val, test) for train, val, test in triples)
