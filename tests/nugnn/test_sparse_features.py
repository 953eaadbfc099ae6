"""Sparse input features: what DGL's layers do with them before the first product keeps them sparse."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nugnn import fit
from nugnn.datasets.graph_data import GraphData
from nugnn.kernels import handlers
from nugnn.models import GNN

NUM_NODES, NUM_FEATURES, NUM_CLASSES = 40, 30, 3


def make_data() -> GraphData:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(NUM_NODES)
    features = torch.randn(NUM_NODES, NUM_FEATURES, generator=generator)
    features[torch.rand(NUM_NODES, NUM_FEATURES, generator=generator) < 0.8] = 0
    features[3] = 0  # a node without features
    return GraphData(
        name="sparse",
        num_nodes=NUM_NODES,
        src=torch.cat([torch.randint(0, NUM_NODES, (160,), generator=generator), ids]),
        dst=torch.cat([torch.randint(0, NUM_NODES, (160,), generator=generator), ids]),
        features=features.to_sparse_csr(),
        labels=torch.randint(0, NUM_CLASSES, (NUM_NODES,), generator=generator),
        num_classes=NUM_CLASSES,
        train_nodes=ids[:20],
        val_nodes=ids[20:30],
        test_nodes=ids[30:],
    )


@pytest.mark.parametrize("input_dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat"])
def test_layers_train_without_making_sparse_features_dense(
    kind: str, input_dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data()
    torch.manual_seed(0)
    # hidden < features: DGL then multiplies before it aggregates
    model = GNN(kind, NUM_FEATURES, NUM_CLASSES, hidden=4, dropout=0.0, input_dropout=input_dropout)
    dense = dataclasses.replace(data, features=data.features.to_dense())
    expected = fit(model, dense, epochs=4, seed=1)

    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("sparse features were made dense")

    monkeypatch.setattr(handlers, "densify", refuse)
    got = fit(model, data, epochs=4, seed=1)
    # float32: products of 30 features are summed in another order, so each differs by at most 30 rounding errors of
    # its size; four steps of Adam, each of the size of lr = 0.01 at most, keep that far below 1e-4 of values near 1
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-4)
    assert [e.loss for e in got.history] == pytest.approx([e.loss for e in expected.history], abs=1e-4)


def test_scaling_by_a_factor_per_row_gives_the_bits_of_the_dense_product() -> None:
    x = make_data().features
    factor = torch.rand(NUM_NODES, 1) + 0.5
    for operation in (torch.mul, torch.div):
        scaled = handlers._scaled_rows(x, factor, operation)
        assert scaled.layout is torch.sparse_csr
        assert torch.equal(scaled.to_dense(), operation(x.to_dense(), factor))


@pytest.mark.parametrize("factor", [0.0, float("inf"), torch.ones(1, NUM_FEATURES), torch.ones(())])
def test_factors_that_are_no_finite_number_per_row_are_left_to_the_dense_path(factor: object) -> None:
    assert handlers._scaled_rows(make_data().features, factor, torch.mul) is None
