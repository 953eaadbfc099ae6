"""How many operators an optimizer's step puts into a GPU's queue, counted where it runs: there, or on a CPU."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nugnn.planning.operator_kinds import describe

_OF_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")


class LaunchCount:
    """Counts what the dispatcher sees of one step.

    On a GPU each operator there counts, one over lists of tensors once. On a CPU torch's optimizers go from tensor to
    tensor where they would take lists on a GPU (``foreach`` left to them): what comes once for each tensor counts once
    for each list, rounded up for operators that only some tensors need. Numbers that torch keeps on the CPU, such as
    counts of steps, are no launches.

    Args:
        optimizer: Whose parameters have their gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        stepped = [
            (number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"]
            if p.grad is not None
        ]  # fmt: skip
        self._is_on_gpu = any(p.device.type == "cuda" for _, p in stepped)
        takes_lists = all(group.get("foreach", False) is None for group in optimizer.param_groups)
        self._share = len({(n, p.dtype) for n, p in stepped}) / len(stepped) if takes_lists and stepped else 1.0
        self._of_lists, self._of_tensors = 0, Counter[str]()

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """One call that the dispatcher has made; arguments are those of `nugnn.planning.operator_kinds.describe`."""
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if self._is_on_gpu:
            is_launched = any(x.device.type == "cuda" for x in tensors)
        else:
            is_launched = any(x.dim() for x in tensors)
        name = func._schema.name.rpartition("::")[2]
        if not is_launched or describe(func, args, kwargs, out).kind == "metadata":
            return
        if self._is_on_gpu or name.startswith(_OF_LISTS):
            self._of_lists += 1
        else:
            self._of_tensors[name] += 1

    @property
    def total(self) -> int:
        """Of the step so far, at least 1."""
        rounding = 1e-9  # of the share
        return max(self._of_lists + sum(math.ceil(n * self._share - rounding) for n in self._of_tensors.values()), 1)
