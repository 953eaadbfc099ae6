"""The first Ctrl-C asks a run to stop after its epoch, the second one ends it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A run stopped because it was asked to; its checkpoint is written.

    Args:
        message: For the user, one line.
        epoch: The last whole epoch of the checkpoint.
        step: Steps of the epoch after it.
    """

    def __init__(self, message: str, epoch: int, step: int = 0) -> None:
        super().__init__(message)
        self.epoch, self.step = epoch, step


class FirstSignalAsks:
    """A context in which, once `arm` was called, SIGINT or SIGTERM asks for the end and every later one interrupts.

    Outside the main thread, where Python takes no signals, it does nothing.

    Args:
        ask: Called in the main thread, between any two instructions; should only leave a mark.
        tell: Called in a thread of its own, as the main one may be in the middle of printing; has returned when the
            context ends.
    """

    def __init__(self, ask: Callable[[], Any], tell: Callable[[], Any]) -> None:
        self._ask = ask
        self._teller = threading.Thread(target=tell, name="nugnn-tell", daemon=True)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> FirstSignalAsks:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in _SIGNALS}
            # None: somebody else's, not set from Python and not ours to put back
            self._before = {number: handler for number, handler in handlers.items() if handler is not None}
        return self

    def arm(self) -> None:
        """From here on; before, a signal does what it did outside."""
        for number in self._before:
            signal.signal(number, self._first)

    def _first(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, self._second)
        self._ask()
        self._teller.start()

    def _second(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._teller.ident is not None:
            self._teller.join()
