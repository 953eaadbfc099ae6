"""Readouts over all nodes or edges of a split graph, under the names DGL gives them.

A readout has one row, the same on every rank; each rank may use it in its own part of the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nugnn.comm.collectives import extreme_over_ranks, gather_over_ranks, sum_over_ranks
from nugnn.kernels.rows import REPLICATED, Rows, tag

if TYPE_CHECKING:
    from nugnn.shard_graph import ShardGraph


def _weighted(data: Any, feat: str, weight: str | None) -> Tensor:
    x: Tensor = data[feat]
    return x if weight is None else x * data[weight]


def _reduce(graph: ShardGraph, x: Tensor, rows: Rows, count_global: int, op: str) -> Tensor:
    """``(1, ...)`` reduction of the rows of every rank."""
    if op in ("sum", "mean"):
        total = sum_over_ranks(x.sum(0, keepdim=True), graph.ranks)
        return tag(total / max(count_global, 1) if op == "mean" else total, REPLICATED)
    if op not in ("max", "min"):
        raise ValueError(f"readout op has to be sum, mean, max or min, got {op!r}")
    if count_global == 0:
        return tag(x.new_zeros((1, *x.shape[1:])), REPLICATED)
    worst = float("-inf") if op == "max" else float("inf")
    padded = torch.cat([x, x.new_full((1, *x.shape[1:]), worst)])
    ids = torch.cat([rows.row_ids(len(x)), torch.tensor([torch.iinfo(torch.int64).max], device=x.device)])
    local = padded.max(0, keepdim=True) if op == "max" else padded.min(0, keepdim=True)
    return tag(extreme_over_ranks(local.values, ids[local.indices], graph.ranks, largest=op == "max"), REPLICATED)


def readout_nodes(
    graph: ShardGraph, feat: str, weight: str | None = None, *, op: str = "sum", ntype: Any = None
) -> Tensor:
    """`dgl.readout_nodes`."""
    graph.get_ntype_id(ntype)
    return _reduce(graph, _weighted(graph.ndata, feat, weight), graph.index.node_rows, graph.num_nodes_global(), op)


def readout_edges(
    graph: ShardGraph, feat: str, weight: str | None = None, *, op: str = "sum", etype: Any = None
) -> Tensor:
    """`dgl.readout_edges`."""
    graph.get_etype_id(etype)
    return _reduce(graph, _weighted(graph.edata, feat, weight), graph.index.edge_rows, graph.num_edges_global(), op)


def _softmax(graph: ShardGraph, x: Tensor, rows: Rows) -> Tensor:
    worst = x.new_full((1, *x.shape[1:]), float("-inf"))
    with torch.no_grad():
        largest = graph.ranks.max_(torch.cat([x.detach(), worst]).amax(0, keepdim=True))
    exp = torch.exp(x - largest)
    return tag(exp / sum_over_ranks(exp.sum(0, keepdim=True), graph.ranks), rows)


def softmax_nodes(graph: ShardGraph, feat: str, *, ntype: Any = None) -> Tensor:
    """`dgl.softmax_nodes`."""
    graph.get_ntype_id(ntype)
    return _softmax(graph, graph.ndata[feat], graph.index.node_rows)


def softmax_edges(graph: ShardGraph, feat: str, *, etype: Any = None) -> Tensor:
    """`dgl.softmax_edges`."""
    graph.get_etype_id(etype)
    return _softmax(graph, graph.edata[feat], graph.index.edge_rows)


def broadcast_nodes(graph: ShardGraph, graph_feat: Tensor, *, ntype: Any = None) -> Tensor:
    """`dgl.broadcast_nodes`: one row for each inner node."""
    graph.get_ntype_id(ntype)
    row = graph_feat if graph_feat.dim() > 1 and graph_feat.shape[0] == 1 else graph_feat[None]
    return tag(row.expand(graph.num_nodes(), *row.shape[1:]), graph.index.node_rows)


def broadcast_edges(graph: ShardGraph, graph_feat: Tensor, *, etype: Any = None) -> Tensor:
    """`dgl.broadcast_edges`: one row for each local edge."""
    graph.get_etype_id(etype)
    row = graph_feat if graph_feat.dim() > 1 and graph_feat.shape[0] == 1 else graph_feat[None]
    return tag(row.expand(graph.num_edges(), *row.shape[1:]), graph.index.edge_rows)


def in_global_order(graph: ShardGraph, x: Tensor, ids: Tensor) -> Tensor:
    """Every rank's rows on every rank, in ascending order of their ids in the whole graph."""
    order = torch.argsort(torch.cat(graph.ranks.gather_rows(ids)))
    return tag(gather_over_ranks(x, graph.ranks).index_select(0, order), REPLICATED)


def _topk(
    graph: ShardGraph, x: Tensor, ids: Tensor, k: int, descending: bool, sortby: int | None
) -> tuple[Tensor, Tensor]:
    """Values ``(1, k, D)`` and global ids, padded with zeros when there are fewer than k rows."""
    if x.dim() > 2:
        raise ValueError(f"topk needs features of one dimension, got shape {tuple(x.shape)}")
    everything = in_global_order(graph, x, ids)
    everything = everything[:, None] if everything.dim() == 1 else everything
    ids = torch.cat(graph.ranks.gather_rows(ids)).sort().values
    missing = max(k - len(everything), 0)
    keys = everything if sortby is None else everything[:, sortby]
    order = torch.argsort(keys, dim=0, descending=descending, stable=True)[:k]
    if sortby is None:
        values, places = everything.gather(0, order), ids[order]
    else:
        values, places = everything[order], ids[order]
    if missing:
        values = torch.cat([values, values.new_zeros(missing, values.shape[1])])
    return tag(values[None], REPLICATED), places[None]


def topk_nodes(
    graph: ShardGraph, feat: str, k: int, *, descending: bool = True, sortby: int | None = None, ntype: Any = None
) -> tuple[Tensor, Tensor]:
    """`dgl.topk_nodes`; ids are ids in the whole graph."""
    graph.get_ntype_id(ntype)
    return _topk(graph, graph.ndata[feat], graph.global_node_ids, k, descending, sortby)


def topk_edges(
    graph: ShardGraph, feat: str, k: int, *, descending: bool = True, sortby: int | None = None, etype: Any = None
) -> tuple[Tensor, Tensor]:
    """`dgl.topk_edges`; ids are ids in the whole graph."""
    graph.get_etype_id(etype)
    return _topk(graph, graph.edata[feat], graph.global_edge_ids, k, descending, sortby)


def laplacian_lambda_max(graph: ShardGraph) -> list[float]:
    """`dgl.laplacian_lambda_max` of the whole graph: rank 0 computes it from all edges, every rank gets it."""
    import dgl

    if not graph.is_split:
        return dgl.laplacian_lambda_max(graph._whole())  # type: ignore[no-any-return]
    structure = graph.index.structure
    halo = graph.index.plan
    from nugnn.comm.halo_exchange import fetch_halo

    global_L = fetch_halo(graph.global_node_ids, halo)
    source = torch.cat(graph.ranks.gather_rows(global_L[structure.indices.long()]))
    target = torch.cat(graph.ranks.gather_rows(graph.global_node_ids[structure.dst.long()]))
    answer = torch.zeros(1, dtype=torch.float64)
    if graph.ranks.rank == 0:
        ends = (target, source) if graph.index.is_reversed else (source, target)
        on_host = dgl.graph(tuple(end.cpu() for end in ends), num_nodes=graph.num_nodes_global())
        answer[0] = dgl.laplacian_lambda_max(on_host)[0]
    return [float(graph.ranks.broadcast_(answer))]


def sum_nodes(graph: ShardGraph, feat: str, weight: str | None = None, *, ntype: Any = None) -> Tensor:
    """`dgl.sum_nodes`."""
    return readout_nodes(graph, feat, weight, op="sum", ntype=ntype)


def mean_nodes(graph: ShardGraph, feat: str, weight: str | None = None, *, ntype: Any = None) -> Tensor:
    """`dgl.mean_nodes`."""
    return readout_nodes(graph, feat, weight, op="mean", ntype=ntype)


def max_nodes(graph: ShardGraph, feat: str, weight: str | None = None, *, ntype: Any = None) -> Tensor:
    """`dgl.max_nodes`."""
    return readout_nodes(graph, feat, weight, op="max", ntype=ntype)


def sum_edges(graph: ShardGraph, feat: str, weight: str | None = None, *, etype: Any = None) -> Tensor:
    """`dgl.sum_edges`."""
    return readout_edges(graph, feat, weight, op="sum", etype=etype)


def mean_edges(graph: ShardGraph, feat: str, weight: str | None = None, *, etype: Any = None) -> Tensor:
    """`dgl.mean_edges`."""
    return readout_edges(graph, feat, weight, op="mean", etype=etype)


def max_edges(graph: ShardGraph, feat: str, weight: str | None = None, *, etype: Any = None) -> Tensor:
    """`dgl.max_edges`."""
    return readout_edges(graph, feat, weight, op="max", etype=etype)


def norm_by_dst(graph: ShardGraph, etype: Any = None) -> Tensor:
    """`dgl.norm_by_dst`: one over the in-degree of each edge's destination, float32 ``(E,)``."""
    graph.get_etype_id(etype)
    degrees = tag(graph.in_degrees().float(), graph.index.node_rows)
    return tag(1 / graph.index.sddmm("copy_rhs", None, degrees, "u", "v"), graph.index.edge_rows)
