"""User-defined message, reduce and apply functions on a shard graph.

Source columns are fetched from their owners when the function first reads them, so only columns in use travel.
Edges are numbered in CSC order: a node's mailbox is a contiguous slice, in global edge-id order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from dgl.udf import EdgeBatch, NodeBatch
from torch import Tensor

from nugnn.comm.halo_exchange import tie
from nugnn.comm.halo_handler import HaloHandler
from nugnn.kernels.rows import Rows, tag

if TYPE_CHECKING:
    from nugnn.shard_graph import ShardGraph


class _Columns(MutableMapping[str, Tensor]):
    """Columns of a frame, gathered when first read; writing stays in this batch."""

    def __init__(self, names: Callable[[], list[str]], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = names, read
        self._known: dict[str, Tensor] = {}
        self._gone: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        if key in self._known:
            return self._known[key]
        if key in self._gone or key not in self._names():
            raise KeyError(key)
        self._known[key] = self._read(key)
        return self._known[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self._known[key] = value
        self._gone.discard(key)

    def __delitem__(self, key: str) -> None:
        self._known.pop(key, None)
        self._gone.add(key)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted((set(self._names()) | set(self._known)) - self._gone))

    def __len__(self) -> int:
        return len(list(iter(self)))


class _ShardEdgeBatch(EdgeBatch):  # type: ignore[misc]
    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        graph: ShardGraph = self._graph
        if graph.is_split:
            graph.refuse("edges.edges() in a message function", "node ids kept as node data: edges.src['id']")
        u, v = graph.index.structure.indices, graph.index.structure.dst
        eid = self._eid.long()
        return u[eid].to(graph.idtype), v[eid].to(graph.idtype), self._eid


def source_rows(graph: ShardGraph, x_N: Tensor) -> Tensor:
    """``(L, ...)`` rows of ``x_N`` for every local source; remembered within the step."""
    if not graph.is_split:
        return x_N
    interceptor = graph.index._interceptor()
    x_L = interceptor.find(HaloHandler).local(x_N, graph.index.plan, interceptor)
    graph.remember_exchange(x_L)
    return x_L


def run_edge_function(
    graph: ShardGraph, edges: Tensor | None, func: Callable[[Any], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Apply ``func`` to all local edges, or to the edge rows ``edges``."""
    structure, frame_N, frame_E = graph.index.structure, graph._node_frames[0], graph._edge_frames[0]
    source, target = structure.indices, structure.dst
    rows = graph.index.edge_rows
    if edges is not None:
        picked = edges.long()
        source, target = source[picked], target[picked]
        assert rows.ids is not None
        rows = Rows("edge", rows.ids[picked], 1, rows.split)
    if graph.index.is_reversed:
        source, target = target, source
    remote_end, own_end = (target, source) if graph.index.is_reversed else (source, target)

    def read_remote(key: str) -> Tensor:
        return tag(source_rows(graph, frame_N[key]).index_select(0, remote_end), rows)

    def read_own(key: str) -> Tensor:
        return tag(frame_N[key].index_select(0, own_end), rows)

    def read_edge(key: str) -> Tensor:
        column = frame_E[key]
        return tag(column if edges is None else column.index_select(0, edges.long()), rows)

    node_keys, edge_keys = (lambda: list(frame_N.keys())), (lambda: list(frame_E.keys()))
    read_source, read_target = (read_own, read_remote) if graph.index.is_reversed else (read_remote, read_own)
    ids = edges
    if ids is None:
        ids = torch.arange(structure.num_edges, dtype=graph.idtype, device=graph.device)
    batch = _ShardEdgeBatch(
        graph,
        ids,
        graph.canonical_etypes[0],
        _Columns(node_keys, read_source),
        _Columns(edge_keys, read_edge),
        _Columns(node_keys, read_target),
    )
    return {key: tag(value, rows) if len(value) == len(ids) else value for key, value in func(batch).items()}


def run_node_function(
    graph: ShardGraph, func: Callable[[Any], dict[str, Tensor]], columns: dict[str, Tensor], nodes: Tensor | None = None
) -> dict[str, Tensor]:
    """Apply ``func`` to the inner nodes ``nodes`` (all when None) with the given columns."""
    rows = graph.index.node_rows
    if nodes is not None:
        assert rows.ids is not None
        rows = Rows("node", rows.ids[nodes.long()], 1, rows.split)
    data = _Columns(lambda: list(columns), lambda key: tag(_pick(columns[key], nodes), rows))
    ids = torch.arange(graph.num_nodes(), dtype=graph.idtype, device=graph.device) if nodes is None else nodes
    return {key: tag(value, rows) for key, value in func(NodeBatch(graph, ids, graph.ntypes[0], data)).items()}


def _pick(column: Tensor, rows: Tensor | None) -> Tensor:
    return column if rows is None else column.index_select(0, rows.long())


def run_reduce_function(
    graph: ShardGraph, func: Callable[[Any], dict[str, Tensor]], messages: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Call ``func`` once for each distinct in-degree, on the nodes of that degree.

    Other nodes get zeros, or what ``set_n_initializer`` makes.

    Args:
        graph: Not reversed, or on one rank.
        func: Gets a ``NodeBatch`` whose mailbox columns are ``(n, degree, ...)``.
        messages: Columns ``(E, ...)``.

    Returns:
        Columns ``(N, ...)``.
    """
    structure = graph.index.structure
    degrees, indptr, order = structure.in_degrees, structure.indptr, None
    if graph.index.is_reversed:
        if graph.is_split:
            graph.refuse("a reduce function on a reversed graph", "edges reversed before nugnn.fit or nugnn.shard")
        view = graph.index._source_view
        degrees, indptr, order = view.in_degrees, view.indptr, structure.transposed.edges
    frame, node_rows = graph._node_frames[0], graph.index.node_rows
    assert node_rows.ids is not None
    results: list[dict[str, Tensor]] = []
    buckets: list[Tensor] = []
    interceptor = graph.index._interceptor()
    with interceptor.scope("reduce") as restart:
        # an empty batch still says which columns come back and keeps them in the autograd graph
        for degree in [d for d in torch.unique(degrees).tolist() if d > 0] or [0]:
            restart()
            nodes = (degrees == degree).nonzero().view(-1) if degree else degrees.new_empty(0)
            edges = (indptr[nodes][:, None] + torch.arange(max(degree, 1), device=graph.device)).view(-1)
            edges = edges if order is None else order[edges]
            rows = Rows("node", node_rows.ids[nodes], 1, node_rows.split)
            mailbox = {
                key: tag(m.index_select(0, edges).view(len(nodes), max(degree, 1), *m.shape[1:]), rows)
                for key, m in messages.items()
            }

            def column(key: str, nodes: Tensor = nodes, rows: Rows = rows) -> Tensor:
                return tag(frame[key][nodes], rows)

            data = _Columns(lambda: list(frame.keys()), column)
            batch = NodeBatch(graph, nodes.to(graph.idtype), graph.ntypes[0], data, msgs=mailbox)
            results.append(func(batch))
            buckets.append(nodes)
    where = torch.cat(buckets)
    merged: dict[str, Tensor] = {}
    for key in results[0]:
        values = torch.cat([result[key] for result in results])
        shape = (graph.num_nodes(), *values.shape[1:])
        initializer = frame.get_initializer(key)
        out = values.new_zeros(shape) if initializer is None else initializer(shape, values.dtype, values.device, None)
        out = out.index_copy(0, where, values)
        merged[key] = tag(out, node_rows)
    return merged


def tie_exchanges(graph: ShardGraph, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make one differentiable column depend on every exchange user functions caused since the last call."""
    anchors = graph.take_exchanges()
    for key, value in columns.items():
        if anchors and value.requires_grad:
            tied = tie(value, anchors)
            columns[key] = tag(tied, getattr(value, "_nugnn_rows", None))
            break
    return columns
