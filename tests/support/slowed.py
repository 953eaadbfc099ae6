"""A process made slower by a factor, exactly and at any moment: unequal devices on a machine with few equal cores.

Another process stops it (SIGSTOP) and lets it go on (SIGCONT), some fifty times a second. How long it stands still
follows from how long it did run, so that late wake-ups on a busy machine cancel out: of each second of the clock it
has ``1 / factor``. Results cannot change, as the process itself is none the wiser.

    with slowed(pid, 3.0):          # from outside
        ...
    slow_down(os.getpid(), 3.0)     # a worker from inside, such as a model's fifth step: until the worker ends
    python tests/support/slowed.py PID FACTOR
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

PERIOD_SECONDS = 0.02
_CHECK_SECONDS = 0.2


def slow_down(pid: int, factor: float) -> subprocess.Popen[bytes]:
    """Slow process ``pid`` down from now on; ends with it, with the process that asked, or by SIGTERM.

    Args:
        pid: Of a process of this user; all its threads are slowed.
        factor: Above 1.
    """
    if not factor > 1:
        raise ValueError(f"factor is {factor}, must be above 1")
    command = [sys.executable, "-S", "-E", __file__, str(pid), repr(factor)]
    slower = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert slower.stdout is not None
    with slower.stdout:
        slower.stdout.readline()  # on busy cores it takes its time to start
    return slower


@contextlib.contextmanager
def slowed(pid: int, factor: float) -> Iterator[None]:
    """Process ``pid`` has ``1 / factor`` of the time inside; see `slow_down`."""
    slower = slow_down(pid, factor)
    try:
        yield
    finally:
        slower.terminate()
        slower.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def main(pid: int, factor: float) -> None:
    """What the other process does."""
    parent, next_check = os.getppid(), 0.0
    late = 0.0  # how much longer it stood still than it had to
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("begins", flush=True)
    begin = time.monotonic()
    try:
        while True:
            if begin > next_check:
                next_check = begin + _CHECK_SECONDS
                if not _is_alive(pid) or os.getppid() != parent:
                    return
            time.sleep(PERIOD_SECONDS / factor)
            stop = time.monotonic()
            late -= (factor - 1) * (stop - begin)
            begin = stop
            if late < 0:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(-late)
                os.kill(pid, signal.SIGCONT)
                begin = time.monotonic()
                late += begin - stop
    except ProcessLookupError:
        return
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
