"""Row identity: which node or edge each row of a tensor stands for, carried along by provenance.

A tag is attached where identity is known (graph frames, message-passing results, UDF batches) and follows the
tensor through the functions that `nugnn.kernels.row_rules` lists, each of which keeps rows apart and in order. A
function that is not listed there drops the tag; nothing is inferred from a shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

_ATTRIBUTE = "_nugnn_rows"


@dataclass(frozen=True, eq=False)
class Rows:
    """Identity of the rows of a tensor.

    Args:
        kind: ``node`` or ``edge`` rows of a (possibly split) graph; ``replicated``: same values on every rank.
        ids: ``(n,)`` int64 global ids; None for ``replicated``.
        fold: Consecutive rows per id, for example heads after ``(N, heads, D) -> (N * heads, D)``.
        split: Whether other ranks hold further rows of the same kind.
    """

    kind: Literal["node", "edge", "replicated"]
    ids: Tensor | None = None
    fold: int = 1
    split: bool = False

    def row_ids(self, num_rows: int) -> Tensor:
        """``(num_rows,)`` int64, one id per row, unique within the kind and equal for any number of parts."""
        if self.ids is None:
            return torch.arange(num_rows)
        if self.fold == 1:
            return self.ids
        return (self.ids[:, None] * self.fold + torch.arange(self.fold)).reshape(-1)

    @property
    def num_rows(self) -> int | None:
        return None if self.ids is None else len(self.ids) * self.fold

    def picked(self, index: Any) -> Rows | None:
        """Identity of ``x[index]`` for a slice, a list of rows, or a tensor of rows or flags; None between folds."""
        if self.fold != 1 or self.ids is None:
            return None
        return Rows(self.kind, self.ids[index], 1, self.split)

    def same_as(self, other: Rows) -> bool:
        """Whether both stand for the same rows in the same order."""
        if self is other:
            return True
        if self.kind != other.kind or self.fold != other.fold:
            return False
        if self.ids is None or other.ids is None or self.ids is other.ids:
            return self.ids is other.ids
        return torch.equal(self.ids, other.ids)


REPLICATED = Rows("replicated")


def tag(x: Tensor, rows: Rows | None) -> Tensor:
    """Attach ``rows`` to ``x`` (in place, returns ``x``)."""
    if rows is not None:
        setattr(x, _ATTRIBUTE, rows)
    return x


def untag(x: Tensor) -> None:
    """Forget the identity of ``x``."""
    x.__dict__.pop(_ATTRIBUTE, None)


def rows_of(x: Any) -> Rows | None:
    """The tag of ``x``; parameters are replicated unless tagged otherwise."""
    rows = getattr(x, _ATTRIBUTE, None)
    if rows is None and isinstance(x, torch.nn.Parameter):
        return REPLICATED
    return rows
