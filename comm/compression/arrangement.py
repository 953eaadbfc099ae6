"""How a gradient is arranged in buckets, as measured: with its memory or across, of usual size or of a quarter of it.

The largest values of a bucket set its levels, and small ones beside them drown. In the gradient of a linear layer the
size of a value goes with its input feature: where some features are seldom, values of one row differ by orders of
magnitude, and those of one column do not. Adam divides each value by its own size, so that what is noise there counts
as much as the gradient of any other. So a bucket holds values that are alike, as far as its ends do not cost more than
they bring: a bit more for each value takes the squared error to a quarter, which is the rate at which bytes are paid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nugnn.comm.compression.wire import Wire

_LEAST_GAIN = 0.8
"""Of the cost; going across takes a copy there and back, and a choice should not change with every look."""
_MOST_BUCKETS = 256


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Of one tensor.

    Args:
        is_across: Whether the matrix of its first axis by all others is packed column by column.
        bucket: Values that share their ends.
    """

    is_across: bool
    bucket: int

    @staticmethod
    def choices(bucket: int) -> tuple[Arrangement, ...]:
        """All there are where ``bucket`` is asked for; the first one is the usual one."""
        buckets = dict.fromkeys((bucket, -(-bucket // 4)))
        return tuple(Arrangement(is_across, size) for size in buckets for is_across in (False, True))


def across(values: Tensor, num_rows: int, out: Tensor | None = None) -> Tensor:
    """The values of a matrix, column by column.

    Args:
        values: ``(n,)``, row by row.
        num_rows: Divides n.
        out: ``(n,)``, other memory, to be filled; new memory when None.

    >>> across(torch.arange(6), 2).tolist(), across(across(torch.arange(6), 2), 3).tolist()
    ([0, 3, 1, 4, 2, 5], [0, 1, 2, 3, 4, 5])
    """
    turned = values.view(num_rows, -1).t()
    return turned.reshape(-1) if out is None else out.view(turned.shape).copy_(turned).view(-1)


def rounding_error(x: Tensor, wire: Wire) -> float:
    """Squared error of ``x (n,)`` float32; infinite where it is not finite.

    Of a long vector some buckets stand for all.
    """
    num_buckets = len(x) // wire.bucket
    if num_buckets > _MOST_BUCKETS:
        some = x[: num_buckets * wire.bucket].view(num_buckets, -1)[:: -(-num_buckets // _MOST_BUCKETS)].flatten()
        return rounding_error(some, wire) * (len(x) / len(some))
    back = torch.empty_like(x)
    wire.decode(wire.encode(x), back)
    error = float((back - x).double().square().sum())
    return error if math.isfinite(error) else math.inf


def errors_of(x: Tensor, num_rows: int, name: str, choices: Sequence[Arrangement]) -> list[float]:
    """`rounding_error` of ``x (n,)``, packed row by row, in each arrangement; ``name`` is that of a `Wire`."""
    packed = {False: x, True: across(x, num_rows)}
    return [rounding_error(packed[choice.is_across], Wire(name, choice.bucket)) for choice in choices]


def best(errors: Sequence[float], size: int, name: str, choices: Sequence[Arrangement], now: int) -> int:
    """The number of the arrangement that costs least, or ``now`` where none is a fifth better.

    Args:
        errors: Of each, over all ranks.
        size: Values of the tensor.
        name: Of a `Wire`.
        choices: What there is to choose from.
        now: Number of the present one.

    >>> choices = Arrangement.choices(512)
    >>> [best(errors, 4096, "4bit", choices, 0) for errors in ([1, 0.9, 0.7, 0.7], [1, 0.5, 0.4, 0.1], [0.0] * 4)]
    [0, 3, 0]
    """
    costs = [
        error * 4.0 ** (8 * Wire(name, choice.bucket).num_bytes(size) / max(size, 1))
        for error, choice in zip(errors, choices, strict=True)
    ]
    least = min(range(len(costs)), key=costs.__getitem__)
    return least if costs[least] < _LEAST_GAIN * costs[now] < math.inf else now
