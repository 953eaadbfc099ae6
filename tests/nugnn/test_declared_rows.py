"""Rows that the user declares: dropout behind an unknown function is exact, and what cannot be is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nugnn
from exactness import make_graph
from nugnn.check_samples import compare_batch, first_batch
from nugnn.kernels.rows import rows_of
from nugnn.module_traces import ModelDiffers
from sample_cases import NUM_CLASSES, make_data


def _smooth(x: Tensor) -> Tensor:
    """Of each row by itself, by functions that no rule is for."""
    return torch.fft.irfft(torch.fft.rfft(x)[:, :3], n=x.shape[1])


class _Net(nn.Module):
    def __init__(self, *, declares: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.declares = nn.Linear(72, 8), nn.Linear(8, NUM_CLASSES), declares
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = _smooth(self.first(x.flatten(1)))
        if self.declares:
            h = nugnn.as_rows_of(h, x)
        return self.last(self.norm(self.dropout(h)))  # type: ignore[no-any-return]


def test_declared_rows_make_dropout_and_batch_norm_exact() -> None:
    batch = first_batch(make_data("images", 12), 12)
    # sums of a few hundred terms in another order, as in test_check_samples.py
    assert compare_batch(_Net(declares=True), batch, (8, 3, 1)).largest_difference <= 1e-10
    with pytest.raises(
        ModelDiffers, match=r"dropout on rows whose identity is not known.*nugnn\.as_rows_of\(x, like\)"
    ):
        compare_batch(_Net(declares=False), batch, (8, 4))
    undropped = _Net(declares=False)
    undropped.dropout.p = 0.0
    with pytest.raises(ModelDiffers, match=r"batch norm over rows whose identity.*nugnn\.as_rows_of\(x, like\)"):
        compare_batch(undropped, batch, (8, 4))


def test_outside_of_training_nothing_is_declared() -> None:
    x = torch.ones(3, 72)
    assert nugnn.as_rows_of(x, torch.ones(3)) is x and rows_of(x) is None
    assert _Net(declares=True).eval()(x.view(3, 2, 6, 6)).shape == (3, NUM_CLASSES)


def test_rows_of_a_graph_too() -> None:
    graph = nugnn.shard(make_graph())
    feat = graph.ndata["feat"]
    x = nugnn.as_rows_of(torch.ones(len(feat), 2), feat)
    assert rows_of(x) is graph.index.node_rows


def test_what_cannot_be_is_refused() -> None:
    like = nugnn.as_replicated(torch.ones(3, 2))
    for x, other, words in (
        (torch.ones(4), like, r"x has the shape \(4,\) and like \(3, 2\): give one row for one"),
        (torch.tensor(1.0), like, r"x has the shape \(\)"),
        (torch.ones(3), like, r"like is the same on every rank; .* nugnn\.as_replicated\(x\)"),
    ):
        with pytest.raises(ValueError, match=words):
            nugnn.as_rows_of(x, other)
    batch = nugnn.as_samples(first_batch(make_data("images", 6), 3), nugnn.init())
    with nugnn.intercept_samples(nn.Identity(), nugnn.init()).step(0):
        turned = batch.data[0].flatten(1).t()
        with pytest.raises(ValueError, match=r"samples of like lie along axis 1 .* like\.movedim\(1, 0\)"):
            nugnn.as_rows_of(torch.ones(72), turned)
