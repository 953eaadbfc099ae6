"""Unmodified `dgl.nn.GATConv` and `GATv2Conv` take the fused attention kernels where only the speed changes by it.

A layer is taken over only when all of this holds; anything else runs DGL's own forward:

- its class is DGL's own, not a subclass, and DGL's forward is a version known here, by its statements;
- the graph is a shard graph on a device with fused kernels, the features are rows of it;
- no edge weights, no request for the attention weights;
- its dropout and leaky rectifier are torch's own, without hooks: their calls are no longer made one by one;
- dropout of the attention weights is off or drawn by row identity, as `nugnn.intercept` does.

Operators keep their names, ``path/sddmm``, ``path/edge_softmax``, ``path.attn_drop/dropout``, ``path/spmm``, and so
their dropout masks. The layer's source rows are exchanged once; source scores of halo rows are computed where they are
used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nugnn import recognition
from nugnn.kernels.attention import AttentionDropout, gat_attention, gatv2_attention
from nugnn.kernels.handlers import DropoutHandler
from nugnn.kernels.interceptor import Interceptor, current_interceptor
from nugnn.kernels.products import products
from nugnn.kernels.rows import tag
from nugnn.kernels.structure import Structure
from nugnn.recognition import count_operators, fingerprint, has_empty_rows, is_plain
from nugnn.shard_graph import ShardGraph

KNOWN_FORWARDS = {
    "GATConv": frozenset({"6a327aa7250620e6"}),
    "GATv2Conv": frozenset({"472fdd9f17d65bf4"}),
}
"""Fingerprints of the forwards that the functions here repeat."""
_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def install() -> None:
    """Take over the two classes, where their forward is known; called once, by `nugnn.seam.install`."""
    from dgl.nn.pytorch import conv

    for cls, attend in ((conv.GATConv, _gat_forward), (conv.GATv2Conv, _gatv2_forward)):
        if fingerprint(cls.forward) in KNOWN_FORWARDS[cls.__name__]:
            _wrap(cls, attend)


def _wrap(cls: type, attend: Callable[..., Tensor]) -> None:
    plain = cls.forward  # type: ignore[attr-defined]

    @functools.wraps(plain)
    def forward(self: Any, graph: Any, feat: Any, *args: Any, **kwargs: Any) -> Any:
        interceptor = _interceptor_to_fuse(cls, self, graph, feat, args, kwargs)
        if interceptor is None:
            return plain(self, graph, feat, *args, **kwargs)
        return attend(self, graph, feat, interceptor)

    cls.forward = forward  # type: ignore[attr-defined]


def _interceptor_to_fuse(
    cls: Any, layer: Any, graph: Any, feat: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Interceptor | None:
    """The interceptor to run a fused layer with; None where DGL's own forward has to run."""
    if type(layer) is not cls or not isinstance(graph, ShardGraph) or graph.index.is_reversed:
        return None
    if not graph.ranks.is_uniform:
        return None  # ranks that run DGL's steps exchange scores too, and would wait for ours
    if any(x is not None and x is not False for x in (*args, *kwargs.values())):
        return None
    feats = feat if isinstance(feat, tuple) else (feat,)
    if not all(isinstance(x, Tensor) and x.dim() == 2 and len(x) == graph.num_nodes() for x in feats):
        return None
    if any(x.device.type not in recognition.FUSED_DEVICES or x.dtype not in _FLOATING for x in feats):
        return None
    if not (is_plain(layer.attn_drop, nn.Dropout) and is_plain(layer.leaky_relu, nn.LeakyReLU)):
        return None
    if not layer._allow_zero_in_degree and has_empty_rows(graph.index.structure):
        return None  # DGL says what is wrong
    interceptor = current_interceptor()
    drops = layer.attn_drop.training and layer.attn_drop.p > 0
    if interceptor is None:
        return None if drops or graph.is_split else Interceptor(())
    if drops:
        try:
            interceptor.find(DropoutHandler)
        except LookupError:
            return None
    return interceptor


def _gat_forward(layer: Any, graph: ShardGraph, feat: Any, interceptor: Interceptor) -> Tensor:
    """`GATConv.forward` around one operator."""
    heads, dim = layer._num_heads, layer._out_feats
    if isinstance(feat, tuple):
        h_src, h_dst = layer.feat_drop(feat[0]), layer.feat_drop(feat[1])
        fc_src, fc_dst = (layer.fc_src, layer.fc_dst) if hasattr(layer, "fc_src") else (layer.fc, layer.fc)
        src, dst = _linear(fc_src, h_src), _linear(fc_dst, h_dst)
    else:
        h_dst = layer.feat_drop(feat)
        src = dst = _linear(layer.fc, h_dst)
    feat_src, left, right = src.view(-1, heads, dim), _per_head(layer.attn_l), _per_head(layer.attn_r)

    def attend(structure: Structure, feat_src_L: Tensor, dropout: AttentionDropout | None) -> Tensor:
        if src is dst:  # of halo rows, too: two narrow products, each of rows read for itself, take far longer
            el_LH, er_LH = products(src if feat_src_L is feat_src else feat_src_L.flatten(1), (left, right))
            er_NH = er_LH if len(er_LH) == len(dst) else er_LH[: len(dst)]
        else:
            (el_LH,), (er_NH,) = products(feat_src_L.flatten(1), (left,)), products(dst, (right,))
        return gat_attention(structure, feat_src_L, el_LH, er_NH, layer.leaky_relu.negative_slope, dropout)

    out = _attention(layer, graph, interceptor, feat_src, attend)
    if layer.res_fc is not None:
        out = _add(out, layer.res_fc(h_dst).view(len(h_dst), -1, dim))
    if layer.has_explicit_bias:
        out = _add(out, layer.bias.view(1, heads, dim))
    return layer.activation(out) if layer.activation else out


def _add(out: Tensor, more: Tensor) -> Tensor:
    """Their sum, in place of ``out``, which nobody has seen and attention does not keep."""
    return out.add_(more) if torch.result_type(out, more) == out.dtype else out + more


def _linear(fc: Any, h: Tensor) -> Tensor:
    """``fc(h)``, with the input gone before its gradient is made where nobody watches ``fc``."""
    if not is_plain(fc, nn.Linear) or h.layout is not torch.strided:
        return fc(h)  # type: ignore[no-any-return]
    count_operators((fc, "linear"))
    return products(h, (fc.weight,), fc.bias)[0]


def _per_head(attn_1HD: Tensor) -> Tensor:
    """``(H, H * D)``: what gives each head's score of ``(n, H * D)`` rows as a product, zero for the other heads.

    A product reads the rows once; multiplied and summed step by step they would be written once more, and twice in
    backward.
    """
    heads = attn_1HD.shape[1]
    eye = torch.eye(heads, dtype=attn_1HD.dtype, device=attn_1HD.device)
    return (eye[:, :, None] * attn_1HD).flatten(1)


def _gatv2_forward(layer: Any, graph: ShardGraph, feat: Any, interceptor: Interceptor) -> Tensor:
    """`GATv2Conv.forward` around one operator."""
    heads, dim = layer._num_heads, layer._out_feats
    if isinstance(feat, tuple):
        h_src, h_dst = layer.feat_drop(feat[0]), layer.feat_drop(feat[1])
    else:
        h_src = h_dst = layer.feat_drop(feat)
    feat_src = _linear(layer.fc_src, h_src).view(-1, heads, dim)
    if layer.share_weights and not isinstance(feat, tuple):
        feat_dst = feat_src
    else:
        feat_dst = _linear(layer.fc_dst, h_dst).view(-1, heads, dim)

    def attend(structure: Structure, feat_src_L: Tensor, dropout: AttentionDropout | None) -> Tensor:
        attn_HD = layer.attn[0]
        return gatv2_attention(structure, feat_src_L, feat_dst, attn_HD, layer.leaky_relu.negative_slope, dropout)

    out = _attention(layer, graph, interceptor, feat_src, attend)
    if layer.res_fc is not None:
        out = _add(out, layer.res_fc(h_dst).view(len(h_dst), -1, dim))
    return layer.activation(out) if layer.activation else out


def _attention(
    layer: Any, graph: ShardGraph, interceptor: Interceptor, feat_src: Tensor, attend: Callable[..., Tensor]
) -> Tensor:
    """Run ``attend`` as the layer's ``spmm``: the chain brings halo rows, and sees one operator in place of four."""
    index = graph.index
    for kind in ("sddmm", "edge_softmax"):
        interceptor.skip(kind)
    name = interceptor.name_inside(layer.attn_drop, "dropout")
    dropout = None
    if layer.attn_drop.training and layer.attn_drop.p > 0:
        dropout = AttentionDropout(layer.attn_drop.p, interceptor.random_key(name), index.edge_rows.source)

    def run(structure: Structure, feat_src_L: Tensor, _: None, **attrs: Any) -> Tensor:
        return attend(structure, feat_src_L, dropout)

    attrs = {"op": "attention", "reduce": "sum", "plan": index.plan}
    out: Tensor = interceptor.call("spmm", index.structure, (feat_src, None), attrs, run)
    return tag(out, index.node_rows)
