"""Which checkpoint a run goes on from, and how it ends when it was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nugnn._counted import counted
from nugnn.checkpoint import moment, newest_checkpoint, remove_checkpoints
from nugnn.checkpointer import CheckpointPlan
from nugnn.fingerprint import check_same_run
from nugnn.history import Epoch
from nugnn.interrupt import Interrupted
from nugnn.train_options import TrainOptions
from nugnn.trainer_state import recorded_history


def from_where(
    plan: CheckpointPlan, options: TrainOptions, resume: bool, note: Callable[[str], Any]
) -> tuple[CheckpointPlan, list[Epoch]]:
    """``plan`` with the checkpoint to go on from, and its epochs; the folder is emptied when the run starts anew.

    Raises:
        CheckpointError: No checkpoint is intact, or it is of another run.
        ValueError: It has more epochs than the run asks for.
    """
    if not resume:
        remove_checkpoints(plan.folder)
        return plan, []
    checkpoint, problems = newest_checkpoint(plan.folder)
    if checkpoint is None:
        note(f"no checkpoint in {plan.folder} yet: starting with epoch 1")
        return plan, []
    check_same_run(checkpoint, plan.identity)
    least = checkpoint.epoch + (checkpoint.step > 0)
    if least > options.epochs:
        raise ValueError(
            f"{checkpoint.folder} was written {checkpoint.moment}, but only {counted(options.epochs, 'epoch')} are "
            f"asked for; ask for {least} or more"
        )
    for problem in problems:
        note(problem)
    note(f"going on {checkpoint.moment}, from {checkpoint.folder}")
    return replace(plan, resume_from=checkpoint.folder), recorded_history(checkpoint).epochs


def raise_if_interrupted(outcome: dict[str, Any], options: TrainOptions, plan: CheckpointPlan | None) -> None:
    """End a run that `nugnn.train_rank.train_rank` stopped on request."""
    if "interrupted_after" in outcome:
        assert plan is not None
        epoch, step = outcome["interrupted_after"]
        raise Interrupted(
            f"interrupted {moment(epoch, step)} of {options.epochs}; the checkpoint is in {plan.folder}, resume=True "
            "goes on from it",
            epoch,
            step,
        )
