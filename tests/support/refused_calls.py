"""A plausible call for every name on the refused lists, and how to compare what DGL and one part answer."""

# ruff: noqa: PLW0108  dgl's functions have to be looked up when called: importing nugnn's seam replaces them
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import dgl
import networkx
import torch
from dgl import function as fn
from scipy import sparse
from torch import Tensor

Call = Callable[[Any], Any]

_SOME = torch.tensor([0, 3, 5])
_MESSAGE, _REDUCE = fn.copy_u("h", "m"), fn.sum("m", "h")


def _labels(graph: Any) -> Tensor:
    return torch.arange(graph.num_nodes()) % 3


def _propagated(call: Callable[[Any], Any]) -> Call:
    def run(graph: Any) -> Any:
        call(graph)
        return graph.ndata["h"]

    return run


def _tagged(graph: Any, name: str) -> Any:
    return getattr(dgl, name)(graph, _labels(graph))


METHOD_CALLS: dict[str, Call] = {
    "add_edges": lambda g: g.add_edges(_SOME, _SOME),
    "add_nodes": lambda g: g.add_nodes(2),
    "remove_edges": lambda g: g.remove_edges(_SOME),
    "remove_nodes": lambda g: g.remove_nodes(_SOME),
    "reorder_graph": lambda g: g.reorder_graph(node_permute_algo="rcmk"),
    "to_simple": lambda g: g.to_simple(copy_edata=False),
    "line_graph": lambda g: g.line_graph(),
    "set_batch_num_nodes": lambda g: g.set_batch_num_nodes(torch.tensor([g.num_nodes()])),
    "set_batch_num_edges": lambda g: g.set_batch_num_edges(torch.tensor([g.num_edges()])),
    "edge_type_subgraph": lambda g: g.edge_type_subgraph(["_E"]),
    "node_type_subgraph": lambda g: g.node_type_subgraph(["_N"]),
    "astype": lambda g: g.astype(torch.int32),
    "inc": lambda g: g.inc("both"),
    "is_multigraph": lambda g: g.is_multigraph,
    "all_edges": lambda g: g.all_edges(form="all", order="srcdst"),
    "find_edges": lambda g: g.find_edges(_SOME),
    "edge_ids": lambda g: g.edge_ids(torch.tensor([0, 1]), torch.tensor([5, 1])),
    "in_edges": lambda g: g.in_edges(_SOME, form="all"),
    "out_edges": lambda g: g.out_edges(_SOME, form="all"),
    "has_edges_between": lambda g: g.has_edges_between([0, 1, 22], [5, 1, 3]),
    "predecessors": lambda g: g.predecessors(5),
    "successors": lambda g: g.successors(0),
    "adj": lambda g: g.adj(),
    "adj_external": lambda g: g.adj_external(scipy_fmt="csr"),
    "adj_tensors": lambda g: g.adj_tensors("csc"),
    "adjacency_matrix": lambda g: g.adjacency_matrix(),
    "incidence_matrix": lambda g: g.incidence_matrix("in"),
    "to_networkx": lambda g: g.to_networkx(node_attrs=["id"], edge_attrs=["eid"]),
    "to_cugraph": lambda g: g.to_cugraph(),
    "subgraph": lambda g: g.subgraph(_SOME),
    "edge_subgraph": lambda g: g.edge_subgraph(_SOME),
    "in_subgraph": lambda g: g.in_subgraph(_SOME),
    "out_subgraph": lambda g: g.out_subgraph(_SOME),
    "khop_in_subgraph": lambda g: g.khop_in_subgraph(_SOME, 2),
    "khop_out_subgraph": lambda g: g.khop_out_subgraph(_SOME, 2),
    "sample_neighbors": lambda g: g.sample_neighbors(_SOME, 2),
    "sample_neighbors_biased": lambda g: g.sample_neighbors_biased(_SOME, 2, torch.ones(1)),
    "sample_neighbors_fused": lambda g: g.sample_neighbors_fused(_SOME, 2),
    "sample_labors": lambda g: g.sample_labors(_SOME, 2),
    "sample_etype_neighbors": lambda g: g.sample_etype_neighbors(_SOME, [0, g.num_edges()], torch.tensor([2])),
    "select_topk": lambda g: g.select_topk(2, "eid"),
    "global_uniform_negative_sampling": lambda g: g.global_uniform_negative_sampling(5),
    "prop_nodes": _propagated(lambda g: g.prop_nodes([[0, 1], [2]], _MESSAGE, _REDUCE)),
    "prop_edges": _propagated(lambda g: g.prop_edges([[0, 1], [2]], _MESSAGE, _REDUCE)),
    "batch_num_nodes": lambda g: g.batch_num_nodes(),
    "batch_num_edges": lambda g: g.batch_num_edges(),
    "shared_memory": lambda g: g.shared_memory("nugnn-test"),
    "pin_memory_": lambda g: g.pin_memory_(),
    "unpin_memory_": lambda g: g.unpin_memory_(),
    "record_stream": lambda g: g.record_stream(None),
}

FUNCTION_CALLS: dict[str, Call] = {
    "add_edges": lambda g: dgl.add_edges(g, _SOME, _SOME),
    "add_nodes": lambda g: dgl.add_nodes(g, 2),
    "add_reverse_edges": lambda g: dgl.add_reverse_edges(g, copy_edata=True),
    "remove_edges": lambda g: dgl.remove_edges(g, _SOME),
    "remove_nodes": lambda g: dgl.remove_nodes(g, _SOME),
    "reorder_graph": lambda g: dgl.reorder_graph(g, node_permute_algo="rcmk"),
    "sort_csc_by_tag": lambda g: _tagged(g, "sort_csc_by_tag"),
    "sort_csr_by_tag": lambda g: _tagged(g, "sort_csr_by_tag"),
    "to_bidirected": lambda g: dgl.to_bidirected(g, copy_ndata=True),
    "to_simple": lambda g: dgl.to_simple(g),
    "to_simple_graph": lambda g: dgl.to_simple_graph(g),
    "line_graph": lambda g: dgl.line_graph(g),
    "khop_graph": lambda g: dgl.khop_graph(g, 2),
    "to_heterogeneous": lambda g: dgl.to_heterogeneous(g, ["a"], ["b"]),
    "to_homogeneous": lambda g: dgl.to_homogeneous(g),
    "metapath_reachable_graph": lambda g: dgl.metapath_reachable_graph(g, ["_E", "_E"]),
    "compact_graphs": lambda g: dgl.compact_graphs(g),
    "batch": lambda g: dgl.batch([g, g]),
    "unbatch": lambda g: dgl.unbatch(g),
    "slice_batch": lambda g: dgl.slice_batch(g, 0),
    "merge": lambda g: dgl.merge([g, g]),
    "adj_product_graph": lambda g: dgl.adj_product_graph(g, g, "w"),
    "adj_sum_graph": lambda g: dgl.adj_sum_graph([g, g], "w"),
    "to_block": lambda g: dgl.to_block(g),
    "block_to_graph": lambda g: dgl.block_to_graph(g),
    "save_graphs": lambda g: dgl.save_graphs("never-written.bin", g),
    "shortest_dist": lambda g: dgl.shortest_dist(g, 0),
    "double_radius_node_labeling": lambda g: dgl.double_radius_node_labeling(g, 0, 5),
    **{
        name: lambda g, name=name: getattr(dgl, name)(g, _labels(g))
        for name in (
            *("edge_label_informativeness", "node_label_informativeness", "edge_homophily", "node_homophily"),
            *("linkx_homophily", "adjusted_homophily"),
        )
    },
    "edge_subgraph": lambda g: dgl.edge_subgraph(g, _SOME),
    "in_subgraph": lambda g: dgl.in_subgraph(g, _SOME),
    "out_subgraph": lambda g: dgl.out_subgraph(g, _SOME),
    "node_subgraph": lambda g: dgl.node_subgraph(g, _SOME),
    "khop_in_subgraph": lambda g: dgl.khop_in_subgraph(g, _SOME, 2),
    "khop_out_subgraph": lambda g: dgl.khop_out_subgraph(g, _SOME, 2),
    "edge_type_subgraph": lambda g: dgl.edge_type_subgraph(g, ["_E"]),
    "node_type_subgraph": lambda g: dgl.node_type_subgraph(g, ["_N"]),
    "khop_adj": lambda g: dgl.khop_adj(g, 2),
    "to_networkx": lambda g: dgl.to_networkx(g),
    "to_cugraph": lambda g: dgl.to_cugraph(g),
    "lap_pe": lambda g: dgl.lap_pe(g, 2),
    "laplacian_pe": lambda g: dgl.laplacian_pe(g, 2),
    "random_walk_pe": lambda g: dgl.random_walk_pe(g, 2),
    "svd_pe": lambda g: dgl.svd_pe(g, 2, random_flip=False),
    **{
        name: lambda g, name=name: list(getattr(dgl, name)(g, 0))
        for name in (
            *("bfs_edges_generator", "bfs_nodes_generator", "dfs_edges_generator"),
            "dfs_labeled_edges_generator",
        )
    },
    "topological_nodes_generator": lambda g: list(dgl.topological_nodes_generator(g)),
    "prop_edges": _propagated(lambda g: dgl.prop_edges(g, [[0, 1], [2]], _MESSAGE, _REDUCE, None)),
    "prop_edges_dfs": _propagated(lambda g: dgl.prop_edges_dfs(g, 0, _MESSAGE, _REDUCE)),
    "prop_nodes": _propagated(lambda g: dgl.prop_nodes(g, [[0, 1], [2]], _MESSAGE, _REDUCE, None)),
    "prop_nodes_bfs": _propagated(lambda g: dgl.prop_nodes_bfs(g, 0, _MESSAGE, _REDUCE)),
    "prop_nodes_topo": _propagated(lambda g: dgl.prop_nodes_topo(g, _MESSAGE, _REDUCE)),
    "metis_partition": lambda g: dgl.metis_partition(g, 2),
    "metis_partition_assignment": lambda g: dgl.metis_partition_assignment(g, 2),
    "partition_graph_with_halo": lambda g: dgl.partition_graph_with_halo(g, _labels(g), 1),
}

NEEDS_MORE = frozenset(
    [
        *("to_cugraph", "adj", "adjacency_matrix"),  # need libraries that DGL does not bring
        *("sample_neighbors_fused", "to_heterogeneous", "block_to_graph"),  # need another kind of graph
        *("adj_sum_graph", "adj_product_graph"),  # need simple graphs
        "sample_neighbors_biased",  # needs edges sorted by tag
        "save_graphs",  # writes a file
        *("lap_pe", "laplacian_pe"),  # eigenvectors from a random start: other signs and digits at each call
    ]
)
"""Not compared with plain DGL on this graph, each for the reason beside it."""


def equal_results(a: Any, b: Any) -> bool:
    """Whether two answers are alike: tensors, graphs, matrices, and containers of them."""
    if isinstance(a, Tensor) and a.layout is not torch.strided:
        return isinstance(b, Tensor) and a.layout is b.layout and equal_results(a.to_dense(), b.to_dense())
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor)
            and a.shape == b.shape
            and a.dtype == b.dtype
            and (torch.equal(a, b) or torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True))
        )
    if isinstance(a, dgl.DGLGraph):
        return _equal_graphs(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal_results(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(equal_results(x, y) for x, y in zip(a, b, strict=True))
    if sparse.issparse(a):
        return sparse.issparse(b) and a.shape == b.shape and (a != b).nnz == 0
    if isinstance(a, networkx.Graph):
        return isinstance(b, networkx.Graph) and networkx.utils.graphs_equal(a, b)
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and bool(a == b)


def _equal_graphs(a: Any, b: Any) -> bool:
    if not isinstance(b, dgl.DGLGraph) or a.num_nodes() != b.num_nodes() or a.num_edges() != b.num_edges():
        return False
    if a.idtype != b.idtype or not equal_results(a.edges(), b.edges()):
        return False
    return all(
        sorted(x) == sorted(y) and all(equal_results(x[key], y[key]) for key in x)
        for x, y in ((a.ndata, b.ndata), (a.edata, b.edata))
    )
