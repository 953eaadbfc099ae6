"""DGL's partition format in and out: what ``dgl.distributed.partition_graph`` writes and ``load_partition`` reads.

Nodes are renumbered so that each part's ids are a range, edges so that each part's are those of the edges into its
nodes, both in the order they had. A part's graph holds its nodes, the sources of edges into them, and those edges.
Shape suffixes: N nodes, E edges, S splits.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nugnn._counted import counted
from nugnn.datasets.dgl_graphs import node_columns
from nugnn.datasets.dgl_parts import EDGE_TYPE, NODE_TYPE, SIDECAR, read_dgl_parts
from nugnn.datasets.graph_data import GraphData
from nugnn.partition.assign import Assignment, partition_nodes

_MASKS = ("train_mask", "val_mask", "test_mask")
_SAVED = (
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)

_log = logging.getLogger("nugnn.partition")


def read_dgl_partition(json_path: str | os.PathLike[str]) -> tuple[GraphData, Assignment]:
    """Read a partition that DGL, or ``write_dgl_partition``, wrote.

    Args:
        json_path: ``NAME.json``.

    Returns:
        The whole graph, as :func:`nugnn.datasets.dgl_parts.read_dgl_parts` gives it, and the parts of its nodes with
        method "given" and as shares the parts' share of the nodes.

    Raises:
        ValueError: what ``read_dgl_parts`` refuses, or a part without a node; names the file.
    """
    data, part_N = read_dgl_parts(json_path)
    num_parts = int(part_N.max()) + 1
    counts = torch.bincount(part_N.to(torch.int64), minlength=num_parts)
    if not bool((counts > 0).all()):
        raise ValueError(f"{json_path}: part {int((counts == 0).nonzero()[0])} has no node; partition again")
    shares = [float(count) for count in counts]
    return data, partition_nodes(data.num_nodes, data.src, data.dst, shares, method="given", parts=part_N)


def write_dgl_partition(data: GraphData, assignment: Assignment, folder: str | os.PathLike[str]) -> Path:
    """Write the parts of a graph as files that ``dgl.distributed`` loads; needs DGL.

    Features, labels and the masks of the split in use get DGL's usual names (``feat``, ``label``, ``train_mask`` ...),
    other data their own. DGL has no sparse features: they become dense, and it says so. What the format cannot keep
    (original order and ids, further splits, the metric, which columns are bool) goes to ``nugnn.npz``.

    Args:
        data: The graph.
        assignment: A part for each of its nodes.
        folder: Made if missing. The JSON file is written last, so an interrupted write leaves no partition.

    Returns:
        Path of ``NAME.json``; NAME is ``data.name``, with ``_`` for what a file name should not hold.

    Raises:
        ValueError: the assignment is of another graph, or data have a type or a name that the format does not take.
    """
    if assignment.num_nodes != data.num_nodes:
        raise ValueError(
            f"the assignment is for {counted(assignment.num_nodes, 'node')}, graph {data.name!r} has {data.num_nodes}; "
            "partition this graph"
        )
    folder = Path(folder)
    node_data, edge_data = _node_columns(data), dict(data.edge_data)
    for kind, columns in (("node", node_data), ("edge", edge_data)):
        _check_columns(data, kind, columns)
    graph_name = re.sub(r"[^\w.-]", "_", data.name) or "graph"
    json_path = folder / f"{graph_name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    json_path.unlink(missing_ok=True)
    part_N = assignment.part.to(torch.int64)
    src_E, dst_E = data.src.to(torch.int64), data.dst.to(torch.int64)
    node_order = part_N.argsort(stable=True)
    edge_order = part_N[dst_E].argsort(stable=True)
    num_parts = assignment.num_parts
    nodes = _ranges(torch.bincount(part_N, minlength=num_parts))
    edges = _ranges(torch.bincount(part_N[dst_E], minlength=num_parts))
    new_id_N = node_order.argsort()
    description: dict[str, Any] = {
        "graph_name": graph_name,
        "num_nodes": data.num_nodes,
        "num_edges": data.num_edges,
        "part_method": assignment.method,
        "num_parts": num_parts,
        "halo_hops": 1,
        "node_map": {NODE_TYPE: nodes},
        "edge_map": {EDGE_TYPE: edges},
        "ntypes": {NODE_TYPE: 0},
        "etypes": {EDGE_TYPE: 0},
    }
    for part, (node_range, edge_range) in enumerate(zip(nodes, edges, strict=True)):
        files = {
            "node_feats": f"part{part}/node_feat.dgl",
            "edge_feats": f"part{part}/edge_feat.dgl",
            "part_graph": f"part{part}/graph.dgl",
        }
        description[f"part-{part}"] = files
        (folder / f"part{part}").mkdir(exist_ok=True)
        own_nodes, own_edges = node_order[slice(*node_range)], edge_order[slice(*edge_range)]
        _save_tensors(folder / files["node_feats"], NODE_TYPE, node_data, own_nodes)
        _save_tensors(folder / files["edge_feats"], EDGE_TYPE, edge_data, own_edges)
        src, dst = new_id_N[src_E[own_edges]], new_id_N[dst_E[own_edges]]
        _save_part_graph(folder / files["part_graph"], nodes, part, src, dst, edge_range)
    np.savez(folder / SIDECAR, **_sidecar(data, node_data, node_order, edge_order))
    json_path.write_text(json.dumps(description, indent=4), encoding="utf-8")
    return json_path


def _ranges(counts: Tensor) -> list[list[int]]:
    ends = counts.cumsum(0).tolist()
    return [[low, high] for low, high in zip([0, *ends], ends, strict=False)]


def _node_columns(data: GraphData) -> dict[str, Tensor]:
    x_NF = data.features
    if x_NF is not None and x_NF.layout == torch.sparse_csr:
        num_bytes = x_NF.shape[0] * x_NF.shape[1] * x_NF.element_size()
        _log.warning("graph %r: DGL's files hold dense features only; they take %d bytes", data.name, num_bytes)
        x_NF = x_NF.to_dense()
    return node_columns(data, x_NF)


def _check_columns(data: GraphData, kind: str, columns: Mapping[str, Tensor]) -> None:
    for name, column in columns.items():
        if column.dtype not in _SAVED:
            raise ValueError(
                f"graph {data.name!r}: {kind} data {name!r} is {column.dtype}, which DGL's files do not hold"
            )
        if not name:
            raise ValueError(f"graph {data.name!r}: {kind} data need a name in DGL's files")


def _save_tensors(path: Path, kind: str, columns: Mapping[str, Tensor], rows: Tensor) -> None:
    from dgl.data.utils import save_tensors

    save_tensors(str(path), {f"{kind}/{name}": _dgl_values(column[rows]) for name, column in columns.items()})


def _dgl_values(column: Tensor) -> Tensor:
    return (column.to(torch.uint8) if column.dtype == torch.bool else column).contiguous()


def _save_part_graph(
    path: Path, nodes: list[list[int]], part: int, src: Tensor, dst: Tensor, edge_range: list[int]
) -> None:
    """``src`` and ``dst`` are new global ids of the part's edges, in the order of new edge ids."""
    import dgl

    low, high = nodes[part]
    halo = src[(src < low) | (src >= high)].unique()
    node_ids = torch.cat([torch.arange(low, high), halo])
    local_src = torch.where((src >= low) & (src < high), src - low, high - low + torch.searchsorted(halo, src))
    graph = dgl.graph((local_src, dst - low), num_nodes=len(node_ids))
    starts = torch.tensor([start for start, _ in nodes])
    graph.ndata["_ID"] = node_ids
    graph.ndata["part_id"] = torch.searchsorted(starts, node_ids, right=True) - 1
    graph.ndata["inner_node"] = (torch.arange(len(node_ids)) < high - low).to(torch.uint8)
    graph.edata["_ID"] = torch.arange(*edge_range)
    graph.edata["inner_edge"] = torch.ones(len(src), dtype=torch.uint8)
    dgl.save_graphs(str(path), [graph], formats="coo")


def _sidecar(
    data: GraphData, node_data: Mapping[str, Tensor], node_order: Tensor, edge_order: Tensor
) -> dict[str, Any]:
    def bools(columns: Mapping[str, Tensor]) -> np.ndarray:
        return np.array([name for name, column in columns.items() if column.dtype == torch.bool], dtype=np.str_)

    arrays: dict[str, Any] = {
        "node_order": node_order.numpy(),
        "edge_order": edge_order.numpy(),
        "int32_ids": np.array(data.src.dtype == torch.int32),
        "bool_node_data": bools(node_data),
        "bool_edge_data": bools(data.edge_data),
        "num_classes": np.int64(data.num_classes),
        "metric": np.array(data.metric),
    }
    if data.original_ids is not None:
        arrays["original_ids"] = data.original_ids
    if data.splits:
        masks = np.zeros((len(data.splits), 3, data.num_nodes), dtype=np.bool_)
        for number, triple in enumerate(data.splits):
            for kind, ids in enumerate(triple):
                masks[number, kind, ids.numpy()] = True
        arrays["split_masks"] = masks
    return arrays
