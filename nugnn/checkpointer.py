"""When a run writes a checkpoint, and whether it stops there: decided by rank 0, between two epochs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nugnn.checkpoint import open_checkpoint, write_checkpoint
from nugnn.trainer import History, Trainer
from nugnn.trainer_state import capture, restore

_SECONDS_BETWEEN = 300.0
_LARGEST_PART = 0.05
"""Of the time that may go into checkpoints when no number of epochs was given."""

_GO_ON, _WRITE, _STOP = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Where and how often; handed to the ranks.

    Args:
        folder: Parent of one folder for each checkpoint.
        identity: Of the run, from `nugnn.fingerprint.run_identity`.
        every: Epochs between checkpoints; None for one every five minutes, less often when writing takes long.
        resume_from: An intact checkpoint of this run; None to start with epoch 1.
    """

    folder: Path
    identity: dict[str, Any]
    every: int | None = None
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
        self._last_written = 0

    def restore(self) -> History:
        """The state of ``plan.resume_from`` in the trainer, and the epochs until then; a collective call."""
        if self._plan.resume_from is None:
            return History()
        checkpoint = open_checkpoint(self._plan.resume_from, was_checked=True)
        self._last_written = checkpoint.epoch
        return restore(self._trainer, checkpoint)

    def between_epochs(self, history: History) -> bool:
        """Write what is due; a collective call.

        Returns:
            Whether to stop: the run was asked to, and its checkpoint is written.
        """
        decision = torch.tensor([_GO_ON])
        if self._trainer.ranks.rank == 0:
            decision[0] = self._decide(len(history.epochs))
        self._trainer.ranks.broadcast_(decision)
        if int(decision) != _GO_ON:
            self.write(history)
        return int(decision) == _STOP

    def write(self, history: History) -> None:
        """Write the state as it is, unless it is on the disk already; a collective call."""
        epoch = len(history.epochs)
        if epoch == self._last_written:
            return
        begin = self._clock()
        shared, own = capture(self._trainer, history)
        write_checkpoint(
            self._plan.folder, self._trainer.ranks, epoch=epoch, shared=shared, own=own, identity=self._plan.identity
        )
        self._last_written = epoch
        now = self._clock()
        self._next_at = now + max(_SECONDS_BETWEEN, (now - begin) / _LARGEST_PART)

    def _decide(self, epoch: int) -> int:
        if self._asked_to_stop():
            return _STOP
        is_due = self._clock() >= self._next_at if self._plan.every is None else epoch % self._plan.every == 0
        return _WRITE if is_due else _GO_ON
