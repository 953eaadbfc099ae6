"""Gradients of a script's first steps after a resume, summed in the buckets of the run that its state is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nugnn.comm.compression.residuals import Order

Sum = Callable[[Tensor, Sequence[str], Sequence[Order]], Any]
"""Of ``values (n,)``, in place: gradients of parameters, by name, and the order in which each one's values come."""


@dataclass(frozen=True)
class Bucket:
    """What DistributedDataParallel hands over at once.

    Args:
        values: ``(n,)`` gradients, one parameter behind the other.
        names: Of the parameters.
        orders: In which the values of each come.
        sizes: Number of values of each.
        target: ``(n,)`` where the sums have to be in the end, of any floating type; ``values`` itself, mostly.
    """

    values: Tensor
    names: Sequence[str]
    orders: Sequence[Order]
    sizes: Sequence[int]
    target: Tensor

    def put(self) -> None:
        """Have the sums where they have to be."""
        if self.target is not self.values:
            self.target.copy_(self.values)


class EarlierBuckets:
    """Holds buckets back until a step's last one has come, and sums them as others.

    DistributedDataParallel lays its buckets out anew after the first step of a process, or the second one of a model
    whose graph is static, in the order in which gradients were made. Which rank adds up which values depends on that,
    and with it what each keeps of their rounding: a resumed script would go on in other bits from its first step on.

    Args:
        names: Of each bucket of the step before the state was taken, in order.
        num_steps: For which they count.
    """

    def __init__(self, names: Sequence[Sequence[str]], num_steps: int = 1) -> None:
        self._names, self._held, self._steps_left = names, list[Bucket](), num_steps

    @property
    def is_done(self) -> bool:
        """Whether all steps for which they count have been summed."""
        return self._steps_left <= 0

    def hold(self, bucket: Bucket) -> None:
        """Keep it until `sum_`; its values stay where they are."""
        self._held.append(bucket)

    def forget(self) -> None:
        """What was held: of a step that did not come to its end."""
        self._held.clear()

    def sum_(self, sum_: Sum) -> list[list[str]]:
        """Call ``sum_`` for the earlier buckets, or for those that were held where these have other gradients.

        Returns:
            Names of the gradients in each bucket that was summed.
        """
        parts = {
            name: (part, order)
            for bucket in self._held
            for name, part, order in zip(
                bucket.names, bucket.values.split([*bucket.sizes]), bucket.orders, strict=True
            )
        }  # fmt: skip
        if sorted(name for names in self._names for name in names) != sorted(parts):
            summed_in = [[*bucket.names] for bucket in self._held]
            for bucket in self._held:
                sum_(bucket.values, bucket.names, bucket.orders)
        else:
            summed_in = [[*names] for names in self._names]
            for names in self._names:
                values = torch.cat([parts[name][0] for name in names])
                sum_(values, names, [parts[name][1] for name in names])
                for name, summed in zip(names, values.split([len(parts[name][0]) for name in names]), strict=True):
                    parts[name][0].copy_(summed)
        for bucket in self._held:
            bucket.put()
        self.forget()
        self._steps_left -= 1
        return summed_in
