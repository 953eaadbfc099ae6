"""Softmax over the in-edges of each destination in plain PyTorch: what the fast kernels must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from nugnn.kernels.structure import Structure


def edge_softmax_reference(structure: Structure, scores: Tensor) -> Tensor:
    """``exp(s[e] - m[v]) / sum over in-edges of exp(s - m[v])``; zeros if all scores are ``-inf``."""
    dst = structure.dst.to(scores.device, torch.int64)
    wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    shape = (structure.num_dst, *scores.shape[1:])
    where = dst.view(-1, *[1] * (scores.dim() - 1)).expand(scores.shape)
    with torch.no_grad():
        largest = wide.new_full(shape, -torch.inf).scatter_reduce(0, where, wide, "amax")
        largest = largest.masked_fill(largest == -torch.inf, 0)
    exponentials = torch.exp(wide - largest[dst])
    total = wide.new_zeros(shape).index_add(0, dst, exponentials)
    return (exponentials / total.masked_fill(total == 0, 1)[dst]).to(scores.dtype)
