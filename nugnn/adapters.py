"""DGL modules that count nodes or skip work in a way one part of a split graph cannot see, each with its small fix.

An adapter changes a class once, only for shard graphs; a module given a plain DGL graph runs DGL's own code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    counts = torch.tensor([graph.num_nodes()])
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


def _set_transformer_encoder(plain: _Forward, module: Any, graph: ShardGraph, feat: Tensor) -> Any:
    """Attention among all nodes: every rank computes it on all rows and keeps its own."""
    everything = in_global_order(graph, feat, graph.index.node_rows)
    counts = torch.tensor([graph.num_nodes_global()])
    with _answering(graph, batch_num_nodes=lambda *_: counts):
        out = plain(module, graph, everything)
    order = torch.cat(graph.ranks.gather_rows(graph.global_node_ids)).sort().values
    mine = torch.searchsorted(order, graph.global_node_ids)
    return tag(out.index_select(0, mine), graph.index.node_rows)


def _set_transformer_decoder(plain: _Forward, module: Any, graph: ShardGraph, feat: Tensor) -> Any:
    """Attention of seed vectors over all nodes: computed on all rows by every rank."""
    everything = in_global_order(graph, feat, graph.index.node_rows)
    counts = torch.tensor([graph.num_nodes_global()])
    with _answering(graph, batch_num_nodes=lambda *_: counts):
        return tag(plain(module, graph, everything), REPLICATED)


def _wrap(cls: type, adapter: Callable[..., Any]) -> None:
    plain = cls.forward  # type: ignore[attr-defined]

    @functools.wraps(plain)
    def forward(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(graph, ShardGraph) and graph.is_split:
            return adapter(plain, self, graph, *args, **kwargs)
        return plain(self, graph, *args, **kwargs)

    cls.forward = forward  # type: ignore[attr-defined]


def install() -> None:
    """Put the adapters in place; called once, by `nugnn.seam.install`."""
    from dgl.nn.pytorch import conv, glob
    from dgl.nn.pytorch.conv.pnaconv import PNAConvTower

    _wrap(PNAConvTower, _pna_tower)  # DGNConvTower inherits forward
    _wrap(conv.APPNPConv, _appnp)
    _wrap(conv.GatedGraphConv, _gated_graph)
    _wrap(glob.SetTransformerEncoder, _set_transformer_encoder)
    _wrap(glob.SetTransformerDecoder, _set_transformer_decoder)
