"""A lock between the processes of a machine, so that what all of them need is made by one and read by the others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path

_ALL: weakref.WeakSet[OneProcess] = weakref.WeakSet()
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.005, 0.1


class OneProcess:
    """Held by at most one process and thread at a time; given back by the system when its process ends.

    Args:
        path: A file that is there for this alone; made where it is not. Its folder has to be there.
        patience_seconds: How long `take` waits for another one, which may be stopped or on another machine.
    """

    def __init__(self, path: Path, patience_seconds: float) -> None:
        self._path, self._patience = path, patience_seconds
        self._held: list[int] = []
        """The file that is locked; a list, from which of several threads only one takes it out."""
        _ALL.add(self)

    def take(self) -> bool:
        """Wait until nobody holds it; False where that takes too long, it is held here, or files cannot be locked."""
        if self._held:
            return False
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        wait, end = _FIRST_WAIT_SECONDS, time.monotonic() + self._patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(wait)
                    wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
                    continue
            except OSError:
                pass
            else:
                self._held.append(file)
                return True
            os.close(file)
            return False

    def give_back(self) -> None:
        """Let the next one take it; nothing where it is not held."""
        with contextlib.suppress(IndexError, OSError):
            file = self._held.pop()
            try:
                fcntl.flock(file, fcntl.LOCK_UN)  # also of a copy in a child that was forked while this one waited
            finally:
                os.close(file)

    def _forget(self) -> None:
        with contextlib.suppress(IndexError, OSError):
            os.close(self._held.pop())


def _forget() -> None:
    """In a child that was forked: it holds nothing, and its copy of a file would keep the lock of its parent's."""
    for each in list(_ALL):
        each._forget()


os.register_at_fork(after_in_child=_forget)
