"""How far rounding may move what a program computes, to first order and for any order of summation.

A program is a chain of elementary results v_i = f_i(v_1 .. v_(i-1)). A machine computes f_i(v^_1 .. v^_(i-1)) + e_i for
it, and f_i and its arguments alone say how large the local error e_i may be. A result q is then a function of all e_i,
the exact one where they are 0, and to first order (Linnainmaa, "Taylor expansion of the accumulated rounding error",
1976; Higham 2002, sec. 3.8)

    q^ - q = sum_i <dq/de_i, e_i>,      |q^ - q| <= sum_i <|dq/de_i|, |e_i|>.

dq/de_i, the adjoint of v_i, is what reverse differentiation gives. `Rounding` writes each e_i down as a tensor of zeros
that is added to v_i, in float64; a backward pass through the program gives all adjoints of one q. The program here is a
whole training: forward, backward and update of every step. Gradients consist of elementary results as well: each
operator below has a ``backward`` written out as torch's kernels compute it, in results with errors of their own, and
``create_graph`` keeps those differentiable.

Notation: u = 2^-24. A local error comes of k roundings, each at most u times a mass: |e| <= k u mass. For a sum of k
products a_i b_i in any order, fused or not, also of parts that other ranks summed first: each product passes one
multiplication and at most k - 1 additions, and mass = sum |a_i| |b_i| (Higham 2002, sec. 3.1). Zeros of ranks without
samples are added exactly. Terms of second order, gamma(k) - k u among them, are left to 1 % of slack on u; a test draws
errors as large as they may be, and sees that the adjoints foretell what comes of them.

Where torch and nugnn evaluate a formula in several ways on CPUs, masses cover all of them: norms by centred values or
as ``x * scale + shift``; variances in two passes or by updating (Chan, Golub and LeVeque, "Algorithms for computing the
sample variance", 1983). A value that one evaluation keeps and another computes twice has two errors here:
|a + b| <= |a| + |b|. Assumed are one unit in the last place for exp, log and rsqrt (SLEEF's bound), no convolution by
Winograd's way, no underflow; and that relus and maxima choose as in the exact program, which a test has to look at.

`Bound.probable` is smaller. If roundings are independent with mean 0, as in Higham and Mary ("A new approach to
probabilistic rounding error analysis", 2019), then by Hoeffding's inequality

    |q^ - q| <= lambda u sqrt(sum_i <(dq/de_i)^2, k_i mass_i^2>)    but for a probability of 2 exp(-lambda^2 / 2).

That is a model of rounding, no theorem about it. Constants, whose rounding is the same at every use, are an e_i each;
two errors in place of one understate it by up to sqrt(2), which lambda leaves room for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F  # noqa: N812

U = 2.0**-24 * 1.01
LAMBDA = 6.0
"""Of `Bound.probable`: exceeded with a probability below 4e-8, if roundings were random."""


@dataclass(frozen=True)
class Bound:
    """On the distance of one computed number from the exact one; see the module."""

    certain: float
    probable: float


class Rounding:
    """Elementary operators in float64 whose results have errors; all are differentiable twice.

    Args:
        size: Of the errors, in local bounds; with random signs. 0 for the exact program.
    """

    def __init__(self, size: float = 0.0) -> None:
        self.errors: list[Tensor] = []
        self._size, self._generator = size, torch.Generator().manual_seed(0)
        self._masses: list[Tensor] = []
        self._counts: list[float] = []

    def bound(self, result: Tensor) -> Bound:
        """On the rounding error of a scalar result."""
        adjoints = torch.autograd.grad(result, self.errors, retain_graph=True, allow_unused=True)
        certain = square = 0.0
        for adjoint, mass, k in zip(adjoints, self._masses, self._counts, strict=True):
            if adjoint is not None:
                each = adjoint.abs().mul_(mass)
                certain += k * float(each.sum())
                square += k * float(each.square_().sum())
        return Bound(U * certain, LAMBDA * U * math.sqrt(square))

    def error(self, mass: Tensor, k: float) -> Tensor:
        """What is to be added to a value that comes of ``k`` roundings, each at most u ``mass``."""
        error = torch.zeros_like(mass)
        if self._size:
            signs = 2 * torch.randint(0, 2, mass.shape, generator=self._generator) - 1
            error = self._size * U * k * mass * signs
        error.requires_grad_()
        self.errors.append(error)
        self._masses.append(mass)
        self._counts.append(k)
        return error

    def rounded(self, value: Tensor, k: float, mass: Callable[[], Tensor] | None = None) -> Tensor:
        """``value`` with its error; as it is where nothing will be differentiated any more.

        Args:
            value: As it would be without.
            k: Roundings.
            mass: What each is at most u times; ``abs(value)`` when None.
        """
        if not torch.is_grad_enabled():
            return value
        with torch.no_grad():
            most = value.abs() if mass is None else mass()
        return value + self.error(most, k)

    def products(self, f: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, k: int) -> Tensor:
        """``f(a, b)``, sums of at most ``k`` products of a value of each."""
        return self.rounded(f(a, b), k, lambda: f(a.abs(), b.abs()))

    def constant(self, value: float) -> Tensor:
        """``value``, rounded once and then the same wherever it is read; without an error if float32 has it."""
        exact = torch.tensor(value, dtype=torch.float64)
        return exact if float(exact.float()) == value else exact + self.error(exact.abs(), 1)

    # operators

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b``, of the same leading axes."""
        return self.products(functools.partial(_MatMul.apply, self), a, b, a.shape[-1])

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The bias is the weight of one more input, a 1: it may be the first that is added, or the last."""
        inputs = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        whole = torch.cat([weight, bias[:, None]], 1)
        return self.matmul(inputs.flatten(0, -2), whole.T).unflatten(0, x.shape[:-1])

    def convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Of ``x (n, C, H, W)`` or ``(n, C, L)``, the size kept; computed as sums of products, not Winograd's way."""
        if x.dim() == 3:
            return self.convolution(x[:, :, None], weight[:, :, None], bias)[:, :, 0]
        if bias is not None:  # as above: the middle of one more channel, of ones
            middle = torch.zeros_like(weight[:, :1])
            middle[:, :, weight.shape[2] // 2, weight.shape[3] // 2] = 1
            weight = torch.cat([weight, middle * bias[:, None, None, None]], 1)
            x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        return self.products(functools.partial(_Convolution.apply, self), x, weight, weight[0].numel())

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self.rounded(a + b, 1)

    def fork(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` for two readers, whose gradients are added."""
        first, second = _Fork.apply(self, x)
        return first, second

    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        """``x * factor``, or ``x / (1 / factor)``; the gradient likewise."""
        return self.rounded(_Scale.apply(self, x, factor), 1)

    def sum(self, x: Tensor, axis: int) -> Tensor:
        return self.rounded(x.sum(axis), x.shape[axis], lambda: x.abs().sum(axis))

    def repeat(self, x: Tensor, n: int) -> Tensor:
        """``x`` for each of ``n`` samples."""
        return _Repeat.apply(self, x, n)

    def take(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows of a table; row 0, of padding, gets no gradient."""
        return _Take.apply(self, table, ids)

    def gelu(self, x: Tensor) -> Tensor:
        return self.rounded(_Gelu.apply(self, x), GELU, x.abs)

    def softmax(self, x: Tensor) -> Tensor:
        """Over the last axis.

        Of x - max, whose rounding exp turns into a relative one, and of exp, for the value and for the sum it is
        divided by; of the additions and the division.
        """
        with torch.no_grad():
            p = x.softmax(-1)
            spread = (x.amax(-1, keepdim=True) - x).masked_fill(p == 0, 0).amax(-1, keepdim=True)
            mass = p * spread.clamp(min=1)
        return _Softmax.apply(self, x, self.error(mass, x.shape[-1] + 10))

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor, over: Sequence[int], eps: float = 1e-5) -> Tensor:
        """``x`` less its mean over some axes, by its deviation; times ``weight``, plus ``bias``, which broadcast."""
        over = tuple(over)
        k = math.prod(x.shape[axis] for axis in over)
        with torch.no_grad():
            mean, centred, inverse = _moments(x, over, eps)
            extent = x.abs() + mean.abs()
            masses = (
                (x.abs().mean(over, keepdim=True), _mean_roundings(k)),
                (_variance_mass(centred, extent, over), k + 4),
                (inverse, 5),
                (extent * inverse * weight.abs() + bias.abs(), 5),
            )
        return _Norm.apply(self, over, eps, x, weight, bias, *(self.error(*each) for each in masses))

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over samples.

        With Z = 2 max |z| + log C of a row of logits z: z - max, its exponential, the sum of C, the logarithm and two
        subtractions make an error of log p of at most u (10 Z + C + 4).
        """
        with torch.no_grad():
            size = 2 * logits.abs().amax(1, keepdim=True) + math.log(logits.shape[1])
            mass = size.clamp(min=1).expand_as(logits)
        log_p = _LogSoftmax.apply(self, logits, self.error(mass, logits.shape[1] + 14))
        rows = -log_p.gather(1, labels[:, None])
        return self.rounded(rows.sum() * self.constant(1 / len(rows)), len(rows))

    def stepped(self, parameter: Tensor, gradient: Tensor, rate: Tensor) -> Tensor:
        """After a step of SGD: a product, and a difference where there is a gradient."""
        step = self.rounded(rate * gradient, 1)
        return self.rounded(parameter - step, 1, lambda: (parameter - step).abs() * (gradient != 0))


GELU = 12
"""Roundings of gelu, each at most u |x|, and of its derivative, at most u.

oneDNN has erf from Abramowitz and Stegun 7.1.26, within 1.5e-7 = 2.5 u, torch from SLEEF; the rest is for its argument,
exp, products and a sum.
"""


class _MatMul(Function):
    @staticmethod
    def forward(ctx: Any, rounding: Rounding, a: Tensor, b: Tensor) -> Tensor:
        ctx.rounding = rounding
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,), (a, b), products = grads, ctx.saved_tensors, ctx.rounding.products
        of_a = products(torch.matmul, g, b.mT, g.shape[-1]) if ctx.needs_input_grad[1] else None
        return None, of_a, products(torch.matmul, a.mT, g, g.shape[-2])


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, rounding: Rounding, x: Tensor, weight: Tensor) -> Tensor:
        ctx.rounding, ctx.padding = rounding, (weight.shape[2] // 2, weight.shape[3] // 2)
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, padding=ctx.padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,), (x, weight), products = grads, ctx.saved_tensors, ctx.rounding.products

        def back(g: Tensor, weight: Tensor) -> Tensor:
            return F.conv_transpose2d(g, weight, padding=ctx.padding)

        def across(x: Tensor, g: Tensor) -> Tensor:
            return F.conv2d(x.transpose(0, 1), g.transpose(0, 1), padding=ctx.padding).transpose(0, 1)

        of_x = products(back, g, weight, weight[:, 0].numel()) if ctx.needs_input_grad[1] else None
        return None, of_x, products(across, x, g, g[:, 0].numel())


class _Fork(Function):
    @staticmethod
    def forward(ctx: Any, rounding: Rounding, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.rounding = rounding
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, ctx.rounding.add(*grads)


class _Scale(Function):
    @staticmethod
    def forward(ctx: Any, rounding: Rounding, x: Tensor, factor: Tensor) -> Tensor:
        ctx.rounding = rounding
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,), (x, factor) = grads, ctx.saved_tensors
        of_x = ctx.rounding.rounded(g * factor, 1)
        return None, of_x, (g * x).sum_to_size(factor.shape) if ctx.needs_input_grad[2] else None


class _Repeat(Function):
    @staticmethod
    def forward(ctx: Any, rounding: Rounding, x: Tensor, n: int) -> Tensor:
        ctx.rounding = rounding
        return x.expand(n, *x.shape).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, ctx.rounding.sum(grads[0], 0), None


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, rounding: Rounding, table: Tensor, ids: Tensor) -> Tensor:
        ctx.rounding, ctx.ids, ctx.num_rows = rounding, ids.flatten(), len(table)
        return table[ids]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        is_kept = (ctx.ids != 0)[:, None]

        def added(g: Tensor) -> Tensor:
            return g.new_zeros(ctx.num_rows, g.shape[1]).index_add(0, ctx.ids, g * is_kept)

        g = grads[0].flatten(0, -2)
        most = int(ctx.ids.bincount().max())
        return None, ctx.rounding.rounded(added(g), most, lambda: added(g.abs())), None


class _Gelu(Function):
    @staticmethod
    def forward(ctx: Any, rounding: Rounding, x: Tensor) -> Tensor:
        ctx.rounding = rounding
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,), (x,) = grads, ctx.saved_tensors
        slope = (1 + torch.erf(x * math.sqrt(0.5))) / 2 + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return None, ctx.rounding.rounded(g * slope, GELU, g.abs)


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, rounding: Rounding, x: Tensor, error: Tensor) -> Tensor:
        ctx.rounding, p = rounding, x.softmax(-1) + error
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,), (p,), rounded = grads, ctx.saved_tensors, ctx.rounding.rounded
        total = rounded((g * p).sum(-1, keepdim=True), p.shape[-1], lambda: (g * p).abs().sum(-1, True))
        of_x = rounded(p * (g - total), 3, lambda: p * (g.abs() + total.abs()))
        return None, of_x, g


class _LogSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, rounding: Rounding, x: Tensor, error: Tensor) -> Tensor:
        ctx.rounding, log_p = rounding, x.log_softmax(-1) + error
        ctx.save_for_backward(log_p)
        return log_p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Of one class: g is 0 elsewhere, and its sum is no sum."""
        (g,), (log_p,), rounded = grads, ctx.saved_tensors, ctx.rounding.rounded
        p, total = log_p.exp(), g.sum(-1, keepdim=True)
        return None, rounded(g - p * total, 6, lambda: g.abs() + p * total.abs()), g


def _moments(x: Tensor, over: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, centred values, inverse deviation."""
    mean = x.mean(over, keepdim=True)
    centred = x - mean
    return mean, centred, (centred.square().mean(over, keepdim=True) + eps).rsqrt()


def _mean_roundings(k: int) -> int:
    """Of a mean of k values, whether a sum is divided or each value moves the mean, ``m += (x - m) / j``.

    There step j rounds a difference, a reciprocal, a product and a sum, and the later steps shrink its error to j / k
    of it: in all u mean |x| (k + 3 + 3 (1 + 1/2 + .. + 1/k)) at most, and that is below 2 k + 6 for every k.
    """
    return 2 * k + 6


def _variance_mass(centred: Tensor, extent: Tensor, over: tuple[int, ...]) -> Tensor:
    """Every term with the rounding of its difference, which updating takes at about |x| + |mean|."""
    return (centred.square() + 2 * centred.abs() * extent).mean(over, keepdim=True)


class _Norm(Function):
    """``extent``, |x| + |mean|, stands in masses where torch has ``x * scale + shift`` in place of centred values."""

    @staticmethod
    def forward(ctx: Any, rounding: Rounding, over: tuple[int, ...], eps: float, *tensors: Tensor) -> Tensor:
        x, weight, bias, of_mean, of_variance, of_inverse, of_value = tensors
        ctx.rounding, ctx.over, ctx.eps = rounding, over, eps
        ctx.save_for_backward(x, weight)
        centred = x - x.mean(over, keepdim=True) - of_mean
        variance = centred.square().mean(over, keepdim=True) + of_variance
        return centred * ((variance + eps).rsqrt() + of_inverse) * weight + bias + of_value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,), (x, weight), rounded = grads, ctx.saved_tensors, ctx.rounding.rounded
        k, num_summed = math.prod(x.shape[axis] for axis in ctx.over), x.numel() // weight.numel()

        def mean_of(x: Tensor) -> Tensor:
            return x.mean(ctx.over, keepdim=True)

        def total_of(x: Tensor) -> Tensor:
            return x.sum_to_size(weight.shape)

        # the moments once more, with errors of their own
        mean = rounded(mean_of(x), _mean_roundings(k), lambda: mean_of(x.abs()))
        centred, extent = x - mean, x.abs() + mean.abs()
        variance = rounded(mean_of(centred.square()), k + 4, lambda: _variance_mass(centred, extent, ctx.over))
        inverse = rounded((variance + ctx.eps).rsqrt(), 5)
        normal, extent = centred * inverse, extent * inverse
        # gradients
        h = g * weight
        first = rounded(mean_of(h), k + 2, lambda: mean_of(h.abs()))
        second = rounded(mean_of(h * normal), k + 6, lambda: mean_of(h.abs() * extent))
        of_x = inverse * (h - first - normal * second)
        of_x = rounded(of_x, 10, lambda: inverse * (h.abs() + first.abs() + extent * second.abs()))
        of_weight = rounded(total_of(g * normal), num_summed + 4, lambda: total_of(g.abs() * extent))
        of_bias = rounded(total_of(g), num_summed, lambda: total_of(g.abs()))
        # errors of forward
        of_mean, of_inverse = -mean_of(h * inverse) * k, mean_of(h * centred) * k
        of_variance = -0.5 * inverse**3 * of_inverse
        return None, None, None, of_x, of_weight, of_bias, of_mean, of_variance, of_inverse, g
