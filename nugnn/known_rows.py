"""Steps in which axis 0 stands for the samples from the first layer to the last, run without a torch-function mode.

An interceptor's mode looks at every function of a model to know whose rows a dropout gets. In a built-in network that
is known beforehand: its layers leave axis 0 alone. Its dropouts get the same names, and so the same masks, here; all
other functions run as if nobody looked. On a CPU the mode and the hooks of modules take a few percent of a small
model's step.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from nugnn.comm.groups import Ranks
from nugnn.kernels.dropout import dropout_rows
from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.philox import RandomKey
from nugnn.known_models import HOOKS, has_global_hooks, is_known

_LONG_SECONDS = 1.0
"""A step that takes longer does not notice the mode, which tells whoever watches for hangs of every operator."""

_KEEP_AXIS_0 = (
    *(nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm),
    *(nn.ReLU, nn.GELU, nn.MaxPool2d, nn.Dropout, nn.Identity, nn.Flatten, nn.Sequential, nn.ModuleList),
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_DROPOUT_FORWARD = nn.Dropout.forward


class KnownRows:
    """Runs training steps of ``model`` on a CPU: without the interceptor's mode where all is known, else with it.

    Looked at before each step: a module put in another's place, a hook, or a forward of its own brings the mode back.
    Steps have the same bits either way.

    Args:
        model: A network of `nugnn.networks`, or any other.
        interceptor: Of the model; runs all other steps.
        ranks: Who takes part.
        batch_norm: ``all`` or ``local``; the former needs the interceptor where there are other ranks.
    """

    def __init__(self, model: nn.Module, interceptor: Interceptor, ranks: Ranks, *, batch_norm: str) -> None:
        self._model, self._interceptor, self._ranks = model, interceptor, ranks
        self._exchanges_norms = batch_norm == "all" and ranks.is_split
        self._last_seconds = float("inf")
        self._layout: list[tuple[nn.Module, type[nn.Module], int, list[nn.Module | None]]] = []
        self._dropouts: list[tuple[nn.Dropout, str]] = []
        if ranks.device.type == "cpu" and self._is_known():
            self._layout = [
                (module, type(module), len(vars(module)), [*module._modules.values()]) for module in model.modules()
            ]
            named = model.named_modules()
            self._dropouts = [(module, f"{path}/dropout") for path, module in named if isinstance(module, nn.Dropout)]

    @contextmanager
    def step(self, number: int, x: Any, ids: Tensor) -> Iterator[None]:
        """Around forward and backward of step ``number``, or of a part of it.

        Args:
            number: As for `Interceptor.step`.
            x: What the model is called with.
            ids: ``(n,)`` int64, the samples that axis 0 of ``x`` stands for.
        """
        begin = time.perf_counter()
        # of two axes, or four: anything else some layer might read as a single sample
        is_fit = self._last_seconds < _LONG_SECONDS and isinstance(x, Tensor) and x.dim() in (2, 4) and len(ids) > 0
        if is_fit and self._is_as_it_was():
            self._draw_by_sample(number, ids)
            try:
                yield
            finally:
                self._draw_as_before()
        else:
            with self._interceptor.step(number):
                yield
        self._last_seconds = time.perf_counter() - begin if self._layout else float("inf")

    def _is_known(self) -> bool:
        if type(self._model).__module__ != "nugnn.networks" or not is_known(self._model):
            return False
        modules = [m for m in self._model.modules() if type(m).__module__ != "nugnn.networks"]
        flattens_rows = any(isinstance(m, nn.Flatten) and m.start_dim < 1 for m in modules)
        needs_all = self._exchanges_norms and any(isinstance(m, _NORMS) for m in modules)
        return all(type(m) in _KEEP_AXIS_0 for m in modules) and not flattens_rows and not needs_all

    def _is_as_it_was(self) -> bool:
        if not self._layout or has_global_hooks() or nn.Dropout.forward is not _DROPOUT_FORWARD:
            return False
        for module, kind, num_attributes, children in self._layout:
            own = vars(module)
            is_same = type(module) is kind and len(own) == num_attributes  # a method of its own is one attribute more
            if not is_same or [*own["_modules"].values()] != children:
                return False
            for hooks in HOOKS:
                if own[hooks]:
                    return False
        return True

    def _draw_by_sample(self, number: int, ids: Tensor) -> None:
        """Dropouts draw by sample, under the names that the interceptor would give them."""
        self._ranks.pulse.begin_step()
        for module, name in self._dropouts:
            vars(module)["forward"] = self._forward_of(module, name, number, ids)

    def _draw_as_before(self) -> None:
        for module, _ in self._dropouts:
            del vars(module)["forward"]
        self._ranks.pulse.beat()

    def _forward_of(self, module: nn.Dropout, name: str, number: int, ids: Tensor) -> Callable[[Tensor], Tensor]:
        seed, beat, calls = self._interceptor.seed, self._ranks.pulse.beat, 0

        def forward(x: Tensor) -> Tensor:
            nonlocal calls
            called = f"{name}#{calls}" if calls else name
            calls += 1
            beat()
            if module.p == 0 or not module.training:
                return nn.Dropout.forward(module, x)
            assert x.dim() > 1 and len(x) == len(ids), f"{called}: {tuple(x.shape)} for {len(ids)} samples"
            key = RandomKey(seed, number, zlib.crc32(called.encode()))
            out = dropout_rows(x, module.p, key, ids)
            return x.copy_(out) if module.inplace else out

        return forward
