"""Starts the worker processes of a run on this machine and watches over them until the last is gone.

Plain subprocesses rather than torch's own process starter: the launching process then needs no torch (2 s), the socket
that workers meet on is bound here, to loopback, and handed to rank 0 as an open descriptor (no port can be taken in
between, and nobody outside can connect), and a worker that hangs is ended after seconds, not after 30.
"""

from __future__ import annotations

import contextlib
import json
import os
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

from nugnn.job import WorkerError, is_done, read_error

_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 2.0
"""After a first failure the others get this long to leave word: the first to be noticed need not be the cause."""
_TERM_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""
_EXIT_SECONDS = 5.0
"""A worker that finished its work may take this long to exit before it is ended."""

EXIT_USER, EXIT_WORKER_LOST = 2, 3


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
) -> None:
    """Run ``main(context)`` of ``module`` in ``num_workers`` processes and return when all have finished.

    All processes are gone when this returns or raises, also after Ctrl-C (KeyboardInterrupt passes through) and SIGTERM
    (SystemExit with code 143).

    Args:
        job_folder: Private folder, made by `nugnn.job.private_job_folder`, with the job in it.
        num_workers: P.
        module: Importable module with a function ``main(context: WorkerContext)``.
        timeout: Seconds after which a silent worker counts as lost.
        on_event: Called in this thread with each event that rank 0 sends.
        log_folder: Where ``worker-RANK.log`` goes, standard output and error together; default: in ``job_folder``.
        port: Port on the loopback address for the workers to meet on; 0 lets the system choose a free one.
        prepare: Called once the workers were started, to put the job into the folder while they import what they need
            (`nugnn.job.read_job` waits for it); None when it is there already. What it raises ends the workers.

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
        for rank in range(num_workers):
            inherited = {"NUGNN_LIFELINE_FD": lifeline_read}
            if rank == 0:
                inherited |= {"NUGNN_EVENTS_FD": events_write, "NUGNN_LISTEN_FD": listener.fileno()}
            environment = worker_environment(rank, num_workers, listener.getsockname()[1], timeout)
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
        if prepare is not None:
            prepare()
        os.set_blocking(events_read, False)
        events = _EventReader(events_read, on_event)
        stack.callback(events.close)
        _watch(workers, job_folder, logs, timeout, events)


def worker_environment(rank: int, num_workers: int, port: int, timeout: float) -> dict[str, str]:
    """Environment of a worker: torchrun's variables, loopback for gloo, and its fair number of OpenMP threads."""
    environment = dict(os.environ)
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
    # With more threads than cores DGL's kernels become a hundred times slower.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_workers)))
    return environment


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _watch(
    workers: Sequence[subprocess.Popen[bytes]], job_folder: Path, logs: Path, timeout: float, events: _EventReader
) -> None:
    """Return when all have finished; raise WorkerFailed when one has failed."""
    first_done: float | None = None
    all_done: float | None = None
    while True:
        events.read(_POLL_SECONDS)
        codes = [worker.poll() for worker in workers]
        done = [is_done(job_folder, rank) for rank in range(len(workers))]
        # Whatever its code: sys.exit(0) in the middle of the work is a failure too.
        if any(code is not None and not finished for code, finished in zip(codes, done, strict=True)):
            raise _failure(workers, job_folder, logs, events)
        now = time.monotonic()
        first_done = first_done or (now if any(done) else None)
        all_done = all_done or (now if all(done) else None)
        if all(code is not None for code in codes) or (all_done is not None and now > all_done + _EXIT_SECONDS):
            events.read(0)
            return
        if first_done is not None and all_done is None and now > first_done + timeout:
            late = [rank for rank, finished in enumerate(done) if not finished]
            raise WorkerFailed(
                EXIT_WORKER_LOST,
                f"{_named(late)} did not finish within {timeout:g} s of the first that did; "
                f"see {logs / f'worker-{late[0]}.log'}",
            )


def _failure(
    workers: Sequence[subprocess.Popen[bytes]], job_folder: Path, logs: Path, events: _EventReader
) -> WorkerFailed:
    """Wait for the others to leave word, then name the cause rather than its consequences."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        events.read(_POLL_SECONDS)
    errors: list[WorkerError] = []
    died: list[int] = []
    for rank, worker in enumerate(workers):
        error = read_error(job_folder, rank)
        if error is not None:
            errors.append(error)
        elif worker.poll() is not None and not is_done(job_folder, rank):
            died.append(rank)
    of_kind = {kind: [error for error in errors if error.kind == kind] for kind in ("user", "internal", "peer")}
    if of_kind["user"]:
        return WorkerFailed(EXIT_USER, of_kind["user"][0].message)
    if died:
        rank = died[0]
        how = _how_it_ended(workers[rank].returncode)
        return WorkerFailed(
            EXIT_WORKER_LOST,
            f"worker {rank} of {len(workers)} died: {how}; its log: {logs / f'worker-{rank}.log'}{_tail(logs, rank)}",
        )
    error = (of_kind["internal"] or of_kind["peer"])[0]
    what = "failed" if error.kind == "internal" else "lost a peer, and no worker says why"
    return WorkerFailed(
        EXIT_WORKER_LOST,
        f"worker {error.rank} of {len(workers)} {what}: {error.message}\n"
        f"traceback in {logs / f'worker-{error.rank}.log'}",
    )


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}" + (" before its work was done" if code == 0 else "")
    name = signal.Signals(-code).name if -code in {member.value for member in signal.Signals} else f"signal {-code}"
    return f"ended by {name}" + (" (the system may have run out of memory)" if name == "SIGKILL" else "")


def _tail(logs: Path, rank: int, num_lines: int = 5) -> str:
    """The last lines of a worker's log, indented, each on a line of its own."""
    text = (logs / f"worker-{rank}.log").read_text(encoding="utf-8", errors="replace").rstrip()
    return "".join(f"\n    {line}" for line in text.splitlines()[-num_lines:])


def _named(ranks: Sequence[int]) -> str:
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(map(str, ranks))


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
            EXIT_USER, f"port {port} cannot be used ({error.strerror}); name another, or 0 for any free one"
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
