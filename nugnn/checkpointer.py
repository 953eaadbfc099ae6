"""When a run writes a checkpoint, and whether it stops there: decided by rank 0, between two epochs or two
steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nugnn.checkpoint import open_checkpoint, write_checkpoint
from nugnn.history import History
from nugnn.trainer import Trainer
from nugnn.trainer_state import capture, restore

_SECONDS_BETWEEN = 300.0
_LARGEST_PART = 0.05
"""Of the time that may go into checkpoints when no number of epochs was given."""

_SECONDS_BETWEEN_LOOKS = 0.25
"""In mid-epoch, whether a checkpoint is due: ranks have to agree on it, which takes an exchange."""

_GO_ON, _WRITE, _STOP = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Where and how often; handed to the ranks.

    Args:
        folder: Parent of one folder for each checkpoint.
        identity: Of the run, from `nugnn.fingerprint.run_identity`.
        every: Epochs between checkpoints.
        every_steps: Optimizer steps between checkpoints. Where neither is given, one is written every five minutes,
            less often when writing takes long.
        resume_from: An intact checkpoint of this run; None to start with epoch 1.
    """

    folder: Path
    identity: dict[str, Any]
    every: int | None = None
    every_steps: int | None = None
    resume_from: Path | None = None


class Checkpointer:
    """Writes the checkpoints of one run; every rank has one.

    Args:
        trainer: Whose state goes into them.
        plan: Where and how often.
        asked_to_stop: Whether the run was asked to stop; rank 0's answer counts.
        clock: Source of seconds, for tests.
    """

    def __init__(
        self,
        trainer: Trainer,
        plan: CheckpointPlan,
        asked_to_stop: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer, self._plan, self._asked_to_stop, self._clock = trainer, plan, asked_to_stop, clock
        self._next_at = clock() + _SECONDS_BETWEEN
        self._last_written = (0, 0)
        self._looked_at, self._next_look, self._looked_clock = 0, 0, clock()

    def restore(self) -> History:
        """The state of ``plan.resume_from`` in the trainer, and the epochs until then; a collective call."""
        if self._plan.resume_from is None:
            return History()
        checkpoint = open_checkpoint(self._plan.resume_from, was_checked=True)
        self._last_written = (checkpoint.epoch, checkpoint.step)
        history = restore(self._trainer, checkpoint)
        self._looked_at = self._next_look = self._trainer.num_steps
        return history

    def between_epochs(self, history: History) -> bool:
        """Write what is due; a collective call.

        Returns:
            Whether to stop: the run was asked to, and its checkpoint is written.
        """
        return self._act(history)

    def between_steps(self, history: History) -> bool:
        """The same in mid-epoch. A collective call at some steps, the same on all ranks: rank 0 says each time when
        the next one will be, so that between them there is nothing to exchange.
        """
        return self._trainer.num_steps >= self._next_look and self._act(history)

    def _act(self, history: History) -> bool:
        message = torch.tensor([_GO_ON, 0])
        if self._trainer.ranks.rank == 0:
            message[0] = self._decide(len(history.epochs))
            message[1] = self._steps_until_look()
        self._trainer.ranks.broadcast_(message)
        decision, steps = message.tolist()
        self._looked_at = self._trainer.num_steps
        self._next_look = self._looked_at + steps
        if decision != _GO_ON:
            self.write(history)
        return decision == _STOP  # type: ignore[no-any-return]

    def _steps_until_look(self) -> int:
        """As many as take a moment, by the time of the last ones; fewer where a checkpoint would be passed."""
        now, done = self._clock(), self._trainer.num_steps
        passed = done - self._looked_at
        seconds_per_step = (now - self._looked_clock) / max(passed, 1)
        self._looked_clock = now
        wanted = int(_SECONDS_BETWEEN_LOOKS / max(seconds_per_step, 1e-9))
        steps = max(1, min(wanted, 2 * passed))
        every = self._plan.every_steps
        return steps if every is None else min(steps, every - done % every)

    def write(self, history: History) -> None:
        """Write the state as it is, unless it is on the disk already; a collective call."""
        place = (len(history.epochs), self._trainer.steps_into_epoch)
        if place == self._last_written:
            return
        begin = self._clock()
        with self._trainer.off_the_clock() if place[1] else contextlib.nullcontext():
            shared, own = capture(self._trainer, history)
            write_checkpoint(
                self._plan.folder,
                self._trainer.ranks,
                epoch=place[0],
                step=place[1],
                shared=shared,
                own=own,
                identity=self._plan.identity,
            )
        self._last_written = place
        now = self._clock()
        self._next_at = now + max(_SECONDS_BETWEEN, (now - begin) / _LARGEST_PART)

    def _decide(self, epoch: int) -> int:
        if self._asked_to_stop():
            return _STOP
        plan, steps = self._plan, self._trainer.num_steps
        if plan.every is None and plan.every_steps is None:
            return _WRITE if self._clock() >= self._next_at else _GO_ON
        is_epoch = plan.every is not None and not self._trainer.steps_into_epoch and epoch % plan.every == 0
        is_step = plan.every_steps is not None and steps % plan.every_steps == 0
        return _WRITE if is_epoch or is_step else _GO_ON
