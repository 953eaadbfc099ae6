"""What a device does in a step, in order: operators, exchanges that begin, and places where it waits for them.

A trace is recorded as if nothing ran beside an exchange. Which exchanges do, and from where to where, is decided here
as the trainer decides it (`nugnn.comm.overlap`, `nugnn.comm.backward_sums`), once for predictions of single devices
(`nugnn.planning.predicted_work`) and for replays of many (`nugnn.planning.replay`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple, get_args

from nugnn.planning.operator_times import is_fetch
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.timeline import Clock
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import Dim, OperatorRecord, Storage, value_of

Passes = Literal["none", "backward", "some", "both"]
"""Passes in which plain sums over neighbours run beside their exchange, as in `nugnn.comm.overlap`.

``both``: forward, all edges from own rows are summed first; ``some``: as many of them as `nugnn.comm.early_rows` says.
"""


class Do(IntEnum):
    """What an instruction is."""

    RUN = 1
    """An operator, whole; views are not among them."""
    RUN_INNER = 2
    """The part of a sum whose source rows are the device's own."""
    RUN_HALO = 3
    """The part whose source rows come from others, or whose results go to them."""
    RUN_EARLY = 4
    """The part of a sum that does not wait for halo rows, as `nugnn.planning.predicted_work.early_share` says."""
    RUN_LATE = 5
    """The rest of it."""
    BEGIN = 6
    """An exchange may begin."""
    WAIT = 7
    """Nothing goes on before the exchange has ended."""


class Instruction(NamedTuple):
    """One of a program.

    Args:
        do: What.
        number: Of the record, or of the exchange in the order of beginnings.
        clock: What the time counts for.
    """

    do: Do
    number: int
    clock: Clock = "compute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One of a program.

    Args:
        record: Its number in the trace; -1 for the loss, which is summed over ranks once an epoch.
        kind: ``fetch`` of halo rows, ``home`` of shares of their gradients, a sum or other collective by its name.
        name: As the record's.
        width: Values of a row; of a sum 1.
        row_bytes: Of a row on the wire, or of a value.
        sent: Rows, or values.
        received: Likewise.
        clock: What waiting for it counts for; as the trainer does it, ``sync`` of whatever is none of halo rows.
        is_gradient: Whether it is a sum of gradients.
        is_aside: Whether it goes through the group in which sums of gradients travel beside backward.
    """

    record: int
    kind: str
    name: str
    width: Dim = 1
    row_bytes: Dim
    sent: Dim
    received: Dim
    clock: Clock = "sync"
    is_gradient: bool = False
    is_aside: bool = False

    @property
    def is_halo(self) -> bool:
        return self.kind in ("fetch", "home")

    def at(self, symbols: Mapping[str, int]) -> Exchange:
        """With numbers in place of formulas; from `PartSizes.symbols`."""
        dims: dict[str, Any] = {
            name: value_of(getattr(self, name), symbols) for name in ("row_bytes", "sent", "received")
        }
        return replace(self, **dims)


@dataclass(frozen=True, slots=True)
class Program:
    """A device's step.

    Args:
        instructions: In order.
        exchanges: In the order in which they begin, the same on all devices of a run.
        early: Records of sums that run early in part, and the exchange of each.
    """

    instructions: tuple[Instruction, ...]
    exchanges: tuple[Exchange, ...]
    early: Mapping[int, int] = field(default_factory=dict)

    def at(self, sizes: PartSizes) -> Program:
        """With numbers in place of formulas."""
        symbols = sizes.symbols()
        return replace(self, exchanges=tuple(exchange.at(symbols) for exchange in self.exchanges))

    def launched(self, trace: StepTrace, *, is_captured: bool) -> list[int]:
        """Of each instruction, how many operators the host has to put into the queue for it.

        Args:
            trace: Of the program.
            is_captured: Whether the passes run as a CUDA graph, which is one launch, at its first operator.
        """
        first_after = after_passes(trace) if is_captured else 0
        counts, has_graph = list[int](), False
        for do, number, _ in self.instructions:
            if do >= Do.BEGIN:
                counts.append(0)
            elif number >= first_after:
                counts.append(trace.operators[number].launches)
            else:
                counts.append(int(not has_graph))
                has_graph = True
        return counts


def after_passes(trace: StepTrace) -> int:
    """The first record after forward, backward and sums of gradients; what comes then is in no CUDA graph.

    `nugnn.step_graphs` records those; clipping and the optimizer are launched one by one.
    """
    first = next((i for i, r in enumerate(trace.operators) if r.phase == "optimizer"), len(trace.operators))
    return max(first, _last_sum(trace) + 1)


def launches_of_graph(trace: StepTrace) -> int:
    """Of a step whose passes run as a CUDA graph: one of the graph, and those of what follows."""
    return 1 + sum(record.launches for record in trace.operators[after_passes(trace) :] if record.kind != "metadata")


def _last_sum(trace: StepTrace) -> int:
    """The last sum of gradients over ranks; -1 without any."""
    return max((i for i, r in enumerate(trace.operators) if _is_gradient(r, trace.storages)), default=-1)


def _is_gradient(record: OperatorRecord, storages: Sequence[Storage]) -> bool:
    """Whether ``record`` is a sum of gradients over ranks."""
    return (
        record.kind == "exchange"
        and record.attrs.get("what") == "all_reduce"
        and any(_category(x.storage, storages) == "gradient" for x in (*record.inputs, *record.outputs))
    )


Loss = Literal["early", "late", "no"]
"""Where the loss is summed over ranks: before backward; at the end of the step; nowhere."""
_LOSS = Exchange(record=-1, kind="all_reduce", name="loss", row_bytes=8, sent=1, received=1)


def loss_of(trace: StepTrace, *, is_nccl: bool) -> Loss:
    """As the trainer does it: of a graph in each step, early where NCCL carries it; of samples once in many steps."""
    if trace.family == "samples" or trace.ranks == 1:
        return "no"
    return "early" if is_nccl else "late"


def passes_of(choice: str, *, is_nccl: bool, num_hosts: int) -> Passes:
    """What the trainer's option ``overlap`` means: see `nugnn.comm.overlap.overlapping_passes`.

    Args:
        choice: ``auto``, ``on``, ``backward`` or ``off``.
        is_nccl: Whether NCCL carries the rows of all ranks.
        num_hosts: GPUs of one host are taken to read each other's memory, as they do over NVLink.

    Raises:
        ValueError: There is no such choice.
    """
    if choice == "auto":
        choice = "on" if is_nccl else "off"
    is_near = is_nccl and num_hosts == 1
    known: dict[str, Passes] = {"on": "some" if is_near else "both", "backward": "backward", "off": "none"}
    if choice not in known:
        raise ValueError(f"overlap is {choice!r}, must be auto, on, backward or off")
    return known[choice]


def make_program(
    trace: StepTrace,
    *,
    overlap: Passes = "none",
    sums_in_backward: bool = True,
    loss: Loss = "no",
) -> Program:
    """The step of ``trace``, whose dimensions may be formulas.

    Args:
        trace: Recorded with ``overlap="off"``.
        overlap: Passes in which plain sums over neighbours run beside their exchange.
        sums_in_backward: Let sums of gradients that were recorded in backward travel while it goes on, and wait for
            them before the optimizer; they are made one by one after backward otherwise.
        loss: See `loss_of`.

    Raises:
        ValueError: There is no such choice.
    """
    if overlap not in get_args(Passes):
        raise ValueError(f"overlap is {overlap!r}, must be none, backward, some or both")
    return _Maker(trace, overlap, sums_in_backward, loss).make()


class _Maker:
    def __init__(self, trace: StepTrace, overlap: Passes, sums_in_backward: bool, loss: Loss) -> None:
        self._operators, self._storages, self._last_sum = trace.operators, trace.storages, _last_sum(trace)
        self._overlap, self._sums_in_backward = overlap, sums_in_backward
        self._loss = loss
        self._instructions: list[Instruction] = []
        self._exchanges: list[Exchange] = []
        self._begun: dict[int, int] = {}
        """Numbers of exchanges that have begun, by record."""
        self._open: list[int] = []
        """Sums of gradients that nobody has waited for."""
        self._early: dict[int, int] = {}
        """Exchanges of sums that run early in part, by record."""
        self._postponed: list[int] = []
        """Records of those that are made after backward."""

    def make(self) -> Program:
        begins_early, waits_late = self._beside_sums()
        fetch_of = {consumer: exchange for exchange, consumer in waits_late.items()}
        begins_after: dict[int, int] = {producer: exchange for exchange, producer in begins_early.items()}
        home_of = self._homes()
        phase = None
        for number, record in enumerate(self._operators):
            if record.phase != phase:
                self._enter(record.phase)
                phase = record.phase
            clock: Clock = "sync" if phase == "optimizer" and number < self._last_sum else "compute"
            if record.kind == "metadata":
                continue
            if record.kind == "exchange":
                self._exchange(number, record, waits_late, home_of)
            elif number in fetch_of:
                self._sum_of_fetched(number, self._begun[fetch_of[number]])
            elif number in home_of:
                self._do(Do.RUN_HALO, number)
                self._begin(home_of[number])
                self._do(Do.RUN_INNER, number)
            else:
                self._do(Do.RUN, number, clock)
            if number in begins_after and begins_after[number] not in self._begun:
                self._begin_fetch(begins_after[number])
        self._enter(None)
        return Program(tuple(self._instructions), tuple(self._exchanges), self._early)

    def _do(self, do: Do, number: int, clock: Clock = "compute") -> None:
        self._instructions.append(Instruction(do, number, clock))

    def _enter(self, phase: str | None) -> None:
        """What happens between two phases."""
        if phase in ("optimizer", None):
            for number in self._postponed:
                self._wait(self._begin(number))
            for exchange in self._open:
                self._wait(exchange)
            self._postponed, self._open = [], []
        if (phase, self._loss) in (("backward", "early"), (None, "late")):
            self._exchanges.append(_LOSS)
            self._do(Do.BEGIN, len(self._exchanges) - 1, _LOSS.clock)
            self._wait(len(self._exchanges) - 1)

    # -- exchanges -----------------------------------------------------------------------------------------------------

    def _exchange(
        self, number: int, record: OperatorRecord, waits_late: dict[int, int], home_of: dict[int, int]
    ) -> None:
        if number in waits_late:
            if number not in self._begun:
                self._begin_fetch(number)
        elif number in home_of.values():
            self._wait(self._begun[number])
            self._do(Do.RUN, number)
        elif _is_gradient(record, self._storages) and record.phase == "backward":
            self._do(Do.RUN, number)
            if self._sums_in_backward:
                self._open.append(self._begin(number))
            else:
                self._postponed.append(number)
        elif record.attrs.get("what") == "halo" and not is_fetch(record):
            self._wait(self._begin(number))
            self._do(Do.RUN, number)
        else:
            self._do(Do.RUN, number)
            self._wait(self._begin(number))

    def _begin_fetch(self, number: int) -> None:
        self._do(Do.RUN, number)  # rows are picked
        self._begin(number)

    def _begin(self, number: int) -> int:
        record = self._operators[number]
        kind, is_halo = record.attrs.get("what", record.op), record.attrs.get("what") == "halo"
        is_gradient = _is_gradient(record, self._storages)
        clock: Clock = "halo" if is_halo else "sync"
        self._exchanges.append(
            Exchange(
                record=number,
                kind=("fetch" if is_fetch(record) else "home") if is_halo else kind,
                name=record.name,
                width=record.sizes["width"],
                row_bytes=record.sizes["row_bytes"],
                sent=record.sizes["sent"],
                received=record.sizes["received"],
                clock=clock,
                is_gradient=is_gradient,
                is_aside=is_gradient and record.phase == "backward" and self._sums_in_backward,
            )
        )
        self._begun[number] = len(self._exchanges) - 1
        self._do(Do.BEGIN, self._begun[number], clock)
        return self._begun[number]

    def _wait(self, exchange: int) -> None:
        self._do(Do.WAIT, exchange, self._exchanges[exchange].clock)

    def _sum_of_fetched(self, number: int, exchange: int) -> None:
        if self._overlap == "both":
            self._do(Do.RUN_INNER, number)
            self._wait(exchange)
            self._do(Do.RUN_HALO, number)
        elif self._overlap == "some":
            self._early[number] = exchange
            self._do(Do.RUN_EARLY, number)
            self._wait(exchange)
            self._do(Do.RUN_LATE, number)
        else:
            self._wait(exchange)
            self._do(Do.RUN, number)

    # -- which run beside others ---------------------------------------------------------------------------------------

    def _beside_sums(self) -> tuple[dict[int, int], dict[int, int]]:
        """Fetches for plain sums: the record after which each begins, and the sum before which it is waited for."""
        begins: dict[int, int] = {}
        waits: dict[int, int] = {}
        if self._overlap == "none":
            return begins, waits
        for number, record in enumerate(self._operators):
            if record.kind != "exchange" or not is_fetch(record) or record.attrs.get("what") != "halo":
                continue
            reader = next(
                (i for i in range(number + 1, len(self._operators)) if self._reads(i, number)), len(self._operators)
            )
            if reader < len(self._operators) and self._is_plain_sum(reader, "forward"):
                waits[number] = reader
                begins[number] = self._rows_are_there(number)
        return begins, waits

    def _rows_are_there(self, number: int) -> int:
        """The record that makes the rows of a fetch, if products alone follow: a layer makes its messages first."""
        producer = max(self._operators[number].depends_on, default=number)
        between = self._operators[producer + 1 : number]
        return producer if all(record.kind in ("product", "metadata") for record in between) else number

    def _homes(self) -> dict[int, int]:
        """Sums that are gradients of plain sums, and the exchange that brings their halo rows home."""
        if self._overlap == "none":
            return {}
        found = {}
        for number, record in enumerate(self._operators):
            if record.kind == "exchange" and record.attrs.get("what") == "halo" and record.phase == "backward":
                producer = max(record.depends_on, default=-1)
                if not is_fetch(record) and producer >= 0 and self._is_plain_sum(producer, "backward"):
                    found[producer] = number
        return found

    def _reads(self, reader: int, written: int) -> bool:
        record = self._operators[reader]
        return record.kind != "metadata" and written in record.depends_on

    def _is_plain_sum(self, number: int, direction: str) -> bool:
        record = self._operators[number]
        words = {"op": "copy_lhs", "reduce": "sum", "direction": direction}
        return record.kind == "spmm" and words.items() <= record.attrs.items()


def _category(storage: int, storages: Sequence[Storage]) -> str:
    return storages[storage].category if storage >= 0 else ""
