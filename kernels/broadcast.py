"""Shapes of operands that meet on an edge: trailing dimensions broadcast as in NumPy, the leading one is the row."""

from __future__ import annotations

import torch
from torch import Tensor

from nugnn.kernels.structure import Structure

BINARY_OPS = ("add", "sub", "mul", "div")
COPY_OPS = ("copy_lhs", "copy_rhs")
_LETTERS = {"u": "source", "v": "destination", "e": "edge"}


def check_rows(name: str, structure: Structure, operand: Tensor, target: str) -> None:
    """Raises ValueError unless ``operand`` has one row per source (u), destination (v) or edge (e)."""
    expected = {"u": structure.num_src, "v": structure.num_dst, "e": structure.num_edges}[target]
    if operand.dim() == 0 or len(operand) != expected:
        raise ValueError(
            f"{name}: the {_LETTERS[target]} operand has shape {tuple(operand.shape)}, the graph has {expected} "
            f"{_LETTERS[target]} rows"
        )


def check_pair(name: str, op: str, lhs: Tensor, rhs: Tensor) -> None:
    """Raises ValueError where two operands cannot meet: different types or devices, arithmetic without a meaning."""
    if lhs.dtype != rhs.dtype or lhs.device != rhs.device:
        raise ValueError(
            f"{name}: operands are {lhs.dtype} on {lhs.device} and {rhs.dtype} on {rhs.device}; convert one of them"
        )
    if lhs.dtype == torch.bool:
        raise ValueError(f"{name}: bool features can be copied and compared (max, min), not combined by {op!r}")
    if op == "div" and not (lhs.is_floating_point() or lhs.is_complex()):
        raise ValueError(
            f"{name}: dividing {lhs.dtype} features would change their type; cast them to a floating dtype"
        )


def align(lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    """Give both the same number of dimensions, with ones after the row dimension, so that trailing ones line up."""
    dims = max(lhs.dim(), rhs.dim())
    return _pad(lhs, dims), _pad(rhs, dims)


def broadcast_features(name: str, lhs: Tensor, rhs: Tensor) -> tuple[int, ...]:
    """Common trailing shape of two aligned operands. Raises ValueError where there is none."""
    try:
        return tuple(torch.broadcast_shapes(lhs.shape[1:], rhs.shape[1:]))
    except RuntimeError:
        raise ValueError(
            f"{name}: feature shapes {tuple(lhs.shape[1:])} and {tuple(rhs.shape[1:])} do not broadcast"
        ) from None


def _pad(x: Tensor, dims: int) -> Tensor:
    return x.reshape(len(x), *[1] * (dims - x.dim()), *x.shape[1:]) if x.dim() < dims else x
