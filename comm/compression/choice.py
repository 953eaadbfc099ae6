"""Which way of gradients is the fastest between these ranks: measured with sums as large as the run's own."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nugnn.comm.compression.compressor import Compressor
from nugnn.comm.compression.link import Link
from nugnn.comm.compression.settings import Compression
from nugnn.comm.groups import Ranks
from nugnn.comm.hosts import HostGroups
from nugnn.comm.together import seconds_together, slowest

CANDIDATES = ("fp32", "bf16", "8bit", "4bit")
"""From the most exact one."""

_MARGIN = 1.05
"""A more exact way that takes at most so much longer than the fastest is preferred: timings are no better."""
_ROUNDS = 5
_FIRST_VALUES, _MOST_VALUES = 1 << 16, 1 << 21
_SECONDS_OF_A_SUM = 0.5
"""Over a slow link: shorter ones are lost in what a link lets through at once, and in the work of others."""


@dataclass(frozen=True)
class Choice:
    """A way and why.

    Args:
        name: One of `CANDIDATES`.
        seconds: For each of them, to sum all gradients that may be compressed, on the slowest rank: a median.
        num_values: Of these gradients.
        step_seconds: Of forward, backward and sums in each way that was tried in steps, likewise; see
            `nugnn.comm.compression.step_trial`. Empty where none was.
        trial_seconds: That took.
    """

    name: str
    seconds: dict[str, float]
    num_values: int
    step_seconds: dict[str, float] = field(default_factory=dict)
    trial_seconds: float = 0.0

    def as_text(self) -> str:
        """A sentence for the user."""
        if not self.seconds:
            return f"grad_sync auto: {self.name}, since no tensor is large enough to be compressed"
        if self.step_seconds:
            times, tried = _in_words(self.step_seconds), f"{self.trial_seconds:.2g} s of trial steps"
            return (
                f"grad_sync auto: {self.name}, which {tried} say in place of sums alone; forward, backward and sums "
                f"take {times}"
            )
        return f"grad_sync auto: {self.name}; a sum of {self.num_values} values takes {_in_words(self.seconds)}"


def _in_words(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {1000 * each:.3g} ms" for name, each in seconds.items())


def choose(named: Mapping[str, Tensor], ranks: Ranks, groups: HostGroups | None = None) -> Choice:
    """Measure and choose, the same on every rank; a collective call.

    Args:
        named: Parameters by name.
        ranks: Who takes part.
        groups: By which sums are made inside hosts first, as in the run; fp32 is the process group's own affair.
    """
    settings = Compression(wire="bf16")
    num_values = sum(p.numel() for p in named.values() if settings.takes(p))
    if num_values == 0:
        return Choice("fp32", {}, 0)
    probe = min(num_values, _FIRST_VALUES)
    first = measured(probe, ranks, CANDIDATES, rounds=2, groups=groups)
    if num_values > probe:
        wanted = probe * _SECONDS_OF_A_SUM / max(first.values())
        probe = int(min(num_values, _MOST_VALUES, max(wanted, probe)))
    seconds = measured(probe, ranks, CANDIDATES, rounds=_ROUNDS, groups=groups)
    return decided({name: s * num_values / probe for name, s in seconds.items()}, num_values)


def decided(seconds: Mapping[str, float], num_values: int) -> Choice:
    """The most exact way that is as fast as any of those there are.

    >>> decided({"fp32": 1.0, "bf16": 0.52, "8bit": 0.5, "4bit": 0.6}, 10).name
    'bf16'
    """
    best = min(seconds.values())
    name = next(name for name in CANDIDATES if seconds.get(name, math.inf) <= _MARGIN * best)
    return Choice(name, dict(seconds), num_values)


def measured(
    num_values: int, ranks: Ranks, names: tuple[str, ...], *, rounds: int, groups: HostGroups | None = None
) -> dict[str, float]:
    """Seconds of a sum in each way on the slowest rank, the median of ``rounds`` that take turns; a collective call."""
    columns = 1024 if num_values >= 2048 else 1
    shape = (num_values // columns, columns)
    values = torch.randn(shape[0] * shape[1], generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device)
    link = Link.of(ranks, groups=groups)

    def way(name: str) -> Callable[[Tensor], Any]:
        if name == "fp32":
            return ranks.sum_
        parameter = values.new_empty(shape)
        compressor = Compressor({"": parameter}, Compression(wire=name, least_size=0), ranks.world_size)
        compressor.step = 1  # of those whose errors are not measured

        def run(x: Tensor) -> None:
            compressor.open()
            compressor.sum_(x, [""], [None], 0, link)

        return run

    ways = {name: way(name) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            taken[name].append(seconds_together(functools.partial(run, values.clone()), ranks))
    medians = [statistics.median(taken[name][1:]) for name in names]  # the first compiles
    return dict(zip(names, slowest(medians, ranks), strict=True))
