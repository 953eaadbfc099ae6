"""Activation checkpointing of any model: its message-passing layers run again in backward, exactly as they ran first.

A layer is a module below the model that is called with the graph, with all that it calls: each `dgl.nn` convolution in
a plain model, each block where a model calls blocks with the graph and these a convolution. A module that calls two or
more such layers (an encoder around its layers) is no layer itself. What is called with the graph shows only when it
runs, so the first step checkpoints at every level: it computes the same, in more time.

In between the layers, outputs are kept as ever.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; the mechanism is `torch.utils.checkpoint`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nugnn.embedding import NodeEmbedding
from nugnn.kernels.interceptor import Interceptor, in_backward
from nugnn.kernels.module_state import ModuleState
from nugnn.kernels.rows import identity_of, tag
from nugnn.shard_graph import ShardGraph

_Forward = Callable[..., Any]


class Recomputation:
    """Makes the layers of ``model`` run again in backward.

    Args:
        model: Called as a whole; what it calls itself is not repeated.
        interceptor: Its step is open around `step`.
    """

    def __init__(self, model: nn.Module, interceptor: Interceptor) -> None:
        self._model, self._interceptor = model, interceptor
        self._num_layers_in: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        """Of each module that was called with the graph in an earlier step."""
        self._seen: dict[nn.Module, int] = {}
        self._counts = [0]
        self._in_layer = False
        self._inside: set[nn.Module] = set()
        """Modules that ran as a part of a layer in this step."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward and backward pass of one step.

        Raises:
            ValueError: A whole step ran, and nothing below the model was called with the graph.
        """
        self._seen, self._counts, self._in_layer, self._inside = {}, [0], False, set()
        with self._forwards_replaced():
            yield
        if not self._seen:
            raise ValueError(
                "activations recompute: nothing below the model is called with the graph, so there is no layer to "
                "compute again. Put message passing into modules called as layer(graph, x), or use keep"
            )
        self._num_layers_in.update(self._seen)  # not before: a step decides in backward as it did in forward

    @contextmanager
    def _forwards_replaced(self) -> Iterator[None]:
        replaced: list[tuple[nn.Module, _Forward | None]] = []
        try:
            for module in self._model.modules():
                if module is not self._model and _may_take_a_graph(module):
                    replaced.append((module, vars(module).get("forward")))
                    vars(module)["forward"] = functools.partial(self._forward, module, module.forward)
            yield
        finally:
            for module, forward in replaced:
                del vars(module)["forward"]
                if forward is not None:
                    vars(module)["forward"] = forward

    def _forward(self, module: nn.Module, plain: _Forward, *args: Any, **kwargs: Any) -> Any:
        graphs = [x for x in (*args, *kwargs.values()) if isinstance(x, ShardGraph)]
        if not graphs or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if self._in_layer:
            self._inside.add(module)
            return plain(*args, **kwargs)
        if in_backward() and module in self._inside:  # a checkpoint of the user's own, inside the layer
            return plain(*args, **kwargs)
        with self._counting(module):
            num_layers = self._num_layers_in.get(module)
            if num_layers is not None and num_layers > 1:
                return plain(*args, **kwargs)
            run = plain if num_layers is None else functools.partial(self._run_as_layer, plain)
            layer = _Layer(module, run, self._interceptor, graphs, args)
            return checkpoint(layer, *args, use_reentrant=False, **kwargs)

    def _run_as_layer(self, plain: _Forward, *args: Any, **kwargs: Any) -> Any:
        self._in_layer = True
        try:
            return plain(*args, **kwargs)
        finally:
            self._in_layer = False

    @contextmanager
    def _counting(self, module: nn.Module) -> Iterator[None]:
        """Note how many layers ``module`` holds: those called inside, or itself."""
        self._counts.append(0)
        try:
            yield
        finally:
            num_inside = self._counts.pop()
            self._seen[module] = max(num_inside, self._seen.get(module, 0))
            self._counts[-1] += max(num_inside, 1)


class _Layer:
    """One call of a module: the second time and later it runs as it did the first time."""

    def __init__(
        self,
        module: nn.Module,
        run: _Forward,
        interceptor: Interceptor,
        graphs: list[ShardGraph],
        args: tuple[Any, ...],
    ) -> None:
        self._run, self._interceptor = run, interceptor
        self._place, self._state = interceptor.place(), ModuleState(module)
        # what is in the graph's data is an input, too
        self._data = [(graph, *_frames(graph)) for graph in graphs]
        self._rows = [identity_of(x) if isinstance(x, Tensor) else None for x in args]
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_run:
            self._has_run = True
            out = self._run(*args, **kwargs)
            self._state.forget_unchanged()
            return out
        for x, rows in zip(args, self._rows, strict=True):
            if rows is not None and identity_of(x) is None:
                tag(x, rows)
        with ExitStack() as stack:
            stack.enter_context(self._interceptor.again(self._place))
            stack.enter_context(self._state.restored())
            for graph, node_frames, edge_frames in self._data:
                stack.enter_context(graph.local_scope())
                graph._node_frames = [frame.clone() for frame in node_frames]
                graph._edge_frames = [frame.clone() for frame in edge_frames]
            return self._run(*args, **kwargs)


def _frames(graph: ShardGraph) -> tuple[list[Any], list[Any]]:
    return [frame.clone() for frame in graph._node_frames], [frame.clone() for frame in graph._edge_frames]


def _may_take_a_graph(module: nn.Module) -> bool:
    """Not torch's own, whose forward others look at to see that it is torch's; not embeddings, which keep nothing."""
    is_torch_s = type(module).__module__.startswith("torch.nn.")
    return not is_torch_s and not isinstance(module, (NodeEmbedding, torch.jit.ScriptModule))
