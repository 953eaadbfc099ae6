"""Base of the operators that come with their own gradient: inside them no torch function is looked at.

While a step is open, a mode sees every torch function, also each question for a shape or an address: a launch of a
Triton kernel asks some forty. An operator is named and intercepted as a whole, by whoever calls it, so what it does
inside is nobody's business, and looking at it was most of the host's time in a step of a small graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class Operator(torch.autograd.Function):
    """A `torch.autograd.Function` whose ``forward`` runs without torch-function modes.

    Its ``backward`` does not: when it asks for its saved tensors, layers may run again that need the step's mode
    (activation checkpointing). Kernels that it calls are `unseen` themselves.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = staticmethod(unseen(cls.forward))  # type: ignore[method-assign, assignment]


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run without torch-function modes."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run
