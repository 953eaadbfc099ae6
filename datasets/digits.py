"""The built-in real graph: scikit-learn's 1,797 handwritten digits, each joined to its nearest neighbours."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch

from nugnn.datasets.counter_hash import counter_hash
from nugnn.datasets.graph_data import GraphData

_NUM_NEIGHBOURS = 10
_TRAIN_PER_CLASS = 20
_NUM_VAL = 300
_NUM_CLASSES = 10
_LARGEST_PIXEL = 16


def digits(seed: int = 0) -> GraphData:
    """The digits graph: the same nodes, edges and split in every process and on every machine.

    An edge joins two images if one is among the 10 nearest of the other by Euclidean distance of the pixels (integers,
    so distances are exact; equal distances go to the lower id). Edges come in both directions, ordered by (src, dst).

    Args:
        seed: Of the split: 200 train nodes (20 per class), 300 val nodes, the rest test.

    Returns:
        1,797 nodes, 64 float32 features (8 x 8 pixels, divided by 16 to lie in [0, 1]), 10 classes.

    Raises:
        ImportError: scikit-learn, which carries the images, is not installed.

    Source: UCI "Optical Recognition of Handwritten Digits" test set, as in ``sklearn.datasets.load_digits``.
    """
    pixels, labels = images()
    src, dst = _neighbour_edges(pixels)
    train, val, test = _split(labels, seed)
    return GraphData(
        name="digits",
        num_nodes=len(pixels),
        src=torch.from_numpy(src),
        dst=torch.from_numpy(dst),
        features=torch.from_numpy((pixels / _LARGEST_PIXEL).astype(np.float32)),
        labels=torch.from_numpy(labels),
        num_classes=_NUM_CLASSES,
        train_nodes=torch.from_numpy(train),
        val_nodes=torch.from_numpy(val),
        test_nodes=torch.from_numpy(test),
    )


def images() -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``(1797, 64)`` float64 integers from 0 to 16, labels ``(1797,)`` int64."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the digits graph needs scikit-learn, which carries the images: pip install scikit-learn")
    table = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if table.is_file():  # read at once: importing sklearn.datasets takes seconds
        with gzip.open(table, "rt") as file:
            rows = np.loadtxt(file, delimiter=",")
        return rows[:, :-1], rows[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels.astype(np.int64)


def _neighbour_edges(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    num_nodes = len(pixels)
    squares = (pixels**2).sum(axis=1)
    distance = squares[:, None] + squares[None, :] - 2 * pixels @ pixels.T  # exact: integers below 2^15
    np.fill_diagonal(distance, np.inf)
    distance += np.arange(num_nodes) / num_nodes  # below one: of equal distances the lower id is nearer
    nearest = np.argpartition(distance, _NUM_NEIGHBOURS, axis=1)[:, :_NUM_NEIGHBOURS]
    joined = np.zeros((num_nodes, num_nodes), dtype=bool)
    joined[np.arange(num_nodes)[:, None], nearest] = True
    src, dst = np.nonzero(joined | joined.T)
    return src, dst


def _split(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.argsort(counter_hash(seed, "digits split", np.arange(len(labels))), kind="stable")
    of_class = [order[labels[order] == label] for label in range(_NUM_CLASSES)]
    train = np.concatenate([nodes[:_TRAIN_PER_CLASS] for nodes in of_class])
    rest = order[~np.isin(order, train)]
    return train, rest[:_NUM_VAL], rest[_NUM_VAL:]
