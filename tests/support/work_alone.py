"""A step model made of a work model alone, for tests of what searches with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy.typing as npt

from nugnn.planning.forecast import Forecast
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import SecondsKind
from nugnn.planning.work_model import WorkModel


@dataclass(frozen=True)
class WorkAlone:
    """A work model alone: whoever is done waits for the slowest, at the end."""

    work: WorkModel

    def forecast(self, sizes: Sequence[PartSizes], sent_rows: npt.NDArray | None = None) -> Forecast:
        """See `nugnn.planning.forecast.StepModel.forecast`."""
        each = [self.work.seconds(rank, size) for rank, size in enumerate(sizes)]
        slowest = max(each)
        kinds: list[dict[SecondsKind, float]] = [
            {"compute": seconds, "halo": 0.0, "sync": 0.0, "wait": slowest - seconds} for seconds in each
        ]
        return Forecast(step_seconds=slowest, seconds=tuple(kinds))

    def among(self, ranks: Sequence[int]) -> WorkAlone:
        """See `nugnn.planning.forecast.StepModel.among`."""
        return WorkAlone(_WorkOfSome(self.work, tuple(ranks)))


@dataclass(frozen=True)
class _WorkOfSome:
    """A work model of some of another one's devices."""

    work: WorkModel
    ranks: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return len(self.ranks)

    def seconds(self, part: int, sizes: PartSizes) -> float:
        return self.work.seconds(self.ranks[part], sizes)

    def bytes(self, part: int, sizes: PartSizes) -> int:
        return self.work.bytes(self.ranks[part], sizes)
