"""What a run shows while it trains: a live bar in a terminal, a line every few seconds elsewhere.

Events are plain dictionaries, as `nugnn.launch` delivers them from rank 0:
``{"kind": "stage", "text": "splitting the graph into 2 parts"}`` and, once an epoch,
``{"kind": "epoch", "epoch": 1, "loss": 1.93, "val": 0.41}`` (``epoch`` counts from 1; further keys are allowed).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from nugnn.planning.in_words import download_bytes
from nugnn.screen import say


class RunProgress:
    """Shows events on a console; a context manager, so that the bar is taken down before anything else is printed.

    Args:
        console: Where to show.
        num_epochs: Epochs planned; fewer may come (early stopping).
        seconds_between_lines: Least time between two lines when the console is no terminal.
        clock: Source of seconds, for tests.
    """

    def __init__(
        self,
        console: Console,
        num_epochs: int,
        *,
        seconds_between_lines: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._num_epochs = num_epochs
        self._gap = seconds_between_lines
        self._clock = clock
        self._next_line = -float("inf")
        self._unshown: str | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> RunProgress:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("starting", total=self._num_epochs)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._unshown is not None:
            self._line(self._unshown)  # the last epoch, or the last before an error

    def on_event(self, event: dict[str, Any]) -> None:
        """Show ``event``: a ``stage``, a ``note`` (a line that stays), a ``download`` or an ``epoch``."""
        if event["kind"] == "stage":
            self._line(event["text"]) if self._bar is None else self._update(event["text"], None)
        elif event["kind"] == "note":
            say(self._console, event["text"])
        elif event["kind"] == "download":
            total = download_bytes(event["total"])
            self._show(f"downloading {download_bytes(event['bytes'])}{total and f' of {total}'}", None)
        elif event["kind"] == "epoch":
            self._show(epoch_text(event, self._num_epochs), event["epoch"])

    def _show(self, text: str, epoch: int | None) -> None:
        """In the bar; or as a line, unless the last one was a moment ago."""
        if self._bar is not None:
            self._update(text, epoch)
        elif self._clock() >= self._next_line:
            self._next_line = self._clock() + self._gap
            self._line(text)
        else:
            self._unshown = text

    def _update(self, text: str, epoch: int | None) -> None:
        assert self._bar is not None and self._task is not None
        self._bar.update(self._task, description=text, completed=epoch)

    def _line(self, text: str) -> None:
        self._unshown = None
        say(self._console, text)


def epoch_text(event: dict[str, Any], num_epochs: int) -> str:
    """One epoch in one line, its number right-aligned so that lines stand under each other."""
    text = f"epoch {event['epoch']:>{len(str(num_epochs))}}/{num_epochs}"
    for name in ("loss", "val"):
        value = event.get(name)
        if value is not None and not math.isnan(value):  # NaN: not evaluated in this epoch
            text += f"  {name} {value:.4f}"
    return text
