"""What follows a layer's product or aggregation, in one pass: row scale, bias, layer norm, activation, dropout.

On a GPU the values are read once and written once, forward and backward; on a CPU the steps run one after the other,
relu and dropout together. Dropout is that of :mod:`nugnn.kernels.dropout`, with the same mask.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor
from torch.autograd.function import once_differentiable

from nugnn.kernels.dropout import check_dropout, dropout_rows, mask_arguments, relu_dropout_rows
from nugnn.kernels.epilogue.reference import before_dropout
from nugnn.kernels.operator import Operator
from nugnn.kernels.padded import is_padded, whole_rows
from nugnn.kernels.philox import RandomKey

if TYPE_CHECKING:
    from nugnn.kernels.epilogue import gpu

__all__ = ["Activation", "epilogue_rows"]

Activation = Literal["none", "relu", "leaky_relu", "elu"]
_ACTIVATIONS = get_args(Activation)
_MAX_NORM_COLUMNS = 8192


def epilogue_rows(
    x: Tensor,
    *,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    layer_norm: bool = False,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = "none",
    alpha: float | None = None,
    p: float = 0.0,
    key: RandomKey | None = None,
    row_ids: Tensor | range | None = None,
) -> Tensor:
    """``dropout(activation(layer_norm(x * row_scale + bias)))``, each step only where asked for.

    On a GPU the steps are taken in float32 (float64 for float64) and rounded to the dtype of ``x`` once, at the end;
    on a CPU after each step. In float32 without layer norm and ``elu`` both have the same bits, and those of the
    separate torch functions. For backward a GPU keeps one bit per value for ``relu`` with or without dropout, two for
    ``leaky_relu`` with dropout, and the input ``x`` for layer norm and ``elu``.

    Args:
        x: ``(n, C)`` float32, float64, bfloat16 or float16. Not modified.
        row_scale: ``(n,)`` factor of each row, a constant: it gets no gradient.
        bias: ``(C,)``.
        layer_norm: Normalise each row by its own mean and variance.
        norm_weight: ``(C,)``, with ``layer_norm`` only.
        norm_bias: ``(C,)``, with ``layer_norm`` only.
        eps: Added to the variance.
        activation: ``none``, ``relu``, ``leaky_relu`` or ``elu``.
        alpha: Slope of ``leaky_relu`` (0.01 unless given) or scale of ``elu`` (1).
        p: Probability of dropping, in ``[0, 1]``.
        key: Seed, step and stream; needed for ``p > 0``.
        row_ids: ``(n,)`` int64 global ids of the rows, or a range of ``n`` ids with step 1; needed for ``p > 0``.

    Returns:
        ``(n, C)`` in the dtype of ``x``; differentiable in ``x``, ``bias``, ``norm_weight`` and ``norm_bias``. On a GPU
        rows are padded (:mod:`nugnn.kernels.padded`) where those of ``x`` are.

    Raises:
        ValueError: Shapes, dtypes or options do not fit together.
    """
    _check(x, row_scale, bias, layer_norm, norm_weight, norm_bias, activation, p, key, row_ids)
    alpha = (0.01 if activation == "leaky_relu" else 1.0) if alpha is None else alpha
    on_gpu = (
        runs_in_triton(x)
        and x.numel() > 0
        and p < 1
        and not (layer_norm and x.shape[1] > _MAX_NORM_COLUMNS)
        and (row_scale is not None or bias is not None or layer_norm or activation != "none")
    )
    if on_gpu:
        mask = None if p == 0 else mask_arguments(p, key, row_ids)
        if p == 0 or mask is not None:
            norm = (layer_norm, eps)
            result: Tensor = _Epilogue.apply(
                x, row_scale, bias, norm_weight, norm_bias, norm, activation, float(alpha), mask
            )
            return result
    norm_step = (norm_weight, norm_bias, eps) if layer_norm else None
    fuses = activation == "relu" and 0 < p < 1
    out = before_dropout(x, row_scale, bias, norm_step, "none" if fuses else activation, alpha)
    if p == 0:
        return out
    assert key is not None
    assert row_ids is not None
    return relu_dropout_rows(out, p, key, row_ids) if fuses else dropout_rows(out, p, key, row_ids)


def runs_in_triton(x: Tensor) -> bool:
    """Whether ``x`` is where our Triton kernels run."""
    return x.device.type == "cuda" and importlib.util.find_spec("triton") is not None


class _Epilogue(Operator):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        row_scale: Tensor | None,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        norm: tuple[bool, float],
        activation: str,
        alpha: float,
        mask: gpu.Mask | None,
    ) -> Tensor:
        from nugnn.kernels.epilogue import gpu

        x = whole_rows(x)
        operands = [None if t is None else t.contiguous() for t in (row_scale, bias, norm_weight, norm_bias)]
        layer_norm = gpu.Norm(operands[2], operands[3], norm[1]) if norm[0] else None
        out, kept = gpu.forward(x, operands[0], operands[1], layer_norm, activation, alpha, mask, remake=False)
        keeps_x = norm[0] or activation == "elu"
        ctx.save_for_backward(x if keeps_x else None, *operands, kept.bits, kept.stats)
        ctx.norm, ctx.activation, ctx.alpha, ctx.mask, ctx.pads = norm, activation, alpha, mask, is_padded(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from nugnn.kernels.epilogue import gpu

        x, row_scale, bias, norm_weight, norm_bias, bits, stats = ctx.saved_tensors
        layer_norm = gpu.Norm(norm_weight, norm_bias, ctx.norm[1]) if ctx.norm[0] else None
        needs = ctx.needs_input_grad
        grad_x, sums = gpu.backward(
            whole_rows(grad),
            gpu.Kept(bits, stats),
            x,
            row_scale,
            bias,
            layer_norm,
            ctx.activation,
            ctx.alpha,
            ctx.mask,
            needs_sums=any(needs[2:5]),
            pads=ctx.pads,
        )
        parameters = (bias, norm_weight, norm_bias)
        grads = [
            sums[i].to(parameter.dtype) if parameter is not None and needs[2 + i] and sums is not None else None
            for i, parameter in enumerate(parameters)
        ]
        return grad_x, None, *grads, None, None, None, None


def _check(
    x: Tensor,
    row_scale: Tensor | None,
    bias: Tensor | None,
    layer_norm: bool,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    activation: str,
    p: float,
    key: RandomKey | None,
    row_ids: Tensor | range | None,
) -> None:
    if x.dim() != 2:
        raise ValueError(f"epilogue_rows: x has shape {tuple(x.shape)}, must be (n, C)")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"epilogue_rows: activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
    if not layer_norm and (norm_weight is not None or norm_bias is not None):
        raise ValueError("epilogue_rows: norm_weight and norm_bias need layer_norm=True")
    given = {"row_scale": row_scale, "bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    for name, operand in given.items():
        length = len(x) if name == "row_scale" else x.shape[1]
        if operand is None:
            continue
        if operand.shape != (length,):
            raise ValueError(
                f"epilogue_rows: {name} has shape {tuple(operand.shape)}, must be ({length},) for x of {tuple(x.shape)}"
            )
        if operand.device != x.device:
            raise ValueError(f"epilogue_rows: {name} is on {operand.device}, x on {x.device}")
    if row_scale is not None and row_scale.requires_grad:
        raise ValueError("epilogue_rows: row_scale gets no gradient; multiply before, or detach it")
    check_dropout("epilogue_rows", x, p, row_ids if p > 0 else range(len(x)))
    if p > 0 and key is None:
        raise ValueError("epilogue_rows: dropout needs a key")
