"""Between ``GraphData`` and DGL's graphs, in memory or saved by ``dgl.save_graphs``; edge ids stay as they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nugnn.datasets._checks import first_true
from nugnn.datasets.dgl_files import DglGraphFile, read_dgl_graph_file
from nugnn.datasets.graph_data import GraphData, Metric, Split
from nugnn.datasets.labels import class_ids

if TYPE_CHECKING:
    import dgl

_MASKS = ("train_mask", "val_mask", "test_mask")
_HETEROGRAPH = (
    "the graph has several node or edge types ({ntypes} and {etypes}); nugnn takes homogeneous graphs. Convert it with "
    "h = dgl.to_homogeneous(g, ndata=[...]): h.ndata['_TYPE'] and h.edata['_TYPE'] then hold the type of each node and "
    "edge, for layers such as RelGraphConv(etypes) and HGTConv(ntype, etype)"
)


def to_dgl(data: GraphData) -> dgl.DGLGraph:
    """A plain ``dgl.DGLGraph`` with the data of ``data`` under DGL's usual names; see :meth:`GraphData.to_dgl`.

    Raises:
        ValueError: ``node_data`` has an entry under one of the names that the features, labels or masks get.
    """
    import dgl

    graph = dgl.graph((data.src, data.dst), num_nodes=data.num_nodes)
    for name, column in node_columns(data, data.features).items():
        graph.ndata[name] = column
    for name, column in data.edge_data.items():
        graph.edata[name] = column
    return graph


def node_columns(data: GraphData, features: Tensor | None) -> dict[str, Tensor]:
    """What DGL's users keep for each node, by name: ``feat``, ``label``, the three masks, and ``node_data``.

    Args:
        data: The graph.
        features: Its features, in the layout that is wanted.

    Raises:
        ValueError: ``node_data`` has an entry under one of the names that the features, labels or masks get.
    """
    columns: dict[str, Tensor] = {}
    if features is not None:
        columns["feat"] = features
    if data.labels is not None:
        columns["label"] = data.labels
    for name, nodes in zip(_MASKS, data.split, strict=True):
        columns[name] = torch.zeros(data.num_nodes, dtype=torch.bool).index_fill(0, nodes, True)
    taken = sorted(columns.keys() & data.node_data.keys())
    if taken:
        raise ValueError(f"graph {data.name!r}: node_data {taken} would be overwritten in ndata; rename them")
    return columns | dict(data.node_data)


def from_dgl(
    graph: dgl.DGLGraph,
    *,
    name: str,
    features: str | None,
    labels: str | None,
    masks: tuple[str | None, str | None, str | None],
    num_classes: int,
    metric: Metric,
) -> GraphData:
    """Read a homogeneous ``dgl.DGLGraph``; the graph is not modified.

    Args:
        graph: On the CPU.
        name: As in ``GraphData``.
        features: Key of the features in ``graph.ndata``; None for a graph without. A default key may be missing.
        labels: Key of the labels: integers or floats (NaN or negative: unlabelled), ``(N,)`` or ``(N, 1)``; or a 0/1
            matrix ``(N, C)`` of any dtype for multi-label.
        masks: Keys of the train, val and test masks, bool or 0/1 ``(N,)``; or ``(N, S)`` for S splits, all three alike.
        num_classes: As in ``GraphData``.
        metric: As in ``GraphData``.

    Returns:
        Everything else in ``ndata`` and ``edata`` becomes ``node_data`` and ``edge_data``.

    Raises:
        ValueError: a heterograph (says how to convert it), a graph off the CPU, a named key that is missing, or
            anything that ``GraphData`` refuses.
    """
    if not graph.is_homogeneous:
        raise ValueError(_HETEROGRAPH.format(ntypes=graph.ntypes, etypes=graph.etypes))
    if graph.device.type != "cpu":
        raise ValueError(f"the graph lies on {graph.device}; the whole graph is kept on the host: use graph.to('cpu')")
    src, dst = graph.edges(order="eid")
    parts = DglGraphFile(graph.num_nodes(), src, dst, dict(graph.ndata), dict(graph.edata))
    keys = (features, labels, *masks)
    return graph_from_columns(parts, name=name, keys=keys, num_classes=num_classes, metric=metric)


def read_dgl_graph(path: str | os.PathLike[str], *, name: str | None = None, metric: Metric = "auto") -> GraphData:
    """Read a file that ``dgl.save_graphs`` wrote with one homogeneous graph in it; DGL is not needed.

    Args:
        path: The file.
        name: Name of the graph; default the file's name without suffix.
        metric: As in ``GraphData``.

    Returns:
        As ``GraphData.from_dgl`` with its default keys: ``feat``, ``label``, ``train_mask``, ``val_mask`` and
        ``test_mask`` of the node data, everything else as ``node_data`` and ``edge_data``.

    Raises:
        ValueError: the file is missing or damaged, or holds no graph that nugnn takes; always names the file.
    """
    path = Path(path)
    parts = read_dgl_graph_file(path)
    try:
        return graph_from_columns(parts, name=name or path.stem, metric=metric)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def graph_from_columns(
    parts: DglGraphFile,
    *,
    name: str,
    keys: tuple[str | None, str | None, str | None, str | None, str | None] = ("feat", "label", *_MASKS),
    num_classes: int = 0,
    metric: Metric = "auto",
) -> GraphData:
    """The graph of DGL's arrays; ``keys`` name features, labels and the three masks among its node data."""
    node_data = dict(parts.node_data)
    x_NF = _take(node_data, "features", keys[0], "feat")
    y = _take(node_data, "labels", keys[1], "label")
    taken = [_take(node_data, key, given, key) for key, given in zip(_MASKS, keys[2:], strict=True)]
    if y is None and keys[1] is not None and any(mask is not None and bool(mask.any()) for mask in taken):
        raise ValueError(
            f"the graph has no labels: they are looked for in the node data {keys[1]!r}, and there is "
            f"{', '.join(map(repr, parts.node_data)) or 'none'}; rename the column, or name it: "
            "GraphData.from_dgl(graph, labels=...)"
        )
    splits = _splits_from_masks(parts.num_nodes, taken)
    return GraphData(
        name=name,
        num_nodes=parts.num_nodes,
        src=parts.src,
        dst=parts.dst,
        features=x_NF,
        labels=None if y is None else _read_labels(y),
        num_classes=num_classes,
        train_nodes=splits[0][0],
        val_nodes=splits[0][1],
        test_nodes=splits[0][2],
        splits=splits if len(splits) > 1 else (),
        node_data=node_data,
        edge_data=dict(parts.edge_data),
        metric=metric,
    )


def _take(columns: dict[str, Tensor], argument: str, key: str | None, default: str) -> Tensor | None:
    if key is None:
        return None
    if key not in columns:
        if key == default:
            return None
        raise ValueError(f"{argument}={key!r} is not in graph.ndata, which has {sorted(columns)}")
    return columns.pop(key)


def _read_labels(labels: Tensor) -> Tensor:
    if labels.dim() != 2 or labels.shape[1] == 1:
        return class_ids(labels)
    bad = ((labels != 0) & (labels != 1)).any(dim=1)
    if bad.any():
        raise ValueError(
            f"label row {int(bad.nonzero()[0])} holds other values than 0 and 1; a label matrix {tuple(labels.shape)} "
            "means multi-label. Give class ids as one column"
        )
    return labels.to(torch.uint8)


def _check_mask(num_nodes: int, key: str, mask: Tensor) -> None:
    if mask.dim() not in (1, 2) or len(mask) != num_nodes or 0 in mask.shape[1:]:
        raise ValueError(f"{key} has shape {tuple(mask.shape)}; a mask has one value per node, ({num_nodes},)")
    bad = ((mask != 0) & (mask != 1)).reshape(num_nodes, -1).any(dim=1)
    if bad.any():
        row = first_true(bad)
        raise ValueError(f"{key} of node {row} is {mask[row].tolist()}; a mask holds only 0 and 1, or False and True")


def _splits_from_masks(num_nodes: int, masks: list[Tensor | None]) -> tuple[Split, ...]:
    for key, mask in zip(_MASKS, masks, strict=True):
        if mask is not None:
            _check_mask(num_nodes, key, mask)
    widths = {mask.shape[1] if mask.dim() == 2 else 1 for mask in masks if mask is not None}
    if len(widths) > 1:
        raise ValueError(f"the masks hold {sorted(widths)} splits; train, val and test masks need the same number")
    width = widths.pop() if widths else 1
    columns = [
        torch.zeros(num_nodes, width, dtype=torch.bool) if mask is None else mask.bool().reshape(num_nodes, width)
        for mask in masks
    ]
    triples = []
    for split in range(width):
        train, val, test = (column[:, split].nonzero().squeeze(1) for column in columns)
        triples.append((train, val, test))
    return tuple(triples)
