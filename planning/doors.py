"""Where the operators of a training step are seen: torch's dispatcher below autograd, and the doors of our own.

Our operators, and DGL's kernels, are seen as wholes: the interceptor's innermost link and `nugnn.kernels.operator` say
when one runs. Nothing that is computed changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.operator import watched_by
from nugnn.kernels.operator_call import Handler, OperatorCall

_ON_GRAPHS = frozenset(("spmm", "sddmm", "edge_softmax"))


class StepWatcher(TorchDispatchMode):
    """Runs every operator of this thread while `at_the_doors` is open; what runs inside one may come by as well.

    Args:
        optimizer: Its step is one operator.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    @contextmanager
    def at_the_doors(self, interceptor: Interceptor, outermost: Handler | None = None) -> Iterator[None]:
        """Around one training step.

        Args:
            interceptor: Of the step.
            outermost: One more link of its chain.
        """
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_optimizer).remove)
            stack.enter_context(interceptor.watched(outermost or _Nothing(), _OnGraphs(self)))
            stack.enter_context(watched_by(self))
            stack.enter_context(_dgl_kernels(self))
            yield

    def passed(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `nugnn.kernels.operator.Watcher`."""
        raise NotImplementedError

    def on_graph(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any]) -> Any:
        """Runs an operator on a graph, as the interceptor computes it, with its halo rows."""
        raise NotImplementedError

    def kernel_of_dgl(self, kind: str, function: Callable[..., Any], graph: Any, op: str, *args: Any) -> Any:
        """Runs one of DGL's kernels, which its own autograd functions call in backward."""
        raise NotImplementedError

    def begin_optimizer(self) -> None:
        """The optimizer's step begins."""
        raise NotImplementedError

    def end_optimizer(self) -> None:
        """It has ended."""
        raise NotImplementedError

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer:
            self.begin_optimizer()

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer:
            self.end_optimizer()


def torch_name(func: Any) -> str:
    """Of an ``OpOverload``, as records have it: ``aten.addmm``."""
    return f"aten.{func._schema.name.rpartition('::')[2]}"


@dataclass(frozen=True, eq=False)
class _OnGraphs:
    """The chain's innermost link."""

    watcher: StepWatcher
    kinds: frozenset[str] | None = _ON_GRAPHS

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        return self.watcher.on_graph(call, proceed)


@dataclass(frozen=True, eq=False)
class _Nothing:
    """A link that is in no chain."""

    kinds: frozenset[str] | None = frozenset()

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        return proceed(call)


@contextmanager
def _dgl_kernels(watcher: StepWatcher) -> Iterator[None]:
    """While open, the watcher runs DGL's kernels, of which torch's dispatcher knows nothing."""
    from dgl.backend.pytorch import sparse

    before = {"spmm": sparse._gspmm, "sddmm": sparse._gsddmm}
    for kind, function in before.items():
        setattr(sparse, f"_g{kind}", functools.partial(watcher.kernel_of_dgl, kind, function))
    try:
        yield
    finally:
        for kind, function in before.items():
            setattr(sparse, f"_g{kind}", function)
