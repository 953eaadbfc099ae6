"""Metrics over the rows of all ranks: exact counts, never an average of per-rank values."""

from __future__ import annotations

import torch
from torch import Tensor

from nugnn.comm.groups import Ranks

METRICS = ("accuracy", "micro_f1", "roc_auc")


def evaluate_rows(metric: str, logits: Tensor, labels: Tensor, ranks: Ranks) -> float:
    """One metric over the rows of every rank, the same on every rank.

    Args:
        metric: ``accuracy``, ``micro_f1`` (multi-label, a class counts when its logit is positive) or ``roc_auc`` (two
            classes, or the mean over the columns of a multi-label target that have both).
        logits: ``(n, C)`` of this rank.
        labels: ``(n,)`` int64, or ``(n, C)`` zeros and ones.
        ranks: Who holds the other rows.

    Returns:
        A value in [0, 1]; NaN when no rank has a row (or, for ROC-AUC, only one class).

    Raises:
        ValueError: Unknown metric; ROC-AUC of one class per row, and not two columns of logits.
    """
    if metric == "accuracy":
        hits, rows = _sum_counts(ranks, (logits.argmax(1) == labels).sum(), labels.new_tensor(len(labels)))
        return hits / rows if rows else float("nan")
    if metric == "micro_f1":
        predicted, actual = logits > 0, labels > 0
        true_positive, false_positive, false_negative = _sum_counts(
            ranks, (predicted & actual).sum(), (predicted & ~actual).sum(), (~predicted & actual).sum()
        )
        positives = 2 * true_positive + false_positive + false_negative
        return 2 * true_positive / positives if positives else float("nan")
    if metric == "roc_auc":
        return _roc_auc(logits, labels, ranks)
    raise ValueError(f"metric {metric!r} is not known; choose one of {', '.join(METRICS)}")


def _sum_counts(ranks: Ranks, *counts: Tensor) -> list[int]:
    return ranks.sum_(torch.stack([c.to(torch.int64) for c in counts])).tolist()  # type: ignore[no-any-return]


def _roc_auc(logits: Tensor, labels: Tensor, ranks: Ranks) -> float:
    if labels.dim() == 1 and logits.shape[1:] != (2,):
        raise ValueError(f"roc_auc needs two classes, and the logits have shape {tuple(logits.shape)}; use accuracy")
    scores = logits if labels.dim() == 2 else (logits[:, 1] - logits[:, 0])[:, None]
    truth = labels if labels.dim() == 2 else labels[:, None]
    scores = torch.cat(ranks.gather_rows(scores.detach().double().contiguous()))
    truth = torch.cat(ranks.gather_rows(truth.to(torch.uint8).contiguous())) > 0
    areas = [area for s, t in zip(scores.T, truth.T, strict=True) if (area := _area(s, t)) is not None]
    return sum(areas) / len(areas) if areas else float("nan")


def _area(scores: Tensor, truth: Tensor) -> float | None:
    """Mann-Whitney statistic with midranks for ties; None when a class is missing."""
    positives = int(truth.sum())
    negatives = len(truth) - positives
    if positives == 0 or negatives == 0:
        return None
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    midrank = last - (counts.double() - 1) / 2
    rank_sum = float(midrank[inverse][truth].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)
