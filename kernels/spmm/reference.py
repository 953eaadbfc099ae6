"""Aggregation over in-edges in plain PyTorch: what the fast kernels must equal, for any dtype and device."""

from __future__ import annotations

import torch
from torch import Tensor

from nugnn.kernels.sddmm.reference import sddmm_reference
from nugnn.kernels.structure import Structure


def spmm_reference(structure: Structure, op: str, reduce: str, u: Tensor | None, e: Tensor | None) -> Tensor:
    """``y[v] = reduce over in-edges (u -> v) of op(u, e)``, differentiable; max and min choose the first of equals.

    Destinations without in-edges get 0 for sum and for integers and bool; ``-inf`` for max and ``+inf`` for min.
    """
    message = sddmm_reference(structure, op, u, e, "u", "e")
    dst = structure.dst.to(message.device, torch.int64)
    shape = (structure.num_dst, *message.shape[1:])
    if reduce == "sum":
        return message.new_zeros(shape).index_add(0, dst, message)
    winner = _first_extreme(dst, message, shape, reduce)
    without = winner == structure.num_edges
    empty = (-torch.inf if reduce == "max" else torch.inf) if message.is_floating_point() else 0
    if structure.num_edges == 0:
        # an empty gather keeps the result in the graph of the operands
        return message.new_full(shape, empty).index_add(0, dst, message)
    return message.gather(0, winner.masked_fill(without, 0)).masked_fill(without, empty)


def _first_extreme(dst: Tensor, message: Tensor, shape: tuple[int, ...], reduce: str) -> Tensor:
    """``(N, ...)`` position of the first edge with the extreme message (NaN above all), E where there is no edge."""
    plain = message.detach()
    plain = plain.to(torch.uint8) if plain.dtype == torch.bool else plain
    where = dst.view(-1, *[1] * (plain.dim() - 1)).expand(plain.shape)
    start = plain.new_zeros(shape)
    extreme = start.scatter_reduce(0, where, plain, "amax" if reduce == "max" else "amin", include_self=False)
    hit = (plain == extreme[dst]) | plain.isnan()
    num_edges = len(plain)
    position = torch.arange(num_edges, device=plain.device).view(-1, *[1] * (plain.dim() - 1))
    candidates = torch.where(hit, position, num_edges)
    return torch.full(shape, num_edges, device=plain.device).scatter_reduce(0, where, candidates, "amin")
