"""Seconds of what all ranks begin at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from nugnn.comm.groups import Ranks


def median_seconds(run: Callable[[], Any], ranks: Ranks, rounds: int) -> float:
    """Of this rank, all of them beginning at once; a collective call."""
    return statistics.median(seconds_together(run, ranks) for _ in range(rounds))


def seconds_together(run: Callable[[], Any], ranks: Ranks) -> float:
    """Of this rank, all of them beginning at once; a collective call."""
    ranks.synchronize()
    ranks.sum_(torch.zeros(1))
    begin = time.perf_counter()
    run()
    ranks.synchronize()
    return time.perf_counter() - begin


def slowest(seconds: list[float], ranks: Ranks) -> list[float]:
    """Of each number the largest over ranks; a collective call."""
    found: list[float] = ranks.max_(torch.tensor(seconds, dtype=torch.float64)).tolist()
    return found
