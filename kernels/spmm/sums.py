"""Autograd around the kernel that sums over in-edges on CPUs, and when it is used in place of DGL's."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from nugnn.kernels._jit import row_tasks
from nugnn.kernels.arrays import as_array, empty_rows
from nugnn.kernels.operator import Operator
from nugnn.kernels.structure import Structure, integer_dtype

FEWEST_BYTES = 32 << 20
"""Features gathered in one call. Below, DGL's kernel takes some milliseconds, and numba need not be loaded."""
_AHEAD_BYTES = 16 << 10
"""Features between the edge that is added and the one that is prefetched: half of a first-level cache of 32 KiB."""
_MOST_AHEAD = 256
_CACHED_BYTES = 2 << 20
"""Of an operand that is read without prefetches: it lies in the second-level cache."""
_COLUMNS_PER_LINE = 16


def serves(structure: Structure, u: Tensor, e: Tensor | None) -> bool:
    """Whether the kernel here computes a sum of ``u``, or of its products with ``e``, and is worth it.

    It has one weight for an edge, or one for each stretch of columns that the last dimension of ``u`` makes.

    Args:
        structure: With edges and destinations.
        u: ``(L, ...)`` contiguous, with at least one feature.
        e: ``(E, ...)`` aligned with ``u``; None for ones.
    """
    row_bytes = math.prod(u.shape[1:]) * u.element_size()
    if u.device.type != "cpu" or structure.num_edges * row_bytes < FEWEST_BYTES:
        return False
    if e is None or math.prod(e.shape[1:]) == 1:
        return True
    return e.dim() > 2 and e.shape[1:] == (*u.shape[1:-1], 1)


def vector_sum(
    structure: Structure,
    u: Tensor,
    e: Tensor | None = None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
) -> Tensor:
    """``y[v] = dst_scale[v] * sum over in-edges (u -> v) of e * (src_scale[u] * x[u])``, edge by edge in CSC order.

    Args:
        structure: On the CPU, with edges and destinations.
        u: ``(L, ...)`` contiguous, float32 or float64, at least one feature.
        e: ``(E, ...)`` contiguous, of the type of ``u``, as `serves` says.
        src_scale: ``(L,)`` of the type of ``u``; no gradient goes to it.
        dst_scale: ``(N,)`` likewise.

    Returns:
        ``(N, ...)``, differentiable in ``u`` and ``e``.
    """
    result: Tensor = _VectorSum.apply(structure, False, u, e, src_scale, dst_scale)
    return result


@dataclass(frozen=True, eq=False)
class _Lists:
    """Edges by the row they are added to: ``indptr``, the row they read, and their number (None: the position)."""

    indptr: np.ndarray
    indices: np.ndarray
    entries: np.ndarray | None = None


_lists: WeakKeyDictionary[Structure, dict[tuple[bool, bool], _Lists]] = WeakKeyDictionary()


def _lists_of(structure: Structure, is_reversed: bool, has_weights: bool) -> _Lists:
    """In-lists, or out-lists made once for each structure; with edge numbers only where weights need them."""
    known = _lists.setdefault(structure, {})
    if not is_reversed:
        if (False, False) not in known:
            indptr, indices = (x.contiguous().numpy() for x in (structure.indptr, structure.indices))
            known[False, False] = _Lists(indptr, indices)
        return known[False, False]
    if (True, True) in known:
        whole = known[True, True]
        return whole if has_weights else _Lists(whole.indptr, whole.indices)
    if (True, has_weights) not in known:
        known[True, has_weights] = _out_lists(structure, has_weights)
        if has_weights:
            known.pop((True, False), None)
    return known[True, has_weights]


def _out_lists(structure: Structure, has_weights: bool) -> _Lists:
    from nugnn.kernels.spmm.vector_sums import by_source

    counts = torch.bincount(structure.indices, minlength=structure.num_src)
    indptr = np.zeros(structure.num_src + 1, np.int64)
    np.cumsum(counts.numpy(), out=indptr[1:])
    destinations = torch.empty(structure.num_edges, dtype=integer_dtype(structure.num_dst)).numpy()
    num_entries = structure.num_edges if has_weights else 0
    entries = torch.empty(num_entries, dtype=integer_dtype(structure.num_edges)).numpy()
    lists = _lists_of(structure, False, False)
    by_source(lists.indptr, lists.indices, indptr[:-1].copy(), destinations, entries)
    return _Lists(indptr, destinations, entries if has_weights else None)


class _VectorSum(Operator):
    """Sums in the direction of the edges or against it; each is the other's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        structure: Structure,
        is_reversed: bool,
        u: Tensor,
        e: Tensor | None,
        src_scale: Tensor | None,
        dst_scale: Tensor | None,
    ) -> Tensor:
        from nugnn.kernels.spmm.vector_sums import vector_sums

        lists = _lists_of(structure, is_reversed, e is not None)
        num_columns = math.prod(u.shape[1:])
        num_weights = 1 if e is None else math.prod(e.shape[1:])
        ahead_bytes = _AHEAD_BYTES if u.numel() * u.element_size() > _CACHED_BYTES else 0
        out = empty_rows((len(lists.indptr) - 1, *u.shape[1:]), u.dtype)
        is_ragged = num_columns * u.element_size() % 64 != 0 or u.data_ptr() % 64 != 0
        vector_sums(
            row_tasks(lists.indptr, torch.get_num_threads()),
            lists.indptr,
            lists.indices,
            _flat(u),
            blocks_of(num_weights, num_columns // num_weights, u.element_size(), _pass_bytes(), ahead_bytes),
            int(is_ragged),
            None if e is None else _flat(e),
            num_weights,
            lists.entries,
            None if src_scale is None else _flat(src_scale),
            _flat(u[:0] if dst_scale is None else dst_scale),
            _flat(out),
        )
        ctx.structure, ctx.is_reversed, ctx.scales = structure, is_reversed, (src_scale, dst_scale)
        ctx.save_for_backward(u if ctx.needs_input_grad[3] else None, e)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        u, e = ctx.saved_tensors
        src_scale, dst_scale = ctx.scales
        grad_u = grad_e = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[2]:
            grad_u = _VectorSum.apply(ctx.structure, not ctx.is_reversed, grad, e, dst_scale, src_scale)
        if ctx.needs_input_grad[3]:
            from nugnn.kernels.sddmm import sddmm

            heads = (math.prod(e.shape[1:]), -1)
            read, added = (_scaled(x, s).view(len(x), *heads) for x, s in ((u, src_scale), (grad, dst_scale)))
            ends = (added, read) if ctx.is_reversed else (read, added)
            grad_e = sddmm(ctx.structure, "dot", *ends, "u", "v").view(e.shape)
        return None, None, grad_u, grad_e, None, None


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale.view(-1, *[1] * (x.dim() - 1))


def _flat(x: Tensor) -> np.ndarray:
    return as_array(x.detach().view(-1))


@functools.cache
def blocks_of(num_heads: int, head_columns: int, itemsize: int, pass_bytes: int, ahead_bytes: int) -> np.ndarray:
    """The passes over the edges: of each, how its columns lie in two vectors.

    The vectors have a power of 2 of values and overlap where the columns are no multiple of it: those are added twice,
    to the same sums, which costs less than a mask or a vector of their own.

    Args:
        num_heads: Stretches of columns with a weight of their own.
        head_columns: Of each, at least 1.
        itemsize: Bytes of a value, 4 or 8.
        pass_bytes: What a pass reads of a row at most.
        ahead_bytes: What lies between the edge that is added and the one that is prefetched; 0 for no prefetches.

    Returns:
        ``(passes, 5)`` int64: lanes of a vector, first column of either, column of the weight, edges to look ahead.
    """
    most = pass_bytes // itemsize
    num_passes = -(-head_columns // most)
    width = -(-head_columns // num_passes)
    if num_passes > 1:
        width = -(-width // _COLUMNS_PER_LINE) * _COLUMNS_PER_LINE
    rows = []
    for head in range(num_heads):
        for first in range(0, head_columns, width):
            columns = min(width, head_columns - first)
            lanes = 1 << max(0, (columns - 1).bit_length() - 1)
            begin = head * head_columns + first
            ahead = min(_MOST_AHEAD, ahead_bytes // (columns * itemsize))
            rows.append((lanes, begin, begin + columns - lanes, head, ahead))
    return np.array(rows, np.int64)


@functools.cache
def _pass_bytes() -> int:
    """Two sums of half of this stay in registers: 32 of 64 bytes with AVX-512, else 16 or more of 16 or 32 bytes."""
    from llvmlite import binding

    return 512 if binding.get_host_cpu_features().get("avx512f") else 256
