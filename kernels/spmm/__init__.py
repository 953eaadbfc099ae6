"""Aggregate messages over the in-edges of each destination: DGL's kernels and numba on CPUs, Triton on GPUs."""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch
from torch import Tensor

from nugnn.kernels.broadcast import BINARY_OPS, COPY_OPS, align, broadcast_features, check_pair, check_rows
from nugnn.kernels.padded import whole_rows
from nugnn.kernels.spmm.reference import spmm_reference
from nugnn.kernels.structure import Structure

__all__ = ["runs_triton", "spmm", "spmm_sum"]

_WIDE = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)
_logger = logging.getLogger(__name__)


def spmm(structure: Structure, op: str, reduce: str, u: Tensor | None, e: Tensor | None) -> Tensor:
    """``y[v] = reduce over in-edges (u -> v) of op(u, e)``.

    Feature shapes of a binary ``op`` broadcast from the right, as in ``dgl.ops.gspmm``. Among equal messages max and
    min choose the first edge in CSC order, and the gradient goes there; NaN is above all. Destinations without
    in-edges get 0 from sum; from max ``-inf`` and from min ``+inf``, which ``update_all`` replaces by 0 (so does
    DGL's own kernel), and 0 for integers and bool; no gradient leaves from them.

    float32 and float64 are summed in their own type; bfloat16 and float16 are converted to float32 and the result is
    rounded once. Integers keep their type exactly (sums wrap as in torch); bool can be copied and compared only.
    The plain PyTorch definition runs for integers, on devices other than CPU and CUDA, and on CUDA without Triton.
    A structure on another device than the operands is copied to theirs, once.

    Args:
        structure: In-edges grouped by destination.
        op: ``add``, ``sub``, ``mul``, ``div``, ``copy_lhs`` (u alone) or ``copy_rhs`` (e alone).
        reduce: ``sum``, ``max`` or ``min``.
        u: ``(L, ...)`` source rows; None for ``copy_rhs``.
        e: ``(E, ...)`` edge rows; None for ``copy_lhs``.

    Returns:
        ``(N, ...)`` in the dtype of the operands; differentiable in both.

    Raises:
        ValueError: Unknown ``op`` or ``reduce``, a missing operand, row counts, dtypes or feature shapes that do not
            fit, a sum of bool.
    """
    u, e = _checked(structure, op, reduce, u, e)
    given = [x for x in (u, e) if x is not None]
    dtype = given[0].dtype
    if _plain(structure, given):
        return spmm_reference(structure.to(given[0].device), op, reduce, u, e)
    if runs_triton(structure, *given):
        from nugnn.kernels.spmm.gpu import aggregate

        return aggregate(structure.to(given[0].device), op, reduce, u, e)
    if dtype in _HALF:
        _log_half_once(dtype)
        return _fast(structure, op, reduce, _float(u), _float(e)).to(dtype)
    return _fast(structure, op, reduce, u, e)


def spmm_sum(
    structure: Structure,
    x: Tensor,
    weights: Tensor | None = None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """``y[v] = dst_scale[v] * sum over in-edges (u -> v) of weights[e] * src_scale[u] * x[u] + add_to[v]``.

    On a GPU it is rounded once.

    A mean has ``dst_scale = 1 / in-degree``; symmetric normalisation has both scales. On a GPU they cost no pass of
    their own.

    Args:
        structure: In-edges grouped by destination.
        x: ``(L, ...)`` source rows, floating.
        weights: ``(E, ...)`` in the dtype of ``x``, feature shapes broadcast as in :func:`spmm`; None for ones.
        src_scale: ``(L,)`` floating, no gradient goes to it; None for ones.
        dst_scale: ``(N,)`` floating, no gradient goes to it; None for ones.
        add_to: ``(N, ...)`` of the shape and dtype of the result, each row contiguous; **a GPU adds to it in place**.

    Returns:
        ``(N, ...)`` in the dtype of ``x``; differentiable in ``x``, ``weights`` and ``add_to``. A matrix of padded rows
        (:mod:`nugnn.kernels.padded`) gives padded rows on a GPU.

    Raises:
        ValueError: As :func:`spmm`; a scale has the wrong shape, lies on another device or requires a gradient; ``x``
            is not floating.
    """
    op = "copy_lhs" if weights is None else "mul"
    u, e = _checked(structure, op, "sum", x, weights)
    assert u is not None
    if u.dtype not in _WIDE + _HALF:
        raise ValueError(f"spmm_sum: x is {u.dtype}, must be float16, bfloat16, float32 or float64")
    for scale, name, rows in ((src_scale, "src_scale", structure.num_src), (dst_scale, "dst_scale", structure.num_dst)):
        if scale is None:
            continue
        if scale.shape != (rows,) or scale.device != u.device or not scale.is_floating_point():
            raise ValueError(
                f"spmm_sum: {name} is {scale.dtype} {tuple(scale.shape)} on {scale.device}, must be floating ({rows},) "
                f"on {u.device}"
            )
        if scale.requires_grad:
            raise ValueError(f"spmm_sum: {name} requires a gradient, which is not computed; multiply outside instead")
    _check_sum(structure, u, e, add_to)
    given = [operand for operand in (u, e) if operand is not None]
    if runs_triton(structure, *given):
        from nugnn.kernels.spmm.gpu import aggregate

        source, target = (None if scale is None else scale.contiguous() for scale in (src_scale, dst_scale))
        return aggregate(structure.to(u.device), op, "sum", u, e, source, target, add_to)
    wide = [operand if operand.dtype in _WIDE else operand.float() for operand in given]
    if src_scale is not None:
        wide[0] = wide[0] * _per_row(src_scale, wide[0])
    out = spmm(structure, op, "sum", wide[0], wide[1] if weights is not None else None)
    if dst_scale is not None:
        out = out * _per_row(dst_scale, out)
    if add_to is not None:
        out = out + add_to
    return out.to(u.dtype)


def _check_sum(structure: Structure, u: Tensor, e: Tensor | None, add_to: Tensor | None) -> None:
    """Raises ValueError unless ``add_to`` is None or like the result."""
    if add_to is None:
        return
    features = u.shape[1:] if e is None else torch.broadcast_shapes(u.shape[1:], e.shape[1:])
    shape, rows = (structure.num_dst, *features), add_to.stride()[1:]
    dense = torch.empty(features, device="meta").stride()
    if add_to.shape != shape or add_to.dtype != u.dtype or add_to.device != u.device or rows != dense:
        raise ValueError(
            f"spmm_sum: add_to is {add_to.dtype} {tuple(add_to.shape)} on {add_to.device} with strides "
            f"{add_to.stride()}, must be {u.dtype} {shape} on {u.device}, each row contiguous"
        )


def _per_row(scale: Tensor, like: Tensor) -> Tensor:
    return scale.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def _fast(structure: Structure, op: str, reduce: str, u: Tensor | None, e: Tensor | None) -> Tensor:
    if reduce == "sum":
        from dgl.backend.pytorch import sparse

        from nugnn.kernels.spmm.dgl_index import graph_index

        result: Tensor = sparse.gspmm(graph_index(structure), op, "sum", u, e)
        return result
    from nugnn.kernels.spmm.extreme import spmm_extreme

    if e is not None and op in ("sub", "div"):
        op, e = ("add", -e) if op == "sub" else ("mul", 1.0 / e)
    return spmm_extreme(structure, op, reduce, u, e)


def _checked(
    structure: Structure, op: str, reduce: str, u: Tensor | None, e: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The operands that ``op`` uses, contiguous and aligned."""
    if op not in BINARY_OPS + COPY_OPS:
        raise ValueError(f"spmm: op is {op!r}, must be one of {', '.join(BINARY_OPS + COPY_OPS)}")
    if reduce not in ("sum", "max", "min"):
        raise ValueError(f"spmm: reduce is {reduce!r}, must be sum, max or min")
    if op == "copy_lhs":
        e = None
    if op == "copy_rhs":
        u = None
    for operand, letter, unused in ((u, "u", "copy_rhs"), (e, "e", "copy_lhs")):
        if operand is not None:
            check_rows("spmm", structure, operand, letter)
            if reduce == "sum" and operand.dtype == torch.bool:
                raise ValueError("spmm: a sum of bool has no type; cast to int64 to count, or use max for 'any'")
        elif op != unused:
            raise ValueError(f"spmm: op {op!r} needs operand {letter}")
    if u is not None and e is not None:
        check_pair("spmm", op, u, e)
        u, e = align(u, e)
        broadcast_features("spmm", u, e)
    return _laid_out(u), _laid_out(e)


def _laid_out(x: Tensor | None) -> Tensor | None:
    """As kernels read it: those of a GPU take rows at any distance."""
    if x is None:
        return None
    return whole_rows(x) if runs_in_triton(x) else x.contiguous()


def _plain(structure: Structure, given: list[Tensor]) -> bool:
    """Whether the plain definition serves: nothing to compute, a type without a kernel, another device."""
    first = given[0]
    empty = structure.num_dst == 0 or any(x.numel() == 0 for x in given)
    if empty or first.dtype not in _WIDE + _HALF:
        return True
    return not (first.device.type == "cpu" or runs_in_triton(first))


def runs_triton(structure: Structure, *operands: Tensor) -> bool:
    """Whether the kernels for GPUs serve these operands."""
    return runs_in_triton(operands[0]) and not _plain(structure, list(operands))


def runs_in_triton(x: Tensor) -> bool:
    """Whether ``x`` is where our Triton kernels run."""
    return x.is_cuda and _has_triton()


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


@functools.cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        _logger.warning(
            "Triton is not installed: message passing on GPUs runs in plain PyTorch, slower and with more memory"
        )
    return found


@functools.cache
def _log_half_once(dtype: torch.dtype) -> None:
    _logger.info("message passing of %s on the CPU is computed in float32 and rounded once", dtype)
