"""Which graph methods and ``dgl`` functions a shard graph answers exactly, locally, or not at all.

Three lists, and nothing beside them: a public name of ``DGLGraph``, or a ``dgl`` function that takes a graph, that is
on none of them fails a test, and is refused at run time. `TAKES_NO_GRAPH` holds the functions that need no list.
"""

from __future__ import annotations

EXACT_METHODS: frozenset[str] = frozenset(
    """
    update_all apply_edges apply_nodes multi_update_all pull push send_and_recv
    in_degrees out_degrees add_self_loop remove_self_loop reverse
    """.split()
)
"""Same result for inner nodes and local edges as on the whole graph, for any number of parts."""

LOCAL_METHODS: frozenset[str] = frozenset(
    """
    ndata srcdata dstdata edata nodes srcnodes dstnodes edges num_nodes num_src_nodes num_dst_nodes num_edges
    number_of_nodes number_of_src_nodes number_of_dst_nodes number_of_edges has_nodes filter_nodes filter_edges
    local_scope local_var clone materialize_data node_attr_schemes edge_attr_schemes set_n_initializer
    set_e_initializer get_node_storage get_edge_storage
    ntypes etypes srctypes dsttypes canonical_etypes metagraph to_canonical_etype get_ntype_id get_etype_id
    get_ntype_id_from_src get_ntype_id_from_dst is_block is_homogeneous is_unibipartite batch_size
    idtype device int long to cpu is_pinned formats create_formats_
    """.split()
)
"""Speaks of this rank's inner nodes and edges (rows of its tensors), or of the graph's type and place."""

_DATA = "on the whole graph, before nugnn.fit or nugnn.shard"
_READ = "nugnn.local_edges(graph) (source rows of nugnn.halo(x), destination rows), or message passing"
_SAMPLE = "full-graph training has no sampling; sample on the whole graph with DGL"

REFUSED_METHODS: dict[str, str] = {
    **dict.fromkeys(
        "add_edges add_nodes remove_edges remove_nodes reorder_graph to_simple line_graph set_batch_num_nodes "
        "set_batch_num_edges edge_type_subgraph node_type_subgraph astype inc is_multigraph".split(),
        _DATA,
    ),
    **dict.fromkeys(
        "all_edges find_edges edge_ids in_edges out_edges has_edges_between predecessors successors adj adj_external "
        "adj_tensors adjacency_matrix incidence_matrix to_networkx to_cugraph".split(),
        _READ,
    ),
    **dict.fromkeys(
        "subgraph edge_subgraph in_subgraph out_subgraph khop_in_subgraph khop_out_subgraph".split(),
        f"mask rows or edge weights instead of cutting a subgraph, or cut it {_DATA}",
    ),
    **dict.fromkeys(
        "sample_neighbors sample_neighbors_biased sample_neighbors_fused sample_labors sample_etype_neighbors "
        "select_topk global_uniform_negative_sampling".split(),
        _SAMPLE,
    ),
    **dict.fromkeys(
        "prop_nodes prop_edges".split(),
        "a loop of graph.pull or graph.send_and_recv that every rank runs equally often",
    ),
    "batch_num_nodes": "graph.num_nodes() for this rank's rows or graph.num_nodes_global() for the whole graph",
    "batch_num_edges": "graph.num_edges() for this rank's rows or graph.num_edges_global() for the whole graph",
    "shared_memory": "the shard files of nugnn.partition.store",
    **dict.fromkeys("pin_memory_ unpin_memory_ record_stream".split(), "nothing: structure stays on the host"),
}
"""No meaning on one part of a split graph; the value names what to use instead."""

_REDUCERS = ("sum", "mean", "max", "min")
_BINARY = ("add", "sub", "mul", "div")
_SPMM = frozenset(
    [f"u_{op}_e_{reduce}" for op in _BINARY for reduce in _REDUCERS]
    + [f"copy_{source}_{reduce}" for source in "ue" for reduce in _REDUCERS]
)
_SDDMM = frozenset(f"{a}_{op}_{b}" for a in "uve" for b in "uve" if a != b for op in (*_BINARY, "dot"))

EXACT_FUNCTIONS: frozenset[str] = (
    _SPMM
    | _SDDMM
    | frozenset(
        """
        add_self_loop remove_self_loop reverse laplacian_lambda_max norm_by_dst
        readout_nodes readout_edges sum_nodes sum_edges mean_nodes mean_edges max_nodes max_edges
        softmax_nodes softmax_edges topk_nodes topk_edges broadcast_nodes broadcast_edges
        copy_u copy_v copy_e gspmm gsddmm edge_softmax
        """.split()
    )
)
"""Functions of ``dgl``, ``dgl.ops`` and ``dgl.nn.functional`` (a name in two of them means the same in both)."""

LOCAL_FUNCTIONS: frozenset[str] = frozenset(
    """
    set_dst_lazy_features set_src_lazy_features set_node_lazy_features set_edge_lazy_features
    to_double to_float to_half to_bfloat16
    """.split()
)

REFUSED_FUNCTIONS: dict[str, str] = {
    **dict.fromkeys(
        "add_edges add_nodes add_reverse_edges remove_edges remove_nodes reorder_graph sort_csc_by_tag sort_csr_by_tag "
        "to_bidirected to_simple to_simple_graph line_graph khop_graph to_heterogeneous to_homogeneous "
        "metapath_reachable_graph compact_graphs batch unbatch slice_batch merge adj_product_graph adj_sum_graph "
        "to_block block_to_graph save_graphs shortest_dist double_radius_node_labeling "
        "edge_label_informativeness node_label_informativeness edge_homophily node_homophily linkx_homophily "
        "adjusted_homophily".split(),
        _DATA,
    ),
    **dict.fromkeys(
        "edge_subgraph in_subgraph out_subgraph node_subgraph khop_in_subgraph khop_out_subgraph edge_type_subgraph "
        "node_type_subgraph".split(),
        f"mask rows or edge weights instead of cutting a subgraph, or cut it {_DATA}",
    ),
    **dict.fromkeys("khop_adj to_networkx to_cugraph".split(), _READ),
    **dict.fromkeys(
        "lap_pe laplacian_pe random_walk_pe svd_pe".split(), f"compute it {_DATA} and keep it as node data"
    ),
    **dict.fromkeys(
        "bfs_edges_generator bfs_nodes_generator dfs_edges_generator dfs_labeled_edges_generator "
        "topological_nodes_generator prop_edges prop_edges_dfs prop_nodes prop_nodes_bfs prop_nodes_topo".split(),
        f"traverse the graph {_DATA}",
    ),
    **dict.fromkeys("metis_partition metis_partition_assignment partition_graph_with_halo".split(), "nugnn.partition"),
}
"""No meaning on one part of a split graph; the value names what to use instead."""

EXACT_TRANSFORMS: frozenset[str] = frozenset("AddSelfLoop RemoveSelfLoop GCNNorm SIGNDiffusion Compose".split())
"""Classes of ``dgl.transforms`` made of exact pieces."""

REFUSED_TRANSFORMS: dict[str, str] = dict.fromkeys(
    "RowFeatNormalizer FeatMask RandomWalkPE LaplacianPE LapPE AddReverse ToSimple LineGraph KHopGraph AddMetaPaths "
    "PPR HeatKernel GDC NodeShuffle DropNode DropEdge AddEdge ToLevi SVDPE".split(),
    _DATA,
)
"""Those that draw at random, look at all rows at once or change the structure."""

NEVER_ANSWERED: frozenset[str] = frozenset(
    """
    add_edges add_nodes remove_edges remove_nodes set_batch_num_nodes set_batch_num_edges shared_memory
    pin_memory_ unpin_memory_ record_stream
    """.split()
)
"""Refused methods that change the graph, or its place in memory: refused on one rank too."""

NEVER_ANSWERED_FUNCTIONS: frozenset[str] = frozenset(
    "metis_partition metis_partition_assignment partition_graph_with_halo".split()
)
"""Refused functions that one rank does not hand to DGL either: they end the interpreter for some graphs."""

TAKES_NO_GRAPH: dict[str, str] = {
    **dict.fromkeys(
        "graph heterograph create_block rand_graph rand_bipartite knn_graph segmented_knn_graph radius_graph "
        "from_networkx from_scipy from_cugraph bipartite_from_networkx bipartite_from_scipy load_graphs "
        "hetero_from_shared_memory".split(),
        "takes no graph: makes one",
    ),
    **dict.fromkeys(
        "segment_reduce segment_softmax segment_mm gather_mm apply_each".split(),
        "takes no graph: a function of tensors",
    ),
    **dict.fromkeys(
        "seed use_libxsmm is_libxsmm_enabled enable_verbose_logging dgl_warning load_backend register_func "
        "get_global_func list_global_func_names extract_ext_funcs".split(),
        "takes no graph: a setting or registry of DGL",
    ),
}
"""Public functions that need no place on a list, each with the reason."""
