"""Softmax over the in-edges of each destination node, fused, with a backward pass from its output alone."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nugnn.kernels._jit import row_tasks
from nugnn.kernels.arrays import as_array
from nugnn.kernels.edge_softmax.reference import edge_softmax_reference
from nugnn.kernels.operator import Operator
from nugnn.kernels.structure import Structure

__all__ = ["edge_softmax"]

_WIDE = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)


def edge_softmax(structure: Structure, scores: Tensor) -> Tensor:
    """Normalise edge scores over the in-edges of each destination, independently per trailing position.

    The largest score of a destination is subtracted first, so nothing overflows. Where every score of a destination is
    ``-inf`` (fully masked) its weights are zeros and its gradients are zero, not NaN. NaN and ``+inf`` scores give NaN.

    Args:
        structure: In-edges grouped by destination.
        scores: ``(E, ...)`` float32, float64, bfloat16 or float16 (the half types are computed in float32), any
            strides.

    Returns:
        Weights of the shape and dtype of ``scores``, contiguous; they sum to 1 over the in-edges of a destination.

    Raises:
        ValueError: ``scores`` does not have one row per edge, or its dtype is not a floating one above.
    """
    if scores.dim() == 0 or len(scores) != structure.num_edges:
        raise ValueError(
            f"edge_softmax: scores of shape {tuple(scores.shape)} need one row for each of {structure.num_edges} edges"
        )
    if scores.dtype not in _WIDE + _HALF:
        raise ValueError(f"edge_softmax: dtype {scores.dtype} has no softmax; cast the scores to a floating dtype")
    on_gpu = scores.device.type == "cuda" and importlib.util.find_spec("triton") is not None
    if scores.device.type != "cpu" and not on_gpu:
        return edge_softmax_reference(structure, scores)
    if scores.dtype in _HALF and not on_gpu:
        wide: Tensor = _EdgeSoftmax.apply(structure, scores.float())
        return wide.to(scores.dtype)
    result: Tensor = _EdgeSoftmax.apply(structure, scores)
    return result


class _EdgeSoftmax(Operator):
    @staticmethod
    def forward(ctx: Any, structure: Structure, scores: Tensor) -> Tensor:
        ctx.structure = structure
        rows = scores.detach().reshape(len(scores), math.prod(scores.shape[1:])).contiguous()
        if scores.device.type != "cpu":
            from nugnn.kernels.edge_softmax import gpu

            weights = gpu.softmax(structure.indptr, rows).view(scores.shape)
            ctx.save_for_backward(weights)
            return weights
        weights = torch.empty_like(scores, memory_format=torch.contiguous_format)
        if scores.numel():
            from nugnn.kernels.edge_softmax import cpu

            cpu.softmax(*_rows_of_work(structure), as_array(rows), as_array(weights.view(rows.shape)))
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (weights,) = ctx.saved_tensors
        if weights.device.type != "cpu":
            from nugnn.kernels.edge_softmax import gpu

            rows = weights.view(len(weights), math.prod(weights.shape[1:]))
            grad_rows = grad.reshape(rows.shape).contiguous()
            return None, gpu.softmax_backward(ctx.structure.indptr, rows, grad_rows).view(weights.shape)
        out = torch.empty_like(weights)
        if weights.numel():
            from nugnn.kernels.edge_softmax import cpu

            rows = weights.view(len(weights), -1)
            grad_rows = grad.reshape(rows.shape).contiguous()
            cpu.softmax_backward(
                *_rows_of_work(ctx.structure), as_array(rows), as_array(grad_rows), as_array(out.view(rows.shape))
            )
        return None, out


def _rows_of_work(structure: Structure) -> tuple[Any, Any]:
    indptr = structure.indptr.numpy()
    return row_tasks(indptr, torch.get_num_threads()), indptr
