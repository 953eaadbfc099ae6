"""Seconds that a rank spends in communication, on the host and between events of a GPU; also of recorded steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Note = Callable[[float], None]
"""Is told seconds."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time between two events of a GPU's stream.

    Args:
        what: It counts for.
        label: What happened.
        first: The event before it.
        last: The one behind it.
        note: Is told the seconds; nobody when None.
    """

    what: str
    label: str
    first: Any
    last: Any
    note: Note | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What of a step that was recorded happens each time that it runs.

    Args:
        spans: What is measured then.
        counts: What is called then.
    """

    spans: list[Span]
    counts: list[Callable[[], None]]


def is_recording(device: torch.device) -> bool:
    """Whether what is asked of ``device`` now goes into a CUDA graph: nothing is computed, nothing may be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Watcher(Protocol):
    """Who wants to know when what the clock measures happened; see `nugnn.comm.step_watch`."""

    def note(self, what: str, label: str, first: Any, last: Any) -> None:
        """Something lay between two times of `time.perf_counter`, or two events of a GPU that have passed."""
        ...

    def begin_lap(self) -> None:
        """Events from now on are of another lap: the GPU has nothing left to do of the last one."""
        ...


@dataclass
class CommClock:
    """Seconds this rank spent in communication, waiting for peers included; read and reset by the trainer.

    On a GPU the time between two events of its stream counts; they are read in `take`, so nothing waits before.
    """

    seconds: dict[str, float] = field(default_factory=lambda: {"halo": 0.0, "sync": 0.0})
    halo_rounds: int = 0
    """Halo exchanges begun since the run started, those of backward included; the same on every rank."""
    watcher: Watcher | None = None
    """Is told all that is measured; nobody when None."""
    _spans: list[Span] = field(default_factory=list, repr=False)
    _counts: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _is_communicating: bool = field(default=False, repr=False)

    def phase(self, name: str, device: torch.device) -> AbstractContextManager[None]:
        """Tell the watcher when what happens inside does, a part of a step; nothing without one."""
        return nullcontext() if self.watcher is None else self.measure(name, device)

    def count(self, device: torch.device, count: Callable[[], None]) -> None:
        """Call ``count``: now, or each time that the step runs which is recorded on ``device``."""
        if is_recording(device):
            self._counts.append(count)
        else:
            count()

    @contextmanager
    def measure(self, what: str, device: torch.device, label: str = "", note: Note | None = None) -> Iterator[None]:
        """Count what happens inside as ``halo`` or ``sync``; ``label`` says to the watcher what it is.

        Communication inside of communication counts for the outer one.

        Args:
            what: It counts for.
            device: Where it happens.
            label: As above.
            note: Is told the seconds as they are counted.
        """
        counts = what in self.seconds
        if counts and self._is_communicating:
            yield
            return
        before, self._is_communicating = self._is_communicating, counts or self._is_communicating
        try:
            with self._measured(what, device, label, note):
                yield
        finally:
            self._is_communicating = before

    @contextmanager
    def _measured(self, what: str, device: torch.device, label: str, note: Note | None) -> Iterator[None]:
        if device.type != "cuda":
            begin = time.perf_counter()
            try:
                yield
            finally:
                end = time.perf_counter()
                self._count(what, end - begin, note)
                if self.watcher is not None:
                    self.watcher.note(what, label, begin, end)
            return
        how = {"enable_timing": True}
        if is_recording(device):  # events of each time that the step runs
            how["external"] = True
        first, last = torch.cuda.Event(**how), torch.cuda.Event(**how)
        first.record()
        try:
            yield
        finally:
            last.record()
            self._spans.append(Span(what, label, first, last, note))

    def _count(self, what: str, seconds: float, note: Note | None) -> None:
        if what in self.seconds:
            self.seconds[what] += seconds
        if note is not None:
            note(seconds)

    def withdraw(self) -> Recorded:
        """What came since the last call of `take`, or was recorded; it does not count unless it is added again."""
        withdrawn, self._spans, self._counts = Recorded(self._spans, self._counts), [], []
        return withdrawn

    def add(self, recorded: Recorded) -> None:
        """Count what is of a recorded step, once for each time it runs; then with its last durations."""
        self._spans += recorded.spans
        for count in recorded.counts:
            count()

    def halo_seconds(self) -> float:
        """What `take` would say of halo exchanges, which still counts there; waits for a GPU that has not got there."""
        queued = 0.0
        for span in self._spans:
            if span.what == "halo":
                span.last.synchronize()
                queued += span.first.elapsed_time(span.last) / 1000
        return self.seconds["halo"] + queued

    def catch_up(self) -> None:
        """Count what a GPU has done, and tell whoever has to note it; waits for one that has not got there."""
        for span in self._spans:
            span.last.synchronize()
            self._count(span.what, span.first.elapsed_time(span.last) / 1000, span.note)
            if self.watcher is not None:
                self.watcher.note(span.what, span.label, span.first, span.last)
        self._spans.clear()

    def take(self) -> tuple[float, float]:
        """``(halo, sync)`` seconds since the last call; waits for a GPU that has not got there."""
        self.catch_up()
        if self.watcher is not None:
            self.watcher.begin_lap()
        taken = (self.seconds["halo"], self.seconds["sync"])
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return taken


class Stopwatch:
    """Adds up seconds between `start` and `stop`, on the host, or between events of a GPU's stream without waiting.

    Args:
        device: Where the time is spent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._seconds = self._begin = 0.0
        self._first: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        """Events that the GPU had not passed when it was last looked at."""

    def start(self) -> None:
        """From now on it counts, in the current stream."""
        self._begin = time.perf_counter()
        self._first = self._event()

    def stop(self) -> None:
        """Until now it has counted."""
        if not self._is_cuda:
            self._seconds += time.perf_counter() - self._begin
            return
        self._pairs.append((self._first, self._event()))
        while self._pairs and self._pairs[0][1].query():
            self._take()

    def seconds(self) -> float:
        """In all; waits for a GPU that has not got there."""
        while self._pairs:
            self._pairs[0][1].synchronize()
            self._take()
        return self._seconds

    def _take(self) -> None:
        first, last = self._pairs.pop(0)
        self._seconds += first.elapsed_time(last) / 1000

    def _event(self) -> Any:
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
