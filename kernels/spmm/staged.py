"""Sums over in-edges in stages: the edges whose sources are here first, the others once their rows have come.

Without autograd; the stages of a 16-bit sum pass float32 on, so that the whole is rounded once, as in one stage.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    initial: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``initial[v] + dst_scale[v] * sum over in-edges (u -> v) of src_scale[u] * x[u]``, rounded once.

    Args:
        structure: In-edges grouped by destination, on the device of ``x``.
        x: ``(L, ...)`` source rows, floating.
        src_scale: ``(L,)``; None for ones.
        dst_scale: ``(N,)``; None for ones.
        initial: ``(N, ...)`` contiguous, in :func:`accumulator_dtype`; may be overwritten. None for zeros.
        dtype: Of the result, that of ``x`` or its :func:`accumulator_dtype`; that of ``x`` when None.

    Returns:
        ``(N, ...)``.
    """
    dtype = dtype or x.dtype
    if not runs_triton(structure, x):
        wide = x.to(accumulator_dtype(x.dtype))
        out = spmm_sum(structure, wide, src_scale=src_scale, dst_scale=dst_scale)
        return (out if initial is None else initial.add_(out)).to(dtype)
    from nugnn.kernels.spmm.gpu_aggregate import aggregate_rows, in_edges

    out, _ = aggregate_rows(
        in_edges(structure), x.reshape(len(x), -1).contiguous(), 1, out_dtype=dtype, src_scale=src_scale,
        dst_scale=dst_scale, initial=None if initial is None else initial.view(len(initial), -1),
    )  # fmt: skip
    return out.view(structure.num_dst, *x.shape[1:])
