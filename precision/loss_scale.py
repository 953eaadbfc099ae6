"""A factor on the loss against float16 underflow, the same on every rank.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, with the usual dynamic rule: halve after an
overflow, double after a run of good steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

_FIRST, _LARGEST = 2.0**16, 2.0**24
_GOOD_STEPS = 2000


class LossScale:
    """Multiplies the loss and divides the gradients; a step with an overflow on any rank is skipped on all.

    Args:
        is_on: Whether there is anything to do; the factor stays 1 otherwise.
        largest: Replaces a tensor by its maximum over ranks and returns it.
    """

    def __init__(self, *, is_on: bool, largest: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.is_on, self._largest = is_on, largest
        self.scale = _FIRST if is_on else 1.0
        self.num_good_steps = 0
        self.num_skipped = 0

    def unscale_(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divide gradients by the factor, in place, after they were summed over ranks; a collective call.

        Returns:
            Whether they are all finite, on every rank: the optimizer may step.
        """
        if not self.is_on:
            return True
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.scale)
        finite = [torch.isfinite(gradient).all() for gradient in gradients]
        overflow = 1 - torch.stack(finite).all().float().reshape(1).cpu() if finite else torch.zeros(1)
        is_finite = float(self._largest(overflow)) == 0  # parameters that live on one rank overflow there alone
        if is_finite:
            self.num_good_steps += 1
            if self.num_good_steps % _GOOD_STEPS == 0:
                self.scale = min(self.scale * 2, _LARGEST)
        else:
            self.num_good_steps = 0
            self.num_skipped += 1
            self.scale = max(self.scale / 2, 1.0)
        return is_finite

    def state(self) -> dict[str, float]:
        """Plain numbers that `load` takes."""
        return {"scale": self.scale, "num_good_steps": self.num_good_steps, "num_skipped": self.num_skipped}

    def load(self, state: dict[str, float]) -> None:
        """Go on where `state` was taken."""
        self.scale = float(state["scale"])
        self.num_good_steps, self.num_skipped = int(state["num_good_steps"]), int(state["num_skipped"])
