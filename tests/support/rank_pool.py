"""Five worker processes, forked once, that serve groups of 1 to 5 ranks over gloo."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from fork_server import ForkedProcess, ForkServer
from rank_server import MAX_RANKS


class RankError(AssertionError):
    """A function raised on a rank."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.rank, self.kind, self.message = rank, kind, message


class RankPool:
    """``pool.run(3, function, ...)`` calls ``function(ranks, ...)`` on 3 ranks and returns the 3 results."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._start()

    def _start(self) -> None:
        import torch.distributed as dist

        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, MAX_RANKS, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._ranks: list[ForkedProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(MAX_RANKS):
            ours, theirs = socket.socketpair()
            with theirs:
                self._ranks.append(self._server.rank(rank, port, theirs))
            self._pipes.append(Connection(ours.detach()))
        for pipe in self._pipes:
            assert pipe.recv_bytes() == b"ready"  # EOFError: it ended

    def run(
        self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 280, **kwargs: Any
    ) -> list[Any]:
        """Results in rank order; the first error is raised as `RankError`, and ranks that hang are started afresh."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None) or ""
            if os.sep + "tests" + os.sep in file:
                cloudpickle.register_pickle_by_value(module)
        job = cloudpickle.dumps((size, function, args, kwargs))
        for pipe in self._pipes[:size]:
            pipe.send_bytes(job)
        results: dict[int, Any] = {}
        errors: list[RankError] = []
        is_whole = True
        pending = {self._pipes[rank]: rank for rank in range(size)}
        while pending:
            ready = wait(list(pending), timeout=5 if errors else timeout)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    kind, value, was_left = cloudpickle.loads(pipe.recv_bytes())
                except EOFError:
                    kind, value, was_left = "error", ("Died", "the process ended", ""), True
                is_whole = is_whole and not was_left
                if kind == "error":
                    errors.append(RankError(rank, *value))
                else:
                    results[rank] = value
        if pending or not is_whole:
            self.stop()
            self._start()
        if errors:
            raise errors[0]
        if pending:
            raise TimeoutError(f"ranks {sorted(pending.values())} did not answer")
        return [results[rank] for rank in range(size)]

    def stop(self) -> None:
        """End the ranks; the process that they were forked from stays."""
        for pipe in self._pipes:
            pipe.close()
        for rank in self._ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
