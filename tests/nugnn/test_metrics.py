"""Metrics over uneven parts equal scikit-learn's over all rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from nugnn.comm.groups import Ranks
from nugnn.metrics import evaluate_rows

SPLITS = [[40], [25, 15], [40, 0, 0], [0, 39, 1], [8, 9, 7, 16, 0]]
# both sides count exactly and divide once; the area adds at most 40 products
BOUND = 40 * np.finfo(np.float64).eps


def _share(ranks: Ranks, metric: str, logits: Tensor, labels: Tensor, sizes: list[int]) -> float:
    first = sum(sizes[: ranks.rank])
    mine = slice(first, first + sizes[ranks.rank])
    return evaluate_rows(metric, logits[mine], labels[mine], ranks)


def _over_parts(ranks: Any, metric: str, logits: Tensor, labels: Tensor, sizes: list[int]) -> float:
    values = ranks.run(len(sizes), _share, metric, logits, labels, sizes)
    assert len(set(values)) == 1 or all(math.isnan(v) for v in values)
    return float(values[0])


def _problem(seed: int, num_classes: int, *, ties: bool, multilabel: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, num_classes, generator=generator, dtype=torch.float64)
    logits = (logits * 2).round() / 2 if ties else logits
    if multilabel:
        return logits, torch.randint(0, 2, (40, num_classes), generator=generator, dtype=torch.uint8)
    return logits, torch.randint(0, num_classes, (40,), generator=generator)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_accuracy(ranks: Any, sizes: list[int]) -> None:
    logits, labels = _problem(0, 5, ties=True, multilabel=False)
    assert _over_parts(ranks, "accuracy", logits, labels, sizes) == sk.accuracy_score(labels, logits.argmax(1))


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_micro_f1(ranks: Any, sizes: list[int]) -> None:
    logits, labels = _problem(1, 7, ties=True, multilabel=True)
    expected = sk.f1_score(labels, logits > 0, average="micro")
    assert abs(_over_parts(ranks, "micro_f1", logits, labels, sizes) - expected) <= BOUND


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_roc_auc_of_two_classes(ranks: Any, sizes: list[int], ties: bool) -> None:
    logits, labels = _problem(2, 2, ties=ties, multilabel=False)
    expected = sk.roc_auc_score(labels, logits[:, 1] - logits[:, 0])
    assert abs(_over_parts(ranks, "roc_auc", logits, labels, sizes) - expected) <= BOUND


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_roc_auc_of_several_labels_leaves_out_columns_of_one_class(ranks: Any, sizes: list[int]) -> None:
    logits, labels = _problem(3, 4, ties=True, multilabel=True)
    labels[:, 2] = 1
    kept = [0, 1, 3]
    expected = sk.roc_auc_score(labels[:, kept], logits[:, kept], average="macro")
    assert abs(_over_parts(ranks, "roc_auc", logits, labels, sizes) - expected) <= BOUND


@pytest.mark.parametrize("metric", ["accuracy", "micro_f1", "roc_auc"])
def test_no_row_anywhere_is_nan(ranks: Any, metric: str) -> None:
    labels = torch.zeros(0, dtype=torch.int64) if metric == "accuracy" else torch.zeros(0, 2, dtype=torch.uint8)
    assert math.isnan(_over_parts(ranks, metric, torch.zeros(0, 2), labels, [0, 0]))


def test_unknown_metric_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'recall' is not known; choose one of accuracy, micro_f1, roc_auc"):
        evaluate_rows("recall", torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), Ranks())
