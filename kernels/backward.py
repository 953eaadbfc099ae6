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

BACKWARD_FUNCTIONS: dict[Callable[..., Any], tuple[str, ...]] = {
    Tensor.backward: ("tensors", "gradient", "retain_graph", "create_graph", "inputs"),
    torch.autograd.backward: ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs"),
    torch.autograd.grad: (
        *("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused"),
        *("is_grads_batched", "materialize_grads"),
    ),
}
"""Functions that start a backward, with the names of their positional arguments."""


def run_backward(mode: TorchFunctionMode, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` for one of `BACKWARD_FUNCTIONS`, with ``mode`` on inside.

    Tensors are replaced by their gradient edges: given tensors, torch would ask the mode again, without end. Everything
    runs on this thread, where torch would take another one for a GPU: a step is open on the thread that opened it.
    """
    options = dict(zip(BACKWARD_FUNCTIONS[func], args, strict=False)) | kwargs
    ends = _as_tuple(options.pop("outputs" if func is torch.autograd.grad else "tensors"))
    inputs = None if options.get("inputs") is None else _as_tuple(options["inputs"])
    if not all(isinstance(x, GradientEdge) or x.requires_grad for x in (*ends, *(inputs or ()))):
        return func(*args, **kwargs)  # torch says what is wrong
    options["inputs"] = None if inputs is None else tuple(map(_edge, inputs))
    if func is not torch.autograd.grad:
        if func is Tensor.backward:
            options["grad_tensors"] = options.pop("gradient", None)
        with torch.autograd.set_multithreading_enabled(False), mode:
            torch.autograd.backward(tuple(map(_edge, ends)), **options)
        return None
    assert inputs is not None
    fills = options.pop("materialize_grads", False)  # torch needs the tensors for this
    if fills:
        options["allow_unused"] = True
    with torch.autograd.set_multithreading_enabled(False), mode:
        grads = torch.autograd.grad(tuple(map(_edge, ends)), **options)
    if not fills:
        return grads
    return tuple(torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, inputs, strict=True))


def _as_tuple(x: Any) -> tuple[Any, ...]:
    if isinstance(x, dict):
        return tuple(x.values())
    return (x,) if isinstance(x, (Tensor, GradientEdge)) else tuple(x)


def _edge(x: Tensor | GradientEdge) -> GradientEdge:
    return x if isinstance(x, GradientEdge) else get_gradient_edge(x)
