"""Sums of source rows that come in two tensors: those that are here first, the others when they have come.

Over in-edges in one pass or in a stage for each tensor, for all rows or for some, and back to the sources of either
tensor alone. Without autograd; the stages of a 16-bit sum pass float32 on, so that the whole is rounded once, as in one
pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nugnn.kernels.padded import empty_rows, is_padded, padded_copy, padded_width, whole_rows
from nugnn.kernels.spmm import runs_triton, spmm_sum
from nugnn.kernels.structure import Structure

if TYPE_CHECKING:
    from nugnn.kernels.spmm.gpu_aggregate import Edges


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
    from nugnn.kernels.spmm.gpu_aggregate import in_edges

    place = _matrix(add_to) if in_place and add_to is not None and add_to.dtype == dtype else None
    return _aggregated(
        in_edges(structure), x, src_scale=src_scale, dst_scale=dst_scale, add_to=add_to, out=place, dtype=dtype
    )


def _aggregated(
    edges: Edges,
    x: Tensor,
    rest: Tensor | None = None,
    *,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    add_to: Tensor | None,
    out: Tensor | None = None,
    first_row: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    from nugnn.kernels.spmm.gpu_aggregate import aggregate_rows

    rows, others = whole_rows(_matrix(x)), None if rest is None else _with_padding_known(whole_rows(_matrix(rest)))
    if others is not None:
        rows = _with_padding_known(rows)
    out, _ = aggregate_rows(
        edges, rows, 1, rest=others, out_dtype=dtype or x.dtype, src_scale=src_scale, dst_scale=dst_scale,
        add_to=None if add_to is None else _matrix(add_to), out=out, first_row=first_row,
    )  # fmt: skip
    return out if x.dim() == 2 else out.view(len(out), *x.shape[1:])


def _matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(len(x), x.shape[1:].numel())  # of no rows -1 is not known


@torch.no_grad()
def sum_of_both(
    structure: Structure,
    first: Tensor,
    rest: Tensor,
    *,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """:func:`add_sum` of ``torch.cat([first, rest])`` in one pass; the same bits as `nugnn.kernels.spmm.spmm_sum` has.

    Args:
        structure: In-edges from ``len(first) + len(rest)`` sources.
        first: Source rows, floating.
        rest: The others.
        src_scale: One for each source row; None for ones.
        dst_scale: ``(N,)``; None for ones.
        add_to: ``(N, ...)`` with contiguous rows, in the type of ``first``; None for zeros. **A GPU adds a matrix in
            place.**

    Returns:
        ``(N, ...)``: ``add_to`` itself where that was added to in place.
    """
    is_in_place = add_to is not None and add_to.dim() == 2
    if len(rest) == 0 or not runs_triton(structure, first):
        x = torch.cat([first, rest]) if len(rest) else first
        return add_sum(structure, x, src_scale=src_scale, dst_scale=dst_scale, add_to=add_to, in_place=is_in_place)
    from nugnn.kernels.spmm.gpu_aggregate import in_edges

    out = add_to if is_in_place else None
    return _aggregated(
        in_edges(structure), first, rest, src_scale=src_scale, dst_scale=dst_scale, add_to=add_to, out=out
    )


@torch.no_grad()
def begin_sum(
    structure: Structure,
    first: Tensor,
    num_rows: int,
    *,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """The first stage of `sum_of_both`: edges from ``first`` to the first ``num_rows`` rows of the result.

    The other arguments are those of `sum_of_both`; ``add_to`` is read alone.

    Returns:
        ``(num_rows, ...)`` in the type in which rows are summed, for `finish_sum`.
    """
    part = structure.split(len(first), num_rows).first
    src_scale, dst_scale, add_to = (
        _leading(src_scale, len(first)),
        _leading(dst_scale, num_rows),
        _leading(add_to, num_rows),
    )
    wide = accumulator_dtype(first.dtype)
    return add_sum(part, first, src_scale=src_scale, dst_scale=dst_scale, add_to=add_to, dtype=wide)


@torch.no_grad()
def finish_sum(
    structure: Structure,
    begun: Tensor,
    first: Tensor,
    rest: Tensor,
    *,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """`sum_of_both`, to rounding, from what `begin_sum` made, which is overwritten; the arguments are those of both.

    Returns:
        ``(N, ...)``: ``add_to`` itself where that was added to in place, as a GPU does with a matrix if rows are left
        that were not begun.
    """
    num_begun, num_rows = len(begun), structure.num_dst
    end = None if src_scale is None else src_scale[len(first) :]
    part = structure.split(len(first), num_begun).rest
    if num_begun == num_rows:
        return add_sum(part, rest, src_scale=end, dst_scale=dst_scale, add_to=begun, in_place=True, dtype=first.dtype)
    of_begun = _leading(dst_scale, num_begun)
    others = None if dst_scale is None else dst_scale[num_begun:]
    base = None if add_to is None else add_to[num_begun:]
    if not runs_triton(structure, first):
        done = add_sum(part, rest, src_scale=end, dst_scale=of_begun, add_to=begun, in_place=True, dtype=first.dtype)
        begin = structure.indptr[num_begun]
        left = Structure(structure.num_src, structure.indptr[num_begun:] - begin, structure.indices[int(begin) :])
        x = torch.cat([first, rest])
        return torch.cat([done, add_sum(left, x, src_scale=src_scale, dst_scale=others, add_to=base)])
    from nugnn.kernels.spmm.gpu_aggregate import Edges, in_edges

    x = _with_padding_known(whole_rows(_matrix(first)))
    if add_to is not None and add_to.dim() == 2:
        out = add_to
    elif is_padded(x):
        out = empty_rows(num_rows, x.shape[1], x.dtype, x.device)
    else:
        out = x.new_empty(num_rows, x.shape[1])
    _aggregated(in_edges(part), _matrix(rest), src_scale=end, dst_scale=of_begun, add_to=begun, out=out)
    edges = Edges(structure.indptr, structure.indices, None, (num_begun, num_rows))
    _aggregated(
        edges, x, _matrix(rest), src_scale=src_scale, dst_scale=others, add_to=base, out=out, first_row=num_begun
    )
    return out if first.dim() == 2 else out.view(num_rows, *first.shape[1:])


def _leading(x: Tensor | None, num_rows: int) -> Tensor | None:
    return None if x is None else x[:num_rows]


@torch.no_grad()
def sum_to_sources(
    structure: Structure,
    y: Tensor,
    num_first: int,
    *,
    of_rest: bool,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """``add_to[u] + src_scale[u] * sum over out-edges (u -> v) of dst_scale[v] * y[v]`` for some of the sources.

    On a GPU each row is the same bits as in a sum for all sources.

    Args:
        structure: In-edges grouped by destination, on the device of ``y``.
        y: ``(N, ...)``, floating.
        num_first: How many sources are the first ones.
        of_rest: Whether the result is of the other sources, else of the first ones.
        src_scale: A factor for each row of the result; None for ones.
        dst_scale: ``(N,)``; None for ones.
        add_to: Of the shape and type of the result, with contiguous rows; None for zeros.

    Returns:
        ``(num_first, ...)``, or a row for each of the others.
    """
    rows = (num_first, structure.num_src) if of_rest else (0, num_first)
    if rows[0] == rows[1] or not runs_triton(structure, y):
        part = structure.reversed_split(num_first)[of_rest]
        return add_sum(part, y, src_scale=dst_scale, dst_scale=src_scale, add_to=add_to)
    from nugnn.kernels.spmm.gpu_aggregate import out_edges

    edges = out_edges(structure, has_edge_rows=False, rows=rows)
    return _aggregated(edges, y, src_scale=dst_scale, dst_scale=src_scale, add_to=add_to)


def prepare_sum_to_sources(structure: Structure, x: Tensor) -> None:
    """Make now what :func:`sum_to_sources` needs on a GPU: in backward, more is alive."""
    if runs_triton(structure, x):
        _ = structure.transposed


def _with_padding_known(x: Tensor) -> Tensor:
    return x if is_padded(x) or padded_width(x.shape[1], x.element_size()) == x.shape[1] else padded_copy(x)
