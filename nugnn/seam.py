"""Connects DGL to shard graphs: three message-passing functions, and every ``dgl`` function that takes a graph."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import dgl
import dgl.ops
from dgl.base import is_all

from nugnn import adapters, readout
from nugnn.graph_index import ShardIndex
from nugnn.shard_graph import ShardGraph
from nugnn.shard_lists import EXACT_FUNCTIONS, LOCAL_FUNCTIONS, REFUSED_FUNCTIONS

_installed = False


def install() -> None:
    """Make DGL's functions know shard graphs; plain graphs take the same way as before. Does nothing when repeated."""
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    _route_operators()
    _route_functions()
    adapters.install()


def _route_operators() -> None:
    spmm_module = importlib.import_module("dgl.ops.spmm")
    sddmm_module = importlib.import_module("dgl.ops.sddmm")
    softmax_module = importlib.import_module("dgl.ops.edge_softmax")
    plain_spmm, plain_sddmm = spmm_module.gspmm_internal, sddmm_module.gsddmm_internal
    plain_softmax = softmax_module.edge_softmax_internal

    def gspmm_internal(gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
        if isinstance(gidx, ShardIndex):
            return gidx.spmm(op, reduce_op, lhs_data, rhs_data)
        return plain_spmm(gidx, op, reduce_op, lhs_data, rhs_data)

    def gsddmm_internal(
        gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v"
    ) -> Any:
        if isinstance(gidx, ShardIndex):
            return gidx.sddmm(op, lhs_data, rhs_data, lhs_target, rhs_target)
        return plain_sddmm(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)

    def edge_softmax_internal(gidx: Any, logits: Any, eids: Any = None, norm_by: str = "dst") -> Any:
        if not isinstance(gidx, ShardIndex):
            return plain_softmax(gidx, logits, **({} if eids is None else {"eids": eids}), norm_by=norm_by)
        if eids is None or is_all(eids):
            return gidx.edge_softmax(logits, norm_by)
        everywhere = logits.new_full((gidx.num_edges(), *logits.shape[1:]), float("-inf"))
        return gidx.edge_softmax(everywhere.index_copy(0, eids.long(), logits), norm_by)[eids.long()]

    spmm_module.gspmm_internal = gspmm_internal  # type: ignore[attr-defined]
    sddmm_module.gsddmm_internal = gsddmm_internal  # type: ignore[attr-defined]
    softmax_module.edge_softmax_internal = edge_softmax_internal  # type: ignore[attr-defined]


def _on_shard(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """What ``dgl.name`` does when its graph is a shard."""
    if name in ("add_self_loop", "remove_self_loop", "reverse"):
        return getattr(ShardGraph, name)  # type: ignore[no-any-return]
    if (exact := getattr(readout, name, None)) is not None and name in EXACT_FUNCTIONS:
        return exact  # type: ignore[no-any-return]
    if name in EXACT_FUNCTIONS or name in LOCAL_FUNCTIONS:
        return plain  # made of exact or local pieces
    instead = REFUSED_FUNCTIONS.get(name, "the whole graph, before nugnn.fit or nugnn.shard")

    def refuse_when_split(graph: Any, *args: Any, **kwargs: Any) -> Any:
        shard = graph if isinstance(graph, ShardGraph) else next(g for g in graph if isinstance(g, ShardGraph))
        if shard.is_split or not isinstance(graph, ShardGraph):
            shard.refuse(f"dgl.{name}", instead)
        return plain(graph._whole(), *args, **kwargs)

    return refuse_when_split


def _holds_shard(x: Any) -> bool:
    return isinstance(x, ShardGraph) or (isinstance(x, (list, tuple)) and any(isinstance(y, ShardGraph) for y in x))


def _dispatch(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    on_shard = _on_shard(name, plain)

    @functools.wraps(plain)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        return (on_shard if _holds_shard(first) else plain)(*args, **kwargs)

    return dispatch


def _route_functions() -> None:
    """Rebind each listed function wherever a loaded DGL module holds it."""
    replacement: dict[int, Callable[..., Any]] = {}
    for name in (*EXACT_FUNCTIONS, *LOCAL_FUNCTIONS, *REFUSED_FUNCTIONS):
        plain = getattr(dgl, name, None)
        if plain is not None:
            replacement[id(plain)] = _dispatch(name, plain)
    importlib.import_module("dgl.nn.pytorch")
    for module_name, module in list(sys.modules.items()):
        if module is None or not (module_name == "dgl" or module_name.startswith("dgl.")):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in replacement:
                setattr(module, attribute, replacement[id(value)])
