"""In float32 uneven batches train as one process does, up to a bound that follows from the arithmetic alone.

Both are float32 evaluations of the same real-number program, with sums in another order. The bound holds for any
order: the distance of either from the program in real numbers. It is carried along, entry by entry, beside a run in
float64, whose own rounding the slack on u covers. Shape suffixes: n samples, D inputs, H hidden, C classes.

Notation: u = 2^-24, gamma(k) = k u / (1 - k u). For a value v of the exact program, E_v bounds |computed v - v|, and
v^ = |v| + E_v bounds |computed v|.

- A sum of k products (a b)_i computed from a^ and b^ in any order, fused or not, also one whose parts were summed on
  other ranks first: every product passes one multiplication and at most k - 1 additions (Higham 2002, sec. 3.1), so
  E = (sum a^ b^) (1 + gamma(k)) - sum |a| |b|. A bias is one more addition. Zeros of ranks without samples are exact.
- relu moves no further than its input; its gradient is 0 or 1, and either where |z| <= E_z.
- Softmax: if no logit moves further than e, p moves by at most the factor exp(2 e). In float32, with
  Z = 2 max |z| + log C: z - m, its exponential (4 u: two units in the last place), the sum of C, the logarithm and
  two subtractions make log p wrong by A <= u (10 Z + C + 4) to first order, and exp adds 4 u. So
  E_p = p (exp(2 e + A + 4 u) - 1).
- delta = (p - y) / n: two products, one addition and the rounded 1 / n: E = (E_p + 4 u (p^ + y)) / n.
- w - rate g: E_w + rate E_g, two roundings of the product (the rate's own is one), one of the difference.
- The loss: E_p's argument per row, a sum of n, a division.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nugnn.comm.groups import Ranks
from nugnn.networks import MLP
from nugnn.sample_family import SampleFamily
from nugnn.trainer import Trainer
from sample_cases import NUM_CLASSES, make_data, make_model

U = 2.0**-24 * 1.01  # 1 %: terms of second order, and float64
RATE = 0.01
SPLITS = [((18, 6), 100), ((144, 112), 600), ((5, 0), 23), ((7, 5, 3, 1), 70)]
IDS = ["18-6", "144-112", "5-0", "7-5-3-1"]


def _model() -> MLP:
    torch.manual_seed(0)
    return MLP(72, NUM_CLASSES, hidden=16, layers=2)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def _train(
    ranks: Ranks, sizes: tuple[int, ...], num: int, name: str = "", dtype: torch.dtype = torch.float32
) -> tuple[list[float], list[Tensor]]:
    """Losses of two epochs and the parameters after them."""
    kind = "tokens" if name == "transformer" else "images"
    model = (make_model(name) if name else _model()).to(dtype)
    family = SampleFamily(model, make_data(kind, num, torch.float32), ranks, sizes=sizes, seed=3)
    trainer = Trainer(family, make_optimizer=_sgd)
    return [trainer.train_epoch() for _ in range(2)], [p.detach().clone() for p in model.parameters()]


def _gamma(k: int) -> float:
    return k * U / (1 - k * U)


class _Near:
    """A value of the exact program, and how far from it a computed one may be."""

    def __init__(self, value: Tensor, error: Tensor | None = None) -> None:
        self.value, self.error = value, torch.zeros_like(value) if error is None else error

    @property
    def most(self) -> Tensor:
        return self.value.abs() + self.error


def _product(a: _Near, b: _Near, bias: _Near | None = None) -> _Near:
    """``a @ b + bias`` in any order of addition."""
    value, mass, most = a.value @ b.value, a.value.abs() @ b.value.abs(), a.most @ b.most
    k = a.value.shape[1]
    if bias is not None:
        value, mass, most, k = value + bias.value, mass + bias.value.abs(), most + bias.most, k + 1
    return _Near(value, most * (1 + _gamma(k)) - mass)


def _turned(x: _Near) -> _Near:
    return _Near(x.value.T, x.error.T)


def _step(weights: list[_Near], x: Tensor, labels: Tensor) -> tuple[list[_Near], Tensor, Tensor]:
    """Parameters after a step, its loss, and the bound on that."""
    w1, b1, w2, b2 = weights
    n, inputs_nD = len(x), _Near(x)
    z_nH = _product(inputs_nD, _turned(w1), b1)
    h_nH = _Near(z_nH.value.relu(), z_nH.error)
    z_nC = _product(h_nH, _turned(w2), b2)
    # softmax and loss
    log_p = z_nC.value.log_softmax(1)
    furthest = z_nC.error.amax(1, keepdim=True)
    size = 2 * (z_nC.most.amax(1, keepdim=True)) + torch.tensor(float(NUM_CLASSES)).log()
    moved = 2 * furthest + U * (10 * size + NUM_CLASSES + 4)
    p = _Near(log_p.exp(), log_p.exp() * torch.expm1(moved + 4 * U))
    y = nn.functional.one_hot(labels, NUM_CLASSES).double()
    row_losses = -log_p.gather(1, labels[:, None])
    loss = row_losses.sum() / n
    loss_error = ((row_losses + moved).sum() * (1 + _gamma(n + 2)) - row_losses.sum()) / n
    # backward
    delta_nC = _Near((p.value - y) / n, (p.error + 4 * U * (p.most + y)) / n)
    back_nH = _product(delta_nC, w2)
    is_either = z_nH.value.abs() <= z_nH.error
    error_nH = torch.where(is_either, back_nH.most, back_nH.error * (z_nH.value > 0))
    delta_nH = _Near(back_nH.value * (z_nH.value > 0), error_nH)
    ones = _Near(torch.ones(1, n, dtype=torch.float64))
    gradients = [
        _product(_turned(delta_nH), inputs_nD),
        _flat(_product(ones, delta_nH)),
        _product(_turned(delta_nC), h_nH),
        _flat(_product(ones, delta_nC)),
    ]
    after = []
    for w, g in zip(weights, gradients, strict=True):
        rounded = 2 * U * RATE * g.most + U * (w.most + RATE * g.most)
        after.append(_Near(w.value - RATE * g.value, w.error + RATE * g.error + rounded))
    return after, loss, loss_error


def _flat(x: _Near) -> _Near:
    return _Near(x.value[0], x.error[0])


def _bounded(batch_size: int, num: int) -> tuple[list[tuple[float, float]], list[_Near]]:
    """Two epochs of one process in float64: losses and parameters, each with its bound."""
    weights = [_Near(p.detach().double()) for p in _model().parameters()]
    x, labels = make_data("images", num, torch.float32)[:]
    order = SampleFamily(_model(), make_data("images", num), Ranks(), sizes=(batch_size,), seed=3).sampler.order
    epochs = []
    for epoch in range(2):
        total = error = 0.0
        for ids in order(epoch).split(batch_size):
            weights, loss, loss_error = _step(weights, x[ids].flatten(1).double(), labels[ids])
            total, error = total + float(loss) * len(ids), error + float(loss_error) * len(ids)
        epochs.append((total / num, error / num))
    return epochs, weights


@pytest.mark.parametrize(("sizes", "num"), SPLITS, ids=IDS)
def test_float32_runs_stay_within_the_rounding_bound_of_the_exact_program(
    ranks: Any, sizes: tuple[int, ...], num: int
) -> None:
    epochs, weights = _bounded(sum(sizes), num)
    # a bound that said little would not be worth its name
    assert max(float(w.error.max()) for w in weights) <= 2e-3 * max(float(w.value.abs().max()) for w in weights)
    runs = [_train(Ranks(), (sum(sizes),), num), *ranks.run(len(sizes), _train, sizes, num)]
    for losses, parameters in runs:
        for got, (loss, error) in zip(losses, epochs, strict=True):
            assert abs(got - loss) <= error
        for got, w in zip(parameters, weights, strict=True):
            assert bool(((got.double() - w.value).abs() <= w.error).all())
    for one, many in zip(runs[0][1], runs[1][1], strict=True):  # and so of each other
        assert float((one - many).abs().max()) <= 2 * max(float(w.error.max()) for w in weights)


SLACK = 8
"""Norms and attention divide by computed values, for which no bound worth having is at hand. A split run may be so many
times further from float64 than one process is: two draws of the same error, the largest entry of each, of which one
may be lucky."""


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_a_split_is_no_further_from_float64_than_one_process(ranks: Any, name: str) -> None:
    _, exact = _train(Ranks(), (16,), 70, name, torch.float64)
    _, one = _train(Ranks(), (16,), 70, name)
    allowed = SLACK * _distance(one, exact)
    for _, many in ranks.run(4, _train, (7, 5, 3, 1), 70, name):
        assert _distance(many, exact) <= allowed


def _distance(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a.double() - b).abs().max()) for a, b in zip(found, exact, strict=True))
