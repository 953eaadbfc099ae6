"""How a predicted epoch gets shorter with more devices, and where exchanges keep it from doing so."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nugnn.planning.draft import HARDLY
from nugnn.planning.plan import Plan, SecondsKind

_WORTH = 0.95
"""Twice the devices have to take an epoch below so much of its time to be worth having."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One size of a cluster.

    Args:
        devices: How many.
        hosts: Of them.
        epoch_seconds: Predicted; None where the data do not fit.
        parts: Of the epoch, by kind, in the mean over devices; they add up to 1.
        halo_rows: For each node, in the mean; 0 for samples.
        fullest: Of the memories, how full the fullest is.
        used: Of the devices, those with more than a hardly noticeable share; None where the data do not fit.
        why_not: What is lacking where the data do not fit.
    """

    devices: int
    hosts: int
    epoch_seconds: float | None = None
    parts: dict[SecondsKind, float] | None = None
    halo_rows: float = 0.0
    fullest: float = 0.0
    used: int | None = None
    why_not: str = ""

    @classmethod
    def of(cls, plan: Plan) -> Growth:
        """What a plan comes to."""
        count, step = len(plan.devices), max(plan.step_seconds, 1e-300)
        kinds: tuple[SecondsKind, ...] = ("compute", "halo", "sync", "wait")
        return cls(
            devices=count,
            hosts=len({device.host for device in plan.devices}),
            epoch_seconds=plan.epoch_seconds,
            parts={
                kind: math.fsum(device.seconds.get(kind, 0.0) for device in plan.devices) / count / step
                for kind in kinds
            },
            halo_rows=sum(device.sizes.halo for device in plan.devices) / max(plan.data.nodes, 1),
            used=sum(device.share >= HARDLY / count for device in plan.devices),
            fullest=max(device.memory_bytes / device.memory_limit_bytes for device in plan.devices),
        )


def speed_ups(rows: Sequence[Growth]) -> list[float | None]:
    """Of each row over the first one that fits."""
    first = next((row.epoch_seconds for row in rows if row.epoch_seconds), None)
    return [None if not row.epoch_seconds or first is None else first / row.epoch_seconds for row in rows]


def where_it_stops(rows: Sequence[Growth]) -> str:
    """A sentence on how many devices are worth having, and what keeps more from helping."""
    fitting = [row for row in rows if row.epoch_seconds is not None]
    if not fitting:
        return "no cluster of these sizes holds the data"
    half = next((row.devices for row in fitting if _exchanges(row) > 0.5), None)
    most = "" if half is None else f"; exchanges take more than half of it from {half} devices on"
    for row, more in itertools.pairwise(fitting):
        assert row.epoch_seconds is not None and more.epoch_seconds is not None and more.parts is not None
        few = more.used is not None and more.used < more.devices
        if few or more.epoch_seconds > _WORTH * row.epoch_seconds:
            why = f"exchanges take {_exchanges(more):.0%} of the epoch and waiting {more.parts['wait']:.0%}"
            if few:
                where = " over the links between hosts" if more.hosts > 1 else ""
                why = f"larger shares do not pay{where}: {more.used} hold nearly all, and the others wait"
            return f"more than {row.devices} devices bring little: with {more.devices}, {why}{most}"
    last = fitting[-1]
    return f"an epoch gets shorter up to {last.devices} devices, the most that were asked for{most}"


def _exchanges(row: Growth) -> float:
    assert row.parts is not None
    return row.parts["halo"] + row.parts["sync"]
