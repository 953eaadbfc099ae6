"""A shard graph with and without edges from a node to itself; all of them are local."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dgl
import torch
from dgl import ops as dgl_ops
from dgl.frame import Frame
from torch import Tensor

from nugnn.kernels.rows import Rows
from nugnn.kernels.structure import Structure

if TYPE_CHECKING:
    from nugnn.shard_graph import ShardGraph


def without_self_loops(graph: ShardGraph) -> ShardGraph:
    """`ShardGraph.remove_self_loop`; a collective call."""
    structure = graph.index.structure
    loops = structure.indices == structure.dst
    part = graph._with_edges(~loops)
    gone = torch.bincount(structure.dst[loops], minlength=graph.num_nodes())
    part._out_degrees = graph._out_degrees - gone
    part._node_frames = [graph._node_frames[0].clone()]
    return _count_edges(part)


def with_self_loops(graph: ShardGraph, edge_feat_names: Any, fill_data: Any) -> ShardGraph:
    """`ShardGraph.add_self_loop`; a collective call."""
    if not isinstance(fill_data, (int, float)) and fill_data not in ("sum", "mean", "max", "min"):
        raise dgl.DGLError(f"fill_data has to be a number, 'sum', 'mean', 'max' or 'min', got {fill_data!r}")
    filled = set(graph._edge_frames[0]) if edge_feat_names is None else set(edge_feat_names)
    if unknown := filled - set(graph._edge_frames[0]):
        raise dgl.DGLError(f"edge_feat_names: there is no edge column {sorted(unknown)[0]!r}")
    old, num_nodes = graph.index.structure, graph.num_nodes()
    nodes = torch.arange(num_nodes + 1, device=graph.device)
    kept = torch.arange(old.num_edges, device=graph.device) + old.dst
    loops = old.indptr[1:] + nodes[:-1]
    indices = old.indices.new_empty(old.num_edges + num_nodes)
    indices[kept], indices[loops] = old.indices, nodes[:-1].to(indices.dtype)

    def with_loops(ids: Tensor) -> Tensor:
        merged = torch.empty(len(indices), dtype=torch.int64, device=graph.device)
        merged[kept], merged[loops] = ids, graph._edge_id_bound + graph.global_node_ids
        return merged

    row_ids = graph.index.edge_rows.ids
    assert row_ids is not None
    part = copy.copy(graph)
    part._graph = replace(
        graph.index,
        structure=Structure(old.num_src, old.indptr + nodes, indices),
        edge_rows=Rows("edge", with_loops(row_ids), 1, graph.is_split),
    )
    part._edge_ids = None if graph._edge_ids is None else with_loops(graph._edge_ids)
    part._edge_id_bound = graph._edge_id_bound + graph._num_nodes_global
    part._out_degrees = graph._out_degrees + 1
    part._node_frames = [graph._node_frames[0].clone()]
    part._edge_frames = [Frame(num_rows=len(indices))]
    part._exchanges = []
    for key in graph._edge_frames[0]:
        column = graph._edge_frames[0][key]
        fill = _loop_fill(graph, column, fill_data if key in filled else 0)
        merged = column.new_empty((len(indices), *column.shape[1:]))
        merged = merged.index_copy(0, kept, column).index_copy(0, loops, fill)
        part._edge_frames[0][key] = merged
    return _count_edges(part)


def _loop_fill(graph: ShardGraph, column: Tensor, fill_data: Any) -> Tensor:
    """A row for each inner node's new graph-loop."""
    if not isinstance(fill_data, str):
        return column.new_full((), fill_data).expand(graph.num_nodes(), *column.shape[1:])
    if fill_data == "mean" and not column.is_floating_point():
        raise dgl.DGLError(f"fill_data 'mean' of {column.dtype} is not defined; convert the column to float")
    return zero_where_infinite(getattr(dgl_ops, f"copy_e_{fill_data}")(graph, column))


def zero_where_infinite(x: Tensor) -> Tensor:
    """What DGL makes of the maximum of no messages."""
    return x.masked_fill(torch.isinf(x), 0) if x.is_floating_point() else x


def _count_edges(graph: ShardGraph) -> ShardGraph:
    """Bring ``num_edges_global`` up to date; every rank has to take part."""
    graph._num_edges_global = int(graph.ranks.sum_(torch.tensor([graph.num_edges()])))
    return graph
