"""The whole graph on the host, as every dataset returns it.

Shape suffixes: N nodes, E edges, F features, C classes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from nugnn._counted import counted
from nugnn.datasets import _checks
from nugnn.datasets.mapped import row_windows

if TYPE_CHECKING:
    import dgl

Metric = Literal["auto", "accuracy", "micro_f1", "roc_auc"]
Split = tuple[Tensor, Tensor, Tensor]

_HASH_FORMAT = b"nugnn.GraphData content, format 2"


def _no_nodes() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphData:
    """One graph with its features, labels and splits; checked when made, so later code need not.

    Edge ``e`` is ``src[e] -> dst[e]``; its position ``e`` is its global id. Parallel edges and self-loops are allowed.
    Tensors are not copied and must not be changed afterwards.

    Args:
        name: How errors and reports call the graph.
        num_nodes: N, at least 1. Isolated nodes count.
        src: ``(E,)`` int64 or int32, source of each edge, in ``[0, N)``.
        dst: ``(E,)`` of the same dtype, destination of each edge.
        features: ``(N, F)`` floating point, dense or ``torch.sparse_csr``, all finite; None for a graph without.
        labels: ``(N,)`` int64 class ids with -1 for unlabelled nodes; or ``(N, C)`` uint8 0/1 for multi-label.
        num_classes: C; 0 takes the number of columns, or the largest label plus one.
        train_nodes: Node ids to train on, every one labelled. Kept ascending, as the next two; all disjoint.
        val_nodes: Node ids that choose the best epoch.
        test_nodes: Node ids of the reported result.
        splits: All published (train, val, test) triples, when there are several; :meth:`with_split` picks one.
        node_data: Further per-node tensors, first dimension N.
        edge_data: Further per-edge tensors, first dimension E; edge weights are called ``"weight"``.
        original_ids: ``(N,)`` int64 or unicode array, the user's own id of each node; None where that is its row.
        metric: ``"auto"`` becomes ``"micro_f1"`` for multi-label graphs, ``"accuracy"`` otherwise; ``"roc_auc"`` is for
            two classes or multi-label.

    Raises:
        ValueError: anything the list above rules out; the message names the first bad row and the allowed range.
    """

    name: str
    num_nodes: int
    src: Tensor
    dst: Tensor
    features: Tensor | None = None
    labels: Tensor | None = None
    num_classes: int = 0
    train_nodes: Tensor = field(default_factory=_no_nodes)
    val_nodes: Tensor = field(default_factory=_no_nodes)
    test_nodes: Tensor = field(default_factory=_no_nodes)
    splits: tuple[Split, ...] = ()
    node_data: Mapping[str, Tensor] = field(default_factory=dict)
    edge_data: Mapping[str, Tensor] = field(default_factory=dict)
    original_ids: np.ndarray | None = None
    metric: Metric = "auto"

    def __post_init__(self) -> None:
        where = f"graph {self.name!r}"
        if self.num_nodes < 1:
            raise ValueError(
                f"{where}: {counted(self.num_nodes, 'node')}; an empty graph cannot be trained or partitioned"
            )
        _checks.check_edges(where, self.num_nodes, self.src, self.dst)
        if self.features is not None:
            _checks.check_features(where, self.num_nodes, self.features)
        if self.labels is not None:
            if not self.num_classes:
                self._set("num_classes", _count_classes(self.labels))
            _checks.check_labels(where, self.num_nodes, self.num_classes, self.labels)
        for name in ("train_nodes", "val_nodes", "test_nodes"):
            self._set(name, _ascending(where, name, getattr(self, name)))
        self._check_split(where, self.split)
        sorted_splits = []
        for number, triple in enumerate(self.splits):
            here = f"{where}, split {number}"
            train, val, test = (_ascending(here, "node ids", ids) for ids in triple)
            self._check_split(here, (train, val, test))
            sorted_splits.append((train, val, test))
        self._set("splits", tuple(sorted_splits))
        _checks.check_columns(where, "node", self.num_nodes, self.node_data)
        _checks.check_columns(where, "edge", self.num_edges, self.edge_data)
        if self.original_ids is not None:
            _checks.check_original_ids(where, self.num_nodes, self.original_ids)
        self._set_metric(where)

    @property
    def num_edges(self) -> int:
        return len(self.src)

    @property
    def num_features(self) -> int:
        """F, or 0 for a graph without features."""
        return 0 if self.features is None else self.features.shape[1]

    @property
    def is_multilabel(self) -> bool:
        return self.labels is not None and self.labels.dim() == 2

    @property
    def split(self) -> Split:
        """The train, val and test node ids in use."""
        return self.train_nodes, self.val_nodes, self.test_nodes

    @property
    def num_splits(self) -> int:
        """How many splits :meth:`with_split` can pick from; 1 when only one is known."""
        return max(1, len(self.splits))

    def with_split(self, number: int) -> GraphData:
        """The same graph with split ``number`` of ``splits`` in use; split 0 is the default one."""
        if not 0 <= number < self.num_splits:
            raise ValueError(
                f"graph {self.name!r} has no split {number}; it has {self.num_splits}, numbered from 0 to "
                f"{self.num_splits - 1}"
            )
        if not self.splits:
            return self
        train, val, test = self.splits[number]
        return dataclasses.replace(self, train_nodes=train, val_nodes=val, test_nodes=test)

    def to_dgl(self) -> dgl.DGLGraph:
        """A plain ``dgl.DGLGraph`` of this graph, edge ids unchanged.

        ``ndata`` gets ``feat`` (sparse features stay ``torch.sparse_csr``), ``label``, ``train_mask``, ``val_mask``,
        ``test_mask`` (bool) and ``node_data``; ``edata`` gets ``edge_data``.
        """
        from nugnn.datasets.dgl_graphs import to_dgl

        return to_dgl(self)

    @classmethod
    def from_dgl(
        cls,
        graph: dgl.DGLGraph,
        *,
        name: str = "graph",
        features: str | None = "feat",
        labels: str | None = "label",
        train_mask: str | None = "train_mask",
        val_mask: str | None = "val_mask",
        test_mask: str | None = "test_mask",
        num_classes: int = 0,
        metric: Metric = "auto",
    ) -> GraphData:
        """Take a user's homogeneous ``dgl.DGLGraph``, edge ids unchanged; see :func:`dgl_graphs.from_dgl`."""
        from nugnn.datasets.dgl_graphs import from_dgl

        masks = (train_mask, val_mask, test_mask)
        return from_dgl(
            graph, name=name, features=features, labels=labels, masks=masks, num_classes=num_classes, metric=metric
        )

    def content_hash(self) -> str:
        """sha256 over every field, as 64 hexadecimal digits: equal in every process for equal graphs.

        Names, dtypes, shapes and bytes all count, so a cache keyed by it never serves a graph that differs in any of
        them; dictionaries count in alphabetical order.
        """
        digest = hashlib.sha256(_HASH_FORMAT)
        for column in dataclasses.fields(self):
            _feed(digest, column.name, getattr(self, column.name))
        return digest.hexdigest()

    def __repr__(self) -> str:
        features = "none" if self.features is None else f"{self.num_features} {self.features.layout}"
        counts = "/".join(str(len(ids)) for ids in self.split)
        return (
            f"GraphData({self.name!r}, {self.num_nodes} nodes, {self.num_edges} edges, features {features}, "
            f"{counted(self.num_classes, 'class', 'classes')}, split {counts}, {self.metric})"
        )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_split(self, where: str, split: Split) -> None:
        by_name = dict(zip(("train", "val", "test"), split, strict=True))
        _checks.check_split(where, self.num_nodes, self.labels, by_name)

    def _set_metric(self, where: str) -> None:
        if self.metric == "auto":
            self._set("metric", "micro_f1" if self.is_multilabel else "accuracy")
        if self.metric not in ("accuracy", "micro_f1", "roc_auc"):
            raise ValueError(f"{where}: metric is {self.metric!r}; allowed are accuracy, micro_f1 and roc_auc")
        if self.metric == "accuracy" and self.is_multilabel:
            raise ValueError(f"{where}: accuracy needs one class per node; use micro_f1 or roc_auc for a label matrix")
        if self.metric == "roc_auc" and not self.is_multilabel and self.num_classes != 2:
            raise ValueError(
                f"{where}: roc_auc needs 2 classes or a label matrix; there are "
                f"{counted(self.num_classes, 'class', 'classes')}"
            )


def graph_from(source: str | os.PathLike[str], **fields: Any) -> GraphData:
    """``GraphData(**fields)`` of a reader: what is wrong with it is said of the file or folder it was read from.

    Raises:
        ValueError: as ``GraphData``, beginning with ``source``.
    """
    try:
        return GraphData(**fields)
    except ValueError as error:
        raise ValueError(f"{os.fspath(source)}: {error}") from None


def _count_classes(labels: Tensor) -> int:
    if labels.dim() == 2:
        return labels.shape[1]
    return max(0, int(labels.max()) + 1) if labels.numel() else 0


def _ascending(where: str, name: str, ids: Tensor) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        given = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"{where}: {name} is {given}; expected a 1-D int64 tensor of node ids (a mask: mask.nonzero())"
        )
    return ids.to(torch.int64).sort().values


def _feed(digest: hashlib._Hash, key: str, value: object) -> None:
    """Add one named value to the digest, framed so that no two different graphs give the same bytes."""
    if isinstance(value, Tensor):
        digest.update(f"\0{key}\0{value.dtype}\0{value.layout}\0{tuple(value.shape)}\0".encode())
        if value.layout == torch.sparse_csr:
            _feed(digest, "crow", value.crow_indices())
            _feed(digest, "col", value.col_indices())
            _feed(digest, "values", value.values())
        elif value.numel():
            for _, window in row_windows(value if value.dim() else value.reshape(1)):
                digest.update(window.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        digest.update(f"\0{key}\0{value.dtype.str}\0{value.shape}\0".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8).data)
    elif isinstance(value, Mapping):
        digest.update(f"\0{key}\0dict\0{len(value)}\0".encode())
        for name in sorted(value):
            _feed(digest, name, value[name])
    elif isinstance(value, tuple):
        digest.update(f"\0{key}\0tuple\0{len(value)}\0".encode())
        for number, item in enumerate(value):
            _feed(digest, str(number), item)
    else:
        digest.update(f"\0{key}\0{value!r}\0".encode())
