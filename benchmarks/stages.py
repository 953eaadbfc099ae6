"""What a long benchmark is at, with the seconds since it began; and stacks of its processes when nothing comes."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

_BETWEEN_DUMPS = 0.3
"""Seconds in which a process writes its stacks, so that those of two do not mix."""


class Stages:
    """Lines such as ``[  12.3 s] made products-like (4.1 s)``, written at once."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begin

    def say(self, text: str) -> None:
        """A line."""
        print(f"[{self.seconds:6.1f} s] {text}", flush=True)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[list[Any]]:
        """A line after the block, with its seconds and with what the block put into the list."""
        begin, more = time.monotonic(), list[Any]()
        yield more
        self.say(f"{name} ({time.monotonic() - begin:.1f} s){': ' if more else ''}{', '.join(map(str, more))}")


def show_stacks_when_asked() -> None:
    """From now on `ask_for_stacks` makes this process write the stacks of all its threads to stderr."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def ask_for_stacks(processes: Iterable[tuple[str, int]]) -> None:
    """Let processes, given by name and id, write their stacks; each must have called `show_stacks_when_asked`."""
    if not hasattr(signal, "SIGUSR1"):
        return
    for name, number in processes:
        print(f"--- stacks of {name} (process {number})", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGUSR1)
        time.sleep(_BETWEEN_DUMPS)
