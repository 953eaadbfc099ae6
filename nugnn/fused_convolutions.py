"""`dgl.nn.SAGEConv` with a mean and `GraphConv` in fewer passes over the features.

GCN's degree factors are applied by the aggregation, which for SAGE also adds the node's own product; where SAGE
aggregates first, its second product is added to the first. SAGE multiplies first where that makes rows no wider: then
the layer keeps its input for backward and no aggregate (DGL multiplies first only where rows get narrower). Features
whose aggregate is kept from step to step are aggregated first at equal width, as DGL does.

Taken over only where DGL's own class runs a forward known here, on a shard graph on a GPU, with features of its nodes,
no weights from outside, and no hooks on a layer that is no longer called. Aggregation and dropout keep their places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from dgl.nn.pytorch import conv
from torch import Tensor, nn

from nugnn import recognition
from nugnn.comm.overlap import Fetch
from nugnn.kernels.epilogue import epilogue_rows
from nugnn.kernels.interceptor import current_interceptor
from nugnn.kernels.products import products, sum_of_products
from nugnn.kernels.reuse import ReuseHandler
from nugnn.kernels.rows import rows_of, tag
from nugnn.recognition import count_operators, fingerprint, has_empty_rows, is_plain
from nugnn.shard_graph import ShardGraph

KNOWN_FORWARDS = {"SAGEConv": "bb848421c5e8d8ae", "GraphConv": "6c3df0ee7bf0849a"}
"""Fingerprints of the forwards that the functions here repeat."""


def install() -> None:
    """Take over the two classes, where their forward is known; called once, by `nugnn.seam.install`."""
    _take_over(conv.SAGEConv, _is_our_sage, _sage_mean)
    _take_over(conv.GraphConv, _is_our_gcn, _gcn)


def _take_over(cls: Any, is_ours: Callable[..., bool], ours: Callable[..., Tensor]) -> None:
    plain = cls.forward
    if fingerprint(plain) != KNOWN_FORWARDS[cls.__name__]:
        return

    @functools.wraps(plain)
    def forward(self: Any, graph: Any, feat: Any, *args: Any, **kwargs: Any) -> Any:
        given = any(x is not None for x in (*args, *kwargs.values()))
        if not given and type(self) is cls and _is_known_place(graph, feat) and is_ours(self, graph):
            return ours(self, graph, feat)
        return plain(self, graph, feat, *args, **kwargs)

    cls.forward = forward


def _is_known_place(graph: Any, feat: Any) -> bool:
    return (
        isinstance(graph, ShardGraph)
        and graph.device.type in recognition.FUSED_DEVICES
        and graph.ranks.is_uniform  # every rank then sends the same rows
        and not graph.index.is_reversed
        and isinstance(feat, Tensor)
        and feat.layout is torch.strided
        and feat.dim() == 2
        and feat.is_floating_point()
        and rows_of(feat) is not None
    )


def _is_our_sage(module: Any, graph: ShardGraph) -> bool:
    return (
        module._aggre_type == "mean"
        and is_plain(module.fc_self, nn.Linear)
        and is_plain(module.fc_neigh, nn.Linear)
        and module.fc_neigh.bias is None
        and graph.num_edges_global() > 0  # a part without edges sends and receives what the others do
    )


def _sage_mean(module: Any, graph: ShardGraph, feat: Tensor) -> Tensor:
    rows, index = graph.index.node_rows, graph.index
    h = module.feat_drop(feat)
    mean = graph.degree_factors("in", -1.0, torch.promote_types(h.dtype, torch.float32))
    count_operators((module.fc_neigh, "linear"), (module.fc_self, "linear"))
    weights, bias = (module.fc_self.weight, module.fc_neigh.weight), module.fc_self.bias
    if module._in_src_feats > module._out_feats or (module._in_src_feats == module._out_feats and not _is_kept(h)):
        if h.requires_grad:
            _ = index.structure.transposed  # sorted once, with scratch, before the products are there as well
        fetches: list[Fetch | None] = []  # the messages travel beside the node's own product
        out, messages = products(h, weights, bias, on_last=lambda x: fetches.append(index.begin_fetch(x)))
        out = index.scaled_sum(tag(messages, rows), dst_scale=mean, add_to=out, fetch=fetches[0])
    else:
        out = tag(sum_of_products((h, index.scaled_sum(h, dst_scale=mean)), weights, bias), rows)
    out = out if module.activation is None else module.activation(out)
    return out if module.norm is None else module.norm(out)  # type: ignore[no-any-return]


def _is_kept(x: Tensor) -> bool:
    """Whether the step that is open keeps what is aggregated from ``x``."""
    interceptor = current_interceptor()
    try:
        return interceptor is not None and interceptor.find(ReuseHandler).is_constant(x)
    except LookupError:
        return False


def _is_our_gcn(module: Any, graph: ShardGraph) -> bool:
    if module.weight is None or module._norm not in ("left", "right", "both"):
        return False
    return module._allow_zero_in_degree or not has_empty_rows(graph.index.structure)


def _gcn(module: Any, graph: ShardGraph, feat: Tensor) -> Tensor:
    rows, index, weight = graph.index.node_rows, graph.index, module.weight.t()
    count_operators((None, "matmul"))
    power = -0.5 if module._norm == "both" else -1.0
    wide = torch.promote_types(feat.dtype, torch.float32)
    source = graph.degree_factors("out", power, wide) if module._norm in ("left", "both") else None
    target = graph.degree_factors("in", power, wide) if module._norm in ("right", "both") else None
    if module._in_feats > module._out_feats:
        (h,) = products(feat, (weight,))
        h = index.scaled_sum(tag(h, rows), src_scale=source, dst_scale=target)
        if module.bias is not None:
            h = epilogue_rows(h, bias=module.bias) if module.bias.dtype == h.dtype else h + module.bias
    else:
        h = index.scaled_sum(feat, src_scale=source, dst_scale=target)
        h = sum_of_products((h,), (weight,), module.bias)
    h = tag(h, rows)
    return h if module._activation is None else module._activation(h)  # type: ignore[no-any-return]
