"""Base of the operators that come with their own gradient: inside them no torch function is looked at.

While a step is open, a mode sees every torch function, also each question for a shape or an address: a launch of a
Triton kernel asks some forty. An operator is named and intercepted as a whole, by whoever calls it, so what it does
inside is nobody's business, and looking at it was most of the host's time in a step of a small graph.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Watcher(Protocol):
    """Sees operators from outside, both passes, as whole calls: see `watched_by`."""

    def passed(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """``function(*args)``, which is the operator ``name``: ``_EdgeSoftmax``, ``_EdgeSoftmax.backward``."""
        ...


class _Door(threading.local):
    watcher: Watcher | None = None


_door = _Door()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """While open, every operator of this thread runs through ``watcher``; nobody watches otherwise."""
    before, _door.watcher = _door.watcher, watcher
    try:
        yield
    finally:
        _door.watcher = before


def at_the_door(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, a single operator to whoever watches."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        watcher = _door.watcher
        return function(*args) if watcher is None else watcher.passed(name, function, args)

    return run


class Operator(torch.autograd.Function):
    """A `torch.autograd.Function` whose ``forward`` runs without torch-function modes.

    Its ``backward`` does not: when it asks for its saved tensors, layers may run again that need the step's mode
    (activation checkpointing). Kernels that it calls are `unseen` themselves.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            forward = at_the_door(cls.__name__, cls.forward)
            cls.forward = staticmethod(unseen(forward))  # type: ignore[method-assign, assignment]
        if "backward" in cls.__dict__:
            backward = at_the_door(f"{cls.__name__}.backward", cls.backward)
            cls.backward = staticmethod(backward)  # type: ignore[method-assign, assignment]


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run without torch-function modes."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run
