"""A whole run on one rank: trainer, checkpoints, and what is left for the launching process."""

from __future__ import annotations

import math
import resource
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nugnn.checkpointer import Checkpointer, CheckpointPlan
from nugnn.comm.groups import Ranks
from nugnn.family import Family
from nugnn.history import Epoch, History
from nugnn.planning.in_use import CoreUseWatch, CoreWait
from nugnn.train_options import TrainOptions
from nugnn.trainer import Trainer
from nugnn.worker_cores import own_cores

if TYPE_CHECKING:
    from nugnn.comm.step_watch import StepWatch

Part = Callable[[Ranks, nn.Module, Any], Family]
"""``part(ranks, model, options)``: what a rank trains on; called there, so that nobody else keeps what it loads."""


def train_rank(
    part: Part,
    ranks: Ranks,
    model: nn.Module,
    options: TrainOptions,
    on_epoch: Callable[[Epoch], Any] | None = None,
    *,
    checkpoints: CheckpointPlan | None = None,
    asked_to_stop: Callable[[], bool] = lambda: False,
    on_note: Callable[[str], Any] | None = None,
    limits: dict[str, Any] | None = None,
    on_rebalance: Callable[[dict[str, Any]], Any] | None = None,
) -> dict[str, Any]:
    """Train on one rank's part of the data.

    Args:
        part: Builds or loads it.
        ranks: Who takes part.
        model: Trained in place, on the device of this rank.
        options: How.
        on_epoch: Gets each `Epoch`.
        checkpoints: Where to write them, and which one to go on from; none when None.
        asked_to_stop: Asked from time to time when there are checkpoints; rank 0's answer counts.
        on_note: Gets sentences for the user.
        limits: What `nugnn.limited.apply_limits` put in force on this rank, for its report.
        on_rebalance: Gets each move of nodes between ranks, see `nugnn.rebalance.move_record`.

    Returns:
        Plain tensors and numbers: ``state`` (best weights; embeddings gathered) and ``logits`` of all rows on rank 0,
        ``epochs``, ``best``, ``report``, ``moves`` and ``time_to_best_seconds`` on every rank. ``interrupted_after``
        (an epoch and the steps of the next one) alone when the run stopped because it was asked to.
    """
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(ranks.device)
    family = part(ranks, model, options)
    trainer = Trainer(family, **options.trainer_options(family.steps_per_epoch))
    checkpointer = None if checkpoints is None else Checkpointer(trainer, checkpoints, asked_to_stop)
    before = History() if checkpointer is None else checkpointer.restore()
    if (said := trainer.grad_sync.prepare()) is not None and on_note is not None:
        on_note(said)

    core_wait, core_use, first = CoreWait(), CoreUseWatch(own_cores()), len(before.epochs) + 1

    def after_epoch(epoch: Epoch) -> None:
        if epoch.number == first:  # it compiles and fills caches
            core_wait.restart()
            core_use.restart()
        if on_epoch is not None:
            on_epoch(epoch)
        for news in (trainer.grad_sync.news(), family.news()):
            if news is not None and on_note is not None:
                on_note(news)

    watch = _watch(ranks) if options.timeline else None
    rebalancer = family.rebalancer(trainer)

    def between_epochs(history: History) -> bool:
        if rebalancer is not None:
            num_moves, left = len(history.moves), options.epochs - len(history.epochs)
            if options.patience is not None:  # it may end sooner: as long again as it has lasted, for all that is known
                left = min(left, max(options.patience, len(history.epochs)))
            if (said := rebalancer.between_epochs(history, left)) is not None and on_note is not None:
                on_note(said)
            if len(history.moves) > num_moves and on_rebalance is not None:
                on_rebalance(history.moves[-1])
        return checkpointer is not None and checkpointer.between_epochs(history)

    history = trainer.fit(
        options.epochs,
        patience=options.patience,
        evaluate_every=options.evaluate_every,
        on_epoch=after_epoch,
        history=before,
        between_epochs=between_epochs,
        between_steps=None if checkpointer is None else checkpointer.between_steps,
    )
    waited, used = core_wait.share, core_use.use
    if not history.is_finished(options.epochs, options.patience):
        return {"interrupted_after": [len(history.epochs), trainer.steps_into_epoch]}
    if checkpointer is not None:
        checkpointer.write(history)
    assert history.best is not None
    model.load_state_dict(history.best_state)
    best = history.best
    if math.isnan(best.train):  # not measured after each epoch
        best = replace(best, train=family.evaluate(trainer.num_steps, with_train=True)["train"])
    logits = trainer.predict_all().cpu() if family.num_predicted else torch.empty(0)
    here = history.epochs[history.num_on_another_split :] or history.epochs
    timed = here[1:] or here  # the first epoch compiles and fills caches
    median = {
        f"{name}_seconds": statistics.median(e.seconds[name] for e in timed)
        for name in ("epoch", "compute", "halo", "sync", "evaluate")
    }
    report = {
        **family.report(),
        "device": torch.cuda.get_device_name(ranks.device) if on_gpu else "cpu",
        "peak_memory_bytes": torch.cuda.max_memory_allocated(ranks.device) if on_gpu else _peak_resident_bytes(),
        "core_wait": waited,
        "core_use": None if used is None else asdict(used),
        **median,
    }
    if limits is not None:
        report["limits"] = limits
    if (traffic := trainer.grad_sync.report()) is not None:
        report["grad_sync"] = traffic
    if watch is not None:
        ranks.clock.watcher = None
        report["steps"] = watch.steps()
    state = family.whole_state()
    outcome: dict[str, Any] = {
        "epochs": [asdict(epoch) for epoch in history.epochs],
        "best": asdict(best),
        "report": report,
        "time_to_best_seconds": history.time_to_best_seconds,
        "moves": history.moves,
    }
    return outcome | ({"state": state, "logits": logits} if ranks.rank == 0 else {})


def _watch(ranks: Ranks) -> StepWatch:
    from nugnn.comm.step_watch import StepWatch  # runs without do not load it

    return StepWatch.of(ranks)


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
