"""How a predicted epoch gets shorter with more devices, and where exchanges keep it from doing so."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nugnn._counted import counted
from nugnn.planning.draft import HARDLY
from nugnn.planning.in_words import seconds_text
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


def are_longer(rows: Sequence[Growth]) -> list[bool]:
    """Of each row, whether its epoch is longer than that of a row before it, which has fewer devices."""
    found, shortest = [], math.inf
    for row in rows:
        found.append(row.epoch_seconds is not None and row.epoch_seconds > shortest)
        shortest = min(shortest, row.epoch_seconds or math.inf)
    return found


def said_of_left_out(rows: Sequence[Growth], notes: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """What plans of several sizes say of devices that bring nothing, as one sentence.

    Args:
        rows: Of all sizes.
        notes: See `nugnn.planning.left_out`, by the number of devices; those of a single size stay as they are.
    """
    *most, last = [count for count, said in notes.items() if said] or [0]
    if not most:
        return tuple(notes.get(last, ()))
    best = min((row for row in rows if row.epoch_seconds), key=lambda row: row.epoch_seconds or math.inf)
    return (
        f"of {', '.join(map(str, most))} and {counted(last, 'device')} not all are worth having: exchanges cost more "
        f"than the others bring. The shortest epoch is that of {_counted(best)}, "
        f"{seconds_text(best.epoch_seconds or 0.0)}; plans have all that were asked for, as each device gets a node at "
        "least",
    )


def where_it_stops(rows: Sequence[Growth]) -> str:
    """A sentence on how many devices are worth having, and what keeps more from helping.

    Those of a row are, where its epoch is clearly shorter than that of every smaller one, and not because the same few
    devices do all in another way. With cards that differ the first that are added may bring nothing, the next ones
    much.
    """
    fitting = [row for row in rows if row.epoch_seconds is not None]
    if not fitting:
        return "no cluster of these sizes holds the data"
    worth, flat = [fitting[0]], list[list[Growth]]()  # flat: runs of rows between those that are worth it
    for before, row in itertools.pairwise(fitting):
        if _is_shorter(row, worth[-1]) and (_used(row) == row.devices or _used(row) > _used(worth[-1])):
            worth.append(row)
        elif before is worth[-1]:
            flat.append([row])
        else:
            flat[-1].append(row)
    half = next((row.devices for row in fitting if _exchanges(row) > 0.5), None)
    most = "" if half is None else f"; exchanges take more than half of it from {counted(half, 'device')} on"
    last = worth[-1]
    if len(fitting) == 1:
        which = "only these hold the data" if len(rows) > 1 else "no other number was asked for"
        return f"{_counted(last)}: {which}, so nothing tells what more would bring{most}"
    between = [f"with {_numbers(run)}" for run in flat if run[-1].devices < last.devices]
    hardly = f", though hardly {' and '.join(between)}" if between else ""
    shorter = f"an epoch gets shorter up to {counted(last.devices, 'device')}"
    if last is fitting[-1]:
        return f"{shorter}, the most that were asked for{hardly}{most}"
    more = flat[-1][0]
    return f"{f'{shorter}{hardly}; ' if hardly else ''}more than {_counted(last)} bring little: {_why(more)}{most}"


def _is_shorter(row: Growth, before: Growth) -> bool:
    assert row.epoch_seconds is not None and before.epoch_seconds is not None
    return row.epoch_seconds <= _WORTH * before.epoch_seconds


def _used(row: Growth) -> int:
    return row.devices if row.used is None else row.used


def _counted(row: Growth) -> str:
    return counted(row.devices, "device")


def _numbers(run: Sequence[Growth]) -> str:
    return f"{run[0].devices}" if len(run) == 1 else f"{run[0].devices} to {run[-1].devices}"


def _why(row: Growth) -> str:
    """What keeps an epoch from getting shorter with so many devices."""
    assert row.parts is not None
    if _used(row) < row.devices:
        where = " over the links between hosts" if row.hosts > 1 else ""
        why = f"larger shares do not pay{where}: {_used(row)} hold nearly all, and the others wait"
    else:
        why = f"exchanges take {_exchanges(row):.0%} of the epoch and waiting {row.parts['wait']:.0%}"
    return f"with {row.devices}, {why}"


def _exchanges(row: Growth) -> float:
    assert row.parts is not None
    return row.parts["halo"] + row.parts["sync"]
