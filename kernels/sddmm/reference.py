"""One value per edge from the rows at its ends, in plain PyTorch: what the fast kernels must equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nugnn.kernels.broadcast import align
from nugnn.kernels.structure import Structure

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}


def sddmm_reference(
    structure: Structure, op: str, lhs: Tensor | None, rhs: Tensor | None, lhs_target: str, rhs_target: str
) -> Tensor:
    """``s[e] = op(lhs row of e, rhs row of e)``, differentiable; any dtype and device."""
    if op == "copy_lhs":
        assert lhs is not None
        return _on_edges(structure, lhs, lhs_target)
    assert rhs is not None
    if op == "copy_rhs":
        return _on_edges(structure, rhs, rhs_target)
    assert lhs is not None
    lhs, rhs = align(lhs, rhs)
    return combine(op, _on_edges(structure, lhs, lhs_target), _on_edges(structure, rhs, rhs_target))


def combine(op: str, lhs: Tensor, rhs: Tensor) -> Tensor:
    """Row-wise ``op`` of aligned operands; ``dot`` sums the last dimension and keeps it, or drops it for plain rows."""
    if op == "dot":
        products = lhs * rhs
        # dtype: torch would widen a sum of small integers
        return products.sum(-1, keepdim=True, dtype=products.dtype) if products.dim() > 1 else products
    return _COMBINE[op](lhs, rhs)


def _on_edges(structure: Structure, x: Tensor, target: str) -> Tensor:
    if target == "e":
        return x
    rows = structure.indices if target == "u" else structure.dst
    return x.index_select(0, rows.to(x.device))
