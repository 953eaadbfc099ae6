"""The loss contract: a function gives one value per row, the trainer divides by the global count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nugnn._counted import counted
from nugnn.comm.groups import Ranks
from nugnn.kernels.cross_entropy import binary_cross_entropy_rows, cross_entropy_rows
from nugnn.kernels.epilogue import runs_in_triton
from nugnn.precision.storage import at_least_float32

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""``loss(logits (n, C), labels (n,) or (n, C)) -> (n,)`` or ``(n, C)``: no reduction over rows."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """``(n,)`` cross-entropy of each row."""
    return F.cross_entropy(logits, labels, reduction="none")


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """``(n, C)`` binary cross-entropy of each row and class."""
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")


@dataclass(frozen=True, eq=False)
class SmoothedCrossEntropy:
    """Cross-entropy against labels of which a part is spread over all classes.

    Args:
        smoothing: That part, in ``[0, 1)``: a row's target is ``1 - smoothing`` at its class, and ``smoothing / C``
            everywhere.
        class_weights: ``(C,)``; each term of a row's loss counts with the weight of the term's own class, as in
            `torch.nn.CrossEntropyLoss`. None for ones.

    Raises:
        ValueError: ``smoothing`` is out of range.

    Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016, section 7.
    """

    smoothing: float
    class_weights: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"label smoothing is {self.smoothing}, must be 0 or more and below 1")

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """``(n,)`` loss of each row, weights included."""
        weights = self.class_weights
        if weights is not None and (weights.device, weights.dtype) != (logits.device, logits.dtype):
            weights = weights.to(logits.device, logits.dtype)
            object.__setattr__(self, "class_weights", weights)  # moved once
        return F.cross_entropy(logits, labels, weights, reduction="none", label_smoothing=self.smoothing)


def choose_loss(loss: RowLoss | None, labels: Tensor, label_smoothing: float = 0.0) -> RowLoss:
    """The loss of a training.

    Args:
        loss: What the user gave; None for cross-entropy, or binary cross-entropy where ``labels`` have columns.
        labels: ``(n,)`` or ``(n, C)``, some of them.
        label_smoothing: See `SmoothedCrossEntropy`.

    Raises:
        ValueError: Label smoothing with another loss than cross-entropy, or out of range.
    """
    chosen = loss or (binary_cross_entropy if labels.dim() == 2 else cross_entropy)
    if not label_smoothing:
        return chosen
    if chosen is not cross_entropy:
        raise ValueError(
            "label smoothing is a part of cross-entropy over one class per row; with "
            + ("a loss of your own put it there" if loss is not None else "multi-label targets leave it out")
        )
    return SmoothedCrossEntropy(label_smoothing)


def weighted_rows(loss: RowLoss, class_weights: Tensor | None) -> tuple[RowLoss, bool]:
    """The loss under class weights, and whether its values are still to be multiplied by the weight of their class."""
    if class_weights is None or not isinstance(loss, SmoothedCrossEntropy):
        return loss, class_weights is not None
    return replace(loss, class_weights=class_weights), False


def share_of_mean(
    loss: RowLoss,
    logits: Tensor,
    labels: Tensor,
    total: float | Tensor,
    weights: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """The sum of the rows' losses over ``total``, a scalar; the shares of all ranks add up to a mean.

    Args:
        loss: See `RowLoss`.
        logits: ``(n, ...)`` for the rows of ``labels``; ``(N, C)``, of which ``rows`` count, where those are given.
        labels: What the loss takes beside them.
        total: Rows of all ranks, or their weights.
        weights: ``(n,)`` of the rows; None for ones.
        rows: ``(n,)`` distinct rows of the logits.

    Raises:
        ValueError: The loss function reduced over rows.
    """
    if loss is cross_entropy and logits.dim() == 2 and runs_in_triton(logits):
        values = cross_entropy_rows(logits, labels, rows)
    elif loss is binary_cross_entropy and logits.dim() == 2 and runs_in_triton(logits):
        values = binary_cross_entropy_rows(logits, labels, rows)
    else:
        values = loss(at_least_float32(logits if rows is None else logits.index_select(0, rows)), labels)
    if values.shape[:1] != labels.shape[:1] or values.dim() not in (1, 2):
        raise ValueError(
            f"the loss function returned shape {tuple(values.shape)} for {counted(len(labels), 'row')}; it has to "
            "return one value per row, (n,) or (n, C), without a mean or sum (reduction='none')."
        )
    if weights is not None:
        values = values * weights.to(values.dtype)
    per_row = values.shape[1] if values.dim() == 2 else 1
    return values.sum() / (total * per_row)


class GlobalMean:
    """Turns per-row losses of this rank into its share of the mean over all ranks' rows.

    The shares of all ranks add up to the loss one device computes, so gradients are summed, not averaged. A rank
    without rows contributes a zero that still depends on its logits.

    Args:
        loss: See `RowLoss`.
        labels: This rank's labels of the rows the loss runs over.
        ranks: Who holds the other rows.
        class_weights: ``(C,)`` weight of each class; the mean is then over weights.
        rows: ``(n,)`` distinct rows of the logits that ``labels`` belong to; all of them, in order, when None.

    Raises:
        ValueError: No rank has a row.
    """

    def __init__(
        self,
        loss: RowLoss,
        labels: Tensor,
        ranks: Ranks,
        class_weights: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        self._loss, multiplies = weighted_rows(loss, class_weights)
        self._labels, self._rows = labels, rows
        is_index = labels.dim() == 1 and not labels.is_floating_point() and len(labels) > 0
        self._num_classes = int(labels.max()) + 1 if is_index else 0
        self._weights = None
        if class_weights is not None:
            if labels.dim() != 1:
                raise ValueError("class_weights need one class per row; multi-label targets have a column per class")
            self._weights = class_weights.to(labels.device)[labels]
        mass = torch.tensor(
            [len(labels) if self._weights is None else self._weights.double().sum()], dtype=torch.float64
        )
        self.normalizer = float(ranks.sum_(mass))
        if not multiplies:
            self._weights = None
        if self.normalizer <= 0:
            raise ValueError("no training rows on any rank: nothing to learn from")

    def __call__(self, logits: Tensor) -> Tensor:
        """Share of the loss on this rank, a scalar.

        Args:
            logits: ``(n, C)`` for the rows of ``labels``; ``(N, C)``, of which ``rows`` count, where those were given.

        Raises:
            ValueError: The loss function reduced over rows.
        """
        is_over_classes = self._loss is cross_entropy or isinstance(self._loss, SmoothedCrossEntropy)
        if is_over_classes and logits.dim() == 2 and logits.shape[1] < self._num_classes:
            raise ValueError(
                f"the model returns {logits.shape[1]} columns, but labels go up to {self._num_classes - 1}: it needs "
                f"{self._num_classes} or more, one for each class"
            )
        return share_of_mean(self._loss, logits, self._labels, self.normalizer, self._weights, self._rows)
