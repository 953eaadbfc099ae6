"""Instance norm over divided batches: its running statistics are means over the samples of all ranks.

Shape suffixes: n samples on this rank, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nugnn.comm.groups import Ranks
from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.operator_call import OperatorCall
from nugnn.kernels.rows import rows_of

_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
_NAMES_OF_TORCH = ("input", "weight", "bias", "running_mean", "running_var", *_NAMES[5:], "cudnn_enabled")


class InstanceNormHandler:
    """Answers ``F.instance_norm`` where a rank has no samples, which torch refuses, and where it keeps statistics.

    A sample is normalised by its own values on any rank. The running mean and variance move towards the mean over
    samples of each one's mean and unbiased variance, as torch has it, here over those of all ranks.

    Args:
        ranks: Who holds the other samples.
    """

    kinds = frozenset({"instance_norm"})

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        names = _NAMES_OF_TORCH if call.run is torch.instance_norm else _NAMES
        a = dict(zip(names, call.inputs, strict=False)) | call.attrs
        x: Tensor = a["input"]
        running = (a.get("running_mean"), a.get("running_var"))
        updates = a.get("use_input_stats", True) and any(value is not None for value in running)
        if updates and self._ranks.is_split:
            rows = rows_of(x)
            if rows is None or not rows.split:
                raise ValueError(
                    f"{call.name}: instance norm with running statistics on rows whose identity is not known (shape "
                    f"{tuple(x.shape)}), so it is not known over which samples they are means. Keep samples on axis 0 "
                    "from the model's input to this norm, mark them with nugnn.as_rows_of(x, like) where a function "
                    "has lost them, or give it track_running_stats=False."
                )
            _update(x, running, a.get("momentum", 0.1), self._ranks)
            inputs, attrs = _without_statistics(names, call)
            call = OperatorCall(call.name, call.kind, call.structure, inputs, attrs, call.run)
        if x.shape[0] > 0:
            return proceed(call)
        shape = [1, -1] + [1] * (x.dim() - 2)
        weight, bias = a.get("weight"), a.get("bias")
        out = x * (1 if weight is None else weight.view(shape))  # empty, and still a function of all three
        return out if bias is None else out + bias.view(shape)


def _without_statistics(names: tuple[str, ...], call: OperatorCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    own = ("running_mean", "running_var")
    inputs = tuple(None if name in own else value for name, value in zip(names, call.inputs, strict=False))
    return inputs, {name: None if name in own else value for name, value in call.attrs.items()}


@torch.no_grad()
def _update(x_nC: Tensor, running: tuple[Tensor | None, Tensor | None], momentum: float, ranks: Ranks) -> None:
    """A collective call; a rank without samples adds nothing."""
    n, channels = x_nC.shape[:2]
    wide = x_nC.detach().to(torch.promote_types(x_nC.dtype, torch.float32)).flatten(2)
    mean, variance = (wide.mean(2), wide.var(2)) if n else (wide.new_zeros(0, channels),) * 2
    packed = ranks.sum_(torch.cat([mean.sum(0), variance.sum(0), wide.new_full((1,), n)]))
    count = packed[-1].clamp(min=1)
    for value, total in zip(running, packed[:-1].split(channels), strict=True):
        if value is not None:
            value.lerp_((total / count).to(value.dtype), momentum)
