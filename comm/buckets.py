"""Gradients of several parameters as one tensor, in which they travel together, and what rides with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""A small one leaves early; the others are large enough that nobody waits for the start of a sum."""


class Riders(Protocol):
    """Values that are summed over ranks beside gradients, and spare an exchange of their own.

    Attributes:
        dtype: Of the values; they ride with gradients of the same one.
        num_values: As many in each step.
        are_carried: Set where a bucket takes them.
    """

    dtype: torch.dtype
    num_values: int
    are_carried: bool

    def summand(self) -> Tensor:
        """``(num_values,)`` of this rank, as they are when the gradients leave."""
        ...

    def take(self, total: Tensor) -> None:
        """Their sum over ranks."""
        ...


class Bucket:
    """Parameters of one type whose gradients are summed together.

    The tensor ends with a flag for each parameter, so that one sum says too who has which gradient, and nothing waits
    for an answer before. On a CPU it is the same one in each step, and gradients are parts of it from their sum to the
    next step's: new memory has to be made by the system first. On a GPU others can use it in between.

    Args:
        parameters: Of one dtype, on one device; the same on every rank.
        orders: For each the axes in the order in which its values lie in memory; its own order of axes when None.

    Attributes:
        riders: At the end, behind the flags; to be set before the first use.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], orders: Sequence[Sequence[int]] | None = None) -> None:
        self.parameters = list(parameters)
        self.riders: Riders | None = None
        self._orders: list[list[int] | None] = [None] * len(self.parameters)
        if orders is not None:
            self._orders = [None if list(order) == sorted(order) else list(order) for order in orders]
        self._is_present: list[bool] = []
        self._kept: tuple[Tensor, list[Tensor], Tensor, Tensor] | None = None
        """The tensor, and its parts: a gradient of each parameter in its shape; flags; riders."""

    @property
    def orders(self) -> list[list[int] | None]:
        """Of each parameter the axes in the order in which its values are packed; None for its own order of axes."""
        return self._orders

    @property
    def num_plain(self) -> int:
        """Values at the end that are no gradients."""
        return len(self.parameters) + self._num_riders

    @property
    def _num_riders(self) -> int:
        return 0 if self.riders is None else self.riders.num_values

    def packed(self) -> Tensor:
        """The gradients, flags and riders of this rank; zeros where there is no gradient."""
        first = self.parameters[0]
        self._is_present = [p.grad is not None for p in self.parameters]
        if first.device.type == "cpu":
            return self._packed_where_it_was()
        if all(self._is_present):
            flags = torch.ones(len(self.parameters), dtype=first.dtype, device=first.device)
        else:
            flags = torch.tensor(self._is_present, dtype=first.dtype).to(first.device, non_blocking=True)
        pieces = [_flat(p, order) for p, order in zip(self.parameters, self._orders, strict=True)]
        return torch.cat([*pieces, flags, *([] if self.riders is None else [self.riders.summand()])])

    def _packed_where_it_was(self) -> Tensor:
        first = self.parameters[0]
        if self._kept is None or self._kept[0].dtype is not first.dtype:
            size = sum(p.numel() for p in self.parameters) + self.num_plain
            self._kept = self._parts(torch.empty(size, dtype=first.dtype))
        tensor, gradients, flags, riders = self._kept
        with torch.no_grad():
            for parameter, place in zip(self.parameters, gradients, strict=True):
                if (gradient := parameter.grad) is None:
                    place.zero_()
                elif gradient is not place:
                    place.copy_(gradient if gradient.layout is torch.strided else gradient.to_dense())
            flags.fill_(1) if all(self._is_present) else flags.copy_(torch.tensor(self._is_present))
            if self.riders is not None:
                riders.copy_(self.riders.summand())
        return tensor

    def _parts(self, total: Tensor) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
        """``total``, the gradients in it, the flags and the riders."""
        sizes = [*(p.numel() for p in self.parameters), len(self.parameters), self._num_riders]
        *pieces, flags, riders = total.split(sizes)
        shapes = zip(pieces, self.parameters, self._orders, strict=True)
        return total, [shaped(piece, p.shape, order) for piece, p, order in shapes], flags, riders

    def unpack(self, total: Tensor) -> None:
        """Give each parameter, and riders, their part of ``total``, the sum over ranks.

        A parameter of which no rank has a gradient gets none.
        """
        is_kept = self._kept is not None and total is self._kept[0]
        _, gradients, counts, riders = self._kept if is_kept else self._parts(total)  # type: ignore[misc]
        is_somewhere = self._is_present if all(self._is_present) else (counts != 0).tolist()
        for parameter, gradient, somewhere in zip(self.parameters, gradients, is_somewhere, strict=True):
            parameter.grad = gradient if somewhere else None
        if self.riders is not None:
            self.riders.take(riders)


def memory_order(x: Tensor) -> list[int]:
    """Axes of ``x`` from the slowest to the fastest, where its values fill a block of memory; else as they are."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda axis: (-strides[axis], axis))
    return order if x.permute(order).is_contiguous() else list(range(x.dim()))


def _flat(parameter: nn.Parameter, order: list[int] | None) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return parameter.new_zeros(parameter.numel())
    gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    return flat(gradient, order)


def flat(x: Tensor, order: Sequence[int] | None) -> Tensor:
    """The values of ``x`` with its axes in ``order``; as they are when None."""
    return (x if order is None else x.permute(*order)).reshape(-1)


def shaped(piece: Tensor, shape: Sequence[int], order: Sequence[int] | None) -> Tensor:
    """What `flat` was given."""
    if order is None:
        return piece.view(list(shape))
    back = sorted(range(len(order)), key=order.__getitem__)
    return piece.view([shape[axis] for axis in order]).permute(back)
