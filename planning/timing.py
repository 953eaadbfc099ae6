"""How long a call takes on a device: a median and its spread, within a budget of seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nugnn.planning.in_use import CoreWait

_MOST_REPEATS = 100
_BETWEEN_BYTES = 256 << 20
"""Several times the L2 cache of any card."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Args:
        seconds: The median.
        spread: (80th - 20th percentile) / median.
        waited: Share of the time in which others had the core: see `nugnn.planning.in_use.CoreWait`; 0 where nobody
            says it.
    """

    seconds: float
    spread: float
    waited: float = 0.0


@dataclass(frozen=True)
class Rate:
    """So much a second, with spread and waiting of the timing behind it."""

    per_second: float
    spread: float
    waited: float = 0.0

    @classmethod
    def of(cls, amount: float, timing: Timing) -> Rate:
        """``amount`` in each call."""
        return cls(amount / timing.seconds, timing.spread, timing.waited)


def time_calls(
    function: Callable[[], Any],
    device: torch.device,
    *,
    budget_seconds: float,
    warmup: int = 2,
    least_repeats: int = 5,
) -> Timing:
    """Time ``function``: one pair of CUDA events around each call on a GPU, the host's clock on a CPU.

    Args:
        function: Called without arguments; what it returns is dropped.
        device: Where it runs.
        budget_seconds: Aim for the timed calls together: ``least_repeats`` to 100 of them.
        warmup: Calls before, at least one; they compile, fill caches and allocators, and the last one tells how many
            calls go into a GPU's queue.
        least_repeats: Calls that are timed though they take longer than the budget.
    """
    wait = CoreWait()
    samples = sample_calls(function, device, budget_seconds=budget_seconds, warmup=warmup, least_repeats=least_repeats)
    return replace(timing_of(samples), waited=wait.share or 0.0 if device.type == "cpu" else 0.0)


def sample_calls(
    function: Callable[[], Any],
    device: torch.device,
    *,
    budget_seconds: float,
    warmup: int = 2,
    least_repeats: int = 5,
    clear_cache: bool = True,
) -> list[float]:
    """Seconds of single calls; arguments as for `time_calls`.

    With ``clear_cache``, what the last call left in a GPU's cache is gone before the next.
    """
    first = 0.0
    for _ in range(warmup):
        first = seconds_of(function, device)
    if device.type != "cuda":
        samples: list[float] = []
        end = time.perf_counter() + budget_seconds
        while len(samples) < least_repeats or (len(samples) < _MOST_REPEATS and time.perf_counter() < end):
            samples.append(seconds_of(function, device))
        return samples
    repeats = max(least_repeats, min(_MOST_REPEATS, int(budget_seconds / max(first, 1e-6))))
    # Written before each call: the GPU is busy until the call and the event behind it are in its queue, so that the
    # host's time for them does not count.
    scratch = torch.empty(_BETWEEN_BYTES if clear_cache else 0, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in events:
        scratch.zero_()
        before.record(stream)
        function()
        after.record(stream)
    synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in events]


def timing_of(samples: Sequence[float]) -> Timing:
    """Of single calls.

    >>> timing_of([1.0, 2.0, 2.0, 2.0, 2.5, 9.0])
    Timing(seconds=2.0, spread=0.25, waited=0.0)
    """
    ordered = sorted(samples)
    median, last = statistics.median(ordered), len(ordered) - 1
    return Timing(median, (ordered[round(0.8 * last)] - ordered[round(0.2 * last)]) / median)


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Of one call, by the host's clock, until the device is done."""
    synchronize(device)
    begin = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
