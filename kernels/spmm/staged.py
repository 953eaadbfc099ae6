"""Sums over in-edges in stages: the edges whose sources are here first, the others once their rows have come.

Without autograd; the stages of a 16-bit sum pass float32 on, so that the whole is rounded once, as in one stage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nugnn.kernels.padded import whole_rows
from nugnn.kernels.spmm import runs_triton, spmm_sum
from nugnn.kernels.structure import Structure


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which rows of ``dtype`` are summed."""
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def add_sum(
    structure: Structure,
    x: Tensor,
    *,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
    in_place: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``add_to[v] + dst_scale[v] * sum over in-edges (u -> v) of src_scale[u] * x[u]``, rounded once.

    Args:
        structure: In-edges grouped by destination, on the device of ``x``.
        x: ``(L, ...)`` source rows, floating.
        src_scale: ``(L,)``; None for ones.
        dst_scale: ``(N,)``; None for ones.
        add_to: ``(N, ...)`` with contiguous rows, in the type of ``x`` or of its sums; None for zeros.
        in_place: Whether ``add_to`` may be overwritten, which saves memory where it has the type of the result.
        dtype: Of the result, that of ``x`` or its :func:`accumulator_dtype`; that of ``x`` when None.

    Returns:
        ``(N, ...)``.
    """
    dtype = dtype or x.dtype
    if not runs_triton(structure, x):
        out = spmm_sum(structure, x.to(accumulator_dtype(x.dtype)), src_scale=src_scale, dst_scale=dst_scale)
        return (out if add_to is None else out.add_(add_to)).to(dtype)
    from nugnn.kernels.spmm.gpu_aggregate import aggregate_rows, in_edges

    rows, base = (y if y is None or y.dim() == 2 else y.reshape(len(y), -1) for y in (x, add_to))
    assert rows is not None
    out, _ = aggregate_rows(
        in_edges(structure), whole_rows(rows), 1, out_dtype=dtype, src_scale=src_scale, dst_scale=dst_scale,
        add_to=base, in_place=in_place and base is not None and base.dtype == dtype,
    )  # fmt: skip
    return out if x.dim() == 2 else out.view(structure.num_dst, *x.shape[1:])
