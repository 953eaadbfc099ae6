"""Training steps whose operators compute in formats of their own, with the casts that `with_formats` predicts.

Linear layers and convolutions compute in the format that they are given. What has none follows its neighbours as in
`nugnn.planning.casts`: products of activations, norms and softmax compute in float32, additions in float32 where their
operands differ, and everything else does with what comes. Weights are cast once in a step and kept until the end of
backward.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from nugnn.planning.casts import CAST, FLOATING
from nugnn.planning.operator_costs import tensor_bytes
from nugnn.planning.trace import OperatorRecord, StepTrace

_OWN = {nn.Linear: "linear", nn.Conv1d: "conv", nn.Conv2d: "conv"}
"""Modules whose operator may be given a format, and how a trace calls it."""
_PRODUCTS = frozenset((F.linear, F.conv1d, F.conv2d))
_OF_ACTIVATIONS = frozenset((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm))
_IN_FLOAT32 = frozenset((F.batch_norm, F.layer_norm, F.softmax, torch.softmax, Tensor.softmax))
_ADDITIONS = frozenset((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__))

Moved = Counter[tuple[str, str, str, int]]
"""Casts by phase, format before and after, and bytes that are read."""


def names_of(model: nn.Module) -> list[str]:
    """Of the operators that may be given a format, as in a trace of ``model``."""
    return [f"{path}/{_OWN[type(module)]}" for path, module in model.named_modules() if type(module) in _OWN]


def drawn_formats(model: nn.Module, draw: random.Random) -> dict[str, str]:
    """Each operator in bfloat16 or not, as likely as not; one at least in either format."""
    names = names_of(model)
    while True:
        chosen = {name: "bfloat16" for name in names if draw.random() < 0.5}
        if 0 < len(chosen) < len(names):
            return chosen


def without_the_rule(trace: StepTrace, formats: Mapping[str, str]) -> dict[str, str]:
    """``formats``, and float32 for whatever else the step computes: casts on all edges of each operator."""
    found: dict[str, set[str]] = {}
    for record in trace.operators:
        if record.kind not in ("metadata", "optimizer"):
            floating = {x.dtype for x in (*record.inputs, *record.outputs) if x.dtype in FLOATING}
            found.setdefault(record.name, set()).update(floating)
    others = [name for name, dtypes in found.items() if dtypes == {"float32"}]
    return {**dict.fromkeys(others, "float32"), **formats}


def casts_of(trace: StepTrace) -> Moved:
    """From one floating format to another one; ``trace`` at numbers."""
    return Counter(
        (record.phase, record.inputs[0].dtype, record.outputs[0].dtype, tensor_bytes(record.inputs[0]))
        for record in trace.operators
        if is_cast(record)
    )


def is_cast(record: OperatorRecord) -> bool:
    """Whether it writes numbers of one floating format in another."""
    return record.op == CAST and record.inputs[0].dtype in FLOATING


class Mixed(nn.Module):
    """``model``, trained with these formats.

    Args:
        model: Of `nugnn.networks`, with parameters in float32, each read once in a step.
        formats: Operators by the names of `names_of` and their formats; all others in float32.
    """

    def __init__(self, model: nn.Module, formats: Mapping[str, str]) -> None:
        super().__init__()
        self.model = model
        self._formats = {name.rpartition("/")[0]: getattr(torch, dtype) for name, dtype in formats.items()}

    def forward(self, *args: Any) -> Tensor:
        """What the model returns."""
        formats = {id(self.model.get_submodule(path).weight): dtype for path, dtype in self._formats.items()}
        casts: list[Tensor] = []
        with _Formats(formats, casts):
            out: Tensor = self.model(*args)
        if out.requires_grad:
            run = Variable._execution_engine  # type: ignore[attr-defined]
            out.register_hook(lambda _: run.queue_callback(casts.clear))
        return out


class _Formats(TorchFunctionMode):
    """Casts operands of what has a format.

    Args:
        formats: By the identity of a weight.
        casts: Of parameters, as they are made.
    """

    def __init__(self, formats: Mapping[int, torch.dtype], casts: list[Tensor]) -> None:
        super().__init__()
        self._formats, self._casts = formats, casts

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            return func(*self._operands(*args), **(kwargs or {}))
        if func in _OF_ACTIVATIONS:
            args = tuple(_in_float32(x.contiguous()) if _is_half(x) else x for x in args)
        elif func in _IN_FLOAT32 or (func in _ADDITIONS and len({x.dtype for x in args if isinstance(x, Tensor)}) > 1):
            args = tuple(_in_float32(x) for x in args)
        return func(*args, **(kwargs or {}))

    def _operands(self, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Any, ...]:
        dtype = self._formats.get(id(weight), torch.float32)
        return (x.to(dtype), self._parameter(weight, dtype), self._parameter(bias, dtype), *others)

    def _parameter(self, x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if x is None or x.dtype is dtype:
            return x
        self._casts.append(x.to(dtype))
        return self._casts[-1]


def _is_half(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)


def _in_float32(x: Any) -> Any:
    return x.float() if _is_half(x) else x
