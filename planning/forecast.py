"""What is expected of a step with all of its parts, and the seam to whatever foresees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy.typing as npt

from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import SecondsKind
from nugnn.planning.timeline import Timeline
from nugnn.planning.work_model import WorkModel


@dataclass(frozen=True, eq=False, kw_only=True)
class Forecast:
    """What is expected of a step with given parts.

    Args:
        step_seconds: Until the slowest device is done.
        seconds: Of each rank by kind; they add up to ``step_seconds``.
        timeline: Of all ranks, where it was replayed.
    """

    step_seconds: float
    seconds: tuple[dict[SecondsKind, float], ...]
    timeline: Timeline | None = None


class StepModel(Protocol):
    """What a step costs: by part, for a search, and with all parts at once.

    Attributes:
        work: Of single parts.
    """

    @property
    def work(self) -> WorkModel: ...

    def forecast(self, sizes: Sequence[PartSizes], sent_rows: npt.NDArray | None = None) -> Forecast:
        """What a step of these parts takes.

        Args:
            sizes: Of each rank.
            sent_rows: ``(P, P)`` rows of the row's rank that the column's reads; as if nobody preferred any peer when
                None.
        """
        ...

    def among(self, ranks: Sequence[int]) -> StepModel:
        """The same for a run of some of the ranks alone, which are numbered in the order given."""
        ...
