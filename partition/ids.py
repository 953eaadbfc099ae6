"""Ids and other numbers below a limit as checked arrays, from whatever they come in."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nugnn._counted import counted

ArrayLike: TypeAlias = Any  # tensor, NumPy array or sequence of numbers


def as_array(values: ArrayLike) -> npt.NDArray:
    """In the host's memory, as it is."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def ids_array(values: ArrayLike, limit: int, name: str) -> npt.NDArray:
    """One-dimensional int32 or int64 numbers in ``[0, limit)``.

    Args:
        values: Integers of any type.
        limit: Above all of them.
        name: Of the argument, for errors.

    Raises:
        ValueError: they are not.
    """
    ids = as_array(values)
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must be one-dimensional integers, got shape {ids.shape} of {ids.dtype}")
    if int(ids.min()) < 0 or int(ids.max()) >= limit:
        bad = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
        raise ValueError(f"entry {bad} of {name} is {ids[bad]}; it must be at least 0 and below {limit}")
    return np.ascontiguousarray(ids, np.int32 if ids.dtype == np.int32 else np.int64)


def edge_arrays(src: ArrayLike, dst: ArrayLike, num_nodes: int) -> tuple[npt.NDArray, npt.NDArray]:
    """Both ends of each edge, as :func:`ids_array` has them.

    Args:
        src: ``(E,)`` source of each edge.
        dst: ``(E,)`` destination of each edge.
        num_nodes: N.

    Raises:
        ValueError: an id is out of range, or there are not as many sources as destinations.
    """
    if len(src) != len(dst):
        raise ValueError(
            f"src has {counted(len(src), 'entry', 'entries')} and dst {len(dst)}; each edge needs one of both"
        )
    return ids_array(src, num_nodes, "src"), ids_array(dst, num_nodes, "dst")
