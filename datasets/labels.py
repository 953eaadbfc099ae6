"""Class ids from label columns that mark missing values with NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from nugnn.datasets._checks import first_true

_LARGEST_EXACT = 2**24  # beyond it float32 no longer tells neighbouring integers apart


def class_ids(values: Tensor) -> Tensor:
    """Turn a column of labels into class ids, with -1 for each missing one.

    Args:
        values: ``(N,)`` or ``(N, 1)``, integers or floats; NaN and every negative integer mean unlabelled.

    Returns:
        ``(N,)`` int64 with values from -1.

    Raises:
        ValueError: more than one column, or a value that is no integer; names the first such row.

    >>> class_ids(torch.tensor([0.0, float("nan"), 2.0])).tolist()
    [0, -1, 2]
    """
    column = values.squeeze(1) if values.dim() == 2 and values.shape[1] == 1 else values
    if column.dim() != 1:
        raise ValueError(f"labels have shape {tuple(values.shape)}; class labels are one column, (num_nodes,)")
    if not column.is_floating_point():
        return column.to(torch.int64).clamp(min=-1)
    missing = column.isnan()
    filled = torch.where(missing, -1.0, column)
    broken = (filled != filled.round()) | (filled.abs() > _LARGEST_EXACT)
    if broken.any():
        row = first_true(broken)
        raise ValueError(f"label row {row} is {float(column[row])}; class ids are integers from 0, NaN where missing")
    return filled.to(torch.int64).clamp(min=-1)
