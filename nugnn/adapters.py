"""DGL modules that count nodes or skip work in a way one part of a split graph cannot see, each with its small fix.

An adapter changes a class once, only for shard graphs; a module given a plain DGL graph runs DGL's own code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from dgl import function as fn
from torch import Tensor, nn

from nugnn.kernels.rows import REPLICATED, tag
from nugnn.readout import in_global_order
from nugnn.shard_graph import ShardGraph

_Forward = Callable[..., Any]


@contextmanager
def _before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While open, the first argument of ``module`` passes through ``change``."""
    hook = module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def _pna_tower(plain: _Forward, module: Any, graph: ShardGraph, *args: Any, **kwargs: Any) -> Any:
    """PNA and DGN divide by the square root of ``batch_num_nodes()``: rows of this rank, nodes of the whole graph."""
    ratio = (graph.num_nodes() / graph.num_nodes_global()) ** 0.5
    rows = graph.index.node_rows

    def correct(h: Tensor) -> Tensor:
        return tag(h * ratio, rows)

    counts = torch.tensor([graph.num_nodes()], device=graph.device)
    with _answering(graph, batch_num_nodes=lambda *_: counts), _before(module.batchnorm, correct):
        return plain(module, graph, *args, **kwargs)


@contextmanager
def _answering(graph: ShardGraph, **methods: Callable[..., Any]) -> Iterator[None]:
    """While open, ``graph`` answers methods it otherwise refuses."""
    for name, method in methods.items():
        graph.__dict__[name] = method
    try:
        yield
    finally:
        for name in methods:
            del graph.__dict__[name]


def _appnp(plain: _Forward, module: Any, graph: ShardGraph, *args: Any, **kwargs: Any) -> Any:
    """APPNP drops edges by dropout on a fresh tensor of ones, one for each edge."""
    with _before(module.edge_drop, lambda ones: tag(ones, graph.index.edge_rows)):
        return plain(module, graph, *args, **kwargs)


def _atomic_message(edges: Any) -> dict[str, Tensor]:
    return {"m": torch.einsum("ij,ik->ijk", edges.src["hv"], edges.data["he"]).flatten(1)}


def _atomic(plain: _Forward, module: Any, graph: ShardGraph, *args: Any, **kwargs: Any) -> Any:
    """AtomicConv reshapes messages to ``(len(edges), -1)``, which has no answer on a rank without edges."""

    def update_all(message: Any, reduce: Any) -> None:
        ShardGraph.update_all(graph, _atomic_message, reduce)

    with _answering(graph, update_all=update_all):
        return plain(module, graph, *args, **kwargs)


def _typed_edges(plain: _Forward, module: Any, graph: ShardGraph, *args: Any, **kwargs: Any) -> Any:
    """RelGraphConv and HGTConv take a promise that edges are sorted by type: edges of a shard are in CSC order."""
    return plain(module, graph, *args, **{**kwargs, "presorted": False})


def _gated_graph(plain: _Forward, module: Any, graph: ShardGraph, feat: Tensor, etypes: Tensor | None = None) -> Any:
    """GatedGraphConv visits an edge type only where it has edges, so ranks would disagree about what to exchange."""
    if etypes is None:
        return plain(module, graph, feat, etypes)

    def message(edges: Any) -> dict[str, Tensor]:
        h = edges.src["h"]
        out = h.new_zeros(h.shape)
        for number, linear in enumerate(module.linears):
            picked = (etypes == number).nonzero().view(-1)
            out = out.index_copy(0, picked, linear(h.index_select(0, picked)))
        return {"m": out}

    padded = torch.cat([feat, feat.new_zeros(len(feat), module._out_feats - feat.shape[1])], -1)
    with graph.local_scope():
        h = tag(padded, graph.index.node_rows)
        for _ in range(module._n_steps):
            graph.ndata["h"] = h
            graph.update_all(message, fn.sum("m", "a"))
            h = module.gru(graph.ndata["a"], h)
    return h


def _label_propagation(
    plain: _Forward, module: Any, graph: ShardGraph, labels: Tensor, mask: Tensor | None = None
) -> Any:
    """LabelPropagation makes one column for each class it sees: a rank may not see them all."""
    if labels.dim() == 1 or labels.shape[1] == 1:
        flat = labels.reshape(-1)
        num_classes = int(graph.ranks.max_(torch.cat([flat, flat.new_zeros(1)]).max() + 1))
        if num_classes > 1:  # one column would be taken for class ids
            labels = nn.functional.one_hot(flat, num_classes)
    return plain(module, graph, labels, mask)


def _node_rows(plain: _Forward, module: Any, graph: ShardGraph, *args: Any, **kwargs: Any) -> Any:
    """Row i of the result is node i, though the module gets there by steps that row identity does not follow."""
    out = plain(module, graph, *args, **kwargs)
    for x in out.values() if isinstance(out, dict) else (out,):
        tag(x, graph.index.node_rows)
    return out


def _replicated(plain: _Forward, module: Any, graph: ShardGraph, *args: Any, **kwargs: Any) -> Any:
    """The result is one for the whole graph, the same on every rank."""
    return tag(plain(module, graph, *args, **kwargs), REPLICATED)


@contextmanager
def _dropping_replicated(module: nn.Module) -> Iterator[None]:
    """While open, what dropouts inside ``module`` get is the same on every rank."""
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                stack.enter_context(_before(part, lambda x: tag(x, REPLICATED)))
        yield


def _set_transformer_encoder(plain: _Forward, module: Any, graph: ShardGraph, feat: Tensor) -> Any:
    """Attention among all nodes: every rank computes it on all rows and keeps its own."""
    everything = in_global_order(graph, feat, graph.global_node_ids)
    counts = torch.tensor([graph.num_nodes_global()], device=graph.device)
    with _answering(graph, batch_num_nodes=lambda *_: counts), _dropping_replicated(module):
        out = plain(module, graph, everything)
    order = torch.cat(graph.ranks.gather_rows(graph.global_node_ids)).sort().values
    mine = torch.searchsorted(order, graph.global_node_ids)
    return tag(out.index_select(0, mine), graph.index.node_rows)


def _set_transformer_decoder(plain: _Forward, module: Any, graph: ShardGraph, feat: Tensor) -> Any:
    """Attention of seed vectors over all nodes: computed on all rows by every rank."""
    everything = in_global_order(graph, feat, graph.global_node_ids)
    counts = torch.tensor([graph.num_nodes_global()], device=graph.device)
    with _answering(graph, batch_num_nodes=lambda *_: counts), _dropping_replicated(module):
        return tag(plain(module, graph, everything), REPLICATED)


def _wrap(cls: type, adapter: Callable[..., Any], *, also_whole: bool = False) -> None:
    """``adapter`` takes over ``cls.forward`` on split shard graphs, and with ``also_whole`` on all shard graphs."""
    plain = cls.forward  # type: ignore[attr-defined]

    @functools.wraps(plain)
    def forward(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(graph, ShardGraph) and (graph.is_split or also_whole):
            return adapter(plain, self, graph, *args, **kwargs)
        return plain(self, graph, *args, **kwargs)

    cls.forward = forward  # type: ignore[attr-defined]


def install() -> None:
    """Put the adapters in place; called once, by `nugnn.seam.install`."""
    from dgl.nn.pytorch import conv, glob, hetero, utils
    from dgl.nn.pytorch.conv.pnaconv import PNAConvTower

    _wrap(PNAConvTower, _pna_tower)  # DGNConvTower inherits forward
    _wrap(conv.APPNPConv, _appnp, also_whole=True)
    _wrap(conv.AtomicConv, _atomic)
    _wrap(conv.RelGraphConv, _typed_edges, also_whole=True)
    _wrap(conv.HGTConv, _typed_edges, also_whole=True)
    _wrap(conv.GatedGraphConv, _gated_graph)
    _wrap(conv.GroupRevRes, _node_rows, also_whole=True)
    _wrap(hetero.HeteroGraphConv, _node_rows, also_whole=True)  # rows of one part can be reordered
    _wrap(utils.LabelPropagation, _label_propagation)
    _wrap(glob.Set2Set, _replicated)
    _wrap(glob.SetTransformerEncoder, _set_transformer_encoder)
    _wrap(glob.SetTransformerDecoder, _set_transformer_decoder)
