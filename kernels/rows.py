"""Row identity: which node, edge or sample each row of a tensor stands for, carried along by provenance.

A tag is attached where identity is known (graph frames, message-passing results, UDF batches) and follows the
tensor through the functions that `nugnn.kernels.row_rule_table` lists, each of which keeps rows apart and in order. A
function that is not listed there drops the tag; nothing is inferred from a shape alone. Rows lie along axis 0, or
along another axis that the tag names: 1 for sequences of ``(length, batch, width)``.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

_STEP_BITS = 24
"""Of the id of a step, for its number in the sequence; an id has 63 in all."""
ATTRIBUTE = "_nugnn_rows"
"""Where a tensor has its tag; `identity_of` reads it, parameters considered."""


@dataclass(frozen=True, eq=False)
class IdRuns:
    """Global ids that need no number per row: runs of consecutive ids, made into a tensor only while in use.

    Args:
        starts: ``(N,)`` int64, first id of each run.
        indptr: ``(N + 1,)`` int64, where each run begins; ``indptr[-1]`` ids in all.
    """

    starts: Tensor
    indptr: Tensor
    _made: list[weakref.ref[Tensor]] = field(default_factory=list, repr=False)
    _num_ids: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        if self._num_ids < 0:  # asked once: on a GPU it means to wait
            object.__setattr__(self, "_num_ids", int(self.indptr[-1]))

    def __len__(self) -> int:
        return self._num_ids

    def __reduce__(self) -> tuple[type[IdRuns], tuple[Tensor, Tensor]]:
        return IdRuns, (self.starts, self.indptr)

    def tensor(self) -> Tensor:
        """``(len(self),)`` int64; the same tensor as long as somebody holds it."""
        known = self._made[0]() if self._made else None
        if known is None:
            shift = self.starts - self.indptr[:-1]
            known = torch.repeat_interleave(shift, self.indptr.diff(), output_size=len(self))
            known.add_(torch.arange(len(self), device=shift.device))
            self._made[:] = [weakref.ref(known)]
        return known

    @property
    def device(self) -> torch.device:
        return self.starts.device

    def to(self, device: torch.device) -> IdRuns:
        """The same ids on ``device``."""
        if device == self.device:
            return self
        return IdRuns(self.starts.to(device), self.indptr.to(device), _num_ids=len(self))


@dataclass(frozen=True, eq=False)
class Rows:
    """Identity of the rows of a tensor.

    Args:
        kind: ``node`` or ``edge`` rows of a (possibly split) graph; ``sample``: rows of a batch; ``replicated``: same
            values on every rank.
        source: Global ids, ``(n,)`` int64 or `IdRuns`; None for ``replicated``.
        fold: Consecutive rows per id, for example heads after ``(N, heads, D) -> (N * heads, D)``.
        split: Whether other ranks hold further rows of the same kind.
        axis: Of the tensor, along which the rows lie.
        sequences: Whose steps the rows are, where sequences of different lengths are packed, see `steps`.
    """

    kind: Literal["node", "edge", "sample", "replicated"]
    source: Tensor | IdRuns | None = None
    fold: int = 1
    split: bool = False
    axis: int = 0
    sequences: Rows | None = None
    _copies: dict[torch.device, Rows] = field(default_factory=dict, init=False, repr=False)
    _turned: dict[int, Rows] = field(default_factory=dict, init=False, repr=False)
    _home: weakref.ref[Rows] | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[type[Rows], tuple[Any, ...]]:
        return Rows, (self.kind, self.source, self.fold, self.split, self.axis, self.sequences)

    def to(self, device: torch.device) -> Rows:
        """The same identity with its ids on ``device``; copied once, on first use."""
        if self.source is None or self.source.device == device:
            return self
        if device not in self._copies:
            self._copies[device] = replace(self, source=self.source.to(device), _home=None)
        return self._copies[device]

    def at(self, axis: int) -> Rows:
        """The same identity along another axis: one object for each, so that axes which come back bring it back."""
        if axis == self.axis:
            return self
        home = None if self._home is None else self._home()
        if home is None:
            home = self
        if axis == home.axis:
            return home
        if axis not in home._turned:
            home._turned[axis] = replace(self, axis=axis, _home=weakref.ref(home))
        return home._turned[axis]

    @property
    def ids(self) -> Tensor | None:
        """``(n,)`` int64 global ids; None for ``replicated``."""
        return self.source.tensor() if isinstance(self.source, IdRuns) else self.source

    def row_ids(self, num_rows: int) -> Tensor:
        """``(num_rows,)`` int64, one id per row, unique within the kind and equal for any number of parts.

        On the device of the ids; on the CPU where there are none.
        """
        ids = self.ids
        if ids is None:
            return torch.arange(num_rows)
        if self.fold == 1:
            return ids
        return (ids[:, None] * self.fold + torch.arange(self.fold, device=ids.device)).reshape(-1)

    @functools.cached_property
    def num_rows(self) -> int | None:
        return None if self.source is None else len(self.source) * self.fold

    def folded(self, fold: int) -> Rows:
        """The same ids with another number of rows for each."""
        return Rows(self.kind, self.source, fold, self.split, self.axis)

    def picked(self, index: Any) -> Rows | None:
        """Identity of the rows that a slice, a list of rows, or a tensor of rows or flags picks; None between folds."""
        if self.fold != 1 or self.source is None:
            return None
        ids = self.ids
        assert ids is not None
        return Rows(self.kind, ids[index], 1, self.split, self.axis)

    def steps(self, batch_sizes: Tensor) -> Rows | None:
        """Identity of the steps of sequences, packed as `torch.nn.utils.rnn` does; None where rows are folded.

        The id of a step follows from the sequence and its number in it, so that each has a mask of its own.

        Args:
            batch_sizes: ``(steps,)`` int64 on the CPU, how many sequences, of the first ones, have each step.
        """
        if self.fold != 1 or self.source is None:
            return None
        step = torch.repeat_interleave(batch_sizes)
        place = torch.arange(len(step)) - (batch_sizes.cumsum(0) - batch_sizes)[step]
        ids = self.ids
        assert ids is not None
        ids = (ids[place.to(ids.device)] << _STEP_BITS) + step.to(ids.device)
        return Rows(self.kind, ids, 1, self.split, 0, self.at(0))

    def same_as(self, other: Rows) -> bool:
        """Whether both stand for the same rows in the same order, along the same axis."""
        if self is other:
            return True
        if self.kind != other.kind or self.fold != other.fold or self.axis != other.axis:
            return False
        if self.source is other.source:
            return True
        if self.source is None or other.source is None or len(self.source) != len(other.source):
            return False
        return torch.equal(self.ids, other.ids)  # type: ignore[arg-type]


REPLICATED = Rows("replicated")


def tag(x: Tensor, rows: Rows | None) -> Tensor:
    """Attach ``rows`` to ``x`` (in place, returns ``x``)."""
    if rows is not None:
        setattr(x, ATTRIBUTE, rows)
    return x


def untag(x: Tensor) -> None:
    """Forget the identity of ``x``."""
    x.__dict__.pop(ATTRIBUTE, None)


def identity_of(x: Any) -> Rows | None:
    """The tag of ``x``, along whichever axis; parameters are replicated unless tagged otherwise."""
    rows: Rows | None = getattr(x, ATTRIBUTE, None)
    # of a parameter's class every isinstance of a plain tensor is a call of Python
    if rows is None and type(x) is not Tensor and isinstance(x, torch.nn.Parameter):
        return REPLICATED
    return rows


def rows_of(x: Any) -> Rows | None:
    """The tag of ``x`` if its rows lie along axis 0, else None."""
    rows = identity_of(x)
    return None if rows is None or rows.axis else rows
