"""Along which axis of a matrix buckets of its gradient lie, as measured: with its memory, or across.

The largest values of a bucket set its levels, and small ones beside them drown. In the gradient of a linear layer the
size of a value goes with its input feature: where some features are seldom, values of one row differ by orders of
magnitude, and those of one column do not. Adam divides each value by its own size, so that what is noise there counts
as much as the gradient of any other. So a bucket holds values of the axis along which they are alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nugnn.comm.compression.wire import Wire

_LEAST_GAIN = 0.8
"""Of the squared error; going across costs a copy there and back, and a choice should not change with every look."""
_MOST_BUCKETS = 256


def across(values: Tensor, num_rows: int) -> Tensor:
    """The values of a matrix, column by column.

    Args:
        values: ``(n,)``, row by row.
        num_rows: Divides n.

    >>> across(torch.arange(6), 2).tolist(), across(across(torch.arange(6), 2), 3).tolist()
    ([0, 3, 1, 4, 2, 5], [0, 1, 2, 3, 4, 5])
    """
    return values.view(num_rows, -1).t().reshape(-1)


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


def goes_across(along: float, across: float, *, now: bool) -> bool:
    """Whether buckets lie across from here on, by the squared error of both ways.

    >>> [goes_across(1.0, 0.9, now=now) for now in (False, True)], goes_across(1.0, 0.5, now=False)
    ([False, True], True)
    """
    better, other = (across, along) if now else (along, across)
    return now != (other < _LEAST_GAIN * better)
