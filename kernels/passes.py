"""Which time a row goes through an operator in a step, however its batch is cut into calls."""

from __future__ import annotations

import torch
from torch import Tensor

from nugnn.kernels.rows import Rows


class Passes:
    """Names of the calls of one step by which random numbers are drawn.

    An operator that is called again has a number in its name, and so other random numbers. Of samples it is the calls
    before with one of the same samples that count: then it does not matter in how many calls a batch goes through.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._calls: dict[str, list[tuple[Rows | None, int]]] = {}

    def name(self, called: str, rows: Rows | None) -> str:
        """The name by which a call draws; the same for a call that is repeated in backward.

        Args:
            called: Its name by all calls before, such as ``drop/dropout#2``.
            rows: Of the call; those of nodes and edges, and unknown ones, go by ``called``.
        """
        if (known := self._known.get(called)) is not None:
            return known
        base, mark, count = called.rpartition("#")
        if not (mark and count.isdecimal()):
            base, count = called, "0"
        before = self._calls.setdefault(base, [])
        number = int(count)
        if rows is not None and rows.kind == "sample":
            number = max((earlier + 1 for others, earlier in before if _meet(rows, others)), default=0)
        before.append((rows, number))
        self._known[called] = name = f"{base}#{number}" if number else base
        return name


def _meet(rows: Rows, others: Rows | None) -> bool:
    """Whether one sample is in both; assumed where that cannot be seen, or where a GPU would have to be asked."""
    if others is None or others.kind != "sample" or (rows.sequences is None) != (others.sequences is None):
        return True
    a, b = rows.source, others.source
    if a is b or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    if min(len(a), len(b)) == 0:
        return False
    with torch._C.DisableTorchFunction():
        is_one = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        if is_one and a.is_contiguous() and b.is_contiguous():  # slices of one vector
            return a.storage_offset() < b.storage_offset() + len(b) and b.storage_offset() < a.storage_offset() + len(a)
        return a.is_cuda or b.is_cuda or bool(torch.isin(a, b).any())
