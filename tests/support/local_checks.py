"""What each name on the local lists means: a check against the whole graph for every one of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import dgl
import torch

from nugnn.datasets.graph_data import GraphData
from nugnn.kernels.rows import rows_of
from nugnn.shard_graph import ShardGraph

Check = Callable[[ShardGraph, GraphData], None]


def _rows_of_nodes(view: str) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        columns = getattr(graph, view)
        assert sorted(columns) == sorted(data.node_data) and len(columns) == len(data.node_data)
        for key, value in columns.items():
            assert torch.equal(value, data.node_data[key][graph.global_node_ids])
            assert rows_of(value) is graph.index.node_rows
        columns["new"] = torch.ones(graph.num_nodes())
        assert "new" in graph.ndata and rows_of(getattr(graph, view)["new"]) is graph.index.node_rows
        del columns["new"]
        assert "new" not in graph.ndata
        _raises(dgl.DGLError, lambda: columns.__setitem__("new", torch.ones(graph.num_nodes() + 1)))

    return check


def _edata(graph: ShardGraph, data: GraphData) -> None:
    assert sorted(graph.edata) == sorted(data.edge_data)
    for key, value in graph.edata.items():
        assert torch.equal(value, data.edge_data[key][graph.global_edge_ids])
        assert rows_of(value) is graph.index.edge_rows


def _nodes(view: str) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        nodes = getattr(graph, view)
        assert torch.equal(nodes(), torch.arange(graph.num_nodes()))
        first = nodes[torch.tensor([0])].data["h"]
        assert torch.equal(first, data.node_data["h"][graph.global_node_ids[:1]])
        rows = rows_of(first)
        assert rows is not None and torch.equal(rows.ids, graph.global_node_ids[:1])
        nodes[[0]].data["h"] = torch.zeros(1, 3, dtype=torch.float64)
        assert torch.equal(graph.ndata["h"][0], torch.zeros(3, dtype=torch.float64))
        assert torch.equal(graph.ndata["h"][1:], data.node_data["h"][graph.global_node_ids[1:]])
        assert torch.equal(nodes["_N"].data["id"], graph.global_node_ids)
        _raises(Exception, lambda: nodes[[graph.num_nodes()]].data["h"])

    return check


def _edges(graph: ShardGraph, data: GraphData) -> None:
    if graph.num_edges():
        last = torch.tensor([graph.num_edges() - 1])
        assert torch.equal(graph.edges[last].data["e"], data.edge_data["e"][graph.global_edge_ids[-1:]])
    assert torch.equal(graph.edges["_E"].data["eid"], graph.global_edge_ids)
    if graph.is_split:
        _raises(NotImplementedError, graph.edges)
        _raises(NotImplementedError, lambda: graph.edges[(torch.tensor([0]), torch.tensor([0]))].data["e"])
    else:
        source, target = graph.edges()
        assert torch.equal(source, data.src[graph.global_edge_ids].long())
        assert torch.equal(target, data.dst[graph.global_edge_ids].long())


def _count_of_nodes(name: str) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        assert getattr(graph, name)() == len(graph.global_node_ids) == getattr(graph, name)("_N")
        total = graph.ranks.sum_(torch.tensor([getattr(graph, name)()]))
        assert int(total) == data.num_nodes == graph.num_nodes_global()
        _raises(Exception, lambda: getattr(graph, name)("other"))

    return check


def _count_of_edges(name: str) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        assert getattr(graph, name)() == int(torch.isin(data.dst.long(), graph.global_node_ids).sum())
        total = graph.ranks.sum_(torch.tensor([getattr(graph, name)()]))
        assert int(total) == len(data.src) == graph.num_edges_global()

    return check


def _has_nodes(graph: ShardGraph, data: GraphData) -> None:
    last = graph.num_nodes() - 1
    assert graph.has_nodes([0, last, last + 1]).tolist() == [True, True, False]
    assert graph.has_nodes(last) is True and graph.has_nodes(last + 1) is False
    _raises(dgl.DGLError, lambda: graph.has_nodes([-1]))


def _filter_nodes(graph: ShardGraph, data: GraphData) -> None:
    expected = (data.node_data["h"][graph.global_node_ids, 0] > 0).nonzero().view(-1)
    assert torch.equal(graph.filter_nodes(lambda nodes: nodes.data["h"][:, 0] > 0), expected)
    assert graph.filter_nodes(lambda nodes: nodes.data["id"] >= 0, [0]).tolist() == [0]


def _filter_edges(graph: ShardGraph, data: GraphData) -> None:
    expected = (data.edge_data["e"][graph.global_edge_ids, 0] > 4).nonzero().view(-1)
    assert torch.equal(graph.filter_edges(lambda edges: edges.data["e"][:, 0] > 4), expected)


def _local_scope(graph: ShardGraph, data: GraphData) -> None:
    with graph.local_scope():
        graph.ndata["h"] = graph.ndata["h"] + 1
        graph.ndata["new"] = graph.ndata["h"]
        del graph.edata["e"]
    assert "new" not in graph.ndata and "e" in graph.edata
    assert torch.equal(graph.ndata["h"], data.node_data["h"][graph.global_node_ids])


def _own_columns(make: Callable[[ShardGraph], ShardGraph]) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        other = make(graph)
        other.ndata["h"] = torch.zeros(graph.num_nodes())
        other.edata["new"] = torch.zeros(graph.num_edges())
        assert torch.equal(graph.ndata["h"], data.node_data["h"][graph.global_node_ids])
        assert "new" not in graph.edata and other.num_nodes() == graph.num_nodes()
        assert rows_of(other.ndata["k"]) is graph.index.node_rows

    return check


def _clone(graph: ShardGraph, data: GraphData) -> None:
    _own_columns(lambda g: g.clone())(graph, data)
    assert torch.equal(graph.clone().in_degrees(), graph.in_degrees())


def _materialize(graph: ShardGraph, data: GraphData) -> None:
    graph.materialize_data()
    assert sorted(graph.ndata) == sorted(data.node_data)


def _schemes(name: str, columns: Callable[[GraphData], dict[str, Any]]) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        schemes = getattr(graph, name)()
        for key, value in columns(data).items():
            assert schemes[key].shape == value.shape[1:] and schemes[key].dtype == value.dtype

    return check


def _initializer(kind: str) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        def sevens(shape: Any, dtype: Any, device: Any, rows: Any) -> torch.Tensor:
            return torch.full(shape, 7, dtype=dtype, device=device)

        getattr(graph, f"set_{kind}_initializer")(sevens)
        view, columns = (graph.nodes, graph.ndata) if kind == "n" else (graph.edges, graph.edata)
        if len(columns["h" if kind == "n" else "e"]) > 1:
            view[[0]].data["new"] = torch.zeros(1)
            assert columns["new"].tolist() == [0] + [7] * (len(columns["new"]) - 1)

    return check


def _storage(name: str, key: str) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        column = getattr(graph, name)(key)
        assert torch.equal(column.data, (graph.ndata if key == "h" else graph.edata)[key])

    return check


def _property(name: str, value: Any) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        assert getattr(graph, name) == value

    return check


def _call(name: str, args: tuple[Any, ...], value: Any) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        assert getattr(graph, name)(*args) == value

    return check


def _metagraph(graph: ShardGraph, data: GraphData) -> None:
    assert list(graph.metagraph().edges(keys=True)) == [("_N", "_N", "_E")]


def _ids(name: str, dtype: torch.dtype) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        other = getattr(graph, name)()
        assert other.idtype is dtype and other.nodes().dtype is dtype and other.in_degrees().dtype is dtype
        assert graph.idtype is torch.int64
        assert torch.equal(other.ndata["h"], graph.ndata["h"])

    return check


def _moves(graph: ShardGraph, data: GraphData) -> None:
    assert graph.to("cpu") is graph and graph.to(torch.device("cpu")) is graph
    _raises(NotImplementedError, lambda: graph.to("cuda:0"))


def _formats(graph: ShardGraph, data: GraphData) -> None:
    assert graph.formats()["created"] == ["csc"]
    assert graph.formats("csc") is graph and graph.formats(["coo", "csr"]) is graph
    _raises(dgl.DGLError, lambda: graph.formats("dense"))


def _create_formats(graph: ShardGraph, data: GraphData) -> None:
    graph.create_formats_()
    assert graph.num_edges() == len(graph.global_edge_ids)


def _copies(graph: ShardGraph, data: GraphData) -> None:
    assert copy.copy(graph).index is graph.index


def _raises(kind: type[BaseException], call: Callable[[], Any]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


METHOD_CHECKS: dict[str, Check] = {
    **{name: _rows_of_nodes(name) for name in ("ndata", "srcdata", "dstdata")},
    "edata": _edata,
    **{name: _nodes(name) for name in ("nodes", "srcnodes", "dstnodes")},
    "edges": _edges,
    **{
        name: _count_of_nodes(name)
        for name in (
            *("num_nodes", "num_src_nodes", "num_dst_nodes"),
            *("number_of_nodes", "number_of_src_nodes", "number_of_dst_nodes"),
        )
    },
    **{name: _count_of_edges(name) for name in ("num_edges", "number_of_edges")},
    "has_nodes": _has_nodes,
    "filter_nodes": _filter_nodes,
    "filter_edges": _filter_edges,
    "local_scope": _local_scope,
    "local_var": _own_columns(lambda graph: graph.local_var()),
    "clone": _clone,
    "materialize_data": _materialize,
    "node_attr_schemes": _schemes("node_attr_schemes", lambda data: data.node_data),
    "edge_attr_schemes": _schemes("edge_attr_schemes", lambda data: data.edge_data),
    "set_n_initializer": _initializer("n"),
    "set_e_initializer": _initializer("e"),
    "get_node_storage": _storage("get_node_storage", "h"),
    "get_edge_storage": _storage("get_edge_storage", "e"),
    **{name: _property(name, ["_N"]) for name in ("ntypes", "srctypes", "dsttypes")},
    "etypes": _property("etypes", ["_E"]),
    "canonical_etypes": _property("canonical_etypes", [("_N", "_E", "_N")]),
    "metagraph": _metagraph,
    "to_canonical_etype": _call("to_canonical_etype", ("_E",), ("_N", "_E", "_N")),
    "get_ntype_id": _call("get_ntype_id", ("_N",), 0),
    "get_etype_id": _call("get_etype_id", ("_E",), 0),
    "get_ntype_id_from_src": _call("get_ntype_id_from_src", ("_N",), 0),
    "get_ntype_id_from_dst": _call("get_ntype_id_from_dst", ("_N",), 0),
    "is_block": _property("is_block", False),
    "is_homogeneous": _property("is_homogeneous", True),
    "is_unibipartite": _property("is_unibipartite", False),
    "batch_size": _property("batch_size", 1),
    "idtype": _property("idtype", torch.int64),
    "device": _property("device", torch.device("cpu")),
    "int": _ids("int", torch.int32),
    "long": _ids("long", torch.int64),
    "to": _moves,
    "cpu": lambda graph, data: _same(graph.cpu(), graph),
    "is_pinned": _call("is_pinned", (), False),
    "formats": _formats,
    "create_formats_": _create_formats,
}


def _same(a: Any, b: Any) -> None:
    assert a is b


def _lazy(name: str) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        getattr(dgl, name)(graph, ["extra"])
        frame = graph._edge_frames[0] if "edge" in name else graph._node_frames[0]
        assert "extra" in frame._columns or "extra" in frame.keys()

    return check


def _precision(name: str, dtype: torch.dtype) -> Check:
    def check(graph: ShardGraph, data: GraphData) -> None:
        other = getattr(dgl, name)(graph)
        assert other.ndata["h"].dtype is dtype and other.edata["e"].dtype is dtype
        assert other.ndata["id"].dtype is torch.int64 and graph.ndata["h"].dtype is torch.float64
        assert torch.equal(other.ndata["h"], graph.ndata["h"].to(dtype))
        assert rows_of(other.ndata["h"]) is graph.index.node_rows

    return check


FUNCTION_CHECKS: dict[str, Check] = {
    **{
        name: _lazy(name)
        for name in (
            *("set_dst_lazy_features", "set_src_lazy_features"),
            *("set_node_lazy_features", "set_edge_lazy_features"),
        )
    },
    "to_double": _precision("to_double", torch.float64),
    "to_float": _precision("to_float", torch.float32),
    "to_half": _precision("to_half", torch.float16),
    "to_bfloat16": _precision("to_bfloat16", torch.bfloat16),
}
