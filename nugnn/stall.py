"""Decides, from what is seen of the workers, when a run has come to a standstill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_TRANSFER_BYTES = 65536
"""Files or messages of this size count as progress: a checkpoint that is being written, a shard that is being read."""
_BUSY_SHARE = 0.05
"""Of a core; a worker that waits uses less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One worker at one moment.

    Args:
        is_done: It has finished its work.
        beats: Operators and exchanges it has finished.
        is_stepping: It is in the part of its work in which `beats` counts everything.
        is_stopped: By a signal.
        cpu_seconds: Computing time so far; None when unknown, as the next.
        transferred_bytes: Read and written so far, what it says in its log left out.
    """

    is_done: bool = False
    beats: int = 0
    is_stepping: bool = False
    is_stopped: bool = False
    cpu_seconds: float | None = None
    transferred_bytes: int | None = None


class StallWatch:
    """Counts the seconds in which no worker makes progress.

    Progress of a worker is an operator or an exchange finished, or a fair amount of bytes read or written; before its
    first step, when it loads its part, also computing. A run in which one worker makes progress goes on, however long
    the others wait for it. A worker that was stopped for the whole timeout ends the run as well.

    Args:
        timeout: Seconds without progress after which the run counts as hung.
        now: The time, as from ``time.monotonic``.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._seen_at = self._moved_at = now
        self._last: list[Sample] = []
        self._bytes_then: list[int | None] = []
        self._stopped_since: list[float | None] = []
        self.is_busy: list[bool] = []

    def is_stalled(self, samples: Sequence[Sample], now: float) -> bool:
        """Take note of ``samples``, one for each worker, and say whether the run has stood still for too long."""
        if not self._last:
            self._last, self._seen_at, self._moved_at = list(samples), now, now
            self._bytes_then = [sample.transferred_bytes for sample in samples]
            self._stopped_since = [now if sample.is_stopped else None for sample in samples]
            self.is_busy = [False] * len(samples)
            return False
        gap = now - self._seen_at
        if gap > max(2.0, self._timeout / 2):  # this process was stopped itself: what it did not see does not count
            self._moved_at += gap
            self._stopped_since = [None if since is None else since + gap for since in self._stopped_since]
        for i, (sample, last) in enumerate(zip(samples, self._last, strict=True)):
            self.is_busy[i] = (
                sample.cpu_seconds is not None
                and last.cpu_seconds is not None
                and sample.cpu_seconds - last.cpu_seconds > _BUSY_SHARE * gap
            )
            if self._moved(i, sample, last):
                self._moved_at = now
            if not sample.is_stopped:
                self._stopped_since[i] = None
            elif self._stopped_since[i] is None:
                self._stopped_since[i] = now
        self._last, self._seen_at = list(samples), now
        stopped_at = [since for since in self._stopped_since if since is not None]
        return now - min([self._moved_at, *stopped_at]) >= self._timeout

    def _moved(self, i: int, sample: Sample, last: Sample) -> bool:
        if sample.is_done != last.is_done or sample.beats != last.beats or sample.is_stepping != last.is_stepping:
            return True
        if not sample.is_stepping and not sample.is_done and self.is_busy[i]:
            return True
        then = self._bytes_then[i]
        if sample.transferred_bytes is None or then is None:
            return False
        if sample.transferred_bytes - then >= _TRANSFER_BYTES:
            self._bytes_then[i] = sample.transferred_bytes
            return True
        return False
