"""Follows the memory of a training step: the storages that tensors lie in, which operator made each and when it went.

Of operators it knows their numbers alone, and whether one runs now that is a single record whatever it does inside:
what such an operator takes and gives up is its workspace. Storages are held by weak references, which say when they go.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nugnn.planning.trace_records import Category, Storage, TensorRecord, WorkspaceRecord


@dataclass(eq=False, slots=True)
class Memory:
    """A storage while the step runs; what is not named here is as in `Storage`.

    Args:
        category: As far as it is known before the step has ended.
        number: Its place in the list of storages; -1 while it has been seen inside an operator alone.
        given_up: `WorkspaceRecord.freed`, of what an operator has taken inside.
    """

    values: int
    dtype: str
    category: Category
    made_by: int
    name: str
    number: int = -1
    freed_by: int | None = None
    is_saved: bool = False
    given_up: int | None = None


class MemoryFollower:
    """Numbers the memory of all tensors that it is shown, and notes when it goes.

    Attributes:
        operator: Number of the record that is in the making, or comes next; whoever makes the records counts it up.
    """

    def __init__(self) -> None:
        self.operator = 0
        self._numbered: list[Memory] = []
        self._alive: dict[int, Memory] = {}
        self._finalizers: list[Any] = []
        self._taken_inside: list[Memory] | None = None
        self._added_to: tuple[int, int] | None = None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around the step. Afterwards nothing is followed any more, and `storages` can be asked."""
        gc.collect(1)  # what the steps before have left
        was_collecting = gc.isenabled()
        gc.disable()  # memory goes when its last reference goes, and not at some later operator
        try:
            yield
        finally:
            for finalizer in self._finalizers:
                finalizer.detach()
            if was_collecting:
                gc.enable()

    # -- tensors -------------------------------------------------------------------------------------------------------

    def show(self, tensors: Iterable[Tensor], category: Category = "input", name: str = "") -> list[TensorRecord]:
        """The tensors as they lie in memory.

        Args:
            tensors: In place of a sparse one stand its three.
            category: Of memory that has not been seen before: an ``activation`` is made by the present operator,
                everything else was there before the step.
            name: Likewise.
        """
        records = []
        for x in (part for whole in tensors for part in _parts(whole)):
            memory = self._memory_of(x, category, name)
            records.append(TensorRecord(storage=memory.number, shape=tuple(x.shape), dtype=_dtype(x)))
        return records

    def mark_saved(self, x: Tensor) -> None:
        """Autograd keeps ``x`` for backward."""
        for part in _parts(x):
            self._memory_of(part, "input", "").is_saved = True

    def made_by(self, storage: int) -> int:
        """See `Storage`."""
        return self._numbered[storage].made_by

    def expect_addition(self, storage: int) -> None:
        """The present operator adds to what lies in ``storage``: in place, where no mode is on.

        Under one, autograd makes a sum elsewhere, and the storage goes right after it. It is then noted to have gone
        right before, so that the two are never counted together.
        """
        self._added_to = storage, self.operator

    def _memory_of(self, x: Tensor, category: Category, name: str) -> Memory:
        storage = x.untyped_storage()
        key = storage._cdata
        memory = self._alive.get(key)
        if memory is not None:
            if memory.number < 0 and not self.is_inside:
                self._number(memory)
            return memory
        is_made = category == "activation"
        made_by = self.operator if is_made else -1
        memory = Memory(storage.nbytes() // x.element_size(), _dtype(x), category, made_by, name)
        self._alive[key] = memory
        self._finalizers.append(weakref.finalize(storage, self._goes, key))
        if self._taken_inside is None:
            self._number(memory)
        elif is_made:  # else it is how an operator of ours has cut up the structure, kept inside
            self._taken_inside.append(memory)
        return memory

    def _number(self, memory: Memory) -> None:
        memory.number = len(self._numbered)
        self._numbered.append(memory)

    def _goes(self, key: int) -> None:
        memory = self._alive.pop(key)
        if memory.number >= 0:
            memory.freed_by = self.operator if self.is_inside else self.operator - 1
            if self._added_to == (memory.number, memory.freed_by):
                memory.freed_by -= 1
        elif self._taken_inside is not None:
            memory.given_up = sum(each.values > 0 for each in self._taken_inside)

    # -- operators that are single records -----------------------------------------------------------------------------

    @property
    def is_inside(self) -> bool:
        """Whether such an operator runs now."""
        return self._taken_inside is not None

    def begin_inside(self) -> list[Memory]:
        """Such an operator begins; what it takes will stand in the list, for `workspace`."""
        self._taken_inside = []
        return self._taken_inside

    def end_inside(self) -> None:
        """It has ended."""
        self._taken_inside = None

    @contextmanager
    def inside(self) -> Iterator[list[Memory]]:
        """`begin_inside` and `end_inside`, whatever happens between."""
        try:
            yield self.begin_inside()
        finally:
            self.end_inside()

    def workspace(self, taken: Sequence[Memory]) -> tuple[WorkspaceRecord, ...]:
        """What an operator that has ended took inside; what is still alive of it gets a number."""
        for memory in taken:
            if memory.given_up is None:
                self._number(memory)
        return tuple(
            WorkspaceRecord(storage=m.number, shape=(m.values,), dtype=m.dtype, freed=m.given_up)
            for m in taken
            if m.values
        )

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def storages(self, kept: Mapping[Category, Iterable[Tensor]]) -> tuple[Storage, ...]:
        """All memory of the step, by number; to be asked right after it.

        Args:
            kept: Tensors whose memory, where the step made it, is of another category than ``activation``.
        """
        for category, tensors in kept.items():
            for x in tensors:
                memory = self._alive.get(x.untyped_storage()._cdata)
                if memory is not None and memory.category == "activation":
                    memory.category = category
        return tuple(
            Storage(
                values=m.values, dtype=m.dtype, category=m.category, made_by=m.made_by, freed_by=m.freed_by,
                is_saved=m.is_saved, name=m.name,
            )
            for m in self._numbered
        )  # fmt: skip


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """What ``x`` lies in: of a sparse tensor its three."""
    if x.layout is torch.strided:
        return (x,)
    if x.layout is torch.sparse_csr:
        return x.crow_indices(), x.col_indices(), x.values()
    return ()


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
