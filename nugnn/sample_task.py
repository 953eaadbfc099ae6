"""Training on samples: which data sets, and how batches are divided."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from nugnn._counted import counted
from nugnn.augmentation import is_own
from nugnn.batch_split import USUAL_BATCH_SIZE, batch_sizes
from nugnn.batches import SplitBatchSampler
from nugnn.comm.groups import Ranks
from nugnn.datasets.samples.registry import load_samples
from nugnn.datasets.samples.sample_data import SampleData, num_samples
from nugnn.fingerprint import run_identity
from nugnn.known_models import is_known
from nugnn.local_statistics import LocalStatistics, check_local_batches
from nugnn.sample_options import SampleOptions, sample_options
from nugnn.sample_part import SamplePart
from nugnn.task import Stage
from nugnn.train_options import check_options
from nugnn.user_code import whose

if TYPE_CHECKING:
    from nugnn.plan_training import TrainingPlan

_COMPARED = (3, 2)
"""Samples of the parts that are compared before training; a single one might be less than training ever has."""
_MOST_PARAMETERS = 50_000_000
"""Copies in float64 of a larger model may not fit beside everything else."""

_MOST_SECONDS = 1.0
"""Forward, of one sample, in float64: the comparison takes some fifty times as long."""


class SampleTask:
    """A `nugnn.task.Task`; the arguments are those of `nugnn.fit`."""

    worker = "nugnn.worker"

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        workers: int,
        shares: Sequence[float] | None,
        options: Mapping[str, Any],
        others: Sequence[str],
        check: bool,
        val: Any,
        test: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            hint = f"; give one of its instances, {model.__name__}(...)" if isinstance(model, type) else ""
            raise TypeError(f"nugnn.fit: the model is {model!r}, not a torch.nn.Module{hint}")
        chosen = sample_options(options, others)
        data = load_samples(data, seed=chosen.seed) if isinstance(data, str) else data
        if isinstance(data, SampleData):
            if val is not None or test is not None:
                raise ValueError(f"{data.name} has parts of its own; leave val and test out")
            name, metric, num_classes = data.name, str(data.metric), data.num_classes
            train, val, test = data.train, data.val, data.test
        else:
            name, metric, num_classes, train = type(data).__name__, "", 0, data
        label = _first_label(name, train)
        is_multilabel = label.dim() == 2
        is_as_given = chosen.collate_fn is None  # a collate function may make other labels of them
        is_class = label.dtype in (torch.int64, torch.uint8)
        if is_as_given and chosen.loss is None and not is_multilabel and not is_class:
            raise ValueError(
                f"{name}: the label of sample 0 is {label.dtype}; a class is a whole number (int64), and other labels "
                "need a loss of your own"
            )
        metric = metric or ("micro_f1" if is_multilabel else "accuracy")
        check_options(chosen, name, metric, is_multilabel=is_multilabel, num_classes=num_classes)
        for part, samples in (("val", val), ("test", test)):
            if samples is not None and len(samples) > 0:
                other = _first_label(f"{name}, {part}", samples)
                if is_as_given and other.shape != label.shape:
                    raise ValueError(
                        f"{name}: the label of a sample of {part} has shape {tuple(other.shape[1:])}, and "
                        f"{tuple(label.shape[1:])} in training; the parts need the same labels"
                    )
        sizes, said = batch_sizes(chosen.batch_split, chosen.batch_size, workers, shares, USUAL_BATCH_SIZE)
        _check_batches(model, chosen, num_samples(train), sizes)
        self.model = model
        self.options = replace(chosen, batch_size=sum(sizes))
        self._without_effect = self.options.without_effect(workers)
        self.said = [*self._without_effect, *([said] if said else [])]
        self._check = check and workers > 1 and not is_known(model)
        self._checks_augment = check and workers > 1 and chosen.augment is not None and not is_own(chosen.augment)
        self._checks_collation = check and workers > 1 and chosen.collate_fn is not None
        self._part = SamplePart(train, val, test, sizes, metric)
        self._name, self._num_classes = name, num_classes
        self.plan: TrainingPlan | None = None

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        part = self._part
        facts: dict[str, Any] = {}
        for name, samples in (("train", part.train), ("val", part.val), ("test", part.test)):
            facts |= {f"{name}_{key}": value for key, value in _facts(samples).items()}
        return run_identity(self.model, facts, self.options, settings)

    def check_devices(self, devices: Sequence[torch.device]) -> None:
        pass

    def use_plan(self, plan: TrainingPlan) -> None:
        sizes = plan.prepare_samples(self.model, self.options, self._part, self._name, self._num_classes)
        _check_batches(self.model, self.options, num_samples(self._part.train), sizes)
        self._part, self.plan = replace(self._part, sizes=sizes), plan
        how = "as the plan says" if plan.planned is not None else f"by {plan.request.shares_by}"
        divided = f"batches of {counted(sum(sizes), 'sample')} are divided {how}: {', '.join(map(str, sizes))}"
        self.said = [*self._without_effect, divided, *plan.notes]

    def stored(self, folder: Path, stage: Stage) -> tuple[SamplePart, list[str]]:
        return self._part, [*self.said, *self._compare_parts(stage)]

    def here(self, stage: Stage) -> tuple[SamplePart, list[str]]:
        return self._part, list(self.said)

    def joined(self, ranks: Ranks, stage: Stage) -> tuple[SamplePart, list[str]]:
        if self.plan is not None:  # which rank 0 alone has made
            sizes = ranks.broadcast_(torch.tensor(self._part.sizes))
            self._part = replace(self._part, sizes=tuple(sizes.tolist()))
        return self._part, [*self.said, *(self._compare_parts(stage) if ranks.rank == 0 else ())]

    def _compare_parts(self, stage: Stage) -> list[str]:
        """Few samples in one process and in two: less work than a usual step, and notes where it could not be done.

        Raises:
            ModelDiffers: See `nugnn.check_samples.check_samples`, `compare_collation` and `compare_augmentation`.
        """
        if not (self._check or self._checks_augment or self._checks_collation):
            return []
        from nugnn.check_samples import (
            compare_augmentation,
            compare_batch,
            compare_collation,
            first_batch,
            seconds_of_a_sample,
        )
        from nugnn.module_traces import ModelDiffers, ModelFails

        if self._checks_collation and num_samples(self._part.train) > 1:
            assert self.options.collate_fn is not None
            stage("check")
            compare_collation(self._part.train, self.options.collate_fn)
        if self._checks_augment and num_samples(self._part.train) >= sum(_COMPARED):
            assert self.options.augment is not None
            stage("check")
            few = first_batch(self._part.train, sum(_COMPARED), self.options.collate_fn)
            compare_augmentation(self.options.augment, few, _COMPARED)
        if not self._check:
            return []
        not_done = "two parts of a batch were not compared with one before training"
        num_parameters = sum(p.numel() for p in self.model.parameters())
        if num_parameters > _MOST_PARAMETERS:
            return [f"{not_done}: the model has {num_parameters:,} parameters; nugnn.check(model, data) does it"]
        if num_samples(self._part.train) < sum(_COMPARED):
            return []
        stage("check")
        batch = first_batch(self._part.train, sum(_COMPARED), self.options.collate_fn)
        if (seconds := seconds_of_a_sample(self.model, batch)) > _MOST_SECONDS:
            return [f"{not_done}: a sample takes {seconds:.1f} s on the CPU; nugnn.check(model, data) does it"]
        try:
            return list(compare_batch(self.model, batch, _COMPARED, loss=self.options.loss).notes)
        except ModelDiffers as error:
            if error.__cause__ is not None:  # what a part raised, training would raise as well
                raise
            raise ModelDiffers(
                f"{error} With workers=1 it trains as it is; nugnn.fit(check=False) trains over several workers "
                "without this comparison."
            ) from error
        except ModelFails as error:  # if it fails in training too, that says why
            return [f"{not_done}: {error}"]


def _check_batches(model: nn.Module, options: SampleOptions, num_samples: int, sizes: tuple[int, ...]) -> None:
    """What a family would refuse in each worker, before any is started.

    Raises:
        ValueError: There is no batch; an option does not fit the sizes or the model.
    """
    sampler = SplitBatchSampler(num_samples, sizes, drop_last=options.drop_last)
    for name, least in (("micro_batches", 1), ("num_data_workers", 0)):
        value = getattr(options, name)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}, must be a whole number from {least} up")
    if options.clip_norm is not None and not options.clip_norm > 0:
        raise ValueError(f"clip_norm is {options.clip_norm:g}, must be positive")
    if options.batch_norm not in ("all", "local"):
        raise ValueError(f"batch_norm is {options.batch_norm!r}, must be all or local")
    if options.batch_norm == "local":
        LocalStatistics(model, Ranks())
        check_local_batches(sampler, options.micro_batches)
    options.built_schedule(sampler.num_batches)


def _first_label(name: str, samples: Any) -> Tensor:
    """The label of the first sample, as a batch of one.

    Raises:
        ValueError: There are no samples, or they are no pairs.
    """
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        raise ValueError(f"{name}: a map-style data set is needed, with len(data) and data[i]")
    if len(samples) == 0:
        raise ValueError(f"{name}: there are no samples to learn from")
    with whose(f"the data set {name}", "sample 0"):
        sample = samples[0]
    if not (isinstance(sample, (tuple, list)) and len(sample) == 2):
        raise ValueError(f"{name}: sample 0 is a {type(sample).__name__}; each has to be a pair (x, label)")
    return torch.as_tensor(default_collate([sample[1]]))


def _facts(samples: Any) -> dict[str, Any]:
    """How many, and a hash of their bytes where a data set can say it or holds tensors."""
    if samples is None or len(samples) == 0:
        return {"samples": 0}
    facts = {"samples": len(samples)}
    if isinstance(samples, TensorDataset):
        digest = hashlib.sha256()
        for x in samples.tensors:
            digest.update(f"{x.dtype}{tuple(x.shape)}".encode())
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return facts | {"content": digest.hexdigest()[:16]}
    if hasattr(samples, "content_hash"):
        return facts | {"content": samples.content_hash()[:16]}
    return facts
