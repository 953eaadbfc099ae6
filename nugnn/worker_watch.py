"""Watches the worker processes of a run: returns when all have finished, or says why the run cannot go on."""

from __future__ import annotations

import contextlib
import contextvars
import json
import mmap
import os
import platform
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nugnn.comm import pulse
from nugnn.failure import Place, WorkerFailed, WorkerView, failure_of, innermost_frame, stall_of
from nugnn.job import is_done, read_error
from nugnn.process_state import HostMemory, ProcessState, host_memory, process_state
from nugnn.stall import Sample, StallWatch
from nugnn.worker_process import STACK_SIGNAL

POLL_SECONDS = 0.05
_SAMPLE_SECONDS = 0.5
"""Between two looks at how far the workers have come."""
_STACK_SECONDS = 0.3
"""A worker that hangs gets this long to write down where it is, and as long again while one has not."""
_LAST_STACK_SECONDS = 5.0
"""But no longer than this in all: on busy cores it takes its time, one that waits for a disk never does."""
_SETTLE_SECONDS = 2.0
"""After a first failure the others get this long to leave word: the first to be noticed need not be the cause."""
_EXIT_SECONDS = 5.0
"""A worker that finished its work may take this long to exit before it is ended."""


class EventReader:
    """Turns the bytes that rank 0 writes into calls of ``on_event``."""

    def __init__(self, descriptor: int, on_event: Callable[[dict[str, Any]], None] | None) -> None:
        self._descriptor = descriptor
        self._on_event = on_event
        self._pending = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(descriptor, selectors.EVENT_READ)

    def close(self) -> None:
        """Forget the descriptor; it stays open."""
        self._selector.close()

    def read(self, wait_seconds: float) -> None:
        """Deliver what has arrived, waiting up to ``wait_seconds`` for something."""
        if not self._selector.select(wait_seconds):
            return
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._descriptor, 65536):
                self._pending += chunk
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            if self._on_event is not None:
                self._on_event(json.loads(line))


class Preparation(threading.Thread):
    """Runs ``prepare`` beside the watch; keeps what it raises."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        # a daemon: when the run ends early, nobody waits for a partition that nobody needs
        super().__init__(name="nugnn-prepare", daemon=True)
        self._prepare = prepare
        self._context = contextvars.copy_context()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._context.run(self._prepare)
        except BaseException as error:
            self.error = error


class WorkerWatch:
    """Looks at the workers and raises WorkerFailed when the run cannot go on."""

    def __init__(
        self,
        workers: Sequence[subprocess.Popen[bytes]],
        stamps: Sequence[mmap.mmap],
        job_folder: Path,
        logs: Path,
        timeout: float,
        events: EventReader,
    ) -> None:
        self._workers, self._stamps, self._job_folder, self._logs = workers, stamps, job_folder, logs
        self._timeout, self._events = timeout, events
        kept = job_folder not in logs.parents
        self._place = Place(host=platform.node(), logs=logs, keeps_logs=kept)
        self._states: list[ProcessState | None] = [None] * len(workers)
        self._memory_before: HostMemory | None = host_memory()
        self._sample_seconds = min(_SAMPLE_SECONDS, timeout / 4)

    def while_running(self, preparation: Preparation) -> None:
        """Return when ``preparation`` has ended; raise what it raised, or WorkerFailed when a worker is lost before."""
        while preparation.is_alive():
            self._events.read(POLL_SECONDS)
            if _lost(*self._codes_and_done()):
                raise self._failure()
        if preparation.error is not None:
            raise preparation.error

    def until_done(self) -> None:
        """Return when all workers have finished."""
        now = time.monotonic()
        stall, next_sample, all_done = StallWatch(self._timeout, now), now, None
        while True:
            self._events.read(POLL_SECONDS)
            codes, done = self._codes_and_done()
            if _lost(codes, done):
                raise self._failure()
            now = time.monotonic()
            all_done = all_done or (now if all(done) else None)
            if all(code is not None for code in codes) or (all_done is not None and now > all_done + _EXIT_SECONDS):
                self._events.read(0)
                return
            if all_done is None and now >= next_sample:
                next_sample = now + self._sample_seconds
                if stall.is_stalled([self._sample(rank, done[rank]) for rank in range(len(done))], now):
                    raise self._stall(stall.is_busy)

    def _codes_and_done(self) -> tuple[list[int | None], list[bool]]:
        """One look at all workers: exit codes, and then who is done, or one that just finished would seem lost."""
        codes = [worker.poll() for worker in self._workers]
        return codes, [is_done(self._job_folder, rank) for rank in range(len(self._workers))]

    def _sample(self, rank: int, finished: bool) -> Sample:
        stamp, state = pulse.read(self._stamps[rank]), process_state(self._workers[rank].pid)
        self._states[rank] = state or self._states[rank]
        if state is None:
            return Sample(is_done=finished, beats=stamp.beats, is_stepping=stamp.is_stepping)
        return Sample(
            is_done=finished,
            beats=stamp.beats,
            is_stepping=stamp.is_stepping,
            is_stopped=state.is_stopped,
            cpu_seconds=state.cpu_seconds,
            transferred_bytes=state.transferred_bytes - self._log_bytes(rank),
        )

    def _log_bytes(self, rank: int) -> int:
        try:
            return (self._logs / f"worker-{rank}.log").stat().st_size
        except OSError:
            return 0

    def _failure(self) -> WorkerFailed:
        """Wait for the others to leave word, then name the cause rather than its consequences."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline and any(worker.poll() is None for worker in self._workers):
            self._events.read(POLL_SECONDS)
        self._events.read(0)  # what rank 0 said before it ended
        memory = (self._memory_before, host_memory())
        return WorkerFailed(*failure_of(self._views(), self._place, memory))

    def _stall(self, is_busy: Sequence[bool]) -> WorkerFailed:
        """Ask everyone where it is, then name who keeps the others waiting."""
        before = [self._log_bytes(rank) for rank in range(len(self._workers))]
        for worker in self._workers:
            if worker.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.send_signal(STACK_SIGNAL)
        deadline = time.monotonic() + _LAST_STACK_SECONDS
        while True:
            time.sleep(_STACK_SECONDS)
            frames = [innermost_frame(self._logged_since(rank, size)) for rank, size in enumerate(before)]
            is_known = [bool(frame) or not self._answers(rank) for rank, frame in enumerate(frames)]
            if all(is_known) or time.monotonic() > deadline:
                self._events.read(0)
                return WorkerFailed(*stall_of(self._views(is_busy, frames), self._place, self._timeout))

    def _answers(self, rank: int) -> bool:
        """Whether worker ``rank`` can be expected to write down where it is."""
        state = self._states[rank]
        is_stopped = state is not None and state.is_stopped
        return self._workers[rank].poll() is None and not is_stopped and not is_done(self._job_folder, rank)

    def _logged_since(self, rank: int, size: int) -> str:
        try:
            with (self._logs / f"worker-{rank}.log").open("rb") as log:
                log.seek(size)
                return log.read(2**20).decode("utf-8", errors="replace")
        except OSError:
            return ""

    def _views(self, is_busy: Sequence[bool] = (), frames: Sequence[str] = ()) -> list[WorkerView]:
        return [
            WorkerView(
                rank=rank,
                pid=worker.pid,
                exit_code=worker.poll(),
                is_done=is_done(self._job_folder, rank),
                error=read_error(self._job_folder, rank),
                stamp=pulse.read(self._stamps[rank]),
                state=self._states[rank],
                is_busy=bool(is_busy) and is_busy[rank],
                frame=frames[rank] if frames else "",
            )
            for rank, worker in enumerate(self._workers)
        ]


def _lost(codes: Sequence[int | None], done: Sequence[bool]) -> bool:
    """Whether a worker has ended before its work; whatever its code, sys.exit(0) in the middle is a failure too."""
    return any(code is not None and not finished for code, finished in zip(codes, done, strict=True))
