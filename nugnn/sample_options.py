"""How to train on samples: what `nugnn.fit` takes by name and hands to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import nn

from nugnn.augmentation import Augmentation
from nugnn.comm.batch_norm import BatchNormRows
from nugnn.parameter_groups import parameter_groups
from nugnn.schedules import usual_warmup
from nugnn.train_options import TrainOptions, named_options

OPTIMIZERS = ("adamw", "adam", "sgd")

GRAPHS_ONLY = (
    *("partitioner", "order", "cache_folder", "inductive"),
    *("weight_decay_first_layer_only", "recompute_inputs", "overlap", "activations"),
    *("halo_wire", "halo_feedback", "halo_mode", "halo_target", "rebalance", "on_move"),
)
"""What `nugnn.fit` takes for graphs alone."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions(TrainOptions):
    """How to train on batches of samples; what `nugnn.fit` takes by name, beside the options of every family.

    Args:
        optimizer: ``adamw``, ``adam`` or ``sgd``; takes ``lr`` and ``weight_decay``.
        momentum: Of ``sgd``.
        schedule: As for every family; ``cosine`` when neither it nor ``make_scheduler`` is given.
        warmup_epochs: As for every family; of ``cosine`` a tenth of the epochs, one at most, when not given.
        batch_size: Samples of a global batch; 64 when neither it nor a split in samples is given.
        batch_split: How a batch is divided among workers: samples of each, such as ``(18, 6)``; ``even``; or ``auto``:
            by the shares where some were given, evenly otherwise.
        micro_batches: Parts of each batch that run one after the other, for less memory.
        drop_last: Leave out the last batch of an epoch when it is smaller.
        batch_norm: ``all`` or ``local``, which is approximate; see `nugnn.sample_family.SampleFamily`.
        augment: Changes training samples at random; see `nugnn.augmentation`.
        clip_norm: Largest norm of the gradient; none when None.
        schedule_steps: Step the schedule after each optimizer step instead of each epoch.
        measure_train: Measure the metric on the training samples after each epoch too; of the best weights it is
            always measured.
        collate_fn: Joins a list of samples; see `nugnn.batches.batch_loader`.
        num_data_workers: Processes that read ahead, for each worker.
    """

    family: ClassVar[str] = "samples"
    rows: ClassVar[str] = "samples"

    epochs: int = 20
    lr: float = 1e-3
    weight_decay: float = 0.01
    optimizer: str = "adamw"
    momentum: float = 0.9
    batch_size: int | None = None
    batch_split: str | Sequence[int] = "auto"
    micro_batches: int = 1
    drop_last: bool = False
    batch_norm: BatchNormRows = "all"
    augment: Augmentation | None = None
    clip_norm: float | None = None
    schedule_steps: bool = False
    measure_train: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_data_workers: int = 0

    @property
    def usual_warmup_epochs(self) -> float:
        """See `nugnn.schedules.usual_warmup`."""
        return usual_warmup(self.schedule, self.epochs)

    def usual_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The one that ``optimizer`` names; ``weight_decay`` is for matrices and kernels alone."""
        groups = parameter_groups(model, self.weight_decay)
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)
        return {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[self.optimizer](groups, lr=self.lr)

    def trainer_options(self, steps_per_epoch: int) -> dict[str, Any]:
        """What `nugnn.trainer.Trainer` takes beside the family."""
        more = {"schedule_steps": self.schedule_steps, "clip_norm": self.clip_norm}
        return super().trainer_options(steps_per_epoch) | more

    def deciding(self) -> dict[str, Any]:
        """Options of samples that decide the weights; how a batch is divided does not."""
        names = ("batch_size", "micro_batches", "drop_last", "clip_norm", "schedule_steps", "measure_train")
        more = {"label_smoothing": self.label_smoothing, "batch_norm": self.batch_norm}
        return {name: getattr(self, name) for name in names} | more | {"augment": repr(self.augment)}


SAMPLES_ONLY = tuple(
    {field.name for field in fields(SampleOptions)}
    - {field.name for field in fields(TrainOptions)}
    - {"optimizer"}  # to graphs, what make_optimizer may have been meant by
)
"""What `nugnn.fit` takes for samples alone."""


def sample_options(options: Mapping[str, Any], others: Iterable[str] = ()) -> SampleOptions:
    """``options`` by name; ``others`` are names that a wrong one may have meant, too.

    Raises:
        TypeError: There is no option of that name; says which one was meant.
        ValueError: An option belongs to graphs, or is not allowed.
    """
    chosen = named_options(SampleOptions, options, dict.fromkeys(GRAPHS_ONLY, "graphs"), others)
    if chosen.make_scheduler is None and "schedule" not in options:
        chosen = replace(chosen, schedule="cosine")
    if "warmup_epochs" not in options and isinstance(chosen.epochs, int):
        chosen = replace(chosen, warmup_epochs=chosen.usual_warmup_epochs)
    if chosen.optimizer not in OPTIMIZERS:
        raise ValueError(
            f"optimizer {chosen.optimizer!r} is not known; choose one of {', '.join(OPTIMIZERS)}, or give one of your "
            "own as make_optimizer=lambda model: ..."
        )
    if chosen.make_optimizer is not None and "optimizer" in options:
        raise ValueError("optimizer and make_optimizer both say which optimizer; give one of them")
    if chosen.momentum != SampleOptions.momentum and (chosen.optimizer != "sgd" or chosen.make_optimizer is not None):
        raise ValueError("momentum has an effect on optimizer sgd alone; leave it out")
    if chosen.schedule_steps and chosen.make_scheduler is None:
        raise ValueError("schedule_steps has an effect on make_scheduler alone; leave it out")
    return chosen
