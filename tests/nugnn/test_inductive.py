"""Inductive training sees the training nodes alone, measures on the whole graph, and does not depend on the parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.subgraph import induced_subgraph
from nugnn.inference import infer
from nugnn.models import WithNodeEmbedding

OPTIONS: dict[str, Any] = {"epochs": 4, "lr": 0.02, "inductive": True, "check": False, "timeout": 60}


def fitted(data: GraphData, **options: Any) -> nugnn.FitResult:
    torch.manual_seed(0)
    model = nugnn.GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=8, norm="batch", dropout=0.3).double()
    return nugnn.fit(model, data, **OPTIONS | options)


def test_training_does_not_depend_on_what_it_must_not_see() -> None:
    data = make_graph()
    hidden = torch.ones(data.num_nodes, dtype=torch.bool)
    hidden[data.train_nodes] = False
    assert data.features is not None and data.labels is not None
    touches_hidden = hidden[data.src] | hidden[data.dst]
    other = dataclasses.replace(
        data,
        features=torch.where(hidden[:, None], data.features * -3 + 1, data.features),
        labels=torch.where(hidden, (data.labels + 1) % NUM_CLASSES, data.labels),
        src=torch.where(touches_hidden & hidden[data.dst], data.dst, data.src),
    )
    first, second = fitted(data), fitted(other)
    assert [e.loss for e in first.history] == [e.loss for e in second.history]
    assert [e.loss for e in first.history] != [e.loss for e in fitted(data, inductive=False).history]


def test_losses_are_those_of_the_subgraph_and_scores_those_of_the_whole_graph() -> None:
    data = make_graph()
    result = fitted(data)
    alone = fitted(induced_subgraph(data, data.train_nodes), inductive=False)
    assert [e.loss for e in result.history] == [e.loss for e in alone.history]
    torch.testing.assert_close(result.logits, infer(result.model, data), rtol=1e-12, atol=1e-12)
    assert data.labels is not None
    hits = result.logits[data.test_nodes].argmax(1) == data.labels[data.test_nodes]
    assert hits.double().mean().item() == pytest.approx(result.best.test, abs=1e-12)


@pytest.mark.usefixtures("forked_workers")
def test_three_unequal_workers_give_what_one_gives() -> None:
    data = make_graph()
    one, three = fitted(data), fitted(data, workers=3, shares=[0.6, 0.3, 0.1])
    assert [e.loss for e in three.history] == pytest.approx([e.loss for e in one.history], rel=1e-10)
    assert [(e.val, e.test) for e in three.history] == [(e.val, e.test) for e in one.history]
    torch.testing.assert_close(three.logits, one.logits, rtol=1e-8, atol=1e-8)


def test_what_inductive_training_cannot_do_is_refused() -> None:
    data = make_graph(features=False)
    model = WithNodeEmbedding(data.num_nodes, 5, nugnn.GNN("sage", 5, NUM_CLASSES))
    with pytest.raises(ValueError, match="inductive training needs features"):
        nugnn.fit(model, data, **OPTIONS)
    with pytest.raises(ValueError, match="30 workers for 20 training nodes"):
        fitted(make_graph(), workers=30)
