"""Dense products of a layer's rows, with no pass over rows that a product can do: several of one input, or their sum.

Backward makes the gradients of the weights first and lets go of the input before it makes the gradient of the input, so
the two are never alive together; a second product is added to the first in place. Where it pays, rows are padded as in
:mod:`nugnn.kernels.padded`, and the weights, which are small, with them.

Shape suffixes: n rows, I columns of an input, O of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.operator import Operator
from nugnn.kernels.padded import carve, is_padded, padded_copy, padded_width, pays, whole_rows, with_padding

__all__ = ["products", "sum_of_products"]


def products(
    x_nI: Tensor,
    weights_OI: Sequence[Tensor],
    bias_O: Tensor | None = None,
    on_last: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, ...]:
    """``x @ w.t()`` for each weight; the bias goes to the first.

    Several products that together are no wider than the input are one, and share a buffer. A step that is open gives no
    name to a product: `nugnn.recognition.count_operators` does, for the layers whose work this is.

    Args:
        x_nI: Floating, any strides.
        weights_OI: In the dtype of ``x``.
        bias_O: Likewise; None for none.
        on_last: Gets the last product before the others are made: to send rows that then travel beside them. It must
            not change them.

    Returns:
        ``(n, O)`` for each weight, rows padded where it pays; differentiable in all operands, once.

    Raises:
        RuntimeError: Shapes or dtypes do not fit, in torch's words.
    """
    with torch._C.DisableTorchFunction():  # one operator: the caller names it
        if torch.is_autocast_enabled(x_nI.device.type):
            return _last_first(lambda i: F.linear(x_nI, weights_OI[i], None if i else bias_O), len(weights_OI), on_last)
        result: tuple[Tensor, ...] = _Products.apply(x_nI, bias_O, on_last, *weights_OI)  # type: ignore[no-untyped-call]
    return result


def sum_of_products(xs_nI: Sequence[Tensor], weights_OI: Sequence[Tensor], bias_O: Tensor | None = None) -> Tensor:
    """``sum of x @ w.t() + bias``: ``(n, O)``.

    Args:
        xs_nI: One or more inputs, floating, any strides.
        weights_OI: One for each input, in its dtype.
        bias_O: Likewise; None for none.

    Returns:
        ``(n, O)``, rows padded where it pays; differentiable in all operands, once.

    Raises:
        RuntimeError: Shapes or dtypes do not fit, in torch's words.
    """
    with torch._C.DisableTorchFunction():
        if torch.is_autocast_enabled(xs_nI[0].device.type):
            out = F.linear(xs_nI[0], weights_OI[0], bias_O)
            for x, w in zip(xs_nI[1:], weights_OI[1:], strict=True):
                out = torch.addmm(out, x, w.t())
            return out
        result: Tensor = _SumOfProducts.apply(bias_O, *xs_nI, *weights_OI)  # type: ignore[no-untyped-call]
    return result


class _Products(Operator):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, on_last: Callable[[Tensor], None] | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        x = _with_aligned_rows(x)
        rows = with_padding(x)
        widths = [_width(len(w), x.dtype) for w in weights]
        ctx.joins = len(weights) > 1 and sum(widths) <= rows.shape[1]
        ctx.widths, ctx.num_columns = widths, rows.shape[1]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *weights)
        if ctx.joins:
            joined = _product(rows, _joined(weights, widths, rows.shape[1]), bias)
            outs = carve(joined, [len(w) for w in weights], widths)
            return _last_first(outs.__getitem__, len(weights), on_last)

        def product(i: int) -> Tensor:
            out = _product(rows, _padded(weights[i], widths[i], rows.shape[1]), None if i else bias)
            return carve(out, [len(weights[i])], [widths[i]])[0]

        return _last_first(product, len(weights), on_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, needs_bias, _, *needs_weights = ctx.needs_input_grad
        grad_bias = grads[0].sum(0) if needs_bias and grads[0] is not None else None
        given = [i for i, grad in enumerate(grads) if grad is not None]
        wholes = [_at_width(grads[i], ctx.widths[i]) for i in given]  # type: ignore[arg-type]
        padded = [_padded(weights[i], ctx.widths[i], ctx.num_columns) for i in given]
        if ctx.joins and len(given) > 1:
            wholes, padded = [torch.cat(wholes, 1)], [torch.cat(padded)]
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if any(needs_weights):
            of_rows = torch.cat([whole.t() @ with_padding(x) for whole in wholes]).split([ctx.widths[i] for i in given])
            for i, grad in zip(given, of_rows, strict=True):
                grad_weights[i] = grad[: len(weights[i]), : weights[i].shape[1]] if needs_weights[i] else None
        width = weights[0].shape[1]
        del x
        ctx.maybe_clear_saved_tensors()
        return _row_gradient(wholes, padded, width) if needs_x and given else None, grad_bias, None, *grad_weights


class _SumOfProducts(Operator):
    @staticmethod
    def forward(ctx: Any, bias: Tensor | None, *operands: Tensor) -> Tensor:
        count = len(operands) // 2
        xs, weights = [_with_aligned_rows(x) for x in operands[:count]], operands[count:]
        wholes = [with_padding(x) for x in xs]
        width = _width(len(weights[0]), xs[0].dtype)
        padded = [_padded(w, width, whole.shape[1]) for w, whole in zip(weights, wholes, strict=True)]
        out = _product(wholes[0], padded[0], bias)
        for whole, w in zip(wholes[1:], padded[1:], strict=True):
            out.addmm_(whole, w.t())
        ctx.width, ctx.num_columns = width, [whole.shape[1] for whole in wholes]
        needs = ctx.needs_input_grad[1 + count :]
        ctx.save_for_backward(*(x if need else None for x, need in zip(xs, needs, strict=True)), *weights)
        return carve(out, [len(weights[0])], [width])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.num_columns)
        saved = list(ctx.saved_tensors)  # asked for once: an activation checkpoint gives them once
        xs, weights = saved[:count], saved[count:]
        del saved
        needs_bias, needs_xs = ctx.needs_input_grad[0], ctx.needs_input_grad[1 : 1 + count]
        grad_bias = grad.sum(0) if needs_bias else None
        whole = _at_width(grad, ctx.width)
        grad_weights = [
            None if x is None else (whole.t() @ with_padding(x))[: len(w), : w.shape[1]]
            for x, w in zip(xs, weights, strict=True)
        ]
        del xs
        ctx.maybe_clear_saved_tensors()
        grad_xs = [
            _row_gradient([whole], [_padded(w, ctx.width, columns)], w.shape[1]) if need else None
            for w, columns, need in zip(weights, ctx.num_columns, needs_xs, strict=True)
        ]
        return grad_bias, *grad_xs, *grad_weights


def _last_first(
    make: Callable[[int], Tensor], count: int, on_last: Callable[[Tensor], None] | None
) -> tuple[Tensor, ...]:
    """What ``make`` makes of 0 to ``count`` - 1; the last comes first, for ``on_last``."""
    last = make(count - 1)
    if on_last is not None:
        on_last(last)
    return *(make(i) for i in range(count - 1)), last


def _width(width: int, dtype: torch.dtype) -> int:
    return padded_width(width, dtype.itemsize) if pays(dtype) else width


def _with_aligned_rows(x: Tensor) -> Tensor:
    x = whole_rows(x)
    return x if is_padded(x) or _width(x.shape[1], x.dtype) == x.shape[1] else padded_copy(x)


def _at_width(grad: Tensor, width: int) -> Tensor:
    """``(n, width)``: with the zeros behind it where it is narrower, which a kernel of ours has put there."""
    if grad.shape[1] == width:
        return whole_rows(grad)
    whole = with_padding(grad)
    return whole if whole.shape[1] == width else with_padding(padded_copy(grad))


def _padded(w_OI: Tensor, num_rows: int, num_columns: int) -> Tensor:
    if w_OI.shape == (num_rows, num_columns):
        return w_OI
    return F.pad(w_OI, (0, num_columns - w_OI.shape[1], 0, num_rows - len(w_OI)))


def _joined(weights: Sequence[Tensor], widths: Sequence[int], num_columns: int) -> Tensor:
    return torch.cat([_padded(w, width, num_columns) for w, width in zip(weights, widths, strict=True)])


def _product(rows: Tensor, w_OI: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return rows @ w_OI.t()
    bias = bias if len(bias) == len(w_OI) else F.pad(bias, (0, len(w_OI) - len(bias)))
    return torch.addmm(bias, rows, w_OI.t())


def _row_gradient(grads: Sequence[Tensor], weights_OI: Sequence[Tensor], width: int) -> Tensor:
    """``(n, width)``: the sum of ``grad @ w``, padded where the weights are."""
    out = grads[0] @ weights_OI[0]
    for grad, w in zip(grads[1:], weights_OI[1:], strict=True):
        out.addmm_(grad, w)
    return carve(out, [width], [out.shape[1]])[0]
