"""Five worker processes, started once, that serve groups of 1 to 5 ranks over gloo."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

MAX_RANKS = 5
_SERVER = Path(__file__).with_name("rank_server.py")


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
        threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pairs = [socket.socketpair() for _ in range(MAX_RANKS)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        self._server = subprocess.Popen(
            [sys.executable, str(_SERVER), str(port), *map(str, descriptors)],
            env={**os.environ, **threads},
            pass_fds=descriptors,
            start_new_session=True,  # the ranks are its children, and go with it
        )
        self._pipes = [Connection(ours.detach()) for ours, _ in pairs]
        for _, theirs in pairs:
            theirs.close()
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
        pending = {self._pipes[rank]: rank for rank in range(size)}
        while pending:
            ready = wait(list(pending), timeout=5 if errors else timeout)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    kind, value = cloudpickle.loads(pipe.recv_bytes())
                except EOFError:
                    kind, value = "error", ("Died", "the process ended", "")
                if kind == "error":
                    errors.append(RankError(rank, *value))
                else:
                    results[rank] = value
        if pending or any(error.kind == "Died" for error in errors):
            self.stop()
            self._start()
        if errors:
            raise errors[0]
        if pending:
            raise TimeoutError(f"ranks {sorted(pending.values())} did not answer")
        return [results[rank] for rank in range(size)]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
