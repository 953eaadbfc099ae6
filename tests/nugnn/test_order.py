"""The order of rows inside a part changes no result: training and predictions in float64, over 1 and 3 parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, largest_difference, make_graph, make_parts, run_steps
from nugnn.comm.groups import Ranks
from nugnn.datasets.synthetic import products_like
from nugnn.models import GNN
from nugnn.partition import order as order_module

# As in test_exactness: sums of at most 61 terms in another order, and four orders of magnitude for what amplifies them.
FLOAT64_BOUND = 1e-10


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3, eps=1e-5)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize(
    "kind",
    [
        dict(kind="gcn", norm="batch", dropout=0.4, input_dropout=0.3),
        dict(kind="sage", aggregator="lstm", dropout=0.4),
        dict(kind="gat", heads=2, norm="batch", dropout=0.4, attention_dropout=0.3),
        dict(kind="gin", aggregator="max", norm="layer", dropout=0.4),
    ],
    ids=lambda kind: kind["kind"],
)
def test_reordered_parts_train_the_same_model(ranks: Any, kind: dict[str, Any], num_parts: int) -> None:
    data = make_graph()
    torch.manual_seed(0)
    options = dict(kind)
    model = GNN(options.pop("kind"), NUM_FEATURES, NUM_CLASSES, hidden=5, layers=3, **options).double()
    by_id = run_steps(Ranks(), data, make_parts(data, 1, "random"), model, adam)
    parts = make_parts(data, num_parts, "metis")
    for run in ranks.run(num_parts, run_steps, data, parts, model, adam, order="clusters"):
        worst, where = largest_difference(by_id, run)
        assert worst <= FLOAT64_BOUND, where
        assert torch.equal(run.logits.argmax(1), by_id.logits.argmax(1))
        assert run.metrics == by_id.metrics


class WithARowForEachNode(nn.Module):
    """What only a single worker can train: it adds to row i what it knows of node i."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.inner = GNN("gcn", NUM_FEATURES, NUM_CLASSES, hidden=5)
        self.register_buffer("known", known)

    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        return self.inner(graph, x + self.known)


def test_a_model_that_knows_nodes_by_their_rows_keeps_the_order_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "_FEWEST_EDGES", 1_000)
    monkeypatch.setattr(order_module, "CACHE_BYTES", 256 * 200)
    data = products_like(3_000, num_features=NUM_FEATURES, num_classes=NUM_CLASSES)
    torch.manual_seed(0)
    model = WithARowForEachNode(torch.randn(3_000, NUM_FEATURES))
    by_id, kept = (nugnn.fit(model, data, order=order, epochs=2) for order in ("none", "auto"))
    assert [note for note in kept.notes if note.startswith("Nodes in the order of their ids, since the model")]
    assert torch.equal(kept.logits, by_id.logits)
    plain = nugnn.fit(model.inner, data, epochs=1)
    assert any("Nodes reordered into" in note for note in plain.notes), "the check finds nothing against this one"


@pytest.mark.usefixtures("forked_workers")
def test_fit_reorders_says_so_and_answers_in_the_order_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "_FEWEST_EDGES", 1_000)
    monkeypatch.setattr(order_module, "CACHE_BYTES", 256 * 200)
    data = products_like(3_000, num_features=NUM_FEATURES, num_classes=NUM_CLASSES)
    data = replace(data, features=data.features.double())
    torch.manual_seed(0)
    model = GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=5, dropout=0.3).double()
    results = {
        (workers, order): nugnn.fit(model, data, workers=workers, order=order, epochs=3, check=False)
        for workers, order in ((1, "none"), (1, "auto"), (3, "auto"))
    }
    base = results[1, "none"]
    assert not any("reordered" in note for note in base.notes)
    for key in ((1, "auto"), (3, "auto")):
        assert sum("Nodes reordered into" in note for note in results[key].notes) == 1, key
        # three Adam steps with rounding of 3,000 terms: 3000 eps = 7e-13, and Adam divides by gradients down to 1e-4
        assert (results[key].logits - base.logits).abs().max() <= 1e-7 * base.logits.abs().max(), key
        assert [epoch.loss for epoch in results[key].history] == pytest.approx(
            [epoch.loss for epoch in base.history], rel=1e-7
        )
