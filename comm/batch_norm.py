"""Batch normalisation over every row of a split graph.

Shape suffixes: n rows on this rank, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nugnn.comm.groups import Ranks
from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.operator import Operator
from nugnn.kernels.operator_call import OperatorCall
from nugnn.kernels.row_follower import where_lost
from nugnn.kernels.rows import rows_of

BatchNormRows = Literal["all", "local"]
"""Whose rows batch norm counts: those of all ranks, as one process would, or a rank's own."""


class _SplitBatchNorm(Operator):
    """Normalise by the mean and biased variance over all ranks' rows; two-pass, float32 or wider statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: Ranks
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        over = [0, *range(2, x.dim())]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        shape = [1, -1] + [1] * (x.dim() - 2)
        per_channel = wide.numel() // max(wide.shape[1], 1)
        packed = torch.cat([wide.sum(over), wide.new_tensor([per_channel])])
        ranks.sum_(packed)
        count = packed[-1:]
        mean = packed[:-1] / count
        centred = wide - mean.view(shape)
        variance = ranks.sum_(centred.square().sum(over)) / count
        inverse = torch.rsqrt(variance + eps)
        normal = centred.mul_(inverse.view(shape))
        ctx.save_for_backward(normal, inverse, weight, count)
        ctx.ranks, ctx.over, ctx.shape, ctx.dtype = ranks, over, shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        out = normal if weight is None else normal * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return (out.clone() if out is normal else out).to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        normal, inverse, weight, count = ctx.saved_tensors
        over, shape = ctx.over, ctx.shape
        grad = grads[0].to(normal.dtype)
        # affine gradients stay local sums: the gradient sync adds them over ranks, once
        grad_weight = (grad * normal).sum(over)
        grad_bias = grad.sum(over)
        totals = ctx.ranks.sum_(torch.stack([grad_bias, grad_weight]))
        scale = inverse if weight is None else inverse * weight
        grad_x = scale.view(shape) * (grad - (totals[0] / count).view(shape) - normal * (totals[1] / count).view(shape))
        return (
            grad_x.to(ctx.dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(ctx.bias_dtype) if ctx.bias_dtype is not None else None,
            None,
            None,
        )


class _FusedBatchNorm(Operator):
    """The same in torch's kernels for GPUs: a pass over ``x`` for its statistics, one to normalise, two in backward.

    Ranks exchange mean, inverse deviation and count, and combine them as Chan et al. do (torch does it in float32).
    Nothing is asked of the device, so the host does not wait in any layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
        ranks: Ranks,
    ) -> Tensor:
        x = _dense(x)
        channels, per_channel = x.shape[1], x.numel() // max(x.shape[1], 1)
        wide = torch.promote_types(x.dtype, torch.float32)
        packed = torch.zeros(ranks.world_size, 2 * channels + 1, dtype=wide, device=x.device)
        own = packed[ranks.rank]
        own[-1].fill_(per_channel or _NO_ROWS)
        if per_channel:
            own[:channels], own[channels:-1] = torch.batch_norm_stats(x, eps)
        else:
            own[channels:-1] = 1
        ranks.sum_(packed)
        means, inverses, counts = (part.contiguous() for part in packed.split([channels, channels, 1], dim=1))
        # a rank with two values knows the answer; asking the GPU for it would make the host wait in every layer
        if per_channel <= 1 and float(counts.sum()) < 1.5:
            raise ValueError(_TOO_FEW)
        counts = counts.view(-1)
        # in one type, that of the counts: the kernel would read them in that of 16-bit rows or statistics
        wide_mean, wide_var = (None if values is None else values.to(wide) for values in running)
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            means, means, inverses, wide_mean, wide_var, momentum, eps, counts
        )
        for values, updated in zip(running, (wide_mean, wide_var), strict=True):
            if values is not None and updated is not None and updated is not values:
                values.copy_(updated)
        ctx.save_for_backward(x, weight, mean, inverse, counts.to(torch.int32))
        ctx.ranks, ctx.bias_dtype = ranks, None if bias is None else bias.dtype
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps) if per_channel else torch.empty_like(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, mean, inverse, counts = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            grad, channels = _dense(grads[0]), x.shape[1]
            totals = torch.zeros(2 * channels, dtype=mean.dtype, device=x.device)
            own_weight, own_bias = totals[:channels], totals[channels:]
            if x.numel():
                sum_grad, sum_grad_x, own_weight, own_bias = torch.batch_norm_backward_reduce(
                    grad, x, mean, inverse, weight, True, weight is not None, ctx.bias_dtype is not None
                )
                totals = torch.cat([sum_grad, sum_grad_x])
            else:
                own_weight, own_bias = own_weight.clone(), own_bias.clone()
            ctx.ranks.sum_(totals)
            grad_x = torch.empty_like(x)
            if x.numel():
                wide_weight = None if weight is None else weight.to(mean.dtype)
                sum_grad, sum_grad_x = totals.split(channels)
                grad_x = torch.batch_norm_backward_elemt(
                    grad, x, mean, inverse, wide_weight, sum_grad, sum_grad_x, counts
                )
            # affine gradients stay local sums: the gradient sync adds them over ranks, once
            grad_weight = None if weight is None else own_weight.to(weight.dtype)
            grad_bias = None if ctx.bias_dtype is None else own_bias.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None


_NO_ROWS = 1e-30
"""The count of a rank without rows: torch divides by the first counts' sum, and this one changes no bit of the rest."""
_TOO_FEW = "batch norm needs more than 1 row over all ranks when training, got 1 or none"


def _dense(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]):
        return x
    return x.contiguous()


def split_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    ranks: Ranks,
) -> Tensor:
    """Batch norm in training mode over the rows of every rank; the same running statistics everywhere.

    Args:
        x: ``(n, C, ...)`` rows of this rank; other ranks pass theirs, any ``n >= 0``.
        running_mean: ``(C,)``, updated in place; None to keep none.
        running_var: The same for the unbiased variance.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        momentum: Weight of the new value in the running statistics.
        eps: Added to the variance.
        ranks: Who takes part.

    Raises:
        ValueError: There is a single value per channel over all ranks.
    """
    if x.device.type == "cuda" and ranks.carries_cuda and ranks.is_uniform:
        running = (running_mean, running_var)
        return _FusedBatchNorm.apply(x, weight, bias, running, momentum, eps, ranks)  # type: ignore[no-any-return, no-untyped-call]
    out, mean, variance, count = _SplitBatchNorm.apply(x, weight, bias, eps, ranks)  # type: ignore[no-untyped-call]
    # a rank with two values knows the answer; asking a GPU for it would make the host wait in every layer
    if x.numel() <= max(x.shape[1], 1) and float(count) <= 1:
        raise ValueError(f"batch norm needs more than 1 row over all ranks when training, got {int(count)}")
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return out  # type: ignore[no-any-return]


class BatchNormHandler:
    """Answers ``F.batch_norm`` in training mode when its rows are part of a split graph."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.kinds = frozenset({"batch_norm"} if ranks.is_split else ())

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        a = _arguments(call)
        if not a.get("training", False):
            return proceed(call)
        x = a["input"]
        rows = rows_of(x)
        if rows is None:
            raise ValueError(
                f"{call.name}: batch norm over rows whose identity is not known, so the count over all ranks is not "
                f"known either.{where_lost(x)} Mark its input with nugnn.as_rows_of(x, like) if its rows are those of "
                "like, such as the model's input, or with nugnn.as_node_rows(x, graph) or nugnn.as_edge_rows(x, graph)."
            )
        if rows.kind == "replicated" or not rows.split:
            return proceed(call)
        if interceptor.in_scope:
            raise NotImplementedError(
                f"{call.name}: batch norm inside a reduce function. It would count the rows of one in-degree on one "
                "rank, and ranks differ in the degrees they have. Normalise messages or results outside of it."
            )
        return split_batch_norm(
            x,
            a.get("running_mean"),
            a.get("running_var"),
            a.get("weight"),
            a.get("bias"),
            a.get("momentum", 0.1),
            a.get("eps", 1e-5),
            self._ranks,
        )


class LocalBatchNormHandler:
    """Lets a rank without rows pass through ``F.batch_norm`` in training mode, which torch would refuse."""

    kinds = frozenset({"batch_norm"})

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        a = _arguments(call)
        x, weight, bias = a["input"], a.get("weight"), a.get("bias")
        if not a.get("training", False) or x.shape[0] > 0:
            return proceed(call)
        shape = [1, -1] + [1] * (x.dim() - 2)
        out = x * (1 if weight is None else weight.view(shape))  # empty, and still a function of all three
        return out if bias is None else out + bias.view(shape)


def _arguments(call: OperatorCall) -> dict[str, Any]:
    """Arguments of ``F.batch_norm`` by name."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    return dict(zip(names, call.inputs, strict=False)) | call.attrs
