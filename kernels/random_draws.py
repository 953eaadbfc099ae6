"""Which calls of torch functions draw random numbers: asked of torch's own operators, not of a list of names."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

_COMPOSED = frozenset(
    {
        *(F.gumbel_softmax, F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices),
        *(F.fractional_max_pool2d, F.fractional_max_pool3d, nn.init.kaiming_uniform_, nn.init.kaiming_normal_),
    }
)
"""Functions in Python that draw inside, where no mode looks; tests go over all that torch has."""
_NO_DRAW = frozenset({"_fused_sdp_choice"})
_SWITCHES, _RATES = ("training", "train"), ("dropout_p", "dropout", "p")
_LIBRARIES = frozenset({"torch", "nugnn", "dgl"})
_STANDARD = sysconfig.get_paths()["stdlib"]


def draws(function: Callable[..., Any]) -> bool:
    """Whether a torch function may draw: an operator of its name takes a generator, or torch marks it as seeded."""
    return function in _COMPOSED or bool(_seeded(function))


def draws_now(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call does: some functions draw in training only, or with a rate above zero, or nothing is given."""
    if function in _COMPOSED:
        return kwargs.get("_random_samples") is None
    arguments = _seeded(function)[0]._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip(list(given), args, strict=False)) | kwargs
    off = _SWITCHES if "generator" in given else (*_SWITCHES, *_RATES)
    return not any(given.get(name, True) in (False, 0) for name in off)


@functools.lru_cache(maxsize=4096)
def _seeded(function: Any) -> tuple[Any, ...]:
    """Torch's operators of this function's name that draw."""
    if isinstance(function, torch._ops.OpOverload):
        return (function,) if _is_seeded(function) else ()
    packet = function
    if not isinstance(function, torch._ops.OpOverloadPacket):
        name = getattr(function, "__name__", "__")
        packet = None if name.startswith("__") or name in _NO_DRAW else getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return ()
    return tuple(operator for overload in packet.overloads() if _is_seeded(operator := getattr(packet, overload)))


def _is_seeded(operator: Any) -> bool:
    is_backward = "backward" in operator._schema.name  # repeats the draw of the forward
    return torch.Tag.nondeterministic_seeded in operator.tags and not is_backward


def calling_line() -> str:
    """`` (FILE, line N)``: the innermost running line that is not torch's, DGL's or nuGNN's; empty without one."""
    frame = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        file = frame.f_code.co_filename
        is_standard = file.startswith(_STANDARD) and "site-packages" not in file
        if package not in _LIBRARIES and not is_standard and not file.startswith("<"):
            return f" ({file}, line {frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
