"""Programs in interpreters that have imported torch and nothing else: one process imports it and forks for each.

`run` is ``subprocess.run([sys.executable, "-W", "error", "-c", code])`` without the two seconds that torch takes. What
matters before torch is there, or without it, needs an interpreter of its own.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from multiprocessing import connection
from pathlib import Path
from socket import socketpair


def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Exit code and output of ``code``, in which every warning is an error."""
    server = _server()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        server.send(
            (code, environment, f"/proc/{os.getpid()}/fd/{out.fileno()}", f"/proc/{os.getpid()}/fd/{err.fileno()}")
        )
        returncode = server.recv()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([code], returncode, out.read(), err.read())


@functools.cache
def _server() -> connection.Connection:
    ours, theirs = socketpair()
    with theirs:
        command = [sys.executable, "-W", "error", str(Path(__file__)), str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
    pipe = connection.Connection(ours.detach())
    atexit.register(lambda: (pipe.close(), process.wait()))
    return pipe


def _serve(pipe: connection.Connection) -> str | None:
    """In each child, the program to run; None when there are no more."""
    while True:
        try:
            code, environment, *outputs = pipe.recv()
        except EOFError:
            return None
        child = os.fork()
        if child == 0:
            pipe.close()
            for descriptor, path in zip((1, 2), outputs, strict=True):
                os.dup2(os.open(path, os.O_WRONLY), descriptor)
            os.environ.clear()
            os.environ.update(environment)
            return code  # type: ignore[no-any-return]
        pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    sys.path[0] = ""  # as under -c
    import torch  # noqa: F401

    program = _serve(connection.Connection(int(sys.argv[1])))
    sys.argv = ["-c"]
    if program is not None:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
