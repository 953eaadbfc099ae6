"""Starts the worker processes of a run on this machine, has them watched, and ends them.

Plain subprocesses rather than torch's own process starter: the launching process then needs no torch (2 s), the socket
that workers meet on is bound here, to loopback, and handed to rank 0 as an open descriptor (no port can be taken in
between, and nobody outside can connect), and a worker that hangs is ended after seconds, not after 30.
"""

from __future__ import annotations

import contextlib
import os
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
from nugnn.failure import EXIT_USER, WorkerFailed
from nugnn.job import pulse_path
from nugnn.worker_cores import WorkerCores
from nugnn.worker_environment import worker_environment
from nugnn.worker_watch import POLL_SECONDS, EventReader, Preparation, WorkerWatch

_COLLECTIVE_SECONDS = 7 * 24 * 3600.0
"""How long a worker waits for its peers by itself: this process sees which one keeps the others waiting."""
_TERM_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""


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
        events = EventReader(events_read, on_event)
        stack.callback(events.close)
        watch = WorkerWatch(workers, stamps, job_folder, logs, timeout, events)
        try:
            if prepare is not None:
                watch.while_running(Preparation(prepare))
            watch.until_done()
        except WorkerFailed as failed:
            if resume_hint is None or failed.exit_code == EXIT_USER:
                raise
            raise WorkerFailed(failed.exit_code, f"{failed.message}\nto go on: {resume_hint}") from None


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End every worker and what it started: SIGTERM, then SIGKILL."""
    try:
        _signal_all(workers, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_SECONDS
        while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
            time.sleep(POLL_SECONDS)
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
