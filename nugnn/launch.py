"""Starts the worker processes of a run on this machine and watches over them until the last is gone.

Plain subprocesses rather than torch's own process starter: the launching process then needs no torch (2 s), the socket
that workers meet on is bound here, to loopback, and handed to rank 0 as an open descriptor (no port can be taken in
between, and nobody outside can connect), and a worker that hangs is ended after seconds, not after 30.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import mmap
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nugnn.comm import pulse
from nugnn.failure import EXIT_USER, Place, WorkerView, failure_of, innermost_frame, stall_of
from nugnn.job import is_done, pulse_path, read_error
from nugnn.process_state import HostMemory, ProcessState, host_memory, process_state
from nugnn.stall import Sample, StallWatch
from nugnn.worker_cores import WorkerCores, fair_threads, own_cores, users_environment
from nugnn.worker_process import STACK_SIGNAL

_POLL_SECONDS = 0.05
_SAMPLE_SECONDS = 0.5
"""Between two looks at how far the workers have come."""
_STACK_SECONDS = 0.3
"""A worker that hangs gets this long to write down where it is, and as long again while one has not."""
_LAST_STACK_SECONDS = 5.0
"""But no longer than this in all: on busy cores it takes its time, one that waits for a disk never does."""
_COLLECTIVE_SECONDS = 7 * 24 * 3600.0
"""How long a worker waits for its peers by itself: this process sees which one keeps the others waiting."""
_SETTLE_SECONDS = 2.0
"""After a first failure the others get this long to leave word: the first to be noticed need not be the cause."""
_TERM_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""
_EXIT_SECONDS = 5.0
"""A worker that finished its work may take this long to exit before it is ended."""


class WorkerFailed(Exception):  # noqa: N818 - it reports what happened to a worker, as TimeoutExpired does
    """A run ended early.

    Args:
        exit_code: 2, the user's input is wrong; 3, a worker died or did not answer.
        message: For the user, complete.
    """

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.message = message


def launch(
    job_folder: Path,
    num_workers: int,
    *,
    module: str = "nugnn.worker",
    timeout: float = 300.0,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    log_folder: Path | None = None,
    port: int = 0,
    prepare: Callable[[], None] | None = None,
    resume_hint: str | None = None,
    cores: Sequence[WorkerCores] | None = None,
) -> None:
    """Run ``main(context)`` of ``module`` in ``num_workers`` processes and return when all have finished.

    All processes are gone when this returns or raises, also after Ctrl-C (KeyboardInterrupt passes through) and SIGTERM
    (SystemExit with code 143).

    Args:
        job_folder: Private folder, made by `nugnn.job.private_job_folder`, with the job in it.
        num_workers: P.
        module: Importable module with a function ``main(context: WorkerContext)``.
        timeout: Seconds after which the run counts as hung when no worker finishes an operator or an exchange, or
            when a worker stands stopped; see `nugnn.stall`.
        on_event: Called in this thread with each event that rank 0 sends.
        log_folder: Where ``worker-RANK.log`` goes, standard output and error together; default: in ``job_folder``.
        port: Port on the loopback address for the workers to meet on; 0 lets the system choose a free one.
        prepare: Called once the workers were started, to put the job into the folder while they import what they need
            (`nugnn.job.read_job` waits for it); None when it is there already. What it raises ends the workers. It
            runs in a thread of its own, so that a worker that dies meanwhile ends the run.
        resume_hint: The command that goes on with this run, for the message when a worker was lost; None when there is
            nothing to go on from.
        cores: Threads and cores of each worker; when None they divide the cores that there are into numbers of
            threads, and have none of their own.

    Raises:
        WorkerFailed: A worker reported an error, died, or did not finish in time.
    """
    logs = log_folder if log_folder is not None else job_folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sigterm_as_exit())
        listener = stack.enter_context(_listen(port))
        events_read, events_write = _pipe(stack)
        lifeline_read, _lifeline_write = _pipe(stack)
        workers: list[subprocess.Popen[bytes]] = []
        stack.callback(lambda: _end(workers))
        stamps = [pulse.create(pulse_path(job_folder, rank)) for rank in range(num_workers)]
        for rank in range(num_workers):
            inherited = {"NUGNN_LIFELINE_FD": lifeline_read}
            if rank == 0:
                inherited |= {"NUGNN_EVENTS_FD": events_write, "NUGNN_LISTEN_FD": listener.fileno()}
            own = None if cores is None else cores[rank]
            environment = worker_environment(rank, num_workers, listener.getsockname()[1], _COLLECTIVE_SECONDS, own)
            environment |= {name: str(descriptor) for name, descriptor in inherited.items()}
            with open(logs / f"worker-{rank}.log", "wb") as log:
                workers.append(
                    subprocess.Popen(
                        # -P: the current folder is not importable unless it is here (it may hold a `datasets` folder).
                        [sys.executable, "-P", "-m", "nugnn.worker_process", module, str(job_folder)],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=tuple(inherited.values()),
                        start_new_session=True,  # Ctrl-C reaches this process only, which then ends them in order
                    )
                )
        os.set_blocking(events_read, False)
        events = _EventReader(events_read, on_event)
        stack.callback(events.close)
        watch = _Watch(workers, stamps, job_folder, logs, timeout, events)
        try:
            if prepare is not None:
                watch.while_running(_Preparation(prepare))
            watch.until_done()
        except WorkerFailed as failed:
            if resume_hint is None or failed.exit_code == EXIT_USER:
                raise
            raise WorkerFailed(failed.exit_code, f"{failed.message}\nto go on: {resume_hint}") from None


def worker_environment(
    rank: int, num_workers: int, port: int, timeout: float, cores: WorkerCores | None = None
) -> dict[str, str]:
    """Environment of a worker: torchrun's variables, loopback for gloo, and its fair number of OpenMP threads."""
    environment = users_environment(os.environ)
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "NUGNN_TIMEOUT": repr(timeout),
        "NUGNN_SYS_PATH": json.dumps([os.path.abspath(entry) for entry in sys.path]),
    }
    environment.setdefault("PYTHONFAULTHANDLER", "1")  # a crash leaves its stack in the log
    environment.setdefault("PYTHONUNBUFFERED", "1")  # and what was printed before
    if cores is not None:
        environment |= cores.environment(environment.get("OMP_NUM_THREADS"))
    # With more threads than cores DGL's kernels become a hundred times slower.
    environment.setdefault("OMP_NUM_THREADS", str(fair_threads(num_workers, num_cores())[rank]))
    if grants_huge_pages():
        # torch asks for huge pages for its large tensors, which are zeroed and found in fewer steps: an epoch on a CPU
        # takes a third less time
        environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return environment


def grants_huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> bool:
    """Whether the system gives huge pages to a process that asks for them; False where it cannot be told."""
    try:
        return any(f"[{choice}]" in setting.read_text() for choice in ("always", "madvise"))
    except OSError:
        return False


def num_cores() -> int:
    """Cores this process may run on."""
    return len(own_cores())


class _EventReader:
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


class _Preparation(threading.Thread):
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


class _Watch:
    """Looks at the workers and raises WorkerFailed when the run cannot go on."""

    def __init__(
        self,
        workers: Sequence[subprocess.Popen[bytes]],
        stamps: Sequence[mmap.mmap],
        job_folder: Path,
        logs: Path,
        timeout: float,
        events: _EventReader,
    ) -> None:
        self._workers, self._stamps, self._job_folder, self._logs = workers, stamps, job_folder, logs
        self._timeout, self._events = timeout, events
        kept = job_folder not in logs.parents
        self._place = Place(host=platform.node(), logs=logs, keeps_logs=kept)
        self._states: list[ProcessState | None] = [None] * len(workers)
        self._memory_before: HostMemory | None = host_memory()
        self._sample_seconds = min(_SAMPLE_SECONDS, timeout / 4)

    def while_running(self, preparation: _Preparation) -> None:
        """Return when ``preparation`` has ended; raise what it raised, or WorkerFailed when a worker is lost before."""
        while preparation.is_alive():
            self._events.read(_POLL_SECONDS)
            if _lost(*self._codes_and_done()):
                raise self._failure()
        if preparation.error is not None:
            raise preparation.error

    def until_done(self) -> None:
        """Return when all workers have finished."""
        now = time.monotonic()
        stall, next_sample, all_done = StallWatch(self._timeout, now), now, None
        while True:
            self._events.read(_POLL_SECONDS)
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
            self._events.read(_POLL_SECONDS)
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


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End every worker and what it started: SIGTERM, then SIGKILL."""
    try:
        _signal_all(workers, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_SECONDS
        while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
            time.sleep(_POLL_SECONDS)
    finally:
        # Also for groups whose leader has gone: its children may still be there. A second Ctrl-C comes here at once.
        _signal_all(workers, signal.SIGKILL)
        for worker in workers:
            worker.wait()


def _signal_all(workers: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, number)


def _listen(port: int) -> socket.socket:
    """A socket that listens on the loopback address."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise WorkerFailed(
            EXIT_USER,
            f"port {port} cannot be used ({error.strerror}); name another, or 0 for any free one",
        ) from None
    listener.listen(1024)
    return listener


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """``(read end, write end)``, both closed at the end."""
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM raises SystemExit(143), so that the workers are ended first; only the main thread can arrange it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
