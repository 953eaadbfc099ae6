"""Evaluating only some epochs: which ones, and that the best epoch is one of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn import fit
from nugnn.datasets.graph_data import GraphData
from nugnn.models import GNN


def data_and_model() -> tuple[GraphData, GNN]:
    torch.manual_seed(0)
    return make_graph(dtype=torch.float32), GNN("gcn", NUM_FEATURES, NUM_CLASSES, hidden=8)


@pytest.mark.parametrize("every", [1, 3, 7, 100])
def test_best_epoch_is_the_best_of_those_evaluated(every: int) -> None:
    data, model = data_and_model()
    result = fit(model, data, epochs=20, evaluate_every=every)
    evaluated = [epoch for epoch in result.history if not math.isnan(epoch.val)]
    assert [epoch.number for epoch in evaluated] == [n for n in range(1, 21) if n % every == 0 or n == 20]
    assert result.best == max(evaluated, key=lambda epoch: epoch.val)  # max: the earliest among equals


def test_evaluation_leaves_training_alone() -> None:
    data, model = data_and_model()
    losses = [[e.loss for e in fit(model, data, epochs=9, evaluate_every=every).history] for every in (1, 4)]
    assert losses[0] == losses[1]


def test_without_validation_rows_the_training_loss_decides_among_evaluated_epochs() -> None:
    data, model = data_and_model()
    data = dataclasses.replace(data, val_nodes=torch.empty(0, dtype=torch.int64))
    result = fit(model, data, epochs=20, evaluate_every=6)
    at = [epoch for epoch in result.history if epoch.number in (6, 12, 18, 20)]
    assert result.best == min(at, key=lambda epoch: epoch.loss)
