"""What went into compressed sums of gradients on each rank, and the same sums made by one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nugnn.comm.compression.compressor import Compressor
from nugnn.comm.compression.link import Link
from nugnn.comm.compression.low_rank import make_compressor
from nugnn.comm.compression.settings import Compression
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks


@dataclass
class Summed:
    """One sum: what this rank gave, of which parameters, and what came of it."""

    values: Tensor
    names: list[str]
    orders: list[Any]
    num_plain: int
    total: Tensor | None = None


@dataclass
class LoggedStep:
    """The sums of a step, under which loss scale, and whether the step counted."""

    scale: float
    sums: list[Summed] = field(default_factory=list)
    is_good: bool = True

    @property
    def names(self) -> set[str]:
        return {name for each in self.sums for name in each.names}


@contextmanager
def logged() -> Iterator[list[LoggedStep]]:
    """Steps of all compressors of this process while open."""
    steps: list[LoggedStep] = []
    open_, sum_, settle_ = Compressor.open, Compressor.sum_, Compressor.settle

    def opened(self: Any, scale: Any = 1.0) -> None:
        steps.append(LoggedStep(float(scale)))
        open_(self, scale)

    def summed(self: Any, values: Tensor, names: Any, orders: Any, num_plain: int, link: Any) -> None:
        each = Summed(values.clone(), list(names), list(orders), num_plain)
        steps[-1].sums.append(each)
        sum_(self, values, names, orders, num_plain, link)
        each.total = values.clone()

    def settled(self: Any, link: Any, *, is_good: bool = True) -> None:
        steps[-1].is_good = is_good
        settle_(self, link, is_good=is_good)

    with mock.patch.multiple(Compressor, open=opened, sum_=summed, settle=settled):
        yield steps


def parts_of(x: Tensor, each: Summed, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``x``, packed as ``each`` is, by parameter: flat, in the order in which values travelled."""
    sizes = [*(named[name].numel() for name in each.names), each.num_plain]
    return dict(zip(each.names, x.split(sizes), strict=False))


def sums_of(logs: Sequence[list[LoggedStep]], named: Mapping[str, Tensor], wire: str) -> list[dict[str, Tensor]]:
    """The gradients of each step, without loss scale: of what the ranks logged, summed by the same codec here."""

    def run(ranks: Ranks) -> list[dict[str, Tensor]]:
        compressor = make_compressor(named, Compression(wire=wire), len(logs))
        link, found = Link.of(ranks), []
        for step in logs[ranks.rank]:
            compressor.open(step.scale)
            sums: dict[str, Tensor] = {}
            for each in step.sums:
                total = each.values.clone()
                compressor.sum_(total, each.names, each.orders, each.num_plain, link)
                sums |= {name: part / step.scale for name, part in parts_of(total, each, named).items()}
            compressor.settle(link, is_good=step.is_good)
            found.append(sums)
        return found

    return run_local_ranks(len(logs), run)[0]


def clipped(gradients: Mapping[str, Tensor], largest: float) -> tuple[float, float]:
    """The norm of all gradients together, and the factor that brings it down to ``largest``."""
    norm = float(torch.cat([g.double().flatten() for g in gradients.values()]).norm())
    return norm, min(1.0, largest / (norm + 1e-6))
