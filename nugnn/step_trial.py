"""Training steps that leave nothing behind, in which ways of gradients are tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from nugnn.comm.backward_sums import BackwardSums, OwnGradients
from nugnn.comm.buckets import Riders
from nugnn.comm.compression.gradient_sync import GradientSync
from nugnn.comm.groups import Ranks
from nugnn.comm.together import seconds_together
from nugnn.kernels.module_state import ModuleState


class TrialSteps:
    """Times steps in each way of gradients.

    All that carries a way is made for one turn and goes with it, so that nothing of it is left in a run and no more
    memory is taken than a run in that way takes. How values share buckets is measured in the first turn alone.

    Args:
        passes: Forward, backward and sums of a step, by the sums that it is given.
        named: Parameters that are replicated, by name.
        ranks: Who takes part.
        hosts: See `GradientSync`.
        riders: See `BackwardSums`.
    """

    def __init__(
        self,
        passes: Callable[[BackwardSums], Any],
        named: Mapping[str, nn.Parameter],
        ranks: Ranks,
        hosts: str,
        riders: Riders | None,
    ) -> None:
        self._passes, self._named, self._ranks, self._hosts, self._riders = passes, named, ranks, hosts, riders
        self._arranged: dict[str | None, dict[str, Any]] = {}

    def timed(self, name: str | None, num_steps: int) -> list[float]:
        """See `nugnn.comm.compression.step_trial.Timed`; a collective call."""
        sync = GradientSync(name or "fp32", self._named, self._ranks, self._hosts)
        carried = OwnGradients() if name is None else sync
        parameters = list(self._named.values())
        sums = BackwardSums(parameters, self._ranks, while_backward_runs=True, sums=carried, riders=self._riders)

        def step() -> None:
            sync.open(1.0)
            self._passes(sums)
            sync.settle(is_good=True)

        try:
            if name in self._arranged:
                sync.load(self._arranged[name], {})
            seconds = [seconds_together(step, self._ranks) for _ in range(1 + num_steps)]
            if (state := sync.shared_state()) is not None:
                self._arranged[name] = state
            return seconds[1:]
        finally:
            sums.close()
            sync.close()


@contextmanager
def leaving_nothing(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Afterwards buffers, attributes of modules and random generators of the host are as before, and no watcher of the
    clock has seen what happened; see `ModuleState` for what of a module is not seen.
    """
    state, watcher = ModuleState(model), ranks.clock.watcher
    of_numpy, of_python = np.random.get_state(), random.getstate()
    ranks.clock.watcher = None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        ranks.clock.watcher = watcher
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        state.put_back()
