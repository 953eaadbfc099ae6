"""What the epochs of a run did, the one that is in progress, and the best of those that are done."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Epoch:
    """What one epoch did; the same on every rank except ``seconds``.

    Args:
        number: From 1.
        loss: Training loss, of the model before this epoch's step.
        train: Metric on the training rows after the step; likewise ``val`` and ``test``. NaN where not evaluated.
        seconds: Wall time on this rank: ``epoch`` (forward, backward, step), of it ``halo`` and ``sync`` (waiting for
            peers included) and ``compute`` (the rest); ``evaluate`` beside it.
    """

    number: int
    loss: float
    train: float
    val: float
    test: float
    seconds: dict[str, float]


@dataclass
class EpochInProgress:
    """What the finished steps of an epoch leave for its end.

    Args:
        loss: This rank's shares of their losses, by the weight of each step: a float64 scalar.
        weight: Of these steps.
        seconds: They took on this rank: ``epoch``, of it ``halo`` and ``sync``.
    """

    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    weight: float | Tensor = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("epoch", "halo", "sync"), 0.0))


@dataclass
class History:
    """Epochs so far and the best one by validation metric (the earliest among equals).

    Args:
        epochs: All of them, the first is number 1.
        best: One of them.
        best_state: The model's state after it.
        elapsed_seconds: Wall time of all epochs on this rank.
        time_to_best_seconds: The same until the end of the best one.
        num_on_another_split: How many of the epochs, from the first on, ran on another split of the graph: their
            ``seconds`` say nothing about this one.
        moves: Moves of rows between ranks, plain values, see `nugnn.rebalance.move_record`.
    """

    epochs: list[Epoch] = field(default_factory=list)
    best: Epoch | None = None
    best_state: dict[str, Tensor] = field(default_factory=dict)
    elapsed_seconds: float = 0.0
    time_to_best_seconds: float = 0.0
    num_on_another_split: int = 0
    moves: list[dict[str, Any]] = field(default_factory=list)

    def is_finished(self, epochs: int, patience: int | None) -> bool:
        """Whether ``epochs`` are done, or ``patience`` epochs have passed since the best one."""
        number = len(self.epochs)
        return number >= epochs or (
            patience is not None and self.best is not None and number - self.best.number >= patience
        )

    def keep_best(self, epoch: Epoch, model: nn.Module) -> None:
        """Note ``epoch``, whose weights ``model`` has, if it is better than the best so far.

        By validation metric; by training loss where there are no validation rows.
        """
        score = epoch.val if not math.isnan(epoch.val) else -epoch.loss
        known = self.best
        if known is not None and score <= (known.val if not math.isnan(epoch.val) else -known.loss):
            return
        self.best = epoch
        self.time_to_best_seconds = self.elapsed_seconds
        self.best_state = copy.deepcopy({k: v.detach() for k, v in model.state_dict().items()})
