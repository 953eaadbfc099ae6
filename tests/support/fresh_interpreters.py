"""Programs in interpreters that have imported torch and what DGL needs: one process imports it and forks for each.

`run` is ``subprocess.run([sys.executable, "-W", "error", "-c", code])`` without the three seconds that torch and the
packages below DGL take. Neither DGL nor nugnn is there yet. What matters before torch is there, or without it, needs an
interpreter of its own; so does what happens when an interpreter ends, which takes half a second and is left out.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import traceback
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
            sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
            return code  # type: ignore[no-any-return]
        pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _exit_code(program: str) -> int:
    code = 0
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = 1 if isinstance(end.code, str) else end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.path[0] = ""  # as under -c
    for name in ("torch._dynamo", "requests", "scipy.sparse.linalg", "scipy.spatial"):
        importlib.import_module(name)
    program = _serve(connection.Connection(int(sys.argv[1])))
    sys.argv = ["-c"]
    if program is not None:
        os._exit(_exit_code(program))
