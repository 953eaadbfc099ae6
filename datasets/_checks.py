"""Checks of graph arrays at the door: each error names the first bad row, its value and the allowed range.

Shape suffixes: N nodes, E edges, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from nugnn._counted import counted
from nugnn.datasets.mapped import known_checked, row_windows

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def first_true(mask: Tensor) -> int:
    """Position of the first True of a 1-D mask that has one."""
    return int(mask.to(torch.uint8).argmax())


def check_edges(where: str, num_nodes: int, src: Tensor, dst: Tensor) -> None:
    """Refuse end points that are not 1-D integer tensors of one length with ids in ``[0, num_nodes)``."""
    for name, ids in (("src", src), ("dst", dst)):
        _check_tensor(where, name, ids)
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            raise ValueError(
                f"{where}: {name} is {_brief(ids)}; it has to be a 1-D int64 or int32 tensor with one node id per edge"
            )
    if len(src) != len(dst):
        raise ValueError(
            f"{where}: src lists {counted(len(src), 'edge')} and dst {len(dst)}; give both ends of each edge"
        )
    if src.dtype != dst.dtype:
        raise ValueError(f"{where}: src is {src.dtype} and dst {dst.dtype}; use one integer type for both")
    bad = _out_of_range(src, 0, num_nodes) | _out_of_range(dst, 0, num_nodes)
    if bad.any():
        edge = first_true(bad)
        u, v = int(src[edge]), int(dst[edge])
        wrong = u if not 0 <= u < num_nodes else v
        raise ValueError(
            f"{where}: edge row {edge} is {u} -> {v}: id {wrong} is out of range for {counted(num_nodes, 'node')}; "
            f"ids start at 0, the largest allowed is {num_nodes - 1}"
        )


def check_features(where: str, num_nodes: int, features: Tensor) -> None:
    """Refuse features that are not a finite float matrix with one row per node."""
    _check_tensor(where, "features", features, layouts=(torch.strided, torch.sparse_csr))
    if features.dtype not in _FLOATS:
        raise ValueError(f"{where}: features are {features.dtype}; convert them to floating point, e.g. x.float()")
    if features.dim() != 2:
        raise ValueError(f"{where}: features have shape {tuple(features.shape)}; expected (num_nodes, num_features)")
    if len(features) != num_nodes:
        raise ValueError(
            f"{where}: features have {counted(len(features), 'row')} for {counted(num_nodes, 'node')}; give one "
            f"row per node, "
            "isolated nodes included, in the order of the node ids"
        )
    values = features
    if features.layout == torch.sparse_csr:
        check_csr(where, "features", features.crow_indices(), features.col_indices(), *features.shape)
        values = features.values()
    if known_checked(features):
        return
    for first, window in row_windows(values):
        if torch.isfinite(window.sum(dtype=torch.float64)):  # cheap; NaN and infinity both survive a sum
            continue
        bad = ~torch.isfinite(window)
        if bad.any():
            place = first_true(bad.flatten())
            if features.layout == torch.sparse_csr:
                row = int(torch.searchsorted(features.crow_indices(), first + place, right=True)) - 1
                column = int(features.col_indices()[first + place])
            else:
                row, column = divmod(place, features.shape[1])
                row += first
            raise ValueError(
                f"{where}: feature row {row}, column {column} is {float(window.flatten()[place])}; "
                "every feature has to be finite: fill or drop missing values first"
            )


def check_csr(where: str, name: str, indptr: Tensor, indices: Tensor, num_rows: int, num_columns: int) -> None:
    """Refuse CSR arrays whose row pointers do not ascend from 0 to the length of ``indices`` or point outside."""
    if indptr.dim() != 1 or indices.dim() != 1 or len(indptr) != num_rows + 1:
        raise ValueError(
            f"{where}: {name}: indptr has shape {tuple(indptr.shape)} and indices {tuple(indices.shape)}; "
            f"expected ({num_rows + 1},), one more than the {counted(num_rows, 'row')}, and one dimension"
        )
    if int(indptr[0]) != 0 or int(indptr[-1]) != len(indices):
        raise ValueError(
            f"{where}: {name}: indptr runs from {int(indptr[0])} to {int(indptr[-1])}; "
            f"it has to run from 0 to {len(indices)}, the number of stored entries"
        )
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        row = first_true(falls)
        raise ValueError(
            f"{where}: {name}: row {row} would have {counted(int(indptr[row + 1] - indptr[row]), 'entry', 'entries')}; "
            "indptr must not fall from one row to the next"
        )
    bad = _out_of_range(indices, 0, num_columns)
    if bad.any():
        place = first_true(bad)
        row = int(torch.searchsorted(indptr, place, right=True)) - 1
        raise ValueError(
            f"{where}: {name}: entry {place}, in row {row}, is {int(indices[place])}, out of range for {num_columns} "
            f"columns; allowed are 0 to {num_columns - 1}"
        )


_MOST_CLASSES = 65_536
"""More than this are believed of graphs with as many nodes only: a model has a column for each class."""


def check_labels(where: str, num_nodes: int, num_classes: int, labels: Tensor) -> None:
    """Refuse labels that are neither int64 ``(N,)`` in ``[-1, num_classes)`` nor a uint8 ``(N, C)`` 0/1 matrix."""
    _check_tensor(where, "labels", labels)
    multilabel = labels.dtype == torch.uint8 and labels.dim() == 2
    if not multilabel and not (labels.dtype == torch.int64 and labels.dim() == 1):
        raise ValueError(
            f"{where}: labels are {_brief(labels)}; expected int64 (num_nodes,) class ids with -1 for unlabelled nodes "
            "(nugnn.datasets.class_ids converts floats with NaN), or a uint8 (num_nodes, num_classes) 0/1 matrix"
        )
    if len(labels) != num_nodes:
        raise ValueError(
            f"{where}: labels have {counted(len(labels), 'row')} for {counted(num_nodes, 'node')}; give one per "
            f"node, or -1"
        )
    if multilabel:
        if labels.shape[1] != num_classes:
            raise ValueError(
                f"{where}: the label matrix has {counted(labels.shape[1], 'column')}, num_classes is {num_classes}; "
                "leave num_classes out to take the number of columns"
            )
        bad = (labels > 1).any(dim=1)
        if bad.any():
            row = first_true(bad)
            raise ValueError(
                f"{where}: label row {row} holds {int(labels[row].max())}; a label matrix holds only 0 and 1"
            )
        return
    if num_classes > max(num_nodes, _MOST_CLASSES):
        row = int(labels.argmax())
        raise ValueError(
            f"{where}: the label of node {row} is {int(labels[row])}, which makes "
            f"{counted(num_classes, 'class', 'classes')} for "
            f"{counted(num_nodes, 'node')}; number the classes from 0 (numpy.unique(labels, return_inverse=True) does)"
        )
    bad = _out_of_range(labels, -1, num_classes)
    if bad.any():
        row = first_true(bad)
        raise ValueError(
            f"{where}: the label of node {row} is {int(labels[row])}; allowed are 0 to {num_classes - 1} "
            f"({counted(num_classes, 'class', 'classes')}), and -1 for an unlabelled node"
        )


def check_split(where: str, num_nodes: int, labels: Tensor | None, split: Mapping[str, Tensor]) -> None:
    """Refuse node ids out of range, listed twice or in two sets, and nodes of a set that have no label.

    Args:
        where: How errors begin.
        num_nodes: N.
        labels: As in ``GraphData``.
        split: ``{"train": ids, "val": ids, "test": ids}``, each ascending.
    """
    owner = torch.full((num_nodes,), -1, dtype=torch.int8)
    names = list(split)
    for number, (name, ids) in enumerate(split.items()):
        bad = _out_of_range(ids, 0, num_nodes)
        if bad.any():
            row = first_true(bad)
            raise ValueError(
                f"{where}: {name} node {row} is {int(ids[row])}, out of range for {counted(num_nodes, 'node')}; "
                f"allowed are 0 to {num_nodes - 1}"
            )
        repeated = ids[1:] == ids[:-1]
        if repeated.any():
            raise ValueError(f"{where}: node {int(ids[first_true(repeated)])} is listed twice among the {name} nodes")
        shared = owner[ids] >= 0
        if shared.any():
            node = int(ids[first_true(shared)])
            raise ValueError(
                f"{where}: node {node} is among both the {names[int(owner[node])]} and the {name} nodes; "
                "the sets have to be disjoint"
            )
        owner[ids] = number
        _check_labelled(where, labels, name, ids)


def check_columns(where: str, kind: str, num_rows: int, columns: Mapping[str, Tensor]) -> None:
    """Refuse extra data that is not a dense host tensor with one row per node or per edge."""
    for name, column in columns.items():
        _check_tensor(where, f"{kind} data {name!r}", column)
        if column.dim() == 0 or len(column) != num_rows:
            raise ValueError(
                f"{where}: {kind} data {name!r} has shape {tuple(column.shape)}; its first dimension has to be "
                f"{num_rows}, one row per {kind}"
            )


def check_original_ids(where: str, num_nodes: int, ids: np.ndarray) -> None:
    """Refuse ids of nodes that are not one int64 or text each; that they differ is for the readers to see to."""
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not (ids.dtype == np.int64 or ids.dtype.kind == "U"):
        given = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise ValueError(f"{where}: original_ids is {given}; expected a 1-D NumPy array of int64 or of text")
    if len(ids) != num_nodes:
        raise ValueError(
            f"{where}: original_ids has {counted(len(ids), 'entry', 'entries')} for "
            f"{counted(num_nodes, 'node')}; give one per node"
        )


def _check_labelled(where: str, labels: Tensor | None, name: str, ids: Tensor) -> None:
    if len(ids) and labels is None:
        raise ValueError(f"{where}: {len(ids)} {name} nodes, but no labels; give labels, or leave the {name} nodes out")
    if labels is None or labels.dim() == 2:
        return
    unlabelled = labels[ids] < 0
    count = int(unlabelled.sum())
    if count:
        raise ValueError(
            f"{where}: {count} of {len(ids)} {name} nodes have no label, for example node "
            f"{int(ids[first_true(unlabelled)])}; leave unlabelled nodes out of the {name} nodes "
            "(they stay in the graph, and predictions cover them)"
        )


def _check_tensor(where: str, name: str, tensor: object, layouts: tuple[torch.layout, ...] = (torch.strided,)) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{where}: {name} is a {type(tensor).__name__}; give a torch tensor, e.g. torch.from_numpy(x)")
    if tensor.device.type != "cpu":
        raise ValueError(f"{where}: {name} lies on {tensor.device}; the whole graph is kept on the host: call .cpu()")
    if tensor.layout not in layouts:
        raise ValueError(f"{where}: {name} has layout {tensor.layout}; expected {' or '.join(map(str, layouts))}")


def _out_of_range(ids: Tensor, low: int, high: int) -> Tensor:
    """Mask of ids outside ``[low, high)``; allocates per-row masks only when there is one."""
    if all(int(window.min()) >= low and int(window.max()) < high for _, window in row_windows(ids)):
        return torch.zeros(1, dtype=torch.bool)
    return (ids < low) | (ids >= high)


def _brief(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
