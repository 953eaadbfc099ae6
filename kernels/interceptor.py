"""The one place every operator call passes through, from DGL's message passing and from torch alike."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from nugnn.kernels.backward import BACKWARD_FUNCTIONS, run_backward
from nugnn.kernels.module_calls import NO_ROWS, Counters, Counts, Start, address, identify
from nugnn.kernels.module_state import ModuleState
from nugnn.kernels.operator_call import KIND_OF, Handler, Observer, OperatorCall
from nugnn.kernels.passes import Passes
from nugnn.kernels.philox import RandomKey
from nugnn.kernels.random_draws import draws
from nugnn.kernels.row_follower import follower, noting_losses
from nugnn.kernels.rows import Rows, identity_of
from nugnn.kernels.structure import Structure

H = TypeVar("H")


_active = threading.local()


def current_interceptor() -> Interceptor | None:
    """The innermost interceptor whose ``step`` is open on this thread."""
    stack: list[Interceptor] = getattr(_active, "stack", [])
    return stack[-1] if stack else None


_Plan = Callable[["Interceptor", tuple[Any, ...], dict[str, Any]], Any]
"""What the mode does about a torch function, found out on its first call: runs it with these arguments."""


@dataclass(frozen=True)
class Place:
    """A point in the forward pass of a step: operators that run from here on have known names."""

    path: tuple[str, ...]
    scope: str
    calls: dict[tuple[str, str], int]


class Interceptor(TorchFunctionMode):
    """Names operator calls, carries row identity and passes each call through the handlers.

    Use ``with interceptor.step(number):`` around a forward (and its backward: recomputation under activation
    checkpointing then repeats the names, and so the dropout masks, of the first run).

    Args:
        handlers: Outermost first; `Observer` among them.
        model: Its module paths become operator names; not modified.
        seed: Of every random mask.

    Attributes:
        notes_losses: Set before the first step, makes refusals of rows without identity say which function lost it;
            for checks, as each call takes longer.
    """

    def __init__(
        self, handlers: Sequence[Handler | Observer], model: nn.Module | None = None, *, seed: int = 0
    ) -> None:
        super().__init__()
        self.seed = seed
        self.step_number = 0
        self.notes_losses = False
        self._handlers = tuple(handlers)
        self._chains: dict[str, tuple[Handler, ...]] = {}
        self._observers: dict[str, tuple[Callable[[], None], ...]] = {}
        self._plans: dict[Any, _Plan] = {}
        self._paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
        self._path_stack: list[str] = [""]
        self._scope = ""
        self._counters = Counters()
        self._anchor_depth = 0
        self._passes = Passes()
        self._second_run = ExitStack()

    # -- a step -------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int) -> Iterator[Interceptor]:
        """One forward and backward under the random key of step ``number``."""
        self.step_number = number
        self._counters, self._scope, self._anchor_depth = Counters(), "", 0
        self._path_stack = [""]
        self._passes = Passes()
        self._second_run = ExitStack()
        for handler in self._handlers:
            if (begin := getattr(handler, "begin_step", None)) is not None:
                begin()
        stack: list[Interceptor] = _active.__dict__.setdefault("stack", [])
        stack.append(self)
        hooks = self._watch_modules()
        try:
            with self:
                yield self
        finally:
            self._second_run.close()
            stack.pop()
            for hook in hooks:
                hook.remove()
            for handler in self._handlers:
                if (end := getattr(handler, "end_step", None)) is not None:
                    end()

    @contextmanager
    def watched(self, first: Handler, last: Handler) -> Iterator[None]:
        """While open, the chain has two more links, outermost and innermost; to be opened outside of a step."""
        before = self._handlers, self._chains, self._observers, self._plans
        self._handlers = (first, *self._handlers, last)
        self._chains, self._observers, self._plans = {}, {}, {}
        try:
            yield
        finally:
            self._handlers, self._chains, self._observers, self._plans = before

    @contextmanager
    def scope(self, name: str) -> Iterator[Callable[[], None]]:
        """Names inside get a prefix and counters of their own.

        For user code that runs a different number of times on each rank (reduce functions run once per distinct
        in-degree): calling the yielded function starts the count again, so every run sees the same names.
        """
        outer_scope, outer_counters = self._scope, self._counters
        self._scope = f"{self._next_name(name)}>"

        def restart() -> None:
            self._counters = Counters()

        restart()
        try:
            yield restart
        finally:
            self._scope, self._counters = outer_scope, outer_counters

    @property
    def in_scope(self) -> bool:
        """Whether user code that runs a rank-dependent number of times is running."""
        return bool(self._scope)

    def place(self) -> Place:
        """Where the forward pass is now, for `again`."""
        return Place(tuple(self._path_stack), self._scope, dict(self._counters.calls))

    @contextmanager
    def again(self, place: Place) -> Iterator[None]:
        """While open, operators get the names, and so the random masks, of those that ran from ``place`` on.

        For whoever repeats a part of the forward pass in backward. Later operators are counted as if it had not run.
        """
        before = self._path_stack, self._scope, self._counters, self._anchor_depth
        self._path_stack, self._scope = list(place.path), place.scope
        self._counters, self._anchor_depth = Counters(Counts(place.calls)), len(place.path)
        try:
            yield
        finally:
            self._path_stack, self._scope, self._counters, self._anchor_depth = before

    # -- names --------------------------------------------------------------------------------------------------

    def _watch_modules(self) -> list[RemovableHandle]:
        stack: list[Interceptor] = _active.stack

        paths = self._paths

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            if getattr(_active, "stack", None) is not stack or stack[-1] is not self:
                return  # another thread's step
            path = paths.get(id(module))
            if path is None:
                path = self._path_of(module)
            self._path_stack.append(path)
            self._begin_module_call(path, args, module)

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if getattr(_active, "stack", None) is not stack or stack[-1] is not self:
                return
            path_stack = self._path_stack
            if len(path_stack) <= self._anchor_depth:
                self._second_run.close()
            if len(path_stack) > 1:
                path_stack.pop()

        return [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]

    def _path_of(self, module: nn.Module) -> str:
        path = self._paths.get(id(module))
        return f"{self._path_stack[-1]}.{type(module).__name__}".lstrip(".") if path is None else path

    def _begin_module_call(self, path: str, args: tuple[Any, ...], module: nn.Module | None = None) -> None:
        """Note how a module call begins; when autograd recomputes the call, everything begins like that again."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        pointer = address(tensors[0]) if tensors else 0
        counters = self._counters
        starts = counters.starts.setdefault(path, [])
        if _graph_task() == -1:  # not in backward
            first, identities = None, NO_ROWS
            if tensors:
                first = weakref.ref(tensors[0])
                identities = tuple([None if (rows := identity_of(x)) is None else weakref.ref(rows) for x in tensors])
            counts = counters.counts
            starts.append(Start(first, pointer, counts, counts.position, identities))
            return
        depth = len(self._path_stack)
        if self._anchor_depth and depth > self._anchor_depth:
            return  # inside a module call that was recognised: counting goes on from its start
        matching = starts
        if len(starts) > 1 and tensors:
            matching = [start for start in starts if start.first is not None and start.first() is tensors[0]]
        if len(starts) > 1 and not matching:  # it was detached on the way
            matching = [start for start in starts if start.pointer == pointer]
        if len(matching) != 1:
            raise RuntimeError(
                f"{path or 'the model'} is recomputed in backward but ran {len(starts)} times in this step, so its "
                "dropout masks cannot be told apart. Give each call a module of its own, or checkpoint the module "
                "that makes the calls."
            )
        identify(path, tensors, matching[0])
        if module is not None:
            start = matching[0]
            self._second_run.enter_context(self._counting_from(start.counts.at(start.position), depth))
            self._second_run.enter_context(ModuleState(module).restored())

    @contextmanager
    def _counting_from(self, calls: dict[tuple[str, str], int], depth: int) -> Iterator[None]:
        before = self._counters.counts
        self._counters.counts, self._anchor_depth = Counts(calls), depth
        try:
            yield
        finally:
            self._counters.counts, self._anchor_depth = before, 0

    def _next_name(self, kind: str) -> str:
        return self._named(kind, self._counters.counts.add((self._path_stack[-1], kind)))

    def coming_name(self, kind: str) -> str:
        """The name that the next operator of ``kind`` in the current module will get; counts nothing."""
        return self._named(kind, self._counters.calls.get((self._path_stack[-1], kind), 0))

    def _named(self, kind: str, count: int) -> str:
        path = self._path_stack[-1]
        base = f"{path}/{kind}" if path else kind
        return f"{self._scope}{base}" + (f"#{count}" if count else "")

    def skip(self, kind: str) -> None:
        """Count an operator of the current module that a fused one does as well, so that later names stay the same."""
        self._next_name(kind)

    def name_inside(self, module: nn.Module, kind: str) -> str:
        """The name of the operator that ``module`` would call next; counts it, as that call would.

        For fused operators: they keep the names, and so the random masks, of the modules whose work they do.
        """
        path = self._path_of(module)
        self._path_stack.append(path)
        try:
            self._begin_module_call(path, ())
            return self._next_name(kind)
        finally:
            self._path_stack.pop()

    # -- calls --------------------------------------------------------------------------------------------------

    def random_key(self, name: str, rows: Rows | None = None) -> RandomKey:
        """Key of the random numbers of operator ``name`` in this step.

        Args:
            name: Of the call.
            rows: That get them. A batch that the model cuts into chunks has as many calls as chunks, and ranks with
                other shares have other chunks: a call on samples counts the calls before that had one of them.

        Raises:
            RuntimeError: The operator runs again in backward, outside any module, so its first name is not known.
        """
        if in_backward() and len(self._path_stack) == 1:
            raise RuntimeError(
                f"{name} is recomputed in backward by a function, so it cannot be matched with its first run. Give "
                "torch.utils.checkpoint a module whose forward does this, not a function or method."
            )
        return RandomKey(self.seed, self.step_number, zlib.crc32(self._passes.name(name, rows).encode()))

    def call(
        self, kind: str, structure: Structure | None, inputs: tuple[Any, ...], attrs: dict[str, Any], run: Any
    ) -> Any:
        """Run one operator through the chain; torch functions that an operator on a graph calls are not looked at."""
        call = OperatorCall(self._next_name(kind), kind, structure, inputs, attrs, run)
        if structure is None:
            out = self._proceed(call, self._chain(kind))
        else:
            with torch._C.DisableTorchFunction():
                out = self._proceed(call, self._chain(kind))
        for finished in self._finished(kind):
            finished()
        return out

    @property
    def handlers(self) -> tuple[Handler | Observer, ...]:
        """The chain, outermost first, and who observes it."""
        return self._handlers

    def find(self, handler_type: type[H]) -> H:
        """The handler of the given type."""
        for handler in self._handlers:
            if isinstance(handler, handler_type):
                return handler
        raise LookupError(f"no {handler_type.__name__} in this interceptor's chain")

    def _chain(self, kind: str) -> tuple[Handler, ...]:
        chain = self._chains.get(kind)
        if chain is None:
            links = [h for h in self._handlers if not hasattr(h, "observed")]
            chain = tuple(h for h in links if h.kinds is None or kind in h.kinds)  # type: ignore[union-attr, misc]
            self._chains[kind] = chain
        return chain

    def _finished(self, kind: str) -> tuple[Callable[[], None], ...]:
        finished = self._observers.get(kind)
        if finished is None:
            observers = [h for h in self._handlers if hasattr(h, "observed")]
            finished = tuple(o.finished for o in observers if kind in o.observed)  # type: ignore[union-attr]
            self._observers[kind] = finished
        return finished

    def _proceed(self, call: OperatorCall, chain: tuple[Handler, ...]) -> Any:
        if not chain:
            return call.compute()
        if len(chain) == 1:
            return chain[0](call, OperatorCall.compute, self)
        return chain[0](call, lambda next_call: self._proceed(next_call, chain[1:]), self)

    def _plan(self, func: Any) -> _Plan:
        plan = self._planned(func)
        if len(self._plans) < _MOST_PLANS:
            self._plans[func] = plan
        return plan

    def _planned(self, func: Any) -> _Plan:
        if func in _QUESTIONS:
            return lambda mode, args, kwargs: func(*args, **kwargs)
        if func is Tensor.__iter__:  # ``forward, backward = h``
            return lambda mode, args, kwargs: (
                iter(mode.__torch_function__(torch.unbind, (), args)) if args[0].dim() else func(*args)
            )
        if func in BACKWARD_FUNCTIONS:
            return lambda mode, args, kwargs: run_backward(mode, func, args, kwargs)
        kind = KIND_OF.get(func) or ("random" if draws(func) else None)
        follow = noting_losses(func) if self.notes_losses else follower(func)
        is_named = kind is not None and bool(self._chain(kind))
        finished = () if kind is None else self._finished(kind)
        densifies = kind is None and bool(self._chain("other"))

        def run(mode: Interceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if len(mode._path_stack) == 1 and _graph_task() != -1 and not torch.is_grad_enabled():
                return func(*args, **kwargs)  # the backward of some operator, not a layer that runs again
            if is_named:
                assert kind is not None
                out = mode.call(kind, None, args, kwargs, func)
            elif densifies and _has_sparse(args):
                out = mode.call("other", None, args, kwargs, func)
            else:  # no handler asks for its name, so it has none
                out = func(*args, **kwargs)
                for tell in finished:
                    tell()
            if isinstance(out, (Tensor, tuple, list)):
                follow(args, kwargs, out)
            return out

        return run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._plans.get(func) or self._plan(func))(self, args, kwargs or {})


_MOST_PLANS = 4096
"""Functions that are made anew for each call would fill the memory otherwise."""

_QUESTIONS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "layout", "is_cuda", "requires_grad")),
        *(getattr(Tensor, name) for name in ("__len__", "dim", "size", "stride", "numel", "element_size", "data_ptr")),
        *(Tensor.is_floating_point, Tensor.is_contiguous, Tensor.untyped_storage, Tensor.storage_offset),
        torch.promote_types,
    }
)
"""Functions whose results are no tensors and that no handler is for, answered at once: a step asks many of them."""


def _has_sparse(args: tuple[Any, ...]) -> bool:
    for x in args:
        if isinstance(x, Tensor) and x.layout is not torch.strided:
            return True
        if isinstance(x, (tuple, list)) and any(isinstance(y, Tensor) and y.layout is not torch.strided for y in x):
            return True
    return False


_graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return _graph_task() != -1
