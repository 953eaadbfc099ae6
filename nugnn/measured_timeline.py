"""What ranks noted of their last steps as one timeline, in the form in which steps are predicted."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from nugnn.comm.step_watch import Noted
from nugnn.planning.timeline import TRANSFER, WAIT, Clock, Event, Timeline

_COMMUNICATION = ("halo", "sync")


def measured_timeline(steps: Sequence[Sequence[Sequence[Noted]]], names: Sequence[str]) -> Timeline | None:
    """Of the step whose makespan is the median.

    An exchange began when the last rank had come to it. What a rank waited before that is waiting for others; how long
    bytes travelled is known up to when they were asked for.

    Args:
        steps: Of each rank, from `nugnn.comm.step_watch.StepWatch.steps`.
        names: Of the ranks' devices.

    Returns:
        None where no step was noted on all ranks.
    """
    count = min(map(len, steps))
    if not count:
        return None
    together = [[own[len(own) - count + i] for own in steps] for i in range(count)]
    makespans = [max(own[0][3] for own in each) - min(own[0][2] for own in each) for each in together]
    chosen = together[makespans.index(statistics.median_low(makespans))]
    begin = min(own[0][2] for own in chosen)
    shifted = [[(what, label, a - begin, b - begin) for what, label, a, b in own] for own in chosen]
    ready = _begins(shifted)
    return Timeline(
        tuple(names),
        tuple(tuple(_events(own, ready)) for own in shifted),
        tuple(own[0][3] for own in shifted),
    )


_Span = tuple[str, str, float, float]


def _numbered(spans: Sequence[_Span]) -> Iterator[tuple[int, _Span]]:
    """Which of its label's each is: of halo rows the even ones are sent, and the odd ones waited for."""
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for span in spans:
        key = span[:2]
        yield seen[key], span
        seen[key] += 1


def _key(number: int, what: str, label: str) -> tuple[str, str, int]:
    return what, label, number // 2 if what == "halo" else number


def _begins(ranks: Sequence[Sequence[_Span]]) -> dict[tuple[str, str, int], float]:
    """When the last rank had come to each exchange."""
    found: dict[tuple[str, str, int], float] = {}
    for spans in ranks:
        for number, (what, label, a, _) in _numbered(spans):
            if what == "sync" or (what == "halo" and number % 2 == 0):
                key = _key(number, what, label)
                found[key] = max(found.get(key, a), a)
    return found


def _events(spans: Sequence[_Span], ready: dict[tuple[str, str, int], float]) -> Iterator[Event]:
    _, _, at, end = spans[0]
    phases = [(what, a, b) for what, _, a, b in spans[1:] if what not in _COMMUNICATION]
    sent: dict[tuple[str, str, int], float] = {}

    def phase_at(moment: float) -> str:
        return next((what for what, a, b in phases if a <= moment < b), "")

    def computed(until: float) -> Iterator[Event]:
        """From ``at`` on, cut where phases begin and end."""
        cuts = sorted({at, max(at, until), *(x for _, a, b in phases for x in (a, b) if at < x < until)})
        for one, other in itertools.pairwise(cuts):
            phase = phase_at(one)
            yield Event(phase or "between phases", "compute", phase, "device", one, other - one)

    for number, (what, label, a, b) in _numbered(spans):
        if what not in _COMMUNICATION:
            continue
        yield from computed(a)
        at, phase, key = b, phase_at(a), _key(number, what, label)
        clock: Clock = "halo" if what == "halo" else "sync"
        if what == "halo" and number % 2 == 0:
            sent[key] = a
            yield Event(label, "exchange", phase, "device", a, b - a, clock)
            continue
        others = min(max(ready.get(key, a), a), b)
        for kind, first, last in ((WAIT, a, others), (TRANSFER, others, b)):
            if last > first:
                yield Event(label, kind, phase, "device", first, last - first, clock)
        begun = max(sent.get(key, a), ready.get(key, a))
        yield Event(label, what, phase, "wire", min(begun, b), max(b - begun, 0.0), clock)
    yield from computed(end)
