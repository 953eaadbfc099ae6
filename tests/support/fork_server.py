"""Processes that need no imports of their own: one imports torch, DGL and nugnn, and becomes each of them by fork.

`ForkServer.popen` stands for ``subprocess.Popen`` where `nugnn.launch` starts a worker: same arguments, environment,
descriptors and exit code, but five seconds less; `ForkServer.torchrun` stands for a run of torchrun. Forks share the
seed of ``hash``, which fresh interpreters do not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import rank_server
import without  # before anything of nugnn

_MODULES = (
    *("cloudpickle", "dgl", "numba", "numba.parfors.parfor", "numba.stencils.stencil", "torch._dynamo"),
    *("torch.distributed", "nugnn.comm.groups", "nugnn.graph_worker", "nugnn.inference_worker", "nugnn.models"),
    *("nugnn.graph_family", "nugnn.graph_part", "nugnn.activations", "nugnn.node_move", "nugnn.rebalance"),
    *("nugnn.sample_family", "nugnn.sample_part", "nugnn.networks", "nugnn.parameter_groups", "nugnn.sample_options"),
    *("nugnn.kernels.dropout.cpu", "nugnn.kernels.edge_softmax.cpu", "nugnn.kernels.spmm.dgl_index"),
)
_FREE_DESCRIPTOR = 512
"""Descriptors that are not of this process's own begin here, before they go where they are expected."""


class ForkServer:
    """The client's side: the process that forks, started here; may be used by several threads."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**os.environ, **threads},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._lock = threading.Lock()

    def rank(self, rank: int, port: int, pipe: socket.socket) -> ForkedProcess:
        """A rank of the pool, which gets its jobs through ``pipe``."""
        return ForkedProcess(self, self.ask((rank, port), [pipe.fileno()]))

    def popen(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: io.IOBase,
        stderr: int,
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> ForkedProcess:
        """What ``python -P -m MODULE ...`` is, as `nugnn.launch` starts it."""
        assert command[:3] == [sys.executable, "-P", "-m"] and start_new_session
        assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.STDOUT)
        request = {
            **{"module": command[3], "arguments": list(command[4:]), "environment": dict(env), "cwd": os.getcwd()},
            "targets": [1, 2, *pass_fds],
        }
        return ForkedProcess(self, self.ask(request, [stdout.fileno(), stdout.fileno(), *pass_fds]))

    def torchrun(
        self, command: Sequence[str], *, capture_output: bool, text: bool, check: bool
    ) -> subprocess.CompletedProcess[str]:
        """What ``subprocess.run`` of ``torch.distributed.run --standalone`` is, without torchrun's own process."""
        assert command[1:4] == ["-m", "torch.distributed.run", "--standalone"] and capture_output and text and not check
        num_ranks = int(command[4].removeprefix("--nproc-per-node="))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with tempfile.TemporaryFile("w+") as output:
            ranks = []
            for rank in range(num_ranks):
                environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                request = {
                    **{"script": command[5], "arguments": list(command[6:]), "cwd": os.getcwd(), "targets": [1, 2]},
                    "environment": {**os.environ, **{name: str(value) for name, value in environment.items()}},
                }
                ranks.append(ForkedProcess(self, self.ask(request, [output.fileno()] * 2)))
            codes = [rank.wait() for rank in ranks]
            output.seek(0)
            return subprocess.CompletedProcess(command, max(map(abs, codes)), "", output.read())

    def script(
        self, path: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """What ``subprocess.run`` of ``python PATH ...`` is, in an interpreter that has imported what workers need."""
        request = {
            **{"script": path, "arguments": list(arguments), "environment": dict(environment)},
            **{"cwd": os.getcwd(), "targets": [1, 2]},
        }
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            code = ForkedProcess(self, self.ask(request, [out.fileno(), err.fileno()])).wait()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess([path, *arguments], code, out.read(), err.read())

    def ask(self, request: Any, descriptors: Sequence[int] = ()) -> Any:
        """The server's answer."""
        with self._lock:
            socket.send_fds(self._ours, [pickle.dumps(request)], descriptors)
            answer = self._ours.recv(2**16)
        if not answer:
            raise EOFError("the process that forks has ended")
        return pickle.loads(answer)

    def stop(self) -> None:
        """End the server, and its children that are of its session."""
        self._ours.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class ForkedProcess:
    """What `nugnn.launch` uses of a ``subprocess.Popen``."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None as long as it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask(self.pid)
        return self.returncode

    def wait(self) -> int:
        """The exit code, once there is one."""
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """As ``subprocess.Popen`` does: not to a process that may be another's by now."""
        if self.poll() is None:
            os.kill(self.pid, number)


# -- the server ----------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Import what children use; starts no thread, as only the one that forks goes on in a child."""
    import torch

    import nugnn  # noqa: F401

    torch.set_num_threads(1)
    if "nugnn.seam" not in without.NAMES:
        from nugnn.seam import install

        install()
    for name in _MODULES:
        if name not in without.NAMES:
            with contextlib.suppress(ModuleNotFoundError) if without.NAMES else contextlib.nullcontext():
                importlib.import_module(name)
    _load_what_numba_needs_to_load_a_kernel()
    gc.freeze()
    assert threading.active_count() == 1


def _load_what_numba_needs_to_load_a_kernel() -> None:
    """A second in each child that runs one: numba registers all that it can type and lower when it first needs it."""
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def _serve(pipe: socket.socket) -> tuple[Any, list[int]] | None:
    """In each child, what it is to become and the descriptors it gets; None in the server when all is done."""
    while True:
        data, descriptors, *_ = socket.recv_fds(pipe, 2**18, 16)
        if not data:
            return None
        request = pickle.loads(data)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            pipe.send(pickle.dumps(os.waitstatus_to_exitcode(status) if pid else None))
            continue
        child = os.fork()
        if child == 0:
            pipe.close()
            if isinstance(request, dict):
                os.setpgid(0, 0)
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)  # so that the child's end is seen at the other end
        if isinstance(request, dict):
            with contextlib.suppress(OSError):  # it has done so itself, and may be gone
                os.setpgid(child, child)  # before the answer: whoever has that may end the group
        pipe.send(pickle.dumps(child))


def _run(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """What a new interpreter with the request's environment does."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))  # as an interpreter reads it at its start
    _place([os.open(os.devnull, os.O_RDONLY), *descriptors], [0, *request["targets"]])
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), errors="backslashreplace", write_through=True)
    faulthandler.enable()
    if "script" in request:
        sys.argv = [request["script"], *request["arguments"]]
        sys.path.insert(0, os.path.dirname(request["script"]))
        runpy.run_path(request["script"], run_name="__main__")
    else:
        sys.argv = [request["module"], *request["arguments"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _place(descriptors: Sequence[int], targets: Sequence[int]) -> None:
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FREE_DESCRIPTOR) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, target in zip(moved, targets, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)


if __name__ == "__main__":
    sys.path.pop(0)  # as under -P
    prepare()
    mine = _serve(socket.socket(fileno=int(sys.argv[1])))
    if mine is not None:
        import numpy as np

        np.random.seed()  # a fork has its parent's state
        what, given = mine
        if isinstance(what, tuple):
            rank_server.serve(*what, given[0])
            os._exit(0)
        _run(what, given)
