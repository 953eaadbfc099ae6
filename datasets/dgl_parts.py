"""DGL's partition format (``dgl.distributed.partition_graph``) read back into one graph; DGL is not needed.

``NAME.json`` gives every part a range of node ids and of edge ids; a part's graph holds its nodes, the in-edges of
those, and the halo. ``nugnn.npz`` beside it, which DGL does not look at, keeps what the format has no place for.
Shape suffixes: N nodes, E edges, S splits.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nugnn._regular_file import require_file
from nugnn.datasets.dgl_files import DglGraphFile, read_dgl_graph_file, read_dgl_tensor_file
from nugnn.datasets.dgl_graphs import graph_from_columns
from nugnn.datasets.graph_data import GraphData, Metric
from nugnn.datasets.npz import read_arrays

SIDECAR = "nugnn.npz"
NODE_TYPE = "_N"
EDGE_TYPE = "_N:_E:_N"


def read_dgl_parts(
    json_path: str | os.PathLike[str], *, name: str | None = None, metric: Metric = "auto"
) -> tuple[GraphData, Tensor]:
    """Put the parts of a homogeneous graph together again.

    Args:
        json_path: ``NAME.json``; the files it names lie in its folder or below.
        name: Name of the graph; default the one in the file.
        metric: Used when ``nugnn.npz`` does not name one.

    Returns:
        The graph, with nodes and edges in the order of DGL's global ids, or in the original order where ``nugnn.npz``
        tells it; and the part of each node, ``(N,)`` int32.

    Raises:
        ValueError: a file is missing, damaged or of GraphBolt, the parts do not make up the graph, or it has several
            node or edge types; names the file.
    """
    path = Path(json_path)
    layout = _Layout.read(path)
    graph = _joined(path, layout)
    part_N = torch.repeat_interleave(
        torch.arange(layout.num_parts, dtype=torch.int32), torch.tensor([high - low for low, high in layout.nodes])
    )
    sidecar = path.parent / SIDECAR
    extra: dict[str, Any] = {}
    where = path
    try:
        if sidecar.exists():
            where = sidecar
            arrays = read_arrays(sidecar)
            graph, part_N, extra = _restored(arrays, graph, part_N)
            metric = extra.pop("metric", metric)
        data = graph_from_columns(
            graph, name=name or layout.graph_name, num_classes=extra.pop("num_classes", 0), metric=metric
        )
        return dataclasses.replace(data, **extra), part_N
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(str(where)) else f"{where}: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Layout:
    graph_name: str
    num_parts: int
    nodes: list[tuple[int, int]]
    edges: list[tuple[int, int]]
    files: list[dict[str, Path]]

    @classmethod
    def read(cls, path: Path) -> _Layout:
        require_file(path)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}). Get the file again") from None
        try:
            return cls._parse(path, raw)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def _parse(cls, path: Path, raw: object) -> _Layout:
        if not isinstance(raw, dict) or "part-0" not in raw:
            raise ValueError(
                "it is not the description of a DGL partition, which has an entry part-0 for the first part"
            )
        graph_name = raw.get("graph_name")
        num_parts = _count(raw, "num_parts")
        if not isinstance(graph_name, str) or num_parts < 1:
            raise ValueError(
                f"graph_name is {graph_name!r:.80} and num_parts {num_parts}; expected a name and at least 1"
            )
        nodes = _ranges(raw, "node_map", num_parts, _count(raw, "num_nodes"))
        edges = _ranges(raw, "edge_map", num_parts, _count(raw, "num_edges"))
        files = [_part_files(path.parent, raw, part) for part in range(num_parts)]
        return cls(graph_name, num_parts, nodes, edges, files)


def _count(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise ValueError(f"{key} is {value!r:.80}; expected a whole number from 0")
    return value


def _ranges(raw: Mapping[str, Any], key: str, num_parts: int, total: int) -> list[tuple[int, int]]:
    """``[[0, a], [a, b], ...]`` of the one type of nodes or edges; old files leave the type out."""
    by_type = raw.get(key)
    if isinstance(by_type, dict):
        if len(by_type) != 1:
            raise ValueError(
                f"{key} has the types {', '.join(by_type)!s:.200}; nugnn takes homogeneous graphs: partition "
                "dgl.to_homogeneous(g, ndata=[...]) instead"
            )
        (by_type,) = by_type.values()
    if not isinstance(by_type, list):
        raise ValueError(f"{key} is {by_type!r:.80}; expected a range of ids per part, as DGL writes since version 0.5")
    if len(by_type) != num_parts:
        raise ValueError(f"{key} has {len(by_type)} ranges for {num_parts} parts")
    ranges: list[tuple[int, int]] = []
    for part, pair in enumerate(by_type):
        low = ranges[-1][1] if ranges else 0
        is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair)
        if not is_pair or pair[0] != low or not low <= pair[1] <= total:
            raise ValueError(f"{key} of part {part} is {pair!r:.80}; expected a range from {low} to at most {total}")
        ranges.append((pair[0], pair[1]))
    if ranges[-1][1] != total:
        raise ValueError(f"{key} ends at {ranges[-1][1]}, the graph has {total}")
    return ranges


def _part_files(folder: Path, raw: Mapping[str, Any], part: int) -> dict[str, Path]:
    entry = raw.get(f"part-{part}")
    if not isinstance(entry, dict):
        raise ValueError(f"part-{part} is missing")
    if "part_graph" not in entry and "part_graph_graphbolt" in entry:
        raise ValueError("the graphs are saved for GraphBolt, as pickles; partition again with use_graphbolt=False")
    files = {}
    for key in ("part_graph", "node_feats", "edge_feats"):
        text = entry.get(key)
        if not isinstance(text, str) or not text or "\0" in text or max(map(len, Path(text).parts), default=0) > 200:
            raise ValueError(f"{key} of part-{part} is {text!r:.80}; expected the name of a file")
        if Path(text).is_absolute() or ".." in Path(text).parts:
            raise ValueError(
                f"{key} of part-{part} is {text!r:.200}, outside the folder of the JSON file; move it inside"
            )
        files[key] = folder / text
    return files


def _joined(path: Path, layout: _Layout) -> DglGraphFile:
    num_nodes = layout.nodes[-1][1]
    src_parts, dst_parts = [], []
    node_parts: list[dict[str, Tensor]] = []
    edge_parts: list[dict[str, Tensor]] = []
    for (node_low, node_high), (edge_low, edge_high), files in zip(
        layout.nodes, layout.edges, layout.files, strict=True
    ):
        where = str(files["part_graph"])
        graph = read_dgl_graph_file(files["part_graph"])
        src, dst = _inner_edges(where, graph, (node_low, node_high), (edge_low, edge_high), num_nodes)
        src_parts.append(src)
        dst_parts.append(dst)
        node_parts.append(_features(files["node_feats"], node_high - node_low))
        edge_parts.append(_features(files["edge_feats"], edge_high - edge_low))
    return DglGraphFile(
        num_nodes,
        torch.cat(src_parts),
        torch.cat(dst_parts),
        _stacked(path, "node", node_parts),
        _stacked(path, "edge", edge_parts),
    )


def _inner_edges(
    where: str, graph: DglGraphFile, nodes: tuple[int, int], edges: tuple[int, int], num_nodes: int
) -> tuple[Tensor, Tensor]:
    """Ends, as global ids, of a part's own edges in the order of their ids."""
    node_ids = _column(where, graph.node_data, "_ID", graph.num_nodes).to(torch.int64)
    edge_ids = _column(where, graph.edge_data, "_ID", len(graph.src)).to(torch.int64)
    inner_node = _column(where, graph.node_data, "inner_node", graph.num_nodes) != 0
    inner_edge = _column(where, graph.edge_data, "inner_edge", len(graph.src)) != 0
    if not torch.equal(node_ids[inner_node], torch.arange(*nodes)):
        raise ValueError(
            f"{where}: its inner nodes are not those from {nodes[0]} to {nodes[1] - 1} that the JSON lists"
        )
    for ends in (graph.src, graph.dst):
        if len(ends) and not 0 <= int(ends.min()) <= int(ends.max()) < graph.num_nodes:
            raise ValueError(f"{where}: the file is damaged: an edge ends outside its {graph.num_nodes} nodes")
    if len(node_ids) and not 0 <= int(node_ids.min()) <= int(node_ids.max()) < num_nodes:
        raise ValueError(
            f"{where}: the file is damaged: a global node id is outside the {num_nodes} nodes of the graph"
        )
    order = edge_ids[inner_edge].argsort()
    if not torch.equal(edge_ids[inner_edge][order], torch.arange(*edges)):
        raise ValueError(
            f"{where}: its inner edges are not those from {edges[0]} to {edges[1] - 1} that the JSON lists"
        )
    src, dst = (node_ids[ends[inner_edge].to(torch.int64)][order] for ends in (graph.src, graph.dst))
    if len(dst) and not nodes[0] <= int(dst.min()) <= int(dst.max()) < nodes[1]:
        raise ValueError(f"{where}: an inner edge ends at a node of another part")
    return src, dst


def _column(where: str, columns: Mapping[str, Tensor], name: str, length: int) -> Tensor:
    column = columns.get(name)
    if column is None or column.shape != (length,) or column.dtype.is_floating_point:
        raise ValueError(f"{where}: it is not a part that DGL wrote: {name!r} is missing or not one integer per row")
    return column


def _features(path: Path, num_rows: int) -> dict[str, Tensor]:
    """The tensors of one part without the type before each name."""
    found = {}
    for key, tensor in read_dgl_tensor_file(path).items():
        if tensor.dim() == 0 or len(tensor) != num_rows:
            raise ValueError(f"{path}: {key!r:.80} has shape {tuple(tensor.shape)} for {num_rows} rows")
        found[key.partition("/")[2] or key] = tensor  # old files have no type
    return found


def _stacked(path: Path, kind: str, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = [sorted(part) for part in parts]
    for number, found in enumerate(names):
        if found != names[0]:
            raise ValueError(f"{path}: part 0 has the {kind} data {names[0]}, part {number} {found}")
    stacked = {}
    for name in names[0]:
        kinds = {(part[name].dtype, part[name].shape[1:]) for part in parts}
        if len(kinds) > 1:
            raise ValueError(f"{path}: {kind} data {name!r:.80} differ in type or width from part to part")
        stacked[name] = torch.cat([part[name] for part in parts])
    return stacked


def _restored(
    arrays: Mapping[str, np.ndarray], graph: DglGraphFile, part_N: Tensor
) -> tuple[DglGraphFile, Tensor, dict[str, Any]]:
    """Undo the renumbering, and give back what only the sidecar keeps."""
    node_order = _permutation(arrays, "node_order", graph.num_nodes)
    edge_order = _permutation(arrays, "edge_order", len(graph.src))
    node_place, edge_place = node_order.argsort(), edge_order.argsort()
    ids = torch.int32 if bool(_entry(arrays, "int32_ids", "b", 0)) else torch.int64
    columns = []
    for kind, place, data in (("node", node_place, graph.node_data), ("edge", edge_place, graph.edge_data)):
        as_bool = set(_entry(arrays, f"bool_{kind}_data", "U", 1).tolist())
        columns.append({name: x[place].bool() if name in as_bool else x[place] for name, x in data.items()})
    restored = DglGraphFile(
        graph.num_nodes,
        node_order[graph.src][edge_place].to(ids),
        node_order[graph.dst][edge_place].to(ids),
        columns[0],
        columns[1],
    )
    extra: dict[str, Any] = {
        "metric": str(_entry(arrays, "metric", "U", 0)),
        "num_classes": int(_entry(arrays, "num_classes", "i", 0)),
    }
    if "original_ids" in arrays:
        extra["original_ids"] = arrays["original_ids"]
    if "split_masks" in arrays:
        masks = _entry(arrays, "split_masks", "b", 3)
        if masks.shape[1:] != (3, graph.num_nodes):
            raise ValueError(f"split_masks has shape {masks.shape}; expected (splits, 3, {graph.num_nodes})")
        extra["splits"] = tuple(tuple(torch.from_numpy(np.flatnonzero(row)) for row in triple) for triple in masks)
    return restored, part_N[node_place], extra


def _entry(arrays: Mapping[str, np.ndarray], key: str, kind: str, dims: int) -> np.ndarray:
    array = arrays.get(key)
    if array is None or array.dtype.kind != kind or array.ndim != dims:
        raise ValueError(f"{key} is missing or not of the kind that write_dgl_partition writes; write the parts again")
    return array


def _permutation(arrays: Mapping[str, np.ndarray], key: str, length: int) -> Tensor:
    order = _entry(arrays, key, "i", 1)
    if len(order) != length or not np.array_equal(np.sort(order), np.arange(length)):
        raise ValueError(f"{key} is not a permutation of the {length} ids of these parts; it is of another run")
    return torch.from_numpy(order.astype(np.int64))
