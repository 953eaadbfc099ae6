"""Attention over in-edges in plain PyTorch: what the fused kernels must equal, for any dtype and device.

Shape suffixes: N inner (destination) rows, L local (source) rows, E edges, H heads, D features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.dropout.reference import dropout_rows_reference
from nugnn.kernels.edge_softmax.reference import edge_softmax_reference
from nugnn.kernels.philox import RandomKey
from nugnn.kernels.sddmm.reference import sddmm_reference
from nugnn.kernels.spmm.reference import spmm_reference
from nugnn.kernels.structure import Structure


def gat_attention_reference(
    structure: Structure,
    feat_src: Tensor,
    el: Tensor,
    er: Tensor,
    negative_slope: float,
    p: float = 0.0,
    key: RandomKey | None = None,
    edge_ids: Tensor | None = None,
) -> Tensor:
    """``y[v] = sum over e = (u -> v) of dropout(softmax_e(leaky_relu(el[u] + er[v]))) * feat_src[u]``."""
    scores_EH = F.leaky_relu(sddmm_reference(structure, "add", el, er, "u", "v"), negative_slope)
    return _weighted_sum(structure, feat_src, scores_EH, p, key, edge_ids)


def gatv2_attention_reference(
    structure: Structure,
    feat_src: Tensor,
    feat_dst: Tensor,
    attn: Tensor,
    negative_slope: float,
    p: float = 0.0,
    key: RandomKey | None = None,
    edge_ids: Tensor | None = None,
) -> Tensor:
    """The same with the score ``sum over d of attn[h, d] * leaky_relu(feat_src[u] + feat_dst[v])[h, d]``."""
    hidden_EHD = F.leaky_relu(sddmm_reference(structure, "add", feat_src, feat_dst, "u", "v"), negative_slope)
    return _weighted_sum(structure, feat_src, (hidden_EHD * attn).sum(-1), p, key, edge_ids)


def _weighted_sum(
    structure: Structure, feat_src: Tensor, scores_EH: Tensor, p: float, key: RandomKey | None, edge_ids: Tensor | None
) -> Tensor:
    weights = edge_softmax_reference(structure, scores_EH)[..., None]
    if p > 0:
        assert key is not None
        ids = torch.arange(structure.num_edges, device=weights.device) if edge_ids is None else edge_ids
        weights = dropout_rows_reference(weights, p, key, ids)
    return spmm_reference(structure, "mul", "sum", feat_src, weights)
