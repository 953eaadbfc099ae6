"""What happens on each rank in a step, and when: predicted by a replay or noted in a run, shown in the same way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nugnn._counted import counted
from nugnn.planning.in_words import seconds_text, short_device

Clock = Literal["compute", "halo", "sync"]
"""What a trainer counts time for: see `nugnn.history.Epoch`."""
Lane = Literal["host", "device", "wire"]
LANES: tuple[Lane, ...] = ("device", "wire", "host")
WAIT, TRANSFER = "wait", "transfer"
"""Kinds of events of a device that stands still: until others have come, and while bytes travel."""
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Event:
    """Something that takes time.

    Args:
        name: Of the operator, or of the exchange.
        kind: Of the operator; of a device that stands still, ``wait`` until others have come and ``transfer`` while
            bytes travel; of a wire ``wait`` likewise, or what travels.
        phase: Of the step; empty where none is known.
        lane: ``device``: one thing after the other; ``wire``: exchanges; ``host``: launches.
        start: Seconds since the step began.
        seconds: How long.
        clock: What a trainer would count it for; see `nugnn.history.Epoch`.
    """

    name: str
    kind: str
    phase: str
    lane: Lane
    start: float
    seconds: float
    clock: Clock = "compute"

    @property
    def end(self) -> float:
        return self.start + self.seconds

    @property
    def stands_still(self) -> bool:
        """Whether it is a device that waits for others or for bytes."""
        return self.lane == "device" and self.kind in (WAIT, TRANSFER)


@dataclass(frozen=True)
class Timeline:
    """The step of a run.

    Args:
        names: Of the ranks' devices.
        events: Of each rank, in the order in which they begin on each lane; ranks that do the same at the same time may
            share them.
        ends: When each rank is done.
    """

    names: tuple[str, ...]
    events: tuple[tuple[Event, ...], ...]
    ends: tuple[float, ...]

    def __str__(self) -> str:
        """Its `picture`."""
        return picture(self)

    @property
    def makespan(self) -> float:
        """Seconds until the last rank is done."""
        return max(self.ends)

    def seconds(self, rank: int) -> dict[str, float]:
        """As a trainer tells an epoch's: ``epoch``, of it ``compute``, ``halo`` and ``sync``; of these three ``wait``.

        ``halo`` and ``sync`` are what computation stands still for, with what packs gradients; an exchange that runs
        beside computation is in neither. ``wait`` is standing still until others have come.
        """
        found = {"epoch": self.ends[rank], "compute": 0.0, "halo": 0.0, "sync": 0.0, "wait": 0.0}
        for event in self.events[rank]:
            if event.lane == "device":
                if event.clock != "compute":
                    found[event.clock] += event.seconds
                if event.kind == WAIT:
                    found["wait"] += event.seconds
        found["compute"] = found["epoch"] - found["halo"] - found["sync"]
        return found

    def by_kind(self, rank: int) -> dict[tuple[str, str], float]:
        """Seconds of the device by phase and kind, standing still included."""
        found: dict[tuple[str, str], float] = {}
        for event in self.events[rank]:
            if event.lane == "device":
                key = event.phase, event.kind
                found[key] = found.get(key, 0.0) + event.seconds
        return found

    def busy(self, rank: int) -> float:
        """Seconds of the device's operators."""
        return sum(e.seconds for e in self.events[rank] if e.lane == "device" and not e.stands_still)

    def idle_share(self, rank: int) -> float:
        """Of the makespan, what the rank spends waiting for others, those included that end after it."""
        waiting = self.seconds(rank)["wait"] + self.makespan - self.ends[rank]
        return waiting / self.makespan if self.makespan else 0.0

    def stretched(self, factor: float) -> Timeline:
        """Everything begins, and takes, ``factor`` times as late and long."""
        longer: dict[int, tuple[Event, ...]] = {}
        for each in self.events:
            if id(each) not in longer:
                longer[id(each)] = tuple(
                    replace(event, start=factor * event.start, seconds=factor * event.seconds) for event in each
                )
        events = tuple(longer[id(each)] for each in self.events)
        return Timeline(self.names, events, tuple(factor * end for end in self.ends))

    def to_chrome(self) -> str:
        """JSON that Perfetto and ``chrome://tracing`` show: a process for each rank, a thread for each lane."""
        shown: list[dict[str, Any]] = []
        for rank, (name, events) in enumerate(zip(self.names, self.events, strict=True)):
            shown.append(_named("process_name", rank, 0, f"rank {rank}: {name}"))
            lanes = {event.lane for event in events}
            shown += [_named("thread_name", rank, i, lane) for i, lane in enumerate(LANES) if lane in lanes]
            shown += [
                {
                    "name": event.name,
                    "cat": event.kind,
                    "ph": "X",
                    "pid": rank,
                    "tid": LANES.index(event.lane),
                    "ts": event.start * _MICROSECONDS,
                    "dur": event.seconds * _MICROSECONDS,
                    "args": {"phase": event.phase, "kind": event.kind, "clock": event.clock},
                }
                for event in events
            ]
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": shown})


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


# -- a picture in text -------------------------------------------------------------------------------------------------

_LETTERS = {"forward": "f", "loss": "l", "backward": "b", "optimizer": "o"}
_MEANING = {
    "f": "forward",
    "l": "loss",
    "b": "backward",
    "o": "optimizer",
    "h": "halo rows",
    "s": "sums over ranks",
    ".": "waits",
    "?": "outside of these phases",
    " ": "nothing on the device",
}


def picture(timeline: Timeline, *, width: int = 80, most_ranks: int = 16, numbers: Sequence[int] | None = None) -> str:
    """A line for each rank, a letter for what the device does most of in each slice of the step.

    Args:
        timeline: Predicted or measured.
        width: Of a line.
        most_ranks: Lines; where there are more ranks, those that take longest.
        numbers: Of the ranks, where the timeline has only some of them.

    Returns:
        Lines, the last ones the legend: what the signs mean that occur.
    """
    ranks = sorted(range(len(timeline.names)), key=lambda rank: (-_own(timeline, rank), rank))[:most_ranks]
    called = range(len(timeline.names)) if numbers is None else numbers
    labels = {rank: f"rank {called[rank]} {short_device(timeline.names[rank])}" for rank in ranks}
    longest = max(map(len, labels.values()))
    figures = {rank: f" {100 * timeline.idle_share(rank):3.0f} % idle" for rank in ranks}
    slices = max(width - longest - 2 - len(next(iter(figures.values()))), 10)
    drawn = {rank: _letters(timeline, rank, slices) for rank in ranks}
    lines = [f"{labels[rank]:<{longest}} |{drawn[rank]}{figures[rank]}" for rank in sorted(ranks)]
    signs = set("".join(drawn.values()))
    legend = "  ".join(f"{sign.replace(' ', 'blank')} {means}" for sign, means in _MEANING.items() if sign in signs)
    if left_out := len(timeline.names) - len(ranks):
        lines.append(f"{counted(left_out, 'rank')} that wait longer are not shown")
    return "\n".join([*lines, f"{seconds_text(timeline.makespan)} from left to right", *_folded(legend, width)])


def _own(timeline: Timeline, rank: int) -> float:
    return timeline.ends[rank] - timeline.seconds(rank)["wait"]


def _letters(timeline: Timeline, rank: int, slices: int) -> str:
    filled: list[dict[str, float]] = [{} for _ in range(slices)]
    each = timeline.makespan / slices if timeline.makespan else 1.0
    for event in timeline.events[rank]:
        if event.lane != "device" or event.seconds <= 0:
            continue
        letter = _letter(event)
        first, last = int(event.start / each), min(int(event.end / each), slices - 1)
        for place in range(min(first, slices - 1), last + 1):
            covered = min(event.end, (place + 1) * each) - max(event.start, place * each)
            filled[place][letter] = filled[place].get(letter, 0.0) + max(covered, 0.0)
    done = timeline.ends[rank]
    return "".join(
        max(parts, key=lambda letter: parts[letter]) if parts else ("." if place * each >= done else " ")
        for place, parts in enumerate(filled)
    )


def _letter(event: Event) -> str:
    if event.kind == WAIT:
        return "."
    if event.clock != "compute":
        return {"halo": "h", "sync": "s"}[event.clock]
    return _LETTERS.get(event.phase, "?")


def _folded(text: str, width: int) -> Sequence[str]:
    lines = [""]
    for word in text.split("  "):
        if lines[-1] and len(lines[-1]) + 2 + len(word) > width:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + word
    return lines
