"""How often a step has called each operator of a module, and how each module call began, for one that runs again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nugnn.kernels.rows import Rows, identity_of, tag


class Counts:
    """How often each (module path, kind) has been called.

    Args:
        before: Counts to begin with; not modified.
    """

    __slots__ = ("_before", "_log", "now")

    def __init__(self, before: dict[tuple[str, str], int] | None = None) -> None:
        self._before: dict[tuple[str, str], int] = before or {}
        self._log: list[tuple[str, str]] = []
        self.now = dict(self._before)

    def add(self, key: tuple[str, str]) -> int:
        """Calls of ``key`` before this one."""
        count = self.now.get(key, 0)
        self.now[key] = count + 1
        self._log.append(key)
        return count

    @property
    def position(self) -> int:
        """For `at`; a number instead of a copy, for every module call asks."""
        return len(self._log)

    def at(self, position: int) -> dict[tuple[str, str], int]:
        """The counts as they were there."""
        calls = dict(self._before)
        for key in self._log[:position]:
            calls[key] = calls.get(key, 0) + 1
        return calls


@dataclass(eq=False, slots=True)
class Start:
    """How a module call began: its first tensor and where that lay, the counts, and the identity of all rows."""

    first: weakref.ref[Tensor] | None
    pointer: int
    counts: Counts
    position: int
    rows: tuple[weakref.ref[Rows] | None, ...]


NO_ROWS: tuple[weakref.ref[Rows] | None, ...] = ()


@dataclass
class Counters:
    """How often each (module path, kind) has been called, and how each module call began."""

    counts: Counts = field(default_factory=Counts)
    starts: dict[str, list[Start]] = field(default_factory=dict)

    @property
    def calls(self) -> dict[tuple[str, str], int]:
        return self.counts.now


def identify(path: str, tensors: list[Tensor], start: Start) -> None:
    """Give the arguments of a repeated module call their identity: hooks on what autograd saves make new tensors."""
    for x, identity in zip(tensors, start.rows, strict=False):
        if identity is None or identity_of(x) is not None:
            continue
        if (rows := identity()) is None:
            raise RuntimeError(
                f"{path or 'the model'} is recomputed in backward, and the identity of its input rows is lost. Mark "
                "them inside the module, with nugnn.as_node_rows, nugnn.as_edge_rows or nugnn.as_rows_of."
            )
        tag(x, rows)


def address(x: Tensor) -> int:
    """Where the values of ``x`` lie; a sparse tensor has no storage of its own."""
    with torch._C.DisableTorchFunction():
        if x.layout is torch.strided:
            return x.data_ptr()
        return x.values().data_ptr() if x.layout is torch.sparse_csr else id(x)
