"""Row scale, bias, layer norm, activation and dropout as one operator: the steps one by one, errors, names of masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.cross_entropy import binary_cross_entropy_rows, cross_entropy_rows
from nugnn.kernels.epilogue import epilogue_rows
from nugnn.kernels.epilogue.reference import epilogue_rows_reference
from nugnn.kernels.handlers import DropoutHandler, epilogue
from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.philox import RandomKey
from nugnn.kernels.rows import IdRuns, Rows, rows_of, tag

KEY = RandomKey(5, 6, 7)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu", "elu"])
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_the_steps_one_by_one(activation: Any, normalises: bool, p: float) -> None:
    x, scale, (bias, weight, shift) = randn(12, 7), randn(12, seed=1).abs(), randn(3, 7, seed=2)
    ids = torch.arange(4, 16)
    results = []
    for one in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, bias, weight, shift)]
        if one:
            out = epilogue_rows(
                leaves[0],
                row_scale=scale,
                bias=leaves[1],
                layer_norm=normalises,
                norm_weight=leaves[2] if normalises else None,
                norm_bias=leaves[3] if normalises else None,
                activation=activation,
                p=p,
                key=KEY,
                row_ids=range(4, 16),
            )
        else:
            norm = (leaves[2], leaves[3], 1e-5) if normalises else None
            alpha = 0.01 if activation == "leaky_relu" else 1.0
            out = epilogue_rows_reference(leaves[0], scale, leaves[1], norm, activation, alpha, p, KEY, ids)
        wanted = leaves if normalises else leaves[:2]
        results.append((out, *torch.autograd.grad(out, wanted, randn(12, 7, seed=3))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"activation": "gelu"}, "gelu"),
        ({"bias": torch.ones(4)}, r"bias has shape \(4,\)"),
        ({"row_scale": torch.ones(7)}, r"row_scale has shape \(7,\)"),
        ({"row_scale": torch.ones(5, requires_grad=True)}, "no gradient"),
        ({"norm_weight": torch.ones(7)}, "need layer_norm"),
        ({"p": 0.5, "row_ids": range(5)}, "needs a key"),
        ({"p": 0.5, "key": KEY}, "row_ids are missing"),
        ({"p": 0.5, "key": KEY, "row_ids": range(4)}, "one id per row"),
        ({"p": 0.5, "key": KEY, "row_ids": range(0, 10, 2)}, "step 1"),
        ({"p": 1.5, "key": KEY, "row_ids": range(5)}, "p is 1.5"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        epilogue_rows(torch.ones(5, 7), **options)


class _Net(nn.Module):
    """Bias, relu and dropout behind a product, as one operator or as three functions."""

    def __init__(self, one: bool) -> None:
        super().__init__()
        self.one = one
        self.bias = nn.Parameter(randn(6, seed=4))

    def forward(self, x: Tensor) -> Tensor:
        if self.one:
            return epilogue(x, p=0.5, training=self.training, bias=self.bias, activation="relu")
        return F.dropout(F.relu(x + self.bias), 0.5, self.training)


def test_one_operator_has_the_mask_of_the_dropout_in_its_place() -> None:
    rows = Rows("node", torch.arange(30, 40), split=True)
    outs = []
    for one in (True, False):
        net = _Net(one)
        with Interceptor((DropoutHandler(is_split=True),), net, seed=3).step(2):
            out = net(tag(randn(10, 6), rows))
            assert rows_of(out) is rows
        with Interceptor((DropoutHandler(is_split=True),), net, seed=3).step(2):
            evaluated = net.eval()(tag(randn(10, 6), rows))
            assert rows_of(evaluated) is rows
        outs.append((out, evaluated))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])
    assert (outs[0][0] == 0).sum() > (outs[0][1] == 0).sum()


def test_rows_of_unknown_identity_are_refused_and_no_step_is_torchs_dropout() -> None:
    net = _Net(True)
    with Interceptor((DropoutHandler(is_split=True),), net).step(0), pytest.raises(ValueError, match="identity"):
        net(randn(10, 6))
    torch.manual_seed(0)
    out = net(randn(10, 6))
    active = F.relu(randn(10, 6) + net.bias)
    dropped = out == 0
    assert torch.equal(out, torch.where(dropped, 0.0, 2 * active))
    assert 0 < (dropped & (active > 0)).sum() < (active > 0).sum()


def test_ids_move_with_their_rows_and_are_copied_once() -> None:
    runs = IdRuns(torch.tensor([5, 100]), torch.tensor([0, 3, 4]))
    rows, meta = Rows("edge", runs, fold=2, split=True), torch.device("meta")
    assert len(runs) == 4 and rows.num_rows == 8
    assert rows.to(torch.device("cpu")) is rows and runs.to(torch.device("cpu")) is runs
    moved = rows.to(meta)
    assert moved is rows.to(meta) and moved.row_ids(8).device == meta
    assert (moved.kind, moved.fold, moved.split, moved.num_rows) == ("edge", 2, True, 8)
    assert rows.row_ids(8).tolist() == [10, 11, 12, 13, 14, 15, 200, 201]
    replicated = Rows("replicated")
    assert replicated.to(meta) is replicated


def test_losses_of_chosen_rows_follow_torch() -> None:
    logits, rows = randn(9, 4).requires_grad_(), torch.tensor([7, 2, 3])
    labels, weights = torch.tensor([0, 3, 1]), randn(4, seed=1).abs()
    loss = cross_entropy_rows(logits, labels, rows, weights)
    right = F.cross_entropy(logits[rows], labels, weight=weights, reduction="none")
    assert torch.equal(loss, right)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.equal(grad, torch.autograd.grad(right.sum(), logits)[0])
    assert cross_entropy_rows(logits.bfloat16(), labels, rows).dtype == torch.float32
    targets = randn(3, 4, seed=2) > 0
    values = binary_cross_entropy_rows(logits, targets, rows)
    right = F.binary_cross_entropy_with_logits(logits[rows], targets.double(), reduction="none").mean(1)
    assert torch.equal(values, right)


@pytest.mark.parametrize(
    ("labels", "rows", "weights", "match"),
    [
        (torch.zeros(4), None, None, "integers"),
        (torch.zeros(3).long(), None, None, r"\(4,\) integers"),
        (torch.zeros(2).long(), torch.zeros(2), None, "int64"),
        (torch.zeros(4).long(), None, torch.ones(2), "class_weights"),
    ],
)
def test_labels_rows_and_weights_that_do_not_fit(labels: Tensor, rows: Any, weights: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        cross_entropy_rows(torch.zeros(4, 3), labels, rows, weights)


def test_targets_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="targets must be"):
        binary_cross_entropy_rows(torch.zeros(4, 3), torch.zeros(4, 2))
