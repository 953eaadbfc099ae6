"""How gloo's threads share a core with what computes there: the one that reads connections does not push others aside.

gloo has a thread (``gloo_tcp_loop``) that waits for what comes. A connection has a lock; where another thread of the
process holds it, as it does while it sends, the waiting thread does not sleep until it is free but asks again and again
(``try_to_lock`` in ``Pair::handleEvents``). Woken on the core of the thread that holds the lock, it pushes this one
aside and asks until its slice of time ends, some 3 ms, in which nothing is sent. The system's policy for work that is
not in a hurry (``SCHED_BATCH``) leaves it its share of a core and its place on an idle one, but it no longer pushes
aside who runs.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NAME = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")


def reading_threads() -> list[int]:
    """Numbers of the threads of this process in which gloo reads connections; empty where they cannot be told."""
    if not _TASKS.is_dir():
        return []
    found = []
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended, or a sandbox does not let us
            if (task / "comm").read_text().strip() == _NAME:
                found.append(int(task.name))
    return found


def let_gloo_wait_its_turn() -> int:
    """Threads of this process in which gloo reads connections push nobody aside from now on.

    Nothing happens where the system is not Linux, or such threads have another name. Call it again after new groups.

    Returns:
        How many there are.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    threads = reading_threads()
    for thread in threads:
        with contextlib.suppress(OSError):  # as above
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:  # else somebody has chosen
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    return len(threads)
