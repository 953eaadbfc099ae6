"""What a rank still owes to the sums of gradients: of each parameter, in the order in which its values travel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from nugnn.comm.buckets import flat, shaped

Order = Sequence[int] | None
"""Of axes, from the slowest to the fastest, as values are packed; the tensor's own when None."""


class Residuals:
    """What roundings left out: float32 ``(n,)`` for a parameter of n values, without a loss scale.

    Args:
        named: Parameters.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._named = named
        self._kept: dict[str, Tensor] = {}
        self._orders: dict[str, Order] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Itself, not a copy; zeros where nothing was kept."""
        parameter = self._named[name]
        if name not in self._kept:
            self._kept[name] = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        return self._kept[name]

    def tensors(self) -> Iterable[Tensor]:
        """All that are kept, themselves."""
        return self._kept.values()

    def order(self, name: str) -> Order:
        """In which it was last packed."""
        return self._orders[name]

    def pack_as(self, name: str, order: Order) -> None:
        """In which the parameter's values travel from now on."""
        if name in self._kept:
            before = self._kept[name]
            self._kept[name] = self.repacked(before, name, self._orders[name], order)
            is_new = self._kept[name] is not before
            if before.is_cuda and is_new:  # perhaps made on another stream, and free from here on
                before.record_stream(torch.cuda.current_stream(before.device))
        self._orders[name] = order

    def repacked(self, x: Tensor, name: str, before: Order, after: Order) -> Tensor:
        """``x (n,)`` in another order of the parameter's axes."""
        return x if before == after else flat(shaped(x, self._named[name].shape, before), after)

    def commit(self, rests: Mapping[str, Tensor], finite: Tensor) -> None:
        """Keep ``rests``, in the orders packed, unless the scalar ``finite`` is False."""
        if finite.device.type == "cpu":
            if bool(finite):
                self._kept.update(rests)
            return
        for name, rest in rests.items():  # without waiting for an answer
            kept = self[name]
            torch.where(finite, rest, kept, out=kept)
            if rest.is_cuda:  # made on another stream, and free from here on
                rest.record_stream(torch.cuda.current_stream(rest.device))

    def copies(self) -> dict[str, Tensor]:
        """What is kept, by name and in the shape of the parameter."""
        return {
            name: shaped(kept, self._named[name].shape, self._orders[name]).clone() for name, kept in self._kept.items()
        }

    def load(self, copies: Mapping[str, Tensor]) -> None:
        """Keep what `copies` gave, and nothing else.

        Raises:
            ValueError: Shapes are not those of the parameters.
        """
        self._kept.clear()
        for name, kept in copies.items():
            if kept.shape != self._named[name].shape:
                raise ValueError(f"what was kept of {name} has shape {tuple(kept.shape)}, not that of the parameter")
            self._orders[name] = None
            self[name].copy_(kept.reshape(-1))
