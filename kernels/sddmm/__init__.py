"""One value per edge from the rows at its ends, on DGL's CPU kernels or in Triton."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from nugnn.kernels.broadcast import BINARY_OPS, COPY_OPS, align, broadcast_features, check_pair, check_rows
from nugnn.kernels.sddmm.reference import combine, sddmm_reference
from nugnn.kernels.structure import Structure

__all__ = ["sddmm"]

_OPS = (*BINARY_OPS, "dot", *COPY_OPS)
_WIDE = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)


def sddmm(
    structure: Structure, op: str, lhs: Tensor | None, rhs: Tensor | None, lhs_target: str = "u", rhs_target: str = "v"
) -> Tensor:
    """``s[e] = op(lhs row of e, rhs row of e)``.

    Feature shapes of a binary ``op`` broadcast from the right, as in ``dgl.ops.gsddmm``; ``dot`` sums the last
    dimension, which must agree, and leaves it as 1. bfloat16 and float16 are computed in float32 and rounded once;
    integers and bool pass ``copy_lhs`` and ``copy_rhs`` unchanged. DGL's kernels on the CPU, Triton on CUDA, where
    gradients are sums in a fixed order; the plain PyTorch definition elsewhere, and for integers.

    Args:
        structure: In-edges grouped by destination; the result is in its edge order.
        op: ``add``, ``sub``, ``mul``, ``div``, ``dot``, ``copy_lhs`` or ``copy_rhs``.
        lhs: Rows of ``lhs_target``; None for ``copy_rhs``.
        rhs: Rows of ``rhs_target``; None for ``copy_lhs``.
        lhs_target: ``u`` (source rows, L), ``v`` (destination rows, N) or ``e`` (edge rows, E).
        rhs_target: The same for ``rhs``.

    Returns:
        ``(E, ...)`` in the dtype of the operands; differentiable in both.

    Raises:
        ValueError: Unknown ``op`` or target, a missing operand, row counts, dtypes or feature shapes that do not fit.
    """
    lhs, rhs = _checked(structure, op, lhs, rhs, lhs_target, rhs_target)
    if (op == "copy_lhs" and lhs_target == "e") or (op == "copy_rhs" and rhs_target == "e"):
        copied = lhs if lhs is not None else rhs
        assert copied is not None
        return copied
    if lhs is not None and rhs is not None and lhs_target == rhs_target:
        # both ends are the same row: combine rows first, of which there are fewer than edges
        return sddmm(structure, "copy_lhs", combine(op, lhs, rhs), None, lhs_target, rhs_target)
    given = [x for x in (lhs, rhs) if x is not None]
    dtype = given[0].dtype
    if _on_gpu(given):
        from nugnn.kernels.sddmm.gpu import sddmm_triton

        return sddmm_triton(structure, op, lhs, rhs, lhs_target, rhs_target)
    if _plain(structure, given):
        return sddmm_reference(structure, op, lhs, rhs, lhs_target, rhs_target)
    if dtype in _HALF:
        return _fast(structure, op, _float(lhs), _float(rhs), lhs_target, rhs_target).to(dtype)
    return _fast(structure, op, lhs, rhs, lhs_target, rhs_target)


def _fast(
    structure: Structure, op: str, lhs: Tensor | None, rhs: Tensor | None, lhs_target: str, rhs_target: str
) -> Tensor:
    from dgl.backend.pytorch import sparse

    from nugnn.kernels.spmm.dgl_index import graph_index

    result: Tensor = sparse.gsddmm(graph_index(structure), op, lhs, rhs, lhs_target, rhs_target)
    return result


def _checked(
    structure: Structure, op: str, lhs: Tensor | None, rhs: Tensor | None, lhs_target: str, rhs_target: str
) -> tuple[Tensor | None, Tensor | None]:
    """The operands that ``op`` uses, contiguous and aligned."""
    if op not in _OPS:
        raise ValueError(f"sddmm: op is {op!r}, must be one of {', '.join(_OPS)}")
    for target in (lhs_target, rhs_target):
        if target not in ("u", "v", "e"):
            raise ValueError(f"sddmm: target is {target!r}, must be u, v or e")
    if op == "copy_lhs":
        rhs = None
    if op == "copy_rhs":
        lhs = None
    for operand, side, target, unused in ((lhs, "lhs", lhs_target, "copy_rhs"), (rhs, "rhs", rhs_target, "copy_lhs")):
        if operand is not None:
            check_rows("sddmm", structure, operand, target)
        elif op != unused:
            raise ValueError(f"sddmm: op {op!r} needs operand {side}")
    if lhs is not None and rhs is not None:
        check_pair("sddmm", op, lhs, rhs)
        lhs, rhs = align(lhs, rhs)
        broadcast_features("sddmm", lhs, rhs)
        if op == "dot" and lhs.shape[-1] != rhs.shape[-1] and lhs.dim() > 1:
            raise ValueError(f"sddmm: dot needs equal last dimensions, got {tuple(lhs.shape)} and {tuple(rhs.shape)}")
    return (None if lhs is None else lhs.contiguous()), (None if rhs is None else rhs.contiguous())


def _on_gpu(given: list[Tensor]) -> bool:
    """Whether the Triton kernels serve."""
    first = given[0]
    return first.device.type == "cuda" and first.dtype in _WIDE + _HALF and find_spec("triton") is not None


def _plain(structure: Structure, given: list[Tensor]) -> bool:
    """Whether the plain definition serves: nothing to compute, a type without a kernel, another device."""
    first = given[0]
    empty = structure.num_edges == 0 or any(x.numel() == 0 for x in given)
    return empty or first.dtype not in _WIDE + _HALF or first.device.type != "cpu"


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()
