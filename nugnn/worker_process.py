"""The worker's side of `nugnn.launch`: runs a module's ``main`` in this process and leaves word of how it ended.

Started as ``python -m nugnn.worker_process MODULE JOB_FOLDER``.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import importlib
import json
import os
import resource
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from nugnn.comm.pulse import Pulse
from nugnn.disk import DiskFullError, free_bytes, full_disk_text, means_full_disk
from nugnn.error_place import place_of_error, place_of_raise
from nugnn.job import ErrorKind, WorkerError, pulse_path, reserve_error, write_done, write_error
from nugnn.process_state import host_memory, in_gib, process_state
from nugnn.worker_cores import stay_on_given_cores

USER_ERRORS = (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError)
"""What a user's input raises: wrong values, files that are missing or unreadable, packages that are not installed,
what a split graph refuses, a loss that diverges."""

STACK_SIGNAL = signal.SIGUSR1
"""Makes a worker write the Python stacks of its threads into its log, also when it holds the interpreter's lock."""

_MEMORY_PHRASES = (
    "DefaultCPUAllocator", "can't allocate memory", "annot allocate memory", "std::bad_alloc", "CUDA out of memory"
)  # fmt: skip
_LIMIT_PHRASES = ("Resource temporarily unavailable", "can't start new thread")
"""Of threads that do not get a stack, and of other lacks: the first, where a process has all that it may have."""
_PEER_PHRASES = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "NCCL")


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Who this worker is; ``main`` of a worker module gets it as its only argument.

    Args:
        rank: This worker, in ``[0, world_size)``.
        world_size: P, the number of workers.
        job_folder: Where `nugnn.job.read_job` finds what to do.
        timeout: Seconds a collective may wait. Long: the launching process sees which worker makes no progress, and
            ends all, before.
        pulse: Where this worker notes its progress for the launching process.
        events_fd: Pipe to the launching process; None for all ranks but 0.
        listen_fd: Socket on which rank 0 answers the others; None for all ranks but 0.
        port: Port of that socket, on the loopback address.
    """

    rank: int
    world_size: int
    job_folder: Path
    timeout: float
    pulse: Pulse = field(default_factory=Pulse)
    events_fd: int | None = None
    listen_fd: int | None = None
    port: int = 0

    def emit(self, **event: Any) -> None:
        """Send ``event``, plain JSON types, to the launching process; does nothing on ranks other than 0."""
        if self.events_fd is None:
            return
        data = (json.dumps(event) + "\n").encode()
        while data:
            data = data[os.write(self.events_fd, data) :]

    def init_process_group(self) -> None:
        """Join all workers in a gloo process group, through a store that listens on the loopback address only."""
        import torch.distributed as dist

        timeout = timedelta(seconds=self.timeout)
        with self.pulse.waiting("the start of all workers"):
            store = dist.TCPStore(
                "127.0.0.1",
                self.port,
                self.world_size,
                is_master=self.rank == 0,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=self.listen_fd,
            )
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)


def classify(error: BaseException, folder: Path | None = None) -> ErrorKind:
    """Whether ``error`` is the user's, a lost peer's, a lack of memory or disk, or ours.

    Args:
        error: What was raised.
        folder: Where this process writes, to see whether there is space left.
    """
    if _means_no_memory(error):
        return "memory"
    if means_full_disk(error, folder or Path.cwd()):
        return "disk"
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return "peer"
    if isinstance(error, ConnectionError | TimeoutError):
        return "peer"
    if isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PEER_PHRASES):
        return "peer"
    return "user" if is_user_error(error) else "internal"


def _means_no_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if not isinstance(error, RuntimeError | ImportError | OSError):
        return False
    if any(phrase in str(error) for phrase in _MEMORY_PHRASES):
        return True
    own = process_state(os.getpid())
    return own is not None and own.is_at_its_limit and any(phrase in str(error) for phrase in _LIMIT_PHRASES)


def is_user_error(error: BaseException) -> bool:
    """Whether ``error`` is for the user as it is: one of `USER_ERRORS`, or what DGL says about the graph."""
    dgl = sys.modules.get("dgl")
    return isinstance(error, USER_ERRORS) or (dgl is not None and isinstance(error, dgl.DGLError))


def context_from_environment(job_folder: Path) -> WorkerContext:
    """The context that `nugnn.launch` put into this process's environment."""
    variables = os.environ

    def descriptor(name: str) -> int | None:
        return int(variables[name]) if name in variables else None

    return WorkerContext(
        rank=int(variables["RANK"]),
        world_size=int(variables["WORLD_SIZE"]),
        job_folder=job_folder,
        timeout=float(variables["NUGNN_TIMEOUT"]),
        pulse=Pulse.open(pulse_path(job_folder, int(variables["RANK"]))),
        events_fd=descriptor("NUGNN_EVENTS_FD"),
        listen_fd=descriptor("NUGNN_LISTEN_FD"),
        port=int(variables["MASTER_PORT"]),
    )


def end_with_the_launcher(lifeline_fd: int) -> None:
    """End this process and what it started when the launching process is gone: the pipe's other end closes then."""

    def wait() -> None:
        os.read(lifeline_fd, 1)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="nugnn-lifeline", daemon=True).start()


def describe(error: BaseException, kind: ErrorKind, job_folder: Path) -> str:
    """One paragraph about ``error`` for the user: with the user's line, or what was used and what is left."""
    if kind == "user" and str(error):
        return f"{error}{place_of_raise(error)}"
    if kind == "disk" and not isinstance(error, DiskFullError):
        named = getattr(error, "filename", None)
        return full_disk_text(Path(named) if named else min(_written_places(job_folder), key=free_bytes))
    if kind == "disk":
        return str(error)
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    if kind == "memory":
        own, host = process_state(os.getpid()), host_memory()
        used = f"; it occupies {in_gib(own.resident_bytes)}" if own is not None else ""
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        used += f" and may have {in_gib(limit)} of its own" if used and limit != resource.RLIM_INFINITY else ""
        used += f", {in_gib(host.used_bytes)} of {in_gib(host.limit_bytes)} are in use here" if host is not None else ""
        return f"out of memory ({text}){used}"
    return f"{text}{place_of_error(error)}" if kind != "peer" else text


def _written_places(job_folder: Path) -> list[Path]:
    """Where this process writes: its log, the job folder, the current folder."""
    places = [job_folder, Path.cwd()]
    with contextlib.suppress(OSError):
        log = Path(os.readlink("/proc/self/fd/2"))
        places += [log] if log.is_file() else []
    return places


def main(module: str, job_folder: Path) -> int:
    """Run ``main(context)`` of ``module``; 0 when it returned, 1 after leaving word of what it raised."""
    stay_on_given_cores()  # before anything starts threads, which stay where they were started
    end_with_the_launcher(int(os.environ["NUGNN_LIFELINE_FD"]))
    if hasattr(faulthandler, "register"):
        faulthandler.register(STACK_SIGNAL)  # the launching process asks a worker that hangs where it is
    for entry in json.loads(os.environ["NUGNN_SYS_PATH"]):
        if entry not in sys.path:
            sys.path.append(entry)
    context = context_from_environment(job_folder)
    reserve_error(job_folder, context.rank)
    try:
        importlib.import_module(module).main(context)
    except Exception as error:
        kind = classify(error, min(_written_places(job_folder), key=free_bytes))
        write_error(job_folder, WorkerError(kind=kind, rank=context.rank, message=describe(error, kind, job_folder)))
        with contextlib.suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()
        return 1
    finally:
        _flush()
    write_done(job_folder, context.rank)
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


if __name__ == "__main__":
    exit_code = main(sys.argv[1], Path(sys.argv[2]))
    atexit._run_exitfuncs()
    _flush()
    os._exit(exit_code)  # without the interpreter's own end, which spends a second on freeing what goes anyway
