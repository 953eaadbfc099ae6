"""In float32 uneven batches train as one process does, up to a bound that follows from the arithmetic alone.

Both are float32 evaluations of the same real-number program, with sums in another order. The bound holds for any
order: the distance of either from the program in real numbers. A perceptron's is carried along, entry by entry, beside
a run in float64, whose own rounding the slack on u covers; carried through norms and attention it would grow without
measure. Theirs is the sum over all values of the training of what each one's rounding does to a result, by adjoints, to
first order: see `rounding`. What follows is about the former. Shape suffixes: n samples, D inputs, H hidden, C classes.

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

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from exact_training import ExactTraining, choice, train_exactly
from nugnn.comm.batch_norm import split_batch_norm
from nugnn.comm.groups import Ranks
from nugnn.networks import MLP
from nugnn.sample_family import SampleFamily
from nugnn.trainer import Trainer
from rounding import Bound, Rounding, U
from sample_cases import FLOAT64_BOUND, NUM_CLASSES, make_data, make_model

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch says so whenever oneDNN is turned off

RATE = 0.01
SEED = 14
"""Of order and masks. In exact trainings of the CNN no relu and no maximum is nearer than 1.5e-5 to choosing otherwise;
in float32 no value that they read moves further than 2e-6."""
SPLITS = [((18, 6), 100), ((144, 112), 600), ((5, 0), 23), ((7, 5, 3, 1), 70)]
IDS = ["18-6", "144-112", "5-0", "7-5-3-1"]


def _model() -> MLP:
    torch.manual_seed(0)
    return MLP(72, NUM_CLASSES, hidden=16, layers=2)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def _data(name: str, num: int) -> TensorDataset:
    return make_data("tokens" if name == "transformer" else "images", num, torch.float32)


Run = tuple[list[float], list[Tensor], list[Tensor]]
"""Losses of two epochs, the parameters after them, and the choices of relus and maxima on this rank."""


def _train(
    ranks: Ranks,
    sizes: tuple[int, ...],
    num: int,
    name: str = "mlp",
    dtype: torch.dtype = torch.float32,
    bits: int = 24,
) -> Run:
    """With fewer than 24 ``bits``, the last layer reads inputs that were rounded to as many."""
    model = (_model() if name == "mlp" else make_model(name)).to(dtype)
    choices: list[Tensor] = []

    def look(layer: nn.Module, inputs: tuple[Tensor], _: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            choices.append(choice(layer, inputs[0].detach()))

    for layer in model.modules():
        if name == "cnn" and isinstance(layer, (nn.ReLU, nn.MaxPool2d)):
            layer.register_forward_hook(look)
    if bits < 24:
        last = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]
        last.register_forward_pre_hook(lambda _, inputs: (_shortened(inputs[0], bits),))
    family = SampleFamily(model, _data(name, num), ranks, sizes=sizes, seed=SEED)
    trainer = Trainer(family, make_optimizer=_sgd)
    losses = [trainer.train_epoch() for _ in range(2)]
    return losses, [p.detach().clone() for p in model.parameters()], choices


def _shortened(x: Tensor, bits: int) -> Tensor:
    """To the nearest value of so many bits; its gradient is that of ``x``."""
    mantissa, exponent = x.detach().frexp()
    return x + (torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent) - x.detach())


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
    order = SampleFamily(_model(), make_data("images", num), Ranks(), sizes=(batch_size,), seed=SEED).sampler.order
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
    for losses, parameters, _ in runs:
        for got, (loss, error) in zip(losses, epochs, strict=True):
            assert abs(got - loss) <= error
        for got, w in zip(parameters, weights, strict=True):
            assert bool(((got.double() - w.value).abs() <= w.error).all())
    for one, many in zip(runs[0][1], runs[1][1], strict=True):  # and so of each other
        assert float((one - many).abs().max()) <= 2 * max(float(w.error.max()) for w in weights)


WHOLE = 4
"""Results that depend on all parameters: sums of them with random signs."""


@pytest.mark.parametrize(("sizes", "num"), SPLITS, ids=IDS)
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_networks_stay_within_the_rounding_bound_of_the_exact_program(
    ranks: Any, name: str, sizes: tuple[int, ...], num: int
) -> None:
    num, one = min(num, 300), (sum(sizes),)
    exact = _exact(name, one[0], num)
    before = [p.detach().double() for p in make_model(name).parameters()]
    after = [p.detach() for p in exact.parameters]
    _, in_float64, _ = _train(Ranks(), one, num, name, torch.float64)
    assert max(float((a - b).abs().max()) for a, b in zip(in_float64, after, strict=True)) <= FLOAT64_BOUND
    runs = [_train(Ranks(), one, num, name), _joined(ranks.run(len(sizes), _train, sizes, num, name))]
    with torch.backends.mkldnn.flags(enabled=False):  # other convolutions, products and error function
        runs.append(_train(Ranks(), one, num, name))
    for _, _, choices in runs:
        same = [torch.equal(a, b) for a, b in zip(choices, exact.choices, strict=True)]
        assert all(same), "a relu or maximum chose otherwise: a fault, or a value too near 0, see SEED"
    for number, loss in enumerate(exact.losses):
        bound = exact.rounding.bound(loss)
        assert bound.probable <= 1e-5 * float(loss.detach())
        for losses, _, _ in runs:
            _assert_within(bound, losses[number] - float(loss.detach()))
    for number, signs in enumerate(_signs(after, each=len(sizes) == 4)):
        bound = exact.rounding.bound(_dot(signs, exact.parameters))
        for _, parameters, _ in runs:
            moved = [p.double() - q for p, q in zip(parameters, after, strict=True)]
            _assert_within(bound, float(_dot(signs, moved)))
        if number < WHOLE:  # a bound that said little would not be worth its name
            length = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True)) ** 0.5
            assert bound.certain <= 0.1 * length
            assert bound.probable <= 5e-4 * length


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_one_product_of_tf32_takes_the_loss_out_of_the_probable_bound(name: str) -> None:
    """In the first epoch; one of 16 bits, or in the second epoch of the transformer, would not be seen."""
    exact = _exact(name, 16, 70)
    losses, _, _ = _train(Ranks(), (16,), 70, name, bits=11)
    assert abs(losses[0] - float(exact.losses[0].detach())) > 3 * exact.rounding.bound(exact.losses[0]).probable


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_adjoints_foretell_what_errors_come_to_where_all_are_as_large_as_may_be(name: str) -> None:
    exact, other = _exact(name, 16, 40), _exact(name, 16, 40, size=1.0)
    assert all(torch.equal(a, b) for a, b in zip(exact.choices, other.choices, strict=True))
    for signs in _signs([p.detach() for p in exact.parameters], each=False):
        before, after = _dot(signs, exact.parameters), _dot(signs, other.parameters)
        adjoints = torch.autograd.grad(before, exact.rounding.errors, retain_graph=True, allow_unused=True)
        pairs = zip(adjoints, other.rounding.errors, strict=True)
        foretold = sum(float((a * e.detach()).sum()) for a, e in pairs if a is not None)
        assert float((after - before).detach()) == pytest.approx(foretold, rel=5e-3)  # of the slack of 1 %


def _exact(name: str, batch_size: int, num: int, size: float = 0.0) -> ExactTraining:
    data = _data(name, num)
    return train_exactly(make_model(name), data, batch_size, epochs=2, rate=RATE, seed=SEED, size=size)


def _assert_within(bound: Bound, error: float) -> None:
    assert abs(error) <= bound.certain, "an order of summation cannot do that"
    assert abs(error) <= bound.probable, "roundings that are independent, with mean 0, hardly ever do that"


def _joined(parts: list[Run]) -> Run:
    """Choices of all ranks' samples; losses and parameters, of which each rank has the same."""
    losses, parameters, _ = parts[0]
    for other_losses, other_parameters, _ in parts[1:]:
        assert other_losses == losses
        assert all(torch.equal(p, q) for p, q in zip(parameters, other_parameters, strict=True))
    return losses, parameters, [torch.cat(of) for of in zip(*(choices for _, _, choices in parts), strict=True)]


def _signs(parameters: list[Tensor], *, each: bool) -> list[list[Tensor]]:
    """For all parameters together and, with ``each``, for every one alone."""
    generator = torch.Generator().manual_seed(5)

    def drawn(p: Tensor) -> Tensor:
        return 2.0 * torch.randint(0, 2, p.shape, generator=generator).double() - 1

    together = [[drawn(p) for p in parameters] for _ in range(WHOLE)]
    alone = [[drawn(p) if p is one else torch.zeros_like(p) for p in parameters] for one in parameters if each]
    return together + alone


def _dot(signs: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.stack([(s * v).sum() for s, v in zip(signs, values, strict=True)]).sum()


def _randn(*shape: int, mean: float = 0.0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale + mean


LABELS = torch.arange(12) % 5
HIDDEN = (torch.arange(9) > 6).expand(4, 9)
OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
    "linear": (F.linear, Rounding.linear, [_randn(6, 40), _randn(3, 40), _randn(3, scale=20)]),
    "convolution": (
        lambda x, w, b: F.conv1d(x, w, b, padding=1),
        Rounding.convolution,
        [_randn(4, 3, 8), _randn(2, 3, 3), _randn(2, scale=20)],
    ),
    "gelu": (F.gelu, Rounding.gelu, [torch.linspace(-6, 6, 241)]),
    "softmax": (lambda x: x.softmax(-1), Rounding.softmax, [_randn(4, 9, scale=8).masked_fill(HIDDEN, -torch.inf)]),
    "cross entropy": (
        lambda x: F.cross_entropy(x, LABELS, reduction="none").sum() / 12.0,
        lambda r, x: r.cross_entropy(x, LABELS),
        [_randn(12, 5, scale=10)],
    ),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (20,), w, b),
        lambda r, x, w, b: r.norm(x, w, b, [-1]),
        [_randn(5, 20, mean=100), _randn(20, mean=1), _randn(20)],
    ),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        lambda r, x, w, b: r.norm(x, w.view(1, -1, 1), b.view(1, -1, 1), [0, 2]),
        [_randn(7, 3, 4, mean=100), _randn(3, mean=1), _randn(3)],
    ),
    "split batch norm": (
        lambda x, w, b: split_batch_norm(x, None, None, w, b, 0.1, 1e-5, Ranks()),
        lambda r, x, w, b: r.norm(x, w.view(1, -1, 1), b.view(1, -1, 1), [0, 2]),
        [_randn(7, 3, 4, mean=100), _randn(3, mean=1), _randn(3)],
    ),
}


@pytest.mark.parametrize("is_with_mkldnn", [True, False], ids=["mkldnn", "plain"])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_value_and_gradient_of_an_operator_stays_within_its_bound(name: str, is_with_mkldnn: bool) -> None:
    computed, program, inputs = OPERATORS[name]
    rounding = Rounding()
    with torch.backends.mkldnn.flags(enabled=is_with_mkldnn):
        found = _values_and_gradients(computed, inputs)
    exact = _values_and_gradients(functools.partial(program, rounding), [x.double() for x in inputs])
    for got, truth in zip(found, exact, strict=True):
        for value, true in zip(got.detach().flatten().double(), truth.flatten(), strict=True):
            assert abs(float(value - true.detach())) <= rounding.bound(true).certain


def _values_and_gradients(f: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    weights = _randn(*out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves, create_graph=out.dtype == torch.float64)]
