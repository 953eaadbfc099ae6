"""Groups of worker processes that do one piece of work after another, several groups side by side.

To start processes takes seconds, so a group lives until there is nothing left to do; one that fails is started afresh.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from stages import ask_for_stacks, show_stacks_when_asked

Item = TypeVar("Item")
Work = Callable[[Any, Any], Any]
"""``work(ranks, item)``, called on every rank of a group; importable by its name, as processes are spawned."""

TIMEOUT_SECONDS = 120.0
"""How long a rank waits for its peers."""
_LAST_MOMENTS_SECONDS = 0.5
_PATIENCE_SECONDS = 30.0
"""Then ranks that have not answered are asked for their stacks."""
_GIVE_UP_SECONDS = 600.0
_STARTED = "started"
"""What a rank says before anything else."""


class WorkFailed(RuntimeError):  # noqa: N818 - a finding about the work
    """What a rank of the group raised, or that one of them died."""


class Group:
    """``size`` processes on this machine that are ranks of one another, through gloo and the loopback interface.

    Args:
        work: What they do.
        size: How many.
        device: Where they compute; on ``cuda`` rank r has GPU r, and NCCL.
        threads: Of each; ``OMP_NUM_THREADS`` when None.
    """

    def __init__(self, work: Work, size: int, device: str = "cpu", threads: int | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self._started: set[int] = set()
        for rank in range(size):
            ours, theirs = context.Pipe()
            where = f"cuda:{rank}" if device == "cuda" else device
            given = (work, rank, size, str(Path(self._folder.name) / "meeting"), theirs, where, threads)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()  # the other end is the process's alone, so its end is seen here
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, item: Any, give_up_seconds: float = _GIVE_UP_SECONDS) -> list[Any]:
        """What the work gave, in rank order; after a minute without it, stacks of all ranks go to stderr.

        Raises:
            WorkFailed: It did not, or took longer than ``give_up_seconds``; the group is of no use afterwards.
        """
        results: dict[int, Any] = {}
        begin = time.monotonic()
        asked = begin
        try:
            for pipe in self._pipes:
                pipe.send(item)
            pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
            while pending:
                if time.monotonic() - begin > give_up_seconds:
                    raise WorkFailed(f"no answer of {sorted(pending.values())} in {give_up_seconds:.0f} s: {item}")
                if time.monotonic() - asked > _PATIENCE_SECONDS:
                    self._show_stacks(sorted(pending.values()), time.monotonic() - begin, item)
                    asked = time.monotonic()
                for ready in wait(list(pending), 1.0):
                    assert isinstance(ready, Connection)
                    rank = pending[ready]
                    said = ready.recv()
                    if said == _STARTED:
                        self._started.add(rank)
                        continue
                    del pending[ready]
                    is_done, value = said
                    if not is_done:
                        raise WorkFailed(f"rank {rank}: {value}{self._said_of_dead()}")
                    results[rank] = value
        except (EOFError, OSError) as error:
            raise WorkFailed(f"a process of the group died ({type(error).__name__})") from error
        return [results[rank] for rank in range(len(self._pipes))]

    def _said_of_dead(self) -> str:
        """Who has died, in words: others fail because of it, and may be heard of first."""
        ended = wait([process.sentinel for process in self._processes], _LAST_MOMENTS_SECONDS)
        dead = [rank for rank, process in enumerate(self._processes) if process.sentinel in ended]
        return "".join(f"\nrank {rank} died" for rank in dead)

    def _show_stacks(self, pending: list[int], seconds: float, item: Any) -> None:
        print(f"ranks {pending} are at this for {seconds:.0f} s: {item}", file=sys.stderr, flush=True)
        ids = [(f"rank {rank}", self._processes[rank].pid or 0) for rank in sorted(self._started)]
        ask_for_stacks(ids)

    def kill(self) -> None:
        """End the processes; whoever is in `run` hears of it."""
        for process in self._processes:
            process.kill()

    def stop(self) -> None:
        """End the processes and free what belongs to the group; nobody may be in `run`."""
        self.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _serve(work: Work, rank: int, size: int, meeting: str, pipe: Connection, device: str, threads: int | None) -> None:
    show_stacks_when_asked()
    pipe.send(_STARTED)
    import torch
    import torch.distributed as dist

    from nugnn.comm.groups import join_ranks

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the process that started this one ends it
    torch.set_num_threads(threads or int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    ranks = join_ranks(TIMEOUT_SECONDS, device=torch.device(device))
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, work(ranks, item))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def run_in_groups(
    work: Work,
    next_item: Callable[[], Item | None],
    on_end: Callable[[Item, list[Any] | WorkFailed], Any],
    *,
    groups: int,
    size: int,
) -> None:
    """Do pieces of work until there are none left.

    Args:
        work: Of one piece.
        next_item: The next piece to start, or None; one call at a time.
        on_end: Gets a piece and what each rank returned, or why it failed; one call at a time.
        groups: Side by side.
        size: Processes of each.
    """
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: os.environ.get(name, value) for name, value in threads.items()})
    taking, ending, stopping = threading.Lock(), threading.Lock(), threading.Event()
    alive: set[Group] = set()

    def one_group() -> None:
        group: Group | None = None
        try:
            while not stopping.is_set():
                with taking:
                    item = next_item()
                if item is None:
                    return
                if group is None:
                    group = Group(work, size)
                    alive.add(group)
                try:
                    outcome: list[Any] | WorkFailed = group.run(item)
                except WorkFailed as error:
                    outcome = error
                    group.stop()
                    group = None
                if not stopping.is_set():
                    with ending:
                        on_end(item, outcome)
        finally:
            if group is not None:
                group.stop()

    with ThreadPoolExecutor(groups) as pool:
        waiting = [pool.submit(one_group) for _ in range(groups)]
        try:
            for each in waiting:
                each.result()
        except BaseException:  # Ctrl-C, or an error in a call of ours
            stopping.set()
            for group in list(alive):
                group.kill()
            raise
