"""Ranks for tests: five worker processes, started once, that serve groups of 1 to 5 ranks over gloo."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import nugnn  # noqa: E402, F401

MAX_RANKS = 5


def _serve(rank: int, port: int, pipe: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", NUMBA_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    import nugnn  # noqa: F401
    from nugnn.comm.groups import Ranks
    from nugnn.seam import install

    torch.set_num_threads(1)
    install()
    store = dist.TCPStore("127.0.0.1", port, MAX_RANKS, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MAX_RANKS)
    groups: dict[int, Ranks] = {1: Ranks()}
    for size in range(2, MAX_RANKS + 1):
        members = list(range(size))
        made = Ranks(rank, size, dist.new_group(members), dist.new_group(members))
        if rank < size:
            groups[size] = made
    pipe.send(("ready", None))
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        try:
            size, function, args, kwargs = cloudpickle.loads(job)
            answer: tuple[str, Any] = ("result", function(groups[size], *args, **kwargs))
        except BaseException as error:
            answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        pipe.send_bytes(cloudpickle.dumps(answer))


class RankError(AssertionError):
    """A function raised on a rank."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.rank, self.kind, self.message = rank, kind, message


class RankPool:
    """``pool.run(3, function, ...)`` calls ``function(ranks, ...)`` on 3 ranks and returns the 3 results."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        import torch.distributed as dist

        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, MAX_RANKS, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        context = mp.get_context("spawn")
        pairs = [context.Pipe() for _ in range(MAX_RANKS)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        main, sys.modules["__main__"] = sys.modules["__main__"], sys.modules[__name__]
        try:
            for process in self._processes:
                process.start()
        finally:
            sys.modules["__main__"] = main
        for pipe in self._pipes:
            assert pipe.poll(120), "a rank did not start"
            pipe.recv()

    def run(
        self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list[Any]:
        """Results in rank order; the first error is raised as `RankError`, and the ranks are started afresh."""
        module = sys.modules.get(function.__module__)
        if module is not None and not function.__module__.startswith("nugnn"):
            cloudpickle.register_pickle_by_value(module)
        job = cloudpickle.dumps((size, function, args, kwargs))
        for pipe in self._pipes[:size]:
            pipe.send_bytes(job)
        results: dict[int, Any] = {}
        errors: list[RankError] = []
        pending = {self._pipes[rank]: rank for rank in range(size)}
        while pending:
            ready = wait(list(pending), timeout=5 if errors else timeout)
            if not ready:
                break
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    kind, value = cloudpickle.loads(pipe.recv_bytes())
                except EOFError:
                    errors.append(RankError(rank, "Died", "the process ended", ""))
                    continue
                if kind == "error":
                    errors.append(RankError(rank, *value))
                else:
                    results[rank] = value
        if errors or pending:
            if pending:
                self.stop()
                self._start()
            raise errors[0] if errors else TimeoutError(f"ranks {sorted(pending.values())} did not answer")
        return [results[rank] for rank in range(size)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.stop()
