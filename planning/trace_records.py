"""What a trace of a training step is made of: operators, tensors, memory, and dimensions that are formulas."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

# fmt: off
Kind = Literal[
    "product", "sparse_product", "spmm", "sddmm", "edge_softmax", "attention", "elementwise", "reduction", "rows",
    "normalisation", "loss", "copy", "optimizer", "exchange", "metadata", "other",
]
# fmt: on
"""What a cost is looked up by; ``docs/replayer.md`` says what belongs where. ``metadata`` reads and writes nothing."""
Phase = Literal["forward", "loss", "backward", "optimizer"]
Category = Literal["parameter", "buffer", "gradient", "optimizer", "input", "activation"]
PHASES: tuple[Phase, ...] = get_args(Phase)

CATEGORIES: tuple[Category, ...] = get_args(Category)

_FORMULA = r"(?:(?P<factor>\d+)\*)?(?P<symbol>[NHLETSB])(?P<offset>[+-]\d+)?"
Dim = int | Annotated[str, Field(pattern=r"^(?:(?:\d+\*)?[NHLETSB](?:[+-]\d+)?|\?.*)$")]
"""A number, or a formula such as ``N``, ``4*E``, ``N+1``; ``?`` and a number for one that could not be told."""


class TraceError(ValueError):
    """A trace cannot be made or read, or does not hold for what was asked."""


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class TensorRecord(Strict):
    """A tensor that an operator reads or makes.

    Args:
        storage: Which of the step's it lies in; -1 for one that an operator makes and gives up inside.
        shape: Of the tensor, which may be a part of its storage, or repeat it.
        dtype: Torch's name, without ``torch.``.
    """

    storage: int
    shape: tuple[Dim, ...]
    dtype: str


class WorkspaceRecord(TensorRecord):
    """Memory that an operator takes while it runs, as one axis.

    Args:
        freed: How many the operator had taken, this one among them, when it gave it up; None where it has not.
    """

    freed: int | None = None


class Storage(Strict):
    """Memory that tensors of the step lie in; its number is its place in the list.

    Args:
        values: How many of ``dtype``.
        dtype: Of the first tensor seen in it.
        category: ``activation`` for all that the step makes and is neither a gradient nor kept by the optimizer.
        made_by: The record that made it; -1 where it was there before.
        freed_by: The last record before it went; None where it stays. -1: before the first record.
        is_saved: Whether autograd kept it for backward.
        name: Of a parameter, or what is known otherwise.
    """

    values: Dim
    dtype: str
    category: Category
    made_by: int
    freed_by: int | None = None
    is_saved: bool = False
    name: str = ""


class OperatorRecord(Strict):
    """One operator.

    Args:
        name: The interceptor's where there is one (``layers.0/spmm``), else module path and torch's operator. In
            backward that of the operator whose gradient this is a part of.
        op: What ran: ``aten.addmm``, ``spmm``, ``_Fetch.backward``.
        kind: Of its cost.
        phase: Of the step.
        inputs: Tensors it reads.
        outputs: Tensors it gives, those that it changes in place among them.
        sizes: What its cost depends on, by kind: ``m``, ``k``, ``n``, ``batch`` of a product; ``rows``, ``sources``,
            ``edges``, ``width`` of an aggregation; ``received``, ``sent``, ``width`` of an exchange.
        attrs: Likewise, in words: ``op``, ``reduce``, ``direction``.
        depends_on: Records that made its inputs, or changed them last.
        workspace: What it takes while it runs, in order, results among them; an operator of torch's own does not say.
        launches: Operators that a GPU's host puts into the queue for it: of the optimizer those of its step.
        within: Kind of the interceptor's call that it is a part of, such as ``batch_norm``; empty without one, and
            in backward.
    """

    name: str
    op: str
    kind: Kind
    phase: Phase
    inputs: tuple[TensorRecord, ...] = ()
    outputs: tuple[TensorRecord, ...] = ()
    sizes: dict[str, Dim] = {}
    attrs: dict[str, str] = {}
    depends_on: tuple[int, ...] = ()
    workspace: tuple[WorkspaceRecord, ...] = ()
    launches: Annotated[int, Field(ge=1)] = 1
    within: str = ""


def value_of(dim: Dim, symbols: Mapping[str, int]) -> int:
    """The number that ``dim`` is.

    Args:
        dim: Not one that could not be told.
        symbols: From `PartSizes.symbols`.
    """
    if isinstance(dim, int):
        return dim
    factor, symbol, offset = parsed(dim)
    return factor * symbols[symbol] + offset


@functools.cache
def parsed(dim: str) -> tuple[int, str, int]:
    """Factor, symbol and offset of a formula."""
    match = re.fullmatch(_FORMULA, dim)
    assert match is not None, dim
    return int(match["factor"] or 1), match["symbol"], int(match["offset"] or 0)


def formula(factor: int, symbol: str, offset: int) -> Dim:
    """``factor * symbol + offset``, as `value_of` reads it."""
    return (f"{factor}*" if factor != 1 else "") + symbol + (f"{offset:+d}" if offset else "")


def dims_of(record: OperatorRecord | Storage) -> Iterator[tuple[str, Dim]]:
    """All dimensions of a record, and where they stand."""
    if isinstance(record, Storage):
        yield "values", record.values
        return
    for where in ("inputs", "outputs", "workspace"):
        for number, tensor in enumerate(getattr(record, where)):
            for axis, dim in enumerate(tensor.shape):
                yield f"{where} {number}, axis {axis}", dim
    yield from record.sizes.items()


def map_dims(record: OperatorRecord, change: Callable[[Dim], Dim]) -> OperatorRecord:
    """``record`` with other dimensions; ``change`` is called in the order of `dims_of`."""
    changed: dict[str, Any] = {}
    for where in ("inputs", "outputs", "workspace"):
        tensors: tuple[TensorRecord, ...] = getattr(record, where)
        changed[where] = tuple(x.model_copy(update={"shape": tuple([change(dim) for dim in x.shape])}) for x in tensors)
    changed["sizes"] = {key: change(dim) for key, dim in record.sizes.items()}
    return record.model_copy(update=changed)
