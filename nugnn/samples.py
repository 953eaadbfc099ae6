"""Training on batches that are divided unevenly among ranks, as one process would: pieces for a loop of one's own.

Put together:

    ranks = nugnn.init()
    sampler = nugnn.SplitBatchSampler(len(dataset), sizes=(18, 6), rank=ranks.rank)
    mean = nugnn.BatchMean(nugnn.loss.cross_entropy, ranks)
    interceptor = nugnn.intercept_samples(model, ranks)
    for epoch in range(epochs):
        sampler.begin(epoch)
        for step, batch in enumerate(nugnn.batch_loader(dataset, sampler), epoch * len(sampler)):
            images, labels = nugnn.as_samples(batch, ranks).data
            with interceptor.step(step):
                loss = mean(model(images), labels, sum(sampler.counts(step % len(sampler))))
                optimizer.zero_grad()
                loss.backward()
            sum_gradients(model.parameters(), ranks)
            optimizer.step()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nugnn._counted import counted
from nugnn.batches import Batch, map_tensors
from nugnn.comm.batch_norm import BatchNormHandler, BatchNormRows, LocalBatchNormHandler
from nugnn.comm.groups import Ranks
from nugnn.comm.instance_norm import InstanceNormHandler
from nugnn.comm.pulse import ProgressHandler
from nugnn.kernels.attention_handler import AttentionHandler
from nugnn.kernels.handlers import DropoutHandler, RandomDrawHandler
from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.rows import Rows, tag
from nugnn.loss import RowLoss, share_of_mean, weighted_rows

_DRAW_BY_SAMPLE = (
    "Dropout is drawn by sample, the same on any number of workers: to drop whole samples (DropPath), write "
    "x * F.dropout(torch.ones_like(x[:, :1]), p, self.training), with :1 for each axis behind the first; to draw once "
    "for all samples, F.dropout(nugnn.as_replicated(torch.ones(1)), p, self.training). Other numbers have to come with "
    "the data (nugnn.fit(augment=...) draws by sample), or the model trains with workers=1."
)
_KEEP_SAMPLES = (
    "Where the tensor is made, nugnn.as_rows_of(x, like) says that row i of x belongs to the sample of row i of like, "
    "such as the model's input; nugnn.as_replicated(x) that x is the same for all samples. A value over the batch is "
    "neither."
)


def as_samples(batch: Batch, ranks: Ranks) -> Batch:
    """Declare that row ``i`` of every tensor in ``batch`` belongs to its sample ``i``.

    Raises:
        ValueError: A tensor has another number of rows; the collate function has to put samples on axis 0.
    """
    rows = Rows("sample", batch.ids, split=ranks.is_split)

    def declare(x: Tensor) -> Tensor:
        if x.shape[:1] != batch.ids.shape:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} in a batch of {counted(len(batch.ids), 'sample')}: the "
                f"collate function "
                "has to put samples on axis 0 of every tensor"
            )
        return tag(x, rows)

    map_tensors(declare, batch.data)
    return batch


def called(model: nn.Module, x: Any) -> Any:
    """``model(x)``, or ``model(*x)`` for a tuple or list, or ``model(**x)`` for a mapping."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def intercept_samples(
    model: nn.Module, ranks: Ranks, *, seed: int = 0, batch_norm: BatchNormRows = "all"
) -> Interceptor:
    """The interceptor that makes ``model`` on divided batches do what it does on whole ones.

    Dropout masks belong to the sample and the step; batch norm, and instance norm where it keeps statistics, see all
    ranks' rows. Any other random draw inside is refused over several ranks. Run forward and backward inside
    ``with interceptor.step(number):``, with a number for each optimizer step; micro-batches of one step share it.

    Args:
        model: Its module paths name the operators.
        ranks: From `nugnn.init`.
        seed: Of dropout masks; the same on every rank.
        batch_norm: ``all``, or ``local``: statistics of a rank's own rows, no exchange, and another result than one
            process has.

    Raises:
        ValueError: No such choice of ``batch_norm``.
    """
    if batch_norm not in ("all", "local"):
        raise ValueError(f"batch_norm is {batch_norm!r}, must be all or local")
    handlers = (
        ProgressHandler(ranks.pulse),
        DropoutHandler(is_split=ranks.is_split, instead=_KEEP_SAMPLES),
        AttentionHandler(is_split=ranks.is_split),
        RandomDrawHandler(is_split=ranks.is_split, refuses_all=True, instead=_DRAW_BY_SAMPLE),
        InstanceNormHandler(ranks),
        BatchNormHandler(ranks) if batch_norm == "all" else LocalBatchNormHandler(),
    )
    return Interceptor(handlers, model, seed=seed)


class BatchMean:
    """Turns per-sample losses of this rank into its share of the mean over a global batch.

    The shares of all ranks add up to the loss that one process computes, so gradients are summed, not averaged. A rank
    without samples contributes a zero that still depends on its logits.

    Args:
        loss: See `nugnn.loss.RowLoss`.
        ranks: Who holds the other samples.
        class_weights: ``(C,)`` weight of each class; the mean is then over weights.
    """

    def __init__(self, loss: RowLoss, ranks: Ranks, class_weights: Tensor | None = None) -> None:
        self._loss, self._multiplies = weighted_rows(loss, class_weights)
        self._ranks, self._class_weights = ranks, class_weights

    def total(self, counts: Sequence[int], labels: Sequence[Tensor]) -> float | Tensor:
        """What the losses of an optimizer step are divided by; with class weights a tensor, and a collective call.

        Args:
            counts: Samples of each rank in the global batch.
            labels: Those of this rank's samples in it, one tensor for each micro-batch.
        """
        if self._class_weights is None:
            return float(sum(counts))
        return self._ranks.sum_(torch.stack([self._weights(part).sum(dtype=torch.float64) for part in labels]).sum())

    def __call__(self, logits: Tensor, labels: Tensor, total: float | Tensor) -> Tensor:
        """Share of the loss on this rank, a scalar.

        Args:
            logits: ``(n, ...)`` of this rank's samples in a batch or micro-batch.
            labels: ``(n,)`` classes, or what the loss function takes.
            total: From `total`; without class weights the number of samples in the global batch.

        Raises:
            ValueError: The loss function reduced over samples; class weights do not fit the labels.
        """
        weights = self._weights(labels) if self._multiplies else None
        return share_of_mean(self._loss, logits, labels, total, weights)

    def _weights(self, labels: Tensor) -> Tensor:
        assert self._class_weights is not None
        self._class_weights = self._class_weights.to(labels.device)  # moved once
        if labels.dim() != 1 or labels.is_floating_point():
            raise ValueError("class_weights need one class per sample; multi-label targets have a column per class")
        try:
            return self._class_weights[labels]
        except IndexError as error:  # on the CPU
            raise ValueError(
                f"class_weights has {counted(len(self._class_weights), 'number')}, but labels of this batch go up to "
                f"{labels.max()}; give one for each class, and let labels count from 0"
            ) from error
