"""How to train, as far as it is the same for every family of data; and how options are read by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from nugnn._counted import counted
from nugnn.comm.compression.gradient_sync import as_compression
from nugnn.comm.compression.settings import Compression
from nugnn.comm.hosts import checked_hosts
from nugnn.comm.replicas import STEPS_BETWEEN_CHECKS
from nugnn.loss import RowLoss
from nugnn.metrics import METRICS
from nugnn.own_rows import sharded_names
from nugnn.precision.storage import Storage
from nugnn.schedules import Constant, Cosine, Schedule, Steps, check_schedule
from nugnn.step_graphs import CUDA_GRAPHS, CudaGraphs
from nugnn.trainer import MakeScheduler

_OTHER_NAMES = {
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "optimizer": "make_optimizer",
    "scheduler": "make_scheduler",
}
"""What other libraries call our options."""

Chosen = TypeVar("Chosen", bound="TrainOptions")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `nugnn.fit_options.FitOptions` and `nugnn.sample_options.SampleOptions` have in common.

    Args:
        epochs: Upper bound of epochs.
        patience: Stop after so many epochs without a better validation metric; None to train all.
        evaluate_every: Epochs between evaluations; the last one is always evaluated.
        lr: Learning rate.
        weight_decay: Penalty on weights.
        make_optimizer: Replaces the optimizer; gets the model.
        make_scheduler: Makes a learning-rate schedule; gets the optimizer. It steps once after each epoch.
        schedule: ``constant``, ``cosine`` to zero over all epochs, ``step``, or a function of the optimizer step; see
            `nugnn.schedules`. In place of ``make_scheduler``.
        warmup_epochs: Epochs, or a fraction of one, in which the rate grows from near zero.
        decay_epochs: Of ``step``: epochs after which the rate is a tenth, again and again; a third of all when None.
        label_smoothing: Part of a label that is spread over all classes.
        loss: Replaces cross-entropy; one value per row.
        metric: Replaces the metric of the data.
        class_weights: ``(C,)``, for the loss.
        regularizer: Parameter-only term added to the loss once.
        seed: Of dropout masks, and of the order of samples.
        precision: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``amp``; see `nugnn.precision.storage.Storage`.
        cuda_graphs: ``auto``, ``on`` or ``off``: whether a GPU repeats a recorded step instead of being told each
            operation anew; see `nugnn.step_graphs`.
        grad_sync: How gradients travel between workers: ``fp32``, ``bf16``, ``fp16``, ``8bit`` to ``1bit``,
            ``adaptive``, ``powersgd`` or ``auto``; or a `nugnn.comm.Compression`, which says all that can be said, such
            as the parameters that travel as float32. It has no effect on one worker.
        grad_sync_hosts: ``auto``: compressed sums are made inside hosts first, where these have as many workers each;
            ``flat``: every worker exchanges with every other one.
        check_replicas: Optimizer steps between comparisons of all parameters over workers; 0 for the first and the last
            epoch alone.
        timeline: Note when each worker computes, exchanges and waits in the last steps: `FitResult.timeline`.
    """

    family: ClassVar[str] = ""
    rows: ClassVar[str] = ""
    """What the options train on, and what each of its labels belongs to, for messages."""
    of_traffic: ClassVar[tuple[str, ...]] = ("grad_sync", "grad_sync_hosts")
    """Options that say how workers exchange values, and nothing else."""

    epochs: int = 200
    patience: int | None = None
    evaluate_every: int = 1
    lr: float = 0.01
    weight_decay: float = 5e-4
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    make_scheduler: MakeScheduler | None = None
    schedule: str | Schedule = "constant"
    warmup_epochs: float = 0.0
    decay_epochs: int | None = None
    label_smoothing: float = 0.0
    loss: RowLoss | None = None
    metric: str | None = None
    class_weights: Tensor | None = None
    regularizer: Callable[[nn.Module], Tensor] | None = None
    seed: int = 0
    precision: str = "fp32"
    cuda_graphs: CudaGraphs = "auto"
    grad_sync: str | Compression = "fp32"
    grad_sync_hosts: str = "auto"
    check_replicas: int = STEPS_BETWEEN_CHECKS
    timeline: bool = False

    @property
    def compression(self) -> Compression:
        """What ``grad_sync`` says.

        Raises:
            ValueError: There is no such choice.
        """
        return as_compression(self.grad_sync)

    def check_gradients(self, model: nn.Module) -> None:
        """Refuse parameters that ``grad_sync`` names and ``model`` has not.

        Raises:
            ValueError: There is one; says which names are near.
        """
        of_each_rank = sharded_names(model)
        self.compression.on(model).check_names(name for name, _ in model.named_parameters() if name not in of_each_rank)

    def without_effect(self, workers: int) -> list[str]:
        """A sentence for each option that was given and has no effect, since there is one worker."""
        usual = {entry.name: entry.default for entry in fields(self)}
        asked = {name: value for name in self.of_traffic if str(value := getattr(self, name)) != str(usual[name])}
        return [
            f"{name if value is True else f'{name} {value}'} has no effect with one worker: nothing travels"
            for name, value in asked.items()
            if workers == 1
        ]

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """What ``make_optimizer`` returns, or the usual one of the family."""
        if self.make_optimizer is None:
            return self.usual_optimizer(model)
        try:
            return self.make_optimizer(model)
        except TypeError as error:
            raise ValueError(
                f"make_optimizer: {error}. It is called with the model and returns an optimizer: "
                "make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"
            ) from error

    def usual_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the family with these options."""
        raise NotImplementedError

    def built_schedule(self, steps_per_epoch: int) -> Schedule | None:
        """What ``schedule`` says, by optimizer steps; None for the same rate throughout."""
        if not isinstance(self.schedule, str):
            return self.schedule
        warmup, num_steps = round(self.warmup_epochs * steps_per_epoch), self.epochs * steps_per_epoch
        if self.warmup_epochs not in (0, self.usual_warmup_epochs) and self.warmup_epochs * steps_per_epoch < 1:
            raise ValueError(
                f"warmup_epochs {self.warmup_epochs:g} is less than one optimizer step, of which an epoch has "
                f"{steps_per_epoch}, and would have no effect; give {1 / steps_per_epoch:.3g} or more, or leave it out"
            )
        if self.schedule == "cosine":
            if warmup >= num_steps:
                raise ValueError(
                    f"warmup_epochs {self.warmup_epochs:g} comes to {counted(warmup, 'optimizer step')}, and there are "
                    f"{num_steps} in all: schedule cosine needs some after the warm-up; give fewer, or more epochs"
                )
            return Cosine(num_steps, warmup)
        if self.schedule == "step":
            assert self.schedule_epochs is not None
            return Steps(self.schedule_epochs * steps_per_epoch, warmup_steps=warmup)
        return Constant(warmup) if warmup else None

    @property
    def usual_warmup_epochs(self) -> float:
        """``warmup_epochs`` where nothing is said: never refused, and none where an epoch has too few steps for it."""
        return 0.0

    @property
    def schedule_epochs(self) -> int | None:
        """Epochs that ``schedule`` is laid out for: until its end, or between two changes; None for no such."""
        if self.schedule == "cosine":
            return self.epochs
        return (self.decay_epochs or max(1, self.epochs // 3)) if self.schedule == "step" else None

    def trainer_options(self, steps_per_epoch: int) -> dict[str, Any]:
        """What `nugnn.trainer.Trainer` takes beside the family."""
        return {
            "make_optimizer": self.build_optimizer,
            "make_scheduler": self.make_scheduler,
            "schedule": self.built_schedule(steps_per_epoch),
            "regularizer": self.regularizer,
            "cuda_graphs": self.cuda_graphs,
            "grad_sync": self.grad_sync,
            "grad_sync_hosts": self.grad_sync_hosts,
            "check_replicas": self.check_replicas,
        }

    def deciding(self) -> dict[str, Any]:
        """Options of the family alone that decide the weights, as plain values: a resumed run has to share them."""
        return {}


def named_options(
    kind: type[Chosen], options: Mapping[str, Any], elsewhere: Mapping[str, str], others: Iterable[str] = ()
) -> Chosen:
    """``options`` by name.

    Args:
        kind: Options of the family that is trained on.
        options: As the user gave them.
        elsewhere: Names that another family has, with its name.
        others: Further names that a wrong one may have meant.

    Raises:
        TypeError: There is no option of that name; says which one was meant.
        ValueError: It belongs to another family.
    """
    known = {field.name: field.name for field in fields(kind)}
    meant = {**_OTHER_NAMES, **known, **{name: name for name in others}}
    for name in options:
        if name in known:
            continue
        if name in elsewhere:
            raise ValueError(f"{name} belongs to {elsewhere[name]}, not to {kind.family}; leave it out")
        near = difflib.get_close_matches(name, meant, n=1)
        hint = f"did you mean {meant[near[0]]!r}?" if near else f"it has {', '.join(known)}"
        raise TypeError(f"nugnn.fit has no option {name!r}; {hint}")
    # a whole number may come as one of NumPy's
    numbers = {name: int(x) for name, x in options.items() if isinstance(x, Integral) and not isinstance(x, bool)}
    chosen = kind(**{**options, **numbers})
    if chosen.make_optimizer is not None:
        for name in ("lr", "weight_decay"):
            if name in options:
                raise ValueError(
                    f"{name} has no effect beside make_optimizer, which makes the optimizer with its own; leave it out"
                )
    return chosen


def check_options(options: TrainOptions, name: str, metric: str, *, is_multilabel: bool, num_classes: int) -> None:
    """Refuse what does not fit the data, before anything is started.

    Args:
        options: As the user gave them.
        name: Of the data.
        metric: Of the data.
        is_multilabel: Whether each row has several labels.
        num_classes: How many weights of classes there have to be; 0 where that is not known.

    Raises:
        ValueError: Numbers of epochs, precision, schedule, metric or class weights do not fit.
    """
    Storage(options.precision)
    if options.cuda_graphs not in CUDA_GRAPHS:
        raise ValueError(f"cuda_graphs is {options.cuda_graphs!r}, must be {', '.join(CUDA_GRAPHS[:-1])} or off")
    compression = options.compression
    try:
        checked_hosts(options.grad_sync_hosts)
    except ValueError as error:
        raise ValueError(f"grad_sync_{error}") from None
    if options.grad_sync_hosts != "auto" and compression.wire == "fp32":
        raise ValueError(
            f"grad_sync_hosts {options.grad_sync_hosts} has no effect on grad_sync fp32, whose sums are the process "
            "group's own; leave it out"
        )
    for what in ("epochs", "evaluate_every", "patience"):
        value = getattr(options, what)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{what} is {value!r}, must be a whole number from 1 up")
    if not isinstance(options.check_replicas, int) or options.check_replicas < 0:
        raise ValueError(f"check_replicas is {options.check_replicas!r}, must be a whole number from 0 up")
    check_schedule(options.schedule, options.epochs, options.warmup_epochs, options.decay_epochs)
    if options.make_scheduler is not None and (options.schedule != "constant" or options.warmup_epochs):
        raise ValueError("make_scheduler was given beside schedule or warmup_epochs; give one of them")
    if options.loss is not None and options.label_smoothing:
        raise ValueError("label_smoothing belongs to cross-entropy; with a loss of your own, smooth in the loss")
    metric = options.metric or metric
    if metric not in METRICS:
        raise ValueError(f"metric {metric!r} is not known; choose one of {', '.join(METRICS)}")
    if metric in ("accuracy", "micro_f1") and is_multilabel != (metric == "micro_f1"):
        raise ValueError(
            f"metric {metric} does not fit {name}, whose {options.rows} have "
            + ("several labels each; use micro_f1" if is_multilabel else "one label each; use accuracy")
        )
    weights = options.class_weights
    if weights is not None and num_classes and weights.shape != (num_classes,):
        raise ValueError(
            f"class_weights has shape {tuple(weights.shape)}, the data {counted(num_classes, 'class', 'classes')}"
        )
