"""Which models are known through and through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dgl import nn as dgl_nn
from torch import Tensor, nn

from nugnn.known_models import is_known
from nugnn.models import ACTIVATIONS, GNN, MODEL_NAMES, SAGE_AGGREGATORS, WithNodeEmbedding


def _made(kind: str = "sage", **options: Any) -> GNN:
    return GNN(kind, 10, 3, hidden=8, **{"norm": "batch", "residual": True, **options})


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", MODEL_NAMES)
def test_built_in_models_are_known(kind: str, activation: str) -> None:
    assert is_known(_made(kind, activation=activation))


def test_aggregators_are_known_but_for_the_one_that_looks_at_degrees() -> None:
    known = {name: is_known(_made(aggregator=name)) for name in SAGE_AGGREGATORS}
    assert known == {"mean": True, "gcn": True, "pool": True, "lstm": False}


class _Own(GNN):
    """Somebody's."""


class _OwnLayer(dgl_nn.SAGEConv):  # type: ignore[misc]
    """Somebody's."""


def _double(x: Tensor) -> Tensor:
    return 2 * x


def _with(change: Callable[[GNN], Any]) -> GNN:
    model = _made()
    change(model)
    return model


def _set(name: str, value: Any) -> Callable[[GNN], None]:
    def change(model: GNN) -> None:
        setattr(model.layers[0], name, value)

    return change


@pytest.mark.parametrize(
    "model",
    [
        _Own("gcn", 10, 3),
        WithNodeEmbedding(5, 10, _made()),
        nn.Sequential(_made()),
        _with(lambda model: model.layers.insert(0, _OwnLayer(10, 10, "mean"))),
        _with(lambda model: setattr(model.dropout, "activation", _double)),
        _with(lambda model: setattr(model, "activation", lambda x: x)),
        _with(_set("activation", _double)),
        _with(_set("norm", _double)),
        _with(_set("forward", lambda graph, x: x)),
        _with(lambda model: model.layers[0].register_forward_hook(lambda module, x, out: None)),
        _with(lambda model: next(model.parameters()).register_hook(lambda gradient: None)),
    ],
)
def test_nobody_elses_code_is_known(model: nn.Module) -> None:
    assert not is_known(model)


def test_layers_may_be_given_functions_and_modules_of_torch() -> None:
    for function in (torch.relu, nn.functional.elu, nn.ReLU(), None):
        assert is_known(_with(_set("activation", function)))
