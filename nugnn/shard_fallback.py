"""The methods of `dgl.DGLGraph` that a shard graph does not have: DGL answers on one rank, a split graph refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import dgl
import torch
from dgl.utils.checks import prepare_tensor
from torch import Tensor

from nugnn._counted import counted
from nugnn.shard_lists import EXACT_METHODS, LOCAL_METHODS, NEVER_ANSWERED, REFUSED_METHODS

if TYPE_CHECKING:
    from nugnn.shard_graph import ShardGraph

_HOST = torch.device("cpu")
_NODE_IDS = frozenset("u v nodes seed_nodes source src dst root src_nodes dst_nodes nids".split())
_EDGE_IDS = frozenset("edges eid eids".split())


def check_ids(graph: ShardGraph, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Refuse ids out of range before DGL's native code reads past its arrays with them.

    Raises:
        DGLError: An argument that ``function`` takes as node or edge ids holds one that does not exist, or
            it is ``dgl.to_block`` and given ``src_nodes``, of which DGL makes a block of edges from no nodes.
    """
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return  # DGL says what is wrong with the arguments
    if given.get("src_nodes") is not None:
        raise dgl.DGLError("to_block: leave src_nodes out; DGL makes a block without source nodes of them")
    if "u" in given and "v" in given:
        few, many = sorted(len(prepare_tensor(graph, given[end], end)) for end in ("u", "v"))
        if few not in (1, many):
            raise dgl.DGLError(
                f"u and v have to be equally long, or one of them a single id; got {few} and {counted(many, 'id')}"
            )
    for name, value in given.items():
        count = graph.num_nodes() if name in _NODE_IDS else graph.num_edges() if name in _EDGE_IDS else None
        for ids in value if isinstance(value, tuple) else (value,):
            if count is None or ids is None or isinstance(ids, (str, dict, dgl.DGLGraph)):
                continue
            limit = graph.num_nodes() if isinstance(value, tuple) else count  # a pair names ends of edges
            if not (isinstance(ids, Tensor) and ids.dtype is torch.bool):
                graph._row_ids(ids, limit)


def on_device(x: Any, device: torch.device) -> Any:
    """``x`` with every tensor in it, also in tuples, lists and dictionaries, on ``device``; graphs stay."""
    if isinstance(x, Tensor):
        return x.to(device)
    if type(x) in (tuple, list):
        return type(x)(on_device(item, device) for item in x)
    return {key: on_device(item, device) for key, item in x.items()} if type(x) is dict else x


def _refusing(name: str, instead: str) -> Callable[..., Any]:
    def method(self: ShardGraph, *args: Any, **kwargs: Any) -> Any:
        if self.is_split or name in NEVER_ANSWERED:
            self.refuse(f"DGLGraph.{name}", instead)
        answer = getattr(self._whole(), name)
        if not callable(answer):
            return on_device(answer, self.device)
        check_ids(self, answer, args, kwargs)
        return on_device(answer(*on_device(args, _HOST), **on_device(kwargs, _HOST)), self.device)

    method.__name__ = name
    method.__doc__ = f"Refused when the graph is split; use instead: {instead}."
    return method


def close_remaining_methods(cls: type[ShardGraph]) -> type[ShardGraph]:
    """Every public method on none of the lists, or on the refused one, says so instead of reaching native code."""
    for name in dir(dgl.DGLGraph):
        if name.startswith("_") or name in EXACT_METHODS or name in LOCAL_METHODS:
            continue
        method = _refusing(name, REFUSED_METHODS.get(name, "the whole graph, before nugnn.fit or nugnn.shard"))
        is_property = isinstance(getattr(dgl.DGLGraph, name), property)
        setattr(cls, name, property(method) if is_property else method)
    return cls
