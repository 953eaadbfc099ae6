"""Backward with a torch-function mode on.

torch turns a mode off while a function that the mode intercepted runs, and backward is such a function. But layers
that run again in backward (activation checkpointing, `dgl.nn.GroupRevRes`) need it there: their dropout masks have to
be those of the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

BACKWARD_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
)


def run_backward(mode: TorchFunctionMode, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` for one of `BACKWARD_FUNCTIONS`, with ``mode`` on inside.

    Tensors are replaced by their gradient edges: given tensors, torch would ask the mode again, without end.
    """
    ends = _as_tuple(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
    names = ("outputs", "inputs") if func is torch.autograd.grad else ("tensors",)
    given = dict(zip(names, args, strict=False)) | kwargs
    inputs = None if given.get("inputs") is None else _as_tuple(given["inputs"])
    if not all(_has_edge(x) for x in (*ends, *(inputs or ()))):
        return func(*args, **kwargs)  # torch says what is wrong
    edges = tuple(map(_edge, ends))
    input_edges = None if inputs is None else tuple(map(_edge, inputs))
    rest = tuple(args[len(names) :])
    options = {key: value for key, value in kwargs.items() if key not in ("tensors", "outputs", "inputs")}
    if func is not torch.autograd.grad:
        if func is Tensor.backward and "gradient" in options:
            options["grad_tensors"] = options.pop("gradient")
        if func is Tensor.backward and len(rest) == 4:  # inputs, which torch.autograd.backward takes further back
            input_edges, rest = tuple(map(_edge, _as_tuple(rest[3]))) if rest[3] is not None else None, rest[:3]
        with mode:
            return torch.autograd.backward(edges, *rest, **options, inputs=input_edges)
    assert inputs is not None and input_edges is not None
    fills = options.pop("materialize_grads", False)
    if fills:
        options["allow_unused"] = True
    with mode:
        grads = torch.autograd.grad(edges, input_edges, *rest, **options)
    if not fills:
        return grads
    return tuple(torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, inputs, strict=True))


def _as_tuple(x: Any) -> tuple[Any, ...]:
    if isinstance(x, dict):
        return tuple(x.values())
    return (x,) if isinstance(x, (Tensor, GradientEdge)) else tuple(x)


def _has_edge(x: Any) -> bool:
    return isinstance(x, GradientEdge) or x.requires_grad


def _edge(x: Tensor | GradientEdge) -> GradientEdge:
    return x if isinstance(x, GradientEdge) else get_gradient_edge(x)
