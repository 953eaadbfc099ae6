"""Logits over any number of unequal workers are those of one; embeddings and unlabelled graphs included."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn.inference import infer
from nugnn.models import WithNodeEmbedding


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_do_not_change_the_logits(workers: int, request: pytest.FixtureRequest) -> None:
    if workers == 3:  # two are interpreters of their own
        request.getfixturevalue("forked_workers")
    data = make_graph()
    torch.manual_seed(0)
    model = nugnn.GNN("gat", NUM_FEATURES, NUM_CLASSES, layers=2, hidden=8, heads=2, norm="batch").double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = infer(model, data)
    split = infer(model, data, workers=workers, shares=[0.7, *[0.3 / (workers - 1)] * (workers - 1)], timeout=60)
    assert one.shape == (data.num_nodes, NUM_CLASSES) and not one.requires_grad
    torch.testing.assert_close(split, one, rtol=1e-10, atol=1e-10)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("forked_workers")
def test_node_embeddings_and_no_labels() -> None:
    none = torch.arange(0)
    data = dataclasses.replace(
        make_graph(features=False), labels=None, num_classes=0, train_nodes=none, val_nodes=none, test_nodes=none
    )
    torch.manual_seed(0)
    model = WithNodeEmbedding(data.num_nodes, 5, nugnn.GNN("sage", 5, NUM_CLASSES, layers=2, hidden=8))
    torch.testing.assert_close(infer(model, data, workers=2, timeout=60), infer(model, data))


@pytest.mark.parametrize(
    ("options", "words"), [({"workers": 2, "shares": [1.0]}, "1 number for 2"), ({"workers": 99}, "99 workers")]
)
def test_wrong_options_are_refused_before_anything_starts(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        infer(nugnn.GNN("gcn", NUM_FEATURES, NUM_CLASSES), make_graph(), **options)  # type: ignore[arg-type]
