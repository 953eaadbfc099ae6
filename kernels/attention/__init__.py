"""Attention over in-edges as one operator: score, softmax, dropout and weighted sum.

On CUDA the fused kernels run, which write nothing of the size of the edges; elsewhere the same steps one by one, from
the kernels of the neighbouring folders.

Shape suffixes: N inner (destination) rows, L local (source) rows, E edges, H heads, D features of a head.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.dropout import dropout_rows
from nugnn.kernels.dropout.reference import keep_scale, keep_threshold
from nugnn.kernels.edge_softmax import edge_softmax
from nugnn.kernels.operator import Operator
from nugnn.kernels.philox import RandomKey, check_row_ids, gpu_key
from nugnn.kernels.rows import IdRuns
from nugnn.kernels.sddmm import sddmm
from nugnn.kernels.spmm import spmm
from nugnn.kernels.structure import Structure

if TYPE_CHECKING:
    from nugnn.kernels.attention.gpu import DropoutArguments

__all__ = ["AttentionDropout", "gat_attention", "gatv2_attention"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MAX_DIM = 4096
"""Widest head the fused kernels hold; wider ones take the steps one by one."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Dropout of attention weights: the mask that :func:`nugnn.kernels.dropout.dropout_rows` draws for ``(E, H, 1)``.

    Args:
        p: Probability of dropping, in ``[0, 1]``.
        key: Seed, step and stream.
        edge_ids: Place of each edge in the whole graph: ``(E,)`` int64, or runs with one run for each destination row;
            None where edge ``e`` of the structure is edge ``e`` of the whole graph.

    Raises:
        ValueError: ``p`` is out of range.
    """

    p: float
    key: RandomKey
    edge_ids: Tensor | IdRuns | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"AttentionDropout: p is {self.p}, must lie in [0, 1]")

    def ids(self, structure: Structure) -> Tensor:
        """``(E,)`` int64 on the structure's device."""
        device = structure.indptr.device
        if self.edge_ids is None:
            return torch.arange(structure.num_edges, device=device)
        ids = self.edge_ids.tensor() if isinstance(self.edge_ids, IdRuns) else self.edge_ids
        return ids.to(device)


def gat_attention(
    structure: Structure,
    feat_src: Tensor,
    el: Tensor,
    er: Tensor,
    negative_slope: float = 0.2,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """``y[v, h] = sum over e = (u -> v) of dropout(softmax_e(leaky_relu(el[u, h] + er[v, h]))) * feat_src[u, h]``.

    bfloat16 and float16 are computed in float32 and rounded once. A destination without in-edges, or with all scores
    ``-inf``, gets zeros; NaN and ``+inf`` scores give NaN. On CUDA nothing of the size of the edges is made, forward or
    backward, and results do not differ from run to run. The gradient cannot be differentiated again.

    Args:
        structure: In-edges grouped by destination.
        feat_src: ``(L, H, D)`` values of source rows: float32, float64, bfloat16 or float16, any strides.
        el: ``(L, H)`` source scores, of one of these types.
        er: ``(N, H)`` destination scores, likewise.
        negative_slope: Of the leaky rectifier.
        dropout: Of the attention weights; None for none.

    Returns:
        ``(N, H, D)`` in the type that torch promotes the operands to; differentiable in all three.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit.

    Source: Veličković et al., "Graph Attention Networks", ICLR 2018.
    """
    num_heads = _check_features("gat_attention", structure, feat_src)
    _check_like("gat_attention", "el", el, (structure.num_src, num_heads), feat_src)
    _check_like("gat_attention", "er", er, (structure.num_dst, num_heads), feat_src)
    _check_dropout("gat_attention", structure, dropout)
    if _fused(feat_src):
        result: Tensor = _Attention.apply(structure, feat_src, el, er, None, float(negative_slope), dropout)
        return result
    el, er = _promoted(el, er)
    scores_EH = F.leaky_relu(sddmm(structure, "add", el, er, "u", "v"), negative_slope)
    return _weighted_sum(structure, feat_src, scores_EH, dropout)


def gatv2_attention(
    structure: Structure,
    feat_src: Tensor,
    feat_dst: Tensor,
    attn: Tensor,
    negative_slope: float = 0.2,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """The same with the score ``sum over d of attn[h, d] * leaky_relu(feat_src[u, h, d] + feat_dst[v, h, d])``.

    Args:
        structure: In-edges grouped by destination.
        feat_src: ``(L, H, D)`` values of source rows and their side of the score.
        feat_dst: ``(N, H, D)`` the destination's side of the score.
        attn: ``(H, D)``.
        negative_slope: Of the leaky rectifier.
        dropout: Of the attention weights; None for none.

    Returns:
        ``(N, H, D)`` in the type that torch promotes the operands to; differentiable in all three.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit.

    Source: Brody, Alon and Yahav, "How Attentive are Graph Attention Networks?", ICLR 2022.
    """
    num_heads = _check_features("gatv2_attention", structure, feat_src)
    dim = feat_src.shape[2]
    _check_like("gatv2_attention", "feat_dst", feat_dst, (structure.num_dst, num_heads, dim), feat_src)
    _check_like("gatv2_attention", "attn", attn, (num_heads, dim), feat_src)
    _check_dropout("gatv2_attention", structure, dropout)
    if _fused(feat_src):
        result: Tensor = _Attention.apply(structure, feat_src, None, feat_dst, attn, float(negative_slope), dropout)
        return result
    hidden_EHD = F.leaky_relu(sddmm(structure, "add", *_promoted(feat_src, feat_dst), "u", "v"), negative_slope)
    return _weighted_sum(structure, feat_src, (hidden_EHD * attn).sum(-1), dropout)


def _weighted_sum(
    structure: Structure, feat_src: Tensor, scores_EH: Tensor, dropout: AttentionDropout | None
) -> Tensor:
    weights = edge_softmax(structure, scores_EH)[..., None]
    if dropout is not None:
        weights = dropout_rows(weights, dropout.p, dropout.key, dropout.ids(structure))
    return spmm(structure, "mul", "sum", *_promoted(feat_src, weights))


def _promoted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    common = torch.promote_types(a.dtype, b.dtype)
    return a.to(common), b.to(common)


class _Attention(Operator):
    """Keeps its inputs and two numbers per row and head; the output is not needed."""

    @staticmethod
    def forward(
        ctx: Any,
        structure: Structure,
        feat_src: Tensor,
        el: Tensor | None,
        dst_side: Tensor,
        attn: Tensor | None,
        slope: float,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        from nugnn.kernels.attention.gpu import Operands, attention_forward

        inputs = [None if x is None else x.detach().contiguous() for x in (feat_src, el, dst_side, attn)]
        assert inputs[0] is not None and inputs[2] is not None
        operands = Operands(inputs[0], inputs[1], inputs[2], inputs[3], slope)
        out, stats = attention_forward(structure, operands, _dropout_arguments(structure, operands.x, dropout))
        ctx.structure, ctx.slope, ctx.dropout = structure, slope, dropout
        ctx.save_for_backward(stats, *inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor | None, Tensor, Tensor | None, None, None]:
        from nugnn.kernels.attention.gpu import Operands, attention_backward

        stats, feat_src, el, dst_side, attn = ctx.saved_tensors
        operands = Operands(feat_src, el, dst_side, attn, ctx.slope)
        dropout = _dropout_arguments(ctx.structure, operands.x, ctx.dropout)
        grad_x, grad_score, grad_dst, grad_attn = attention_backward(
            ctx.structure, operands, dropout, stats, grad.contiguous()
        )
        return None, grad_x, grad_score, grad_dst, grad_attn, None, None


def _dropout_arguments(structure: Structure, like: Tensor, dropout: AttentionDropout | None) -> DropoutArguments:
    from nugnn.kernels.attention import gpu

    if dropout is None or dropout.p == 0:
        return gpu.no_dropout(like)
    key = gpu_key(dropout.key)
    threshold, scale = keep_threshold(dropout.p), keep_scale(dropout.p)
    ids = dropout.edge_ids
    if isinstance(ids, Tensor):
        return gpu.dropout_by_tensor(ids.to(like.device).contiguous(), threshold, scale, key)
    return gpu.dropout_by_shift(_shift(structure, ids, like.device), threshold, scale, key)


_shifts: WeakKeyDictionary[IdRuns | Structure, tuple[torch.device, Tensor]] = WeakKeyDictionary()


def _shift(structure: Structure, runs: IdRuns | None, device: torch.device) -> Tensor:
    """``(N,)`` what to add to the number of an edge into ``v`` for its global id; kept as long as its runs."""
    owner = structure if runs is None else runs
    known = _shifts.get(owner)
    if known is None or known[0] != device:
        if runs is None:
            shift = torch.zeros(structure.num_dst, dtype=torch.int64, device=device)
        else:
            shift = (runs.starts - runs.indptr[:-1]).to(device)
        known = _shifts[owner] = (device, shift)
    return known[1]


def _fused(feat_src: Tensor) -> bool:
    if feat_src.device.type != "cuda" or feat_src.shape[2] > _MAX_DIM:
        return False
    if importlib.util.find_spec("triton") is None:
        _log_missing_triton()
        return False
    return True


@functools.cache
def _log_missing_triton() -> None:
    _logger.warning("Triton is not installed: attention runs step by step, with tensors of the size of the edges.")


def _check_features(name: str, structure: Structure, feat_src: Tensor) -> int:
    if feat_src.dim() != 3 or len(feat_src) != structure.num_src:
        raise ValueError(
            f"{name}: feat_src has shape {tuple(feat_src.shape)}, must be (source rows, heads, features) with "
            f"{structure.num_src} source rows"
        )
    if feat_src.dtype not in _DTYPES:
        raise ValueError(f"{name}: dtype {feat_src.dtype} has no softmax; cast the operands to a floating dtype")
    return feat_src.shape[1]


def _check_like(name: str, operand: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}: {operand} has shape {tuple(x.shape)}, must be {shape}")
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name}: {operand} is {x.dtype}; cast it to a floating dtype")
    if x.device != like.device:
        raise ValueError(f"{name}: {operand} is on {x.device}, feat_src on {like.device}; move one of them")


def _check_dropout(name: str, structure: Structure, dropout: AttentionDropout | None) -> None:
    if dropout is None or dropout.edge_ids is None:
        return
    ids = dropout.edge_ids
    if isinstance(ids, Tensor):
        check_row_ids(ids)
    elif len(ids.starts) != structure.num_dst:
        raise ValueError(
            f"{name}: edge_ids has {len(ids.starts)} runs, must have one for each of {structure.num_dst} rows"
        )
    if isinstance(ids, Tensor) and len(ids) != structure.num_edges:
        raise ValueError(f"{name}: edge_ids has {len(ids)} ids, must have one for each of {structure.num_edges} edges")
