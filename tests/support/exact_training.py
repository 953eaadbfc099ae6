"""Trainings of built-in networks as programs of `rounding.Rounding`: forward, backward and every update, in float64.

Written out from the definitions of the networks. Dropout masks are those of `nugnn.kernels.dropout`, drawn by sample.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from nugnn.batches import SplitBatchSampler
from nugnn.kernels.dropout import dropout_rows
from nugnn.kernels.philox import RandomKey
from nugnn.networks import CNN, TransformerClassifier
from rounding import Rounding


@dataclass
class ExactTraining:
    """What a training comes to, all of it differentiable with respect to every rounding error.

    Args:
        rounding: Which knows these.
        losses: Of each epoch, in the mean over samples.
        parameters: After the last step, as the model orders them.
        choices: Of each relu and maximum in each step, see `choice`.
    """

    rounding: Rounding
    losses: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    choices: list[Tensor] = field(default_factory=list)


def choice(layer: nn.Module, x: Tensor) -> Tensor:
    """Which values of ``x`` pass a relu, or are the maxima; -1 for a maximum that no relu before it has let through."""
    if isinstance(layer, nn.ReLU):
        return x > 0
    assert isinstance(layer, nn.MaxPool2d), layer
    most, where = F.max_pool2d(x, layer.kernel_size, ceil_mode=layer.ceil_mode, return_indices=True)
    return where.masked_fill(most == 0, -1)


def train_exactly(
    model: nn.Module, data: TensorDataset, batch_size: int, *, epochs: int, rate: float, seed: int, size: float = 0.0
) -> ExactTraining:
    """What `nugnn.trainer.Trainer` does with a `SampleFamily` of one process and SGD; ``size`` as for `Rounding`."""
    training = ExactTraining(Rounding(size))
    parameters = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    sampler = SplitBatchSampler(len(data), (batch_size,), seed=seed)
    step_size = training.rounding.constant(rate)
    assert isinstance(model, (CNN, TransformerClassifier)), model
    for epoch in range(epochs):
        losses = torch.zeros((), dtype=torch.float64)
        for number, ids in enumerate(sampler.order(epoch).split(batch_size), epoch * sampler.num_batches):
            x, labels = data[ids]
            step = _Step(training, parameters, RandomKey(seed, number, 0), ids)
            logits = _cnn(step, model, x.double()) if isinstance(model, CNN) else _transformer(step, model, x)
            loss = training.rounding.cross_entropy(logits, labels)
            gradients = torch.autograd.grad(loss, [*parameters.values()], create_graph=True)
            after = zip(parameters.items(), gradients, strict=True)
            parameters = {name: training.rounding.stepped(p, g, step_size) for (name, p), g in after}
            losses = losses + loss * len(ids)
        training.losses.append(losses / len(data))
    training.parameters = [*parameters.values()]
    return training


@dataclass(frozen=True)
class _Step:
    """Forward of a step: the operators that have parameters, or a mask, by name."""

    training: ExactTraining
    parameters: dict[str, Tensor]
    key: RandomKey
    ids: Tensor

    @property
    def r(self) -> Rounding:
        return self.training.rounding

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.r.linear(x, self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"])

    def convolution(self, name: str, x: Tensor) -> Tensor:
        return self.r.convolution(x, self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias"))

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        return self.r.norm(x, self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"], [-1])

    def batch_norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.parameters[f"{name}.{of}"].view(1, -1, 1, 1) for of in ("weight", "bias"))
        return self.r.norm(x, weight, bias, [0, 2, 3])

    def is_kept(self, name: str, p: float, like: Tensor) -> Tensor:
        key = RandomKey(self.key.seed, self.key.step, zlib.crc32(f"{name}/dropout".encode()))
        return dropout_rows(torch.ones_like(like, dtype=torch.float64), p, key, self.ids) > 0

    def dropout(self, name: str, p: float, x: Tensor) -> Tensor:
        return self.r.scale(x, self.is_kept(name, p, x.detach()) * self.r.constant(1 / (1 - p)))


def _cnn(step: _Step, model: CNN, x: Tensor) -> Tensor:
    for name, layer in model.features.named_children():
        if isinstance(layer, nn.Conv2d):
            x = step.convolution(f"features.{name}", x)
        elif isinstance(layer, nn.BatchNorm2d):
            x = step.batch_norm(f"features.{name}", x)
        else:
            step.training.choices.append(choice(layer, x.detach()))
            x = layer(x)
    assert x.shape[2:] == (model.regions,) * 2, f"the mean of each region is one of a single pixel, not of {x.shape}"
    return step.linear("classify", step.dropout("dropout", model.dropout.p, x.flatten(1)))


def _transformer(step: _Step, model: TransformerClassifier, ids: Tensor) -> Tensor:
    r, p, is_token = step.r, model.dropout.p, ids != 0
    is_kept = step.is_kept("token_dropout", model.token_dropout.p, is_token)
    ids = ids.masked_fill(is_token & ~is_kept, 1)
    x, beside = r.fork(r.take(step.parameters["tokens.weight"], ids))
    x = r.add(x, r.gelu(step.convolution("convolution", beside.transpose(1, 2))).transpose(1, 2))
    places = r.repeat(step.parameters["places.weight"][: ids.shape[1]], len(ids))
    x = step.dropout("dropout", p, r.add(x, places))
    blocks: Any = model.blocks
    for number, block in enumerate(blocks):
        x = _block(step, f"blocks.{number}", p, block.attention.heads, x, is_token)
    x = step.layer_norm("norm", x).masked_fill(~is_token[..., None], 0)
    return step.linear("classify", r.scale(r.sum(x, 1), 1 / is_token.sum(1, keepdim=True).double()))


def _block(step: _Step, name: str, p: float, heads: int, x: Tensor, is_token: Tensor) -> Tensor:
    r, (n, length, width) = step.r, x.shape
    x, beside = r.fork(x)
    projected = step.linear(f"{name}.attention.project", step.layer_norm(f"{name}.before", beside))
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in projected.chunk(3, dim=-1))
    scores = r.scale(r.matmul(q, k.mT), r.constant(1 / math.sqrt(width // heads)))
    weights = r.softmax(scores.masked_fill(~is_token[:, None, None, :], -torch.inf))
    mixed = r.matmul(step.dropout(f"{name}.attention.dropout", p, weights), v)
    merged = step.linear(f"{name}.attention.merge", mixed.transpose(1, 2).reshape(n, length, width))
    x, beside = r.fork(r.add(x, step.dropout(f"{name}.dropout.0", p, merged)))
    hidden = r.gelu(step.linear(f"{name}.widen", step.layer_norm(f"{name}.between", beside)))
    narrowed = step.linear(f"{name}.narrow", step.dropout(f"{name}.dropout.1", p, hidden))
    return r.add(x, step.dropout(f"{name}.dropout.2", p, narrowed))
