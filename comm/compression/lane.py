"""A thread that does what it is given in that order, so that its exchanges come in the same order on all ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from nugnn.kernels.green_context import new_stream

Work = Callable[[], None]


class Lane:
    """Runs work beside the thread that hands it over; on a GPU in a stream of its own.

    The thread starts with the first work and does not keep the interpreter from ending.

    Args:
        device: Where the work computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._work: queue.SimpleQueue[tuple[Work, Any, _Outcome] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: Any = None

    def submit(self, work: Work, then: Callable[[BaseException | None], None] | None = None) -> Callable[[], None]:
        """Have ``work`` done after all that was handed over before.

        Args:
            work: What it reads on a GPU may still be queued in the current stream, and has to live until it is done.
            then: Called when it is done, in the thread, with what it raised.

        Returns:
            What waits until it is done and raises what it raised; a GPU's current stream waits, not the host.
        """
        if self._thread is None:
            self._stream = new_stream(self._device) if self._is_cuda else None
            threads = torch.get_num_threads()
            self._thread = threading.Thread(target=self._run, args=(threads,), name="nugnn-gradients", daemon=True)
            self._thread.start()
        ready = None
        if self._is_cuda:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
        outcome = _Outcome(then)
        self._work.put((work, ready, outcome))

        def wait() -> None:
            outcome.is_done.wait()
            if outcome.error is not None:
                raise outcome.error
            if outcome.event is not None:
                torch.cuda.current_stream(self._device).wait_event(outcome.event)

        return wait

    def close(self) -> None:
        """End the thread after what it was given."""
        if self._thread is not None:
            self._work.put(None)

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # of OpenMP, which counts them for each thread anew
        if self._is_cuda:
            torch.cuda.set_device(self._device)
        while (entry := self._work.get()) is not None:
            work, ready, outcome = entry
            try:
                with torch.cuda.stream(self._stream) if self._is_cuda else nullcontext(), torch.no_grad():
                    if ready is not None:
                        self._stream.wait_event(ready)
                    work()
                    if self._is_cuda:
                        outcome.event = torch.cuda.Event()
                        outcome.event.record(self._stream)
                    outcome.finish(None)
            except BaseException as error:
                outcome.finish(error)
            del entry, work, outcome


class _Outcome:
    def __init__(self, then: Callable[[BaseException | None], None] | None) -> None:
        self.is_done = threading.Event()
        self.error: BaseException | None = None
        self.event: Any = None
        self._then = then

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        try:
            if self._then is not None:
                self._then(error)
        finally:
            self.is_done.set()
