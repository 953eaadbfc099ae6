"""Operators with what they took: entries of a table of times, and what of a record an entry is looked up by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from pydantic import Field

from nugnn.kernels.spmm.sums import FEWEST_BYTES
from nugnn.planning.operator_costs import bytes_of, flops_of, item_bytes, number, tensor_bytes
from nugnn.planning.time_curves import Amount
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import Kind, OperatorRecord, Storage, Strict, TensorRecord

Size = Annotated[int, Field(ge=0)]
Quantity = Annotated[float, Field(ge=0, allow_inf_nan=False)]
BY_OPERATIONS = frozenset(("product", "attention"))
"""Kinds whose work is counted in operations; attention on a graph, which has edges, in bytes."""


class OperandShape(Strict):
    """A tensor that an operator reads or makes.

    Args:
        dtype: Torch's name, without ``torch.``.
        shape: None for an axis that grows with the data.
    """

    dtype: str
    shape: tuple[Size | None, ...]


class TimedPoint(Strict):
    """Seconds of an operator at one size.

    Args:
        edges: See `Amount`; ``rest`` too.
        seconds: In the mean over ``count``.
        count: Records of the same step, or of several, that did as much.
    """

    edges: Quantity = 0.0
    rest: Quantity
    seconds: Quantity
    count: int = Field(default=1, ge=1)

    @property
    def amount(self) -> Amount:
        return Amount(self.edges, self.rest)


class TimedOperator(Strict):
    """An operator, and how long it took.

    Args:
        kind: As in `OperatorRecord`.
        op: Likewise.
        attrs: See `attributes_of`.
        inputs: What it reads.
        outputs: What it gives.
        points: Its seconds, by what there was to do.
    """

    kind: Kind
    op: str
    attrs: dict[str, str] = Field(default_factory=dict)
    inputs: tuple[OperandShape, ...] = ()
    outputs: tuple[OperandShape, ...] = ()
    points: tuple[TimedPoint, ...] = Field(min_length=1)


def amount_of(record: OperatorRecord, storages: Sequence[Storage]) -> Amount:
    """What ``record`` has to do: operations of products and of torch's attention, bytes of all others."""
    if record.kind in BY_OPERATIONS and "edges" not in record.sizes:
        return Amount(0.0, flops_of(record))
    moved = bytes_of(record, storages)
    if "edges" not in record.sizes:
        return Amount(0.0, moved)
    edges = number(record.sizes["edges"])
    rows = sum(tensor_bytes(x) for x in record.outputs if x.shape and x.shape[0] != edges)
    rest = min(moved, rows + 4 * number(record.sizes["rows"]))
    return Amount(moved - rest, rest)


def attributes_of(record: OperatorRecord, device: str) -> dict[str, str]:
    """What an entry is looked up by beside types and shapes; ``record`` is at numbers.

    On a CPU large sums over neighbours run another kernel than small ones do, which has a time of its own.
    """
    if device == "cpu" and is_large_sum(record):
        return record.attrs | {"kernel": "vector"}
    return record.attrs


def is_large_sum(record: OperatorRecord) -> bool:
    """Whether a CPU runs the kernel for large sums, see `nugnn.kernels.spmm.sums.serves`."""
    return number(record.sizes.get("edges", 0)) * row_bytes(record) >= FEWEST_BYTES


def row_bytes(record: OperatorRecord) -> int:
    """Of a row that is gathered for an edge by what may be a large sum; 0 for all else."""
    if record.kind not in ("spmm", "sddmm", "attention") or "edges" not in record.sizes:
        return 0
    return number(record.sizes["width"]) * max(4, item_bytes(record.outputs[0].dtype))  # CPUs sum in float32 at least


def operators_at(formulas: StepTrace, at: StepTrace, seconds: Sequence[float]) -> Iterator[TimedOperator]:
    """Entries of one point each, from the seconds of all records of a step.

    Args:
        formulas: The trace, with formulas for what grows with the data.
        at: The same at the sizes that were measured.
        seconds: Of its records; those of metadata are not looked at.
    """
    for record, numbers, taken in zip(formulas.operators, at.operators, seconds, strict=True):
        if record.kind == "metadata":
            continue
        amount = amount_of(numbers, at.storages)
        yield TimedOperator(
            kind=record.kind,
            op=record.op,
            attrs=attributes_of(numbers, at.device),
            inputs=tuple(_operand(x) for x in record.inputs),
            outputs=tuple(_operand(x) for x in record.outputs),
            points=(TimedPoint(edges=amount.edges, rest=amount.rest, seconds=taken),),
        )


def joined_operators(operators: Iterable[TimedOperator]) -> tuple[TimedOperator, ...]:
    """One entry for each operator; points of the same amount become their mean."""
    points: dict[str, dict[Amount, tuple[float, int]]] = {}
    first: dict[str, TimedOperator] = {}
    for each in operators:
        key = each.model_dump_json(exclude={"points"})
        first.setdefault(key, each)
        of_key = points.setdefault(key, {})
        for point in each.points:
            total, count = of_key.get(point.amount, (0.0, 0))
            of_key[point.amount] = total + point.seconds * point.count, count + point.count
    return tuple(
        each.model_copy(
            update={
                "points": tuple(
                    TimedPoint(edges=a.edges, rest=a.rest, seconds=total / count, count=count)
                    for a, (total, count) in sorted(points[key].items())
                )
            }
        )
        for key, each in first.items()
    )


def _operand(x: TensorRecord) -> OperandShape:
    return OperandShape(dtype=x.dtype, shape=tuple(dim if isinstance(dim, int) else None for dim in x.shape))
