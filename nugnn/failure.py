"""What is said about a run that ended early: the cause rather than its consequences, on one screen."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nugnn._counted import counted
from nugnn.comm.pulse import Stamp
from nugnn.job import WorkerError
from nugnn.process_state import HostMemory, ProcessState, in_gib

EXIT_USER, EXIT_WORKER_LOST = 2, 3
_MAX_OTHERS = 6
_WAITING_FILES = (
    *("torch/distributed/", "nugnn/comm/"),
    *("/comm/groups.py", "/comm/clock.py", "/comm/halo_transfer.py", "/comm/halo_exchange.py"),
    *("/comm/byte_exchange.py", "/comm/direct_sums.py"),
)


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


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run takes place.

    Args:
        host: Name of the machine.
        logs: Folder of ``worker-RANK.log``.
        keeps_logs: Whether the folder is still there after the run.
    """

    host: str
    logs: Path
    keeps_logs: bool = True

    def of(self, worker: WorkerView) -> str:
        """The worker's process and log."""
        return f"process {worker.pid} on {worker.host or self.host}" + self.log(worker.rank)

    def log(self, rank: int) -> str:
        """``; its log: PATH``, or nothing when it is not kept."""
        return f"; its log: {self.logs / f'worker-{rank}.log'}" if self.keeps_logs else ""


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """What the launching process knows about one worker.

    Args:
        rank: The worker.
        pid: Its process.
        exit_code: As `subprocess` has it, negative for a signal; None while it runs.
        is_done: Whether it finished its work.
        error: The word it left.
        stamp: Its last stamp.
        state: What the system last said about it.
        is_busy: Whether it was computing lately.
        host: Where it runs, when not on this machine.
        is_silent: Whether it is on another host and does not answer.
        frame: Innermost line of Python it was in, ``model.py:12 in forward``; empty when unknown.
    """

    rank: int
    pid: int = 0
    exit_code: int | None = None
    is_done: bool = False
    error: WorkerError | None = None
    stamp: Stamp = field(default_factory=Stamp)
    state: ProcessState | None = None
    is_busy: bool = False
    frame: str = ""
    host: str = ""
    is_silent: bool = False

    @property
    def is_stopped(self) -> bool:
        return self.is_silent or (self.state is not None and self.state.is_stopped)

    @property
    def waits_in(self) -> str | None:
        """The exchange with others it is in, as far as stamp and stack tell."""
        if self.stamp.waits_in is not None or not any(part in self.frame for part in _WAITING_FILES):
            return self.stamp.waits_in
        return f"an exchange of its own ({self.frame})"


def failure_of(
    workers: Sequence[WorkerView], place: Place, memory: tuple[HostMemory | None, HostMemory | None] = (None, None)
) -> tuple[int, str]:
    """Exit code and text for a run in which a worker raised or went.

    Args:
        workers: All of them.
        place: Where.
        memory: When the run began, and now.
    """
    errors = [worker.error for worker in workers if worker.error is not None]
    died = [w for w in workers if w.error is None and w.exit_code is not None and not w.is_done]
    for error in errors:
        if error.kind == "user":
            return EXIT_USER, error.message
    for error in errors:
        if error.kind in ("memory", "disk"):
            text = f"worker {error.rank} of {len(workers)}: {error.message}"
            if error.kind == "memory":
                text += "\nuse more workers, a smaller share for this one (--shares) or a narrower model (--hidden)"
            return EXIT_WORKER_LOST, f"{text}\n{place.of(workers[error.rank])}"
    if died:
        lost = died[0]
        assert lost.exit_code is not None
        also = f"\nso did {named([w.rank for w in died[1:]])}" if died[1:] else ""
        return EXIT_WORKER_LOST, (
            f"worker {lost.rank} of {len(workers)} died: {how_it_ended(lost, memory)}{also}\n"
            f"{place.of(lost)}{_tail(place, lost.rank)}"
        )
    error = next((e for e in errors if e.kind == "internal"), None) or errors[0]
    what = "failed" if error.kind == "internal" else "lost a peer, and no worker says why"
    text = f"worker {error.rank} of {len(workers)} {what}: {error.message}\n{place.of(workers[error.rank])}"
    return EXIT_WORKER_LOST, text + _tail(place, error.rank, 0 if place.keeps_logs else 12)


def stall_of(workers: Sequence[WorkerView], place: Place, timeout: float) -> tuple[int, str]:
    """Exit code and text for a run that makes no progress."""
    running = [worker for worker in workers if not worker.is_done]
    guilty = [worker for worker in running if worker.is_stopped]
    guilty = guilty or [worker for worker in running if worker.waits_in is None]
    lines = []
    for worker in guilty[:_MAX_OTHERS]:
        lines.append(
            f"worker {worker.rank} of {len(workers)} {_how_it_hangs(worker)}: no progress for {timeout:g} s (--timeout)"
        )
        lines.append(place.of(worker))
    if not guilty:
        lines.append(
            f"the {counted(len(workers), 'worker')} wait for each other and make no progress for {timeout:g} s "
            f"(--timeout): they "
            "took different ways through the model"
        )
        lines.append(f"on {place.host}{place.log(0)}")
    others = [worker for worker in workers if worker not in guilty]
    for worker in others[:_MAX_OTHERS]:
        doing = "has finished" if worker.is_done else f"waits in {worker.waits_in}" if worker.waits_in else "runs"
        lines.append(f"    worker {worker.rank} {doing}")
    if others[_MAX_OTHERS:]:
        lines.append(f"    and {len(others) - _MAX_OTHERS} more")
    if any(worker.is_busy for worker in guilty):
        lines.append(
            "when it is only slow, give it longer: a worker counts as lost when it finishes no operator and no "
            "exchange for --timeout seconds"
        )
    return EXIT_WORKER_LOST, "\n".join(lines)


def _how_it_hangs(worker: WorkerView) -> str:
    where = f" in {worker.frame}" if worker.frame else ""
    if worker.is_silent:
        return "does not answer: it is stopped, or its host is gone"
    if worker.is_stopped:
        return "is stopped (SIGSTOP)"
    if worker.is_busy:
        return f"computes{where} without coming to an end"
    return f"hangs{where}"


def how_it_ended(worker: WorkerView, memory: tuple[HostMemory | None, HostMemory | None] = (None, None)) -> str:
    """Exit code or signal in words, with the memory it had when the system may have run out of it."""
    code = worker.exit_code
    assert code is not None
    if code >= 0:
        return f"exit code {code}" + (" before its work was done" if code == 0 else "")
    name = signal.Signals(-code).name if -code in {member.value for member in signal.Signals} else f"signal {-code}"
    if name != "SIGKILL":
        state = worker.state
        if name in _OF_LIBRARIES and state is not None and state.own_limit_bytes is not None and state.is_at_its_limit:
            return (
                f"out of memory, in all likelihood: ended by {name}, as libraries do that get no more; it may have "
                f"{in_gib(state.own_limit_bytes)} of its own (memory_fraction) and had {in_gib(state.own_bytes)} when "
                "last seen; use more workers, a smaller share for this one (--shares) or a larger memory_fraction"
            )
        return f"ended by {name}"
    before, now = memory
    size = f", it occupied {in_gib(worker.state.resident_bytes)} when last seen" if worker.state is not None else ""
    if before is not None and now is not None and now.num_kills > before.num_kills:
        return (
            f"ended by SIGKILL: the system ran out of memory ({in_gib(now.limit_bytes)} here{size}); use fewer workers "
            "on this machine, a smaller share for this one (--shares) or a narrower model (--hidden)"
        )
    room = f" ({in_gib(now.used_bytes)} of {in_gib(now.limit_bytes)} are in use here{size})" if now is not None else ""
    return f"ended by SIGKILL, by somebody or by the system for lack of memory{room}"


_OF_LIBRARIES = ("SIGSEGV", "SIGABRT", "SIGBUS")
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$')
_PLUMBING = ("/kernels/interceptor.py", "/kernels/operator_call.py", "/torch/nn/modules/module.py")


def innermost_frame(dump: str) -> str:
    r"""Where the main thread is, from what `faulthandler` wrote: the innermost line that says something.

    >>> innermost_frame('Current thread 0x1 (most recent call first):\n  File "/a/model.py", line 7 in forward\n')
    '/a/model.py:7 (forward)'
    """
    # the main thread comes last, the newest dump after older ones
    block = re.split(r"^(?:Current t|T)hread 0x.*$", dump, flags=re.MULTILINE)[-1]
    frames = [match for match in map(_FRAME.match, block.splitlines()) if match is not None]
    frames = [frame for frame in frames if not frame["file"].endswith(_PLUMBING)] or frames
    if not frames:
        return ""
    return f"{frames[0]['file']}:{frames[0]['line']} ({frames[0]['name']})"


def named(ranks: Sequence[int]) -> str:
    """``worker 1`` or ``workers 1, 2``."""
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(map(str, ranks))


def _tail(place: Place, rank: int, num_lines: int = 5, num_bytes: int = 8192) -> str:
    """The last lines of a worker's log, indented, each on a line of its own."""
    try:
        with (place.logs / f"worker-{rank}.log").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - num_bytes))
            text = file.read().decode("utf-8", errors="replace").rstrip()
    except OSError:
        return ""
    return "".join(f"\n    {line[:200]}" for line in text.splitlines()[-num_lines:] if num_lines)
