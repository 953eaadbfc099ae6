"""One or more calls for every name on the exact lists; each works on a plain graph and on a part of a split one."""

# ruff: noqa: PLW0108  dgl's functions have to be looked up when called: importing nugnn's seam replaces them
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import dgl.nn.functional
import dgl.ops
import torch
from dgl import function as fn
from torch import Tensor

from shard_calls import Case, Kit, Out

_REDUCERS = ("sum", "mean", "max", "min")
_SOME_NODES = [0, 1, 4, 7, 8, 12, 19, 22]
_SOME_EDGES = [0, 2, 3, 11, 17, 40, 41, 70, 73, 76, 80]


# -- user functions ------------------------------------------------------------------------------------------------


def _message(edges: Any) -> dict[str, Tensor]:
    return {"m": edges.src["h"] * edges.data["w"] + edges.dst["k"].tanh()}


def _reduce(nodes: Any) -> dict[str, Tensor]:
    mail = nodes.mailbox["m"]
    places = torch.arange(1, mail.shape[1] + 1, dtype=mail.dtype)[None, :, None]  # sees the order of the mailbox
    return {"a": (mail * places).sum(1) + nodes.data["k"]}


def _reduce_any_order(nodes: Any) -> dict[str, Tensor]:
    # DGL fills the mailbox of push in the order of its node argument
    return {"a": nodes.mailbox["m"].square().sum(1) + nodes.data["k"]}


def _apply(nodes: Any) -> dict[str, Tensor]:
    return {"a": nodes.data["a"].sin() + nodes.data["h"]}


def _squash(nodes: Any) -> dict[str, Tensor]:
    # DGL hands nodes without in-edges to the apply function as -inf
    return {"a": nodes.data["a"].sigmoid() + 1, "b": nodes.data["a"].exp()}


def _on_nodes(nodes: Any) -> dict[str, Tensor]:
    return {"a": nodes.data["h"] * 2 + nodes.data["k"], "count": nodes.data["id"] + 1}


def _on_edges(edges: Any) -> dict[str, Tensor]:
    return {"x": edges.src["h"].sum(-1, keepdim=True) * edges.dst["k"] + edges.data["w"]}


def _functions(kit: Kit, message: Any, reduce: Any, apply: Any = None) -> dict[str, Out]:
    kit.graph.update_all(message, reduce, apply)
    return {"a": kit.column("a")}


def _update_all(message: Any, reduce: Any, apply: Any = None) -> Case:
    return lambda kit: _functions(kit, message, reduce, apply)


def _on_reverse(message: Any, reduce: Any) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        other = dgl.reverse(kit.graph, copy_edata=True)
        other.update_all(message, reduce)
        return {"a": kit.column("a", other)}

    return case


def _apply_edges(func: Any) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        kit.graph.apply_edges(func)
        return {"x": kit.edge_column("x")}

    return case


def _apply_some_edges(func: Any) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        kit.graph.apply_edges(func, kit.edges(_SOME_EDGES))
        return {"x": kit.edge_column("x")}

    return case


def _apply_nodes(kit: Kit) -> dict[str, Out]:
    kit.graph.apply_nodes(_on_nodes)
    return {"a": kit.column("a"), "count": kit.column("count")}


def _apply_some_nodes(kit: Kit) -> dict[str, Out]:
    kit.graph.apply_nodes(lambda nodes: {"h": nodes.data["h"] * 3}, kit.nodes(_SOME_NODES))
    return {"h": kit.column("h")}


def _multi_update_all(kit: Kit) -> dict[str, Out]:
    kit.graph.multi_update_all({"_E": (fn.u_mul_e("h", "w", "m"), fn.sum("m", "a"))}, "sum", _apply)
    return {"a": kit.column("a")}


def _multi_stack(kit: Kit) -> dict[str, Out]:
    kit.graph.multi_update_all({"_E": (fn.copy_u("h", "m"), fn.max("m", "a"))}, "stack")
    return {"a": kit.column("a")}


def _multi_apply_per_type(kit: Kit) -> dict[str, Out]:
    kit.graph.multi_update_all({"_E": (fn.copy_u("h", "m"), fn.max("m", "a"), _squash)}, "sum", _apply)
    return {"a": kit.column("a"), "b": kit.column("b")}


def _multi_update_all_own_apply(kit: Kit) -> dict[str, Out]:
    kit.graph.multi_update_all({("_N", "_E", "_N"): (_message, _reduce)}, "max", _apply)
    return {"a": kit.column("a")}


def _send_and_recv(message: Any, reduce: Any, apply: Any = None) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        kit.graph.ndata["a"] = kit.k * 1
        kit.graph.send_and_recv(kit.edges(_SOME_EDGES), message, reduce, apply)
        return {"a": kit.column("a")}

    return case


def _pull(message: Any, reduce: Any, apply: Any = None) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        kit.graph.ndata["a"] = kit.k * 1
        kit.graph.pull(kit.nodes(_SOME_NODES), message, reduce, apply)
        return {"a": kit.column("a")}

    return case


def _push(message: Any, reduce: Any, apply: Any = None) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        kit.graph.ndata["a"] = kit.k * 1
        kit.graph.push(kit.nodes(_SOME_NODES), message, reduce, apply)
        return {"a": kit.column("a")}

    return case


def _degrees(which: str) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        rows = kit.nodes(_SOME_NODES)
        some = getattr(kit.graph, which)(rows)
        reverse = getattr(dgl.reverse(kit.graph), which)()
        loops = getattr(dgl.add_self_loop(kit.graph), which)()
        bare = getattr(dgl.remove_self_loop(kit.graph), which)()
        both = getattr(dgl.add_self_loop(dgl.reverse(dgl.remove_self_loop(kit.graph))), which)()
        return {
            "all": kit.node(getattr(kit.graph, which)()),
            "some": Out("node", some, kit.node_ids[rows]),
            "reverse": kit.node(reverse),
            "with loops": kit.node(loops),
            "without loops": kit.node(bare),
            "both": kit.node(both),
        }

    return case


def _columns(kit: Kit, graph: Any) -> dict[str, Out]:
    """Every column of a derived graph, a sum over its in-edges, and its degrees."""
    nodes = {f"ndata {key}": kit.column(key, graph) for key in sorted(graph.ndata)}
    edges = {f"edata {key}": kit.edge_column(key, graph) for key in sorted(graph.edata)}
    with graph.local_scope():
        graph.ndata["t"] = kit.h
        graph.update_all(fn.copy_u("t", "m"), fn.mean("m", "t"))
        summed = kit.column("t", graph)
    degrees = {"in": kit.node(graph.in_degrees()), "out": kit.node(graph.out_degrees())}
    return nodes | edges | degrees | {"mean": summed}


def _graph_call(call: Callable[[Any], Any]) -> Case:
    return lambda kit: _columns(kit, call(kit.graph))


# -- readouts ------------------------------------------------------------------------------------------------------


def _same(call: Callable[[Any], Tensor]) -> Case:
    return lambda kit: {"out": Out("same", call(kit.graph))}


def _topk(call: Callable[[Any], tuple[Tensor, Tensor]]) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        values, ids = call(kit.graph)
        return {"values": Out("same", values), "ids": Out("same", ids)}

    return case


def _row() -> Tensor:
    return torch.arange(1.0, 4.0, dtype=torch.float64)[None]


def _edge_softmax(function: Any, **options: Any) -> Case:
    return lambda kit: {"x": kit.edge(function(kit.graph, kit.e, **options))}


def _edge_softmax_some(kit: Kit) -> dict[str, Out]:
    rows = kit.edges(_SOME_EDGES)
    return {"x": Out("edge", dgl.ops.edge_softmax(kit.graph, kit.e[rows], eids=rows), kit.edge_ids[rows])}


# -- operators -----------------------------------------------------------------------------------------------------


def _operand(kit: Kit, letter: str, second: bool) -> Tensor:
    # away from zero where it divides
    if letter == "e":
        return kit.e
    return kit.k if second else kit.h


def _spmm_case(name: str, *, reverse: bool = False) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        graph = dgl.reverse(kit.graph, copy_edata=True) if reverse else kit.graph
        function = getattr(dgl.ops, name)
        parts = name.split("_")
        if parts[0] == "copy":
            return {"y": kit.node(function(graph, kit.h if parts[1] == "u" else kit.e))}
        wide = {"y": kit.node(function(graph, kit.h, kit.e))}
        return wide | {"broadcast": kit.node(function(graph, kit.h, kit.w + 3))}

    return case


def _spmm_reversed_without_gradient(name: str) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        with torch.no_grad():
            return _spmm_case(name, reverse=True)(kit)

    return case


def _sddmm_case(name: str, *, reverse: bool = False) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        graph = dgl.reverse(kit.graph, copy_edata=True) if reverse else kit.graph
        lhs, _, rhs = name.split("_")
        outs = {"ops": kit.edge(getattr(dgl.ops, name)(graph, _operand(kit, lhs, False), _operand(kit, rhs, True)))}
        if hasattr(dgl, name):
            outs["dgl"] = kit.edge(getattr(dgl, name)(graph, kit.h, kit.k))
        return outs

    return case


def _copy_case(name: str, *, reverse: bool = False) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        graph = dgl.reverse(kit.graph, copy_edata=True) if reverse else kit.graph
        operand = kit.e if name == "copy_e" else kit.h
        homes = [home for home in (dgl.ops, dgl) if hasattr(home, name)]
        return {home.__name__: kit.edge(getattr(home, name)(graph, operand)) for home in homes}

    return case


def _gspmm(kit: Kit) -> dict[str, Out]:
    call = dgl.ops.gspmm
    return {
        "mul sum": kit.node(call(kit.graph, "mul", "sum", kit.h, kit.w)),
        "copy mean": kit.node(call(kit.graph, "copy_lhs", "mean", kit.h, None)),
        "add max": kit.node(call(kit.graph, "add", "max", kit.h, kit.e)),
        "reverse mean": kit.node(call(dgl.reverse(kit.graph), "copy_rhs", "mean", None, kit.e)),
    }


def _gsddmm(kit: Kit) -> dict[str, Out]:
    call = dgl.ops.gsddmm
    return {
        "u dot v": kit.edge(call(kit.graph, "dot", kit.h, kit.k)),
        "e div u": kit.edge(call(kit.graph, "div", kit.e, kit.k, "e", "u")),
        "v copy": kit.edge(call(kit.graph, "copy_lhs", kit.h, None, "v", "u")),
        "reverse u sub v": kit.edge(call(dgl.reverse(kit.graph), "sub", kit.h, kit.k)),
    }


_BUILTIN_MESSAGES = {
    "copy_u": fn.copy_u("h", "m"),
    "copy_e": fn.copy_e("e", "m"),
    "u_mul_e": fn.u_mul_e("h", "w", "m"),
    "u_div_e": fn.u_div_e("h", "e", "m"),
    "e_sub_u": fn.e_sub_u("e", "h", "m"),
    "u_add_v": fn.u_add_v("h", "k", "m"),
    "u_mul_v": fn.u_mul_v("h", "k", "m"),
    "e_sub_v": fn.e_sub_v("e", "k", "m"),
    "v_dot_u": fn.v_dot_u("k", "h", "m"),
}
_BUILTIN_REDUCERS = {name: getattr(fn, name)("m", "a") for name in _REDUCERS}


METHOD_CASES: dict[str, dict[str, Case]] = {
    "update_all": {
        **{
            f"{m}-{r}": _update_all(message, reducer)
            for m, message in _BUILTIN_MESSAGES.items()
            for r, reducer in _BUILTIN_REDUCERS.items()
        },
        "user-user": _update_all(_message, _reduce),
        "user-user-apply": _update_all(_message, _reduce, _apply),
        "user-builtin": _update_all(_message, fn.max("m", "a")),
        "user-mean": _update_all(_message, fn.mean("m", "a")),
        "builtin-user": _update_all(fn.u_mul_e("h", "w", "m"), _reduce),
        "copy-user": _update_all(fn.copy_e("e", "m"), _reduce),
        "max-apply": _update_all(fn.copy_u("h", "m"), fn.max("m", "a"), _squash),
        "builtin-apply": _update_all(fn.copy_u("h", "m"), fn.sum("m", "a"), _apply),
        "reverse-sum": _on_reverse(fn.u_mul_e("h", "w", "m"), fn.sum("m", "a")),
        "reverse-mean": _on_reverse(fn.copy_u("h", "m"), fn.mean("m", "a")),
        "reverse-user-message": _on_reverse(_message, fn.sum("m", "a")),
    },
    "apply_edges": {
        **{f"{name}": _apply_edges(getattr(fn, name)("h", "k", "x")) for name in ("u_add_v", "v_div_u", "u_dot_v")},
        "copy_u": _apply_edges(fn.copy_u("h", "x")),
        "copy_e": _apply_edges(fn.copy_e("e", "x")),
        "u_mul_e": _apply_edges(fn.u_mul_e("h", "w", "x")),
        "user": _apply_edges(_on_edges),
        "some-builtin": _apply_some_edges(fn.u_sub_v("h", "k", "x")),
        "some-user": _apply_some_edges(_on_edges),
    },
    "apply_nodes": {"all": _apply_nodes, "some": _apply_some_nodes},
    "multi_update_all": {
        "builtin": _multi_update_all,
        "user": _multi_update_all_own_apply,
        "stack": _multi_stack,
        "apply per type": _multi_apply_per_type,
    },
    "pull": {
        "builtin": _pull(fn.u_mul_e("h", "w", "m"), fn.sum("m", "a")),
        "max": _pull(fn.copy_u("h", "m"), fn.max("m", "a")),
        "mean": _pull(fn.copy_u("h", "m"), fn.mean("m", "a")),
        "user": _pull(_message, _reduce),
        "apply": _pull(_message, _reduce, _apply),
    },
    "push": {
        "builtin": _push(fn.u_mul_e("h", "w", "m"), fn.sum("m", "a")),
        "max": _push(fn.copy_u("h", "m"), fn.max("m", "a")),
        "mean": _push(fn.copy_u("h", "m"), fn.mean("m", "a")),
        "user": _push(_message, _reduce_any_order),
        "apply": _push(_message, _reduce_any_order, _apply),
    },
    "send_and_recv": {
        "builtin": _send_and_recv(fn.u_mul_e("h", "w", "m"), fn.sum("m", "a")),
        "min": _send_and_recv(fn.copy_u("h", "m"), fn.min("m", "a")),
        "mean": _send_and_recv(fn.copy_u("h", "m"), fn.mean("m", "a")),
        "user": _send_and_recv(_message, _reduce),
        "apply": _send_and_recv(_message, _reduce, _apply),
    },
    "in_degrees": {"": _degrees("in_degrees")},
    "out_degrees": {"": _degrees("out_degrees")},
    "add_self_loop": {"": _graph_call(lambda g: g.add_self_loop())},
    "remove_self_loop": {"": _graph_call(lambda g: g.remove_self_loop())},
    "reverse": {"": _graph_call(lambda g: g.reverse(copy_ndata=True, copy_edata=True))},
}

FUNCTION_CASES: dict[str, dict[str, Case]] = {
    "add_self_loop": {
        "": _graph_call(lambda g: dgl.add_self_loop(g)),
        "one column": _graph_call(lambda g: dgl.add_self_loop(g, ["w"], 2)),
        "none": _graph_call(lambda g: dgl.add_self_loop(g, [])),
        **{how: _graph_call(lambda g, how=how: dgl.add_self_loop(g, ["w", "e"], how)) for how in _REDUCERS},
        "twice": _graph_call(lambda g: dgl.add_self_loop(dgl.add_self_loop(g, fill_data=3.5), fill_data=-1.0)),
        "after removal": _graph_call(lambda g: dgl.add_self_loop(dgl.remove_self_loop(g))),
        "on reverse": _graph_call(lambda g: dgl.add_self_loop(dgl.reverse(g, copy_edata=True), ["w"], "sum")),
    },
    "remove_self_loop": {
        "": _graph_call(lambda g: dgl.remove_self_loop(g)),
        "after adding": _graph_call(lambda g: dgl.remove_self_loop(dgl.add_self_loop(g))),
        "on reverse": _graph_call(lambda g: dgl.remove_self_loop(dgl.reverse(g, copy_edata=True))),
    },
    "reverse": {
        "": _graph_call(lambda g: dgl.reverse(g)),
        "edges": _graph_call(lambda g: dgl.reverse(g, copy_ndata=False, copy_edata=True)),
        "twice": _graph_call(lambda g: dgl.reverse(dgl.reverse(g, copy_edata=True), copy_edata=True)),
    },
    "laplacian_lambda_max": {
        "": lambda kit: {"out": Out("same", torch.tensor(dgl.laplacian_lambda_max(kit.graph), dtype=torch.float32))}
    },
    "norm_by_dst": {"": lambda kit: {"x": kit.edge(dgl.norm_by_dst(kit.graph))}},
    "readout_nodes": {
        **{op: _same(lambda g, op=op: dgl.readout_nodes(g, "h", op=op)) for op in _REDUCERS},
        "weight": _same(lambda g: dgl.readout_nodes(g, "h", "k")),
        "weighted mean": _same(lambda g: dgl.readout_nodes(g, "h", "k", op="mean")),
    },
    "readout_edges": {
        **{op: _same(lambda g, op=op: dgl.readout_edges(g, "e", op=op)) for op in _REDUCERS},
        "weight": _same(lambda g: dgl.readout_edges(g, "e", "w")),
    },
    "sum_nodes": {"": _same(lambda g: dgl.sum_nodes(g, "h")), "weight": _same(lambda g: dgl.sum_nodes(g, "h", "k"))},
    "sum_edges": {"": _same(lambda g: dgl.sum_edges(g, "e")), "weight": _same(lambda g: dgl.sum_edges(g, "e", "w"))},
    "mean_nodes": {"": _same(lambda g: dgl.mean_nodes(g, "h")), "weight": _same(lambda g: dgl.mean_nodes(g, "h", "k"))},
    "mean_edges": {"": _same(lambda g: dgl.mean_edges(g, "e")), "weight": _same(lambda g: dgl.mean_edges(g, "e", "w"))},
    "max_nodes": {"": _same(lambda g: dgl.max_nodes(g, "h")), "weight": _same(lambda g: dgl.max_nodes(g, "h", "k"))},
    "max_edges": {"": _same(lambda g: dgl.max_edges(g, "e")), "weight": _same(lambda g: dgl.max_edges(g, "e", "w"))},
    "softmax_nodes": {"": lambda kit: {"x": kit.node(dgl.softmax_nodes(kit.graph, "h"))}},
    "softmax_edges": {"": lambda kit: {"x": kit.edge(dgl.softmax_edges(kit.graph, "e"))}},
    "topk_nodes": {
        "each column": _topk(lambda g: dgl.topk_nodes(g, "h", 4)),
        "by column": _topk(lambda g: dgl.topk_nodes(g, "h", 3, sortby=1)),
        "ascending": _topk(lambda g: dgl.topk_nodes(g, "h", 3, descending=False, sortby=-1)),
    },
    "topk_edges": {
        "each column": _topk(lambda g: dgl.topk_edges(g, "e", 4)),
        "by column": _topk(lambda g: dgl.topk_edges(g, "e", 3, sortby=2, descending=False)),
    },
    "broadcast_nodes": {"": lambda kit: {"x": kit.node(dgl.broadcast_nodes(kit.graph, _row()))}},
    "broadcast_edges": {"": lambda kit: {"x": kit.edge(dgl.broadcast_edges(kit.graph, _row()))}},
    **{
        name: {"": _copy_case(name), "reverse": _copy_case(name, reverse=True)}
        for name in ("copy_u", "copy_v", "copy_e")
    },
    "gspmm": {"": _gspmm},
    "gsddmm": {"": _gsddmm},
    "edge_softmax": {
        "ops": _edge_softmax(dgl.ops.edge_softmax),
        "functional": _edge_softmax(dgl.nn.functional.edge_softmax),
        "src": _edge_softmax(dgl.ops.edge_softmax, norm_by="src"),
        "reverse": lambda kit: {"x": kit.edge(dgl.ops.edge_softmax(dgl.reverse(kit.graph), kit.e))},
        "reverse src": lambda kit: {"x": kit.edge(dgl.ops.edge_softmax(dgl.reverse(kit.graph), kit.e, norm_by="src"))},
        "some edges": _edge_softmax_some,
    },
}

for _name in [f"u_{op}_e_{reduce}" for op in ("add", "sub", "mul", "div") for reduce in _REDUCERS] + [
    f"copy_{source}_{reduce}" for source in "ue" for reduce in _REDUCERS
]:
    _back = (
        _spmm_case(_name, reverse=True) if _name.endswith(("sum", "mean")) else _spmm_reversed_without_gradient(_name)
    )
    FUNCTION_CASES[_name] = {"": _spmm_case(_name), "reverse": _back}

for _a in "uve":
    for _b in "uve":
        for _op in ("add", "sub", "mul", "div", "dot"):
            if _a != _b:
                _name = f"{_a}_{_op}_{_b}"
                FUNCTION_CASES[_name] = {"": _sddmm_case(_name), "reverse": _sddmm_case(_name, reverse=True)}


def _diffusion(how: str) -> Case:
    def case(kit: Kit) -> dict[str, Out]:
        kit.graph.ndata["narrow"] = kit.h.detach().float()  # DGL weighs edges in float32
        transform = dgl.transforms.SIGNDiffusion(2, "narrow", "out", diffuse_op=how)
        return _columns(kit, transform(dgl.add_self_loop(kit.graph)))

    return case


TRANSFORM_CASES: dict[str, dict[str, Case]] = {
    "AddSelfLoop": {
        "": _graph_call(lambda g: dgl.transforms.AddSelfLoop()(g)),
        "duplicates": _graph_call(lambda g: dgl.transforms.AddSelfLoop(allow_duplicate=True)(g)),
        "fill": _graph_call(lambda g: dgl.transforms.AddSelfLoop(edge_feat_names=["w"], fill_data="sum")(g)),
    },
    "RemoveSelfLoop": {"": _graph_call(lambda g: dgl.transforms.RemoveSelfLoop()(g))},
    "GCNNorm": {
        "": lambda kit: {"w": kit.edge_column("norm", dgl.transforms.GCNNorm("norm")(kit.graph))},
        "weighted": lambda kit: {"w": kit.edge_column("positive", _gcn_norm_of_positive(kit))},
    },
    "SIGNDiffusion": {how: _diffusion(how) for how in ("raw", "gcn", "rw", "ppr")},
    "Compose": {
        "": _graph_call(
            lambda g: dgl.transforms.Compose([dgl.transforms.RemoveSelfLoop(), dgl.transforms.AddSelfLoop()])(g)
        )
    },
}


def _gcn_norm_of_positive(kit: Kit) -> Any:
    kit.graph.edata["positive"] = kit.w.square() + 1
    kit.graph.edata["positive"] = kit.graph.edata["positive"][:, 0]
    return dgl.transforms.GCNNorm("positive")(kit.graph)
