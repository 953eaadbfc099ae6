"""Connects DGL to shard graphs: three message-passing functions, and every ``dgl`` function that takes a graph."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import dgl
import dgl.ops
import dgl.transforms
import torch
from dgl.base import is_all

from nugnn import adapters, fused_attention, fused_convolutions, readout, recognition
from nugnn.graph_index import ShardIndex
from nugnn.kernels.rows import rows_of, tag
from nugnn.shard_graph import ShardGraph, check_ids, on_device
from nugnn.shard_lists import (
    EXACT_FUNCTIONS,
    LOCAL_FUNCTIONS,
    NEVER_ANSWERED_FUNCTIONS,
    REFUSED_FUNCTIONS,
    REFUSED_TRANSFORMS,
)

_installed = False


def install() -> None:
    """Make DGL's functions know shard graphs; plain graphs take the same way as before. Does nothing when repeated."""
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    _route_operators()
    _route_functions()
    _route_transforms()
    adapters.install()
    fused_attention.install()
    fused_convolutions.install()


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

    plain_gspmm = spmm_module.gspmm

    @functools.wraps(plain_gspmm)
    def gspmm(g: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
        if not (isinstance(g, ShardGraph) and reduce_op == "mean"):
            return plain_gspmm(g, op, reduce_op, lhs_data, rhs_data)
        is_fused = g.device.type in recognition.FUSED_DEVICES and not g.index.is_reversed
        in_one_pass = is_fused and op in ("copy_lhs", "mul")
        if in_one_pass and lhs_data.is_floating_point() and (op == "copy_lhs" or lhs_data.dim() == rhs_data.dim()):
            factors = g.degree_factors("in", -1.0, torch.promote_types(lhs_data.dtype, torch.float32))
            return g.index.scaled_sum(lhs_data, None if op == "copy_lhs" else rhs_data, dst_scale=factors)
        # DGL caps degrees at the number of edges, which a part of a reversed graph has fewer of
        total = plain_gspmm(g, op, "sum", lhs_data, rhs_data)
        if not total.is_floating_point():
            raise dgl.DGLError(f"a mean of {total.dtype} is not defined; convert the messages to float")
        degrees = g.in_degrees().clamp(min=1).to(total.dtype)
        return tag(total / degrees.view(-1, *([1] * (total.dim() - 1))), g.index.node_rows)

    spmm_module.gspmm = dgl.ops.gspmm = gspmm  # type: ignore[attr-defined]
    spmm_module.gspmm_internal = gspmm_internal  # type: ignore[attr-defined]
    sddmm_module.gsddmm_internal = gsddmm_internal  # type: ignore[attr-defined]
    softmax_module.edge_softmax_internal = edge_softmax_internal  # type: ignore[attr-defined]


def _on_shard(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """What ``dgl.name`` does when its graph is a shard."""
    if name in ("add_self_loop", "remove_self_loop", "reverse"):
        return lambda g, *args, **kwargs: getattr(g, name)(*args, **kwargs)
    if (exact := getattr(readout, name, None)) is not None and name in EXACT_FUNCTIONS:
        return exact  # type: ignore[no-any-return]
    if name in EXACT_FUNCTIONS or name in LOCAL_FUNCTIONS:
        return plain  # made of exact or local pieces
    instead = REFUSED_FUNCTIONS.get(name, "the whole graph, before nugnn.fit or nugnn.shard")

    def refuse_when_split(*args: Any, **kwargs: Any) -> Any:
        for shard in _shards_in((*args, *kwargs.values())):
            if shard.is_split or name in NEVER_ANSWERED_FUNCTIONS:
                shard.refuse(f"dgl.{name}", instead)
        only = next(iter(_shards_in((*args, *kwargs.values()))))
        check_ids(only, plain, args, kwargs)
        host = torch.device("cpu")
        given = [_with_whole(on_device(x, host)) for x in args]
        named = {key: _with_whole(on_device(x, host)) for key, x in kwargs.items()}
        return on_device(plain(*given, **named), only.device)

    return refuse_when_split


def _shards_in(arguments: Iterable[Any]) -> Iterator[ShardGraph]:
    """Shard graphs among the arguments of a call and in lists of graphs."""
    for x in arguments:
        if isinstance(x, ShardGraph):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from (y for y in x if isinstance(y, ShardGraph))


def _with_whole(x: Any) -> Any:
    """``x`` with plain graphs in place of shard graphs of one rank."""
    if isinstance(x, (list, tuple)) and any(isinstance(y, ShardGraph) for y in x):
        return [_with_whole(y) for y in x]
    return x._whole() if isinstance(x, ShardGraph) else x


def _dispatch(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    on_shard = _on_shard(name, plain)

    @functools.wraps(plain)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        has_shard = next(_shards_in((*args, *kwargs.values())), None) is not None
        return (on_shard if has_shard else plain)(*args, **kwargs)

    return dispatch


def _keeping_rows(plain: Callable[..., Any], on_gpu: Callable[..., Any]) -> Callable[..., Any]:
    """``gather_mm`` and ``segment_mm`` multiply each row by the matrix of its type: row identity stays."""

    @functools.wraps(plain)
    def product(a: Any, *args: Any, **kwargs: Any) -> Any:
        return tag((on_gpu if a.is_cuda else plain)(a, *args, **kwargs), rows_of(a))

    return product


def _segment_mm(a: torch.Tensor, b: torch.Tensor, seglen_a: torch.Tensor) -> torch.Tensor:
    """``(n, D2)``: the i-th run of ``seglen_a[i]`` rows of ``a (n, D1)`` times ``b[i] (D1, D2)``; any device."""
    pieces = a.split(seglen_a.tolist())
    return torch.cat([piece @ matrix for piece, matrix in zip(pieces, b, strict=True)])


def _gather_mm(a: torch.Tensor, b: torch.Tensor, *, idx_b: torch.Tensor) -> torch.Tensor:
    """``(n, D2)``: row i of ``a (n, D1)`` times ``b[idx_b[i]] (D1, D2)``; any device."""
    order = torch.argsort(idx_b, stable=True)
    sorted_rows = _segment_mm(a[order], b, torch.bincount(idx_b, minlength=len(b)))
    return torch.empty_like(sorted_rows).index_copy(0, order, sorted_rows)


def _route_transforms() -> None:
    """Transform objects meet a shard graph when they are called."""
    for name, instead in REFUSED_TRANSFORMS.items():
        cls = getattr(dgl.transforms, name)
        cls.__call__ = _transform_on_whole(name, cls.__call__, instead)


def _transform_on_whole(name: str, plain: Callable[..., Any], instead: str) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: Any, g: Any) -> Any:
        if not isinstance(g, ShardGraph):
            return plain(self, g)
        if g.is_split:
            g.refuse(f"dgl.transforms.{name}", instead)
        return plain(self, g._whole())

    return call


def _route_functions() -> None:
    """Rebind each listed function wherever a loaded DGL module holds it."""
    replacement: dict[int, Callable[..., Any]] = {}
    for name in (*EXACT_FUNCTIONS, *LOCAL_FUNCTIONS, *REFUSED_FUNCTIONS):
        plain = getattr(dgl, name, None)
        if plain is not None:
            replacement[id(plain)] = _dispatch(name, plain)
    for name, on_gpu in (("gather_mm", _gather_mm), ("segment_mm", _segment_mm)):
        plain = getattr(dgl.ops, name)
        replacement[id(plain)] = _keeping_rows(plain, on_gpu)
    importlib.import_module("dgl.nn.pytorch")
    for module_name, module in list(sys.modules.items()):
        if module is None or not (module_name == "dgl" or module_name.startswith("dgl.")):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in replacement:
                setattr(module, attribute, replacement[id(value)])
