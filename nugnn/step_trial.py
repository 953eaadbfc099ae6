"""Training steps that leave nothing behind, in which ways of gradients are tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nugnn.comm.backward_sums import BackwardSums, OwnGradients, Sums
from nugnn.comm.buckets import Bucket, Riders
from nugnn.comm.compression.gradient_sync import GradientSync
from nugnn.comm.compression.step_trial import STEPS_BEFORE
from nugnn.comm.groups import Ranks
from nugnn.comm.together import seconds_together
from nugnn.kernels.module_state import ModuleState


class _Carried:
    """Sums by one way after the other; see `nugnn.comm.backward_sums.Sums`."""

    def __init__(self) -> None:
        self.by: Sums = OwnGradients()

    def sum_(self, bucket: Bucket) -> Tensor:
        return self.by.sum_(bucket)

    def begin(self, bucket: Bucket) -> tuple[Tensor, Callable[[], None]]:
        return self.by.begin(bucket)


class TrialSteps:
    """Times steps in each way of gradients, with sums, buckets and residuals that are of no run.

    Args:
        passes: Forward, backward and sums of a step, by the sums that it is given.
        named: Parameters that are replicated, by name.
        ranks: Who takes part.
        way: Makes sums of a way, see `GradientSync.in_way`.
        riders: See `BackwardSums`.
    """

    def __init__(
        self,
        passes: Callable[[BackwardSums], Any],
        named: Mapping[str, nn.Parameter],
        ranks: Ranks,
        way: Callable[[str], GradientSync],
        riders: Riders | None,
    ) -> None:
        self._passes, self._ranks, self._way = passes, ranks, way
        self._carried = _Carried()
        self._ways: dict[str | None, GradientSync | None] = {}
        self._sums = BackwardSums(
            list(named.values()), ranks, while_backward_runs=True, sums=self._carried, riders=riders
        )

    def timed(self, name: str | None) -> float:
        """See `nugnn.comm.compression.step_trial.Timed`; a collective call."""
        if name not in self._ways:
            self._ways[name] = None if name is None else self._way(name)
            for _ in range(STEPS_BEFORE):
                self._step(self._ways[name])
        return seconds_together(lambda: self._step(self._ways[name]), self._ranks)

    def close(self) -> None:
        """End their threads."""
        for sync in self._ways.values():
            if sync is not None:
                sync.close()

    def _step(self, sync: GradientSync | None) -> None:
        if sync is None:
            self._carried.by = OwnGradients()
            self._passes(self._sums)
            return
        self._carried.by = sync
        sync.open(1.0)
        self._passes(self._sums)
        sync.settle(is_good=True)


@contextmanager
def leaving_nothing(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers, attributes of modules and random generators of the host are as before; see `ModuleState` for
    what of a module is not seen.
    """
    state, of_numpy, of_python = ModuleState(model), np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        state.put_back()
