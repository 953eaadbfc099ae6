"""A training step on any number of unequal devices, replayed from what each of them does: who waits for whom, and when.

Every rank goes through its program (`nugnn.planning.step_program`). A GPU has a host that launches one operator after
the other; the device runs each when it is launched and the one before has ended. An exchange begins when all ranks have
come to it, takes on each rank what the links say, and what needs it waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nugnn._counted import counted
from nugnn.comm.compression.wire import Wire
from nugnn.planning.after_rest import Rests
from nugnn.planning.exchange_seconds import collective_passing_seconds, collective_seconds, taken_seconds
from nugnn.planning.links import Links
from nugnn.planning.operator_costs import number
from nugnn.planning.operator_times import OperatorTimes, host_seconds_of_launch
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.predicted_work import PredictedWork, early_share, halo_share_of
from nugnn.planning.rank_time import RankTime
from nugnn.planning.rested import Rested
from nugnn.planning.step_program import (
    Do,
    Exchange,
    Instruction,
    Passes,
    Program,
    loss_of,
    make_program,
)
from nugnn.planning.timeline import TRANSFER, WAIT, Event, Timeline
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import OperatorRecord, TraceError

Floats = npt.NDArray[np.float64]


def replay(
    steps: Sequence[StepTrace],
    times: Sequence[OperatorTimes],
    links: Links,
    *,
    overlap: Passes = "none",
    sums_in_backward: bool = True,
    gradient_wire: str = "fp32",
    captured: bool | Sequence[bool] = False,
    reads_loss: bool = True,
    halo_shares: Sequence[float] | None = None,
    rows_between: Floats | None = None,
    num_steps: int = 1,
    names: Sequence[str] | None = None,
) -> Timeline:
    """The step of a run.

    Args:
        steps: Of each rank, with numbers for dimensions: see `StepTrace.at`. Ranks with the same object share work.
        times: Of each rank's operators; likewise.
        links: Between the ranks.
        overlap: Passes in which plain sums over neighbours run beside their exchange.
        sums_in_backward: Whether sums of gradients that were recorded in backward travel beside it.
        gradient_wire: How gradients travel: see `nugnn.planning.exchange_seconds.collective_seconds`.
        captured: Whether steps run as CUDA graphs, of all ranks or of each.
        reads_loss: Whether a graph's loss is summed over ranks in each step, as `nugnn.fit` does.
        halo_shares: Of each rank's edges, those from halo rows, by which its sums are divided where they overlap. Where
            None, as if all rows had as many edges.
        rows_between: ``(P, P)`` rows that each rank sends to each other one in a layer; where None, as if nobody
            preferred any peer.
        num_steps: Steps one after the other. The host goes on launching from one to the next, but for graphs, after
            each of which `nugnn.fit` waits for the GPU. Before the first one links have rested.
        names: Of the devices; their types when None.

    Raises:
        TraceError: Ranks do not make the same exchanges in the same order; a step was recorded on one device alone.
        ValueError: There are not as many steps and times as ranks.
    """
    num_ranks = links.num_ranks
    is_captured = [captured] * num_ranks if isinstance(captured, bool) else list(captured)
    for what, given in (("steps", steps), ("times", times), ("captured", is_captured), ("halo_shares", halo_shares)):
        if given is not None and len(given) != num_ranks:
            raise ValueError(
                f"{what} has {counted(len(given), 'entry', 'entries')}; the links connect {counted(num_ranks, 'rank')}"
            )
    programs: dict[int, Program] = {}
    seconds: dict[tuple[int, int], list[float]] = {}
    ranks: list[_Given] = []
    for rank, (step, own) in enumerate(zip(steps, times, strict=True)):
        if id(step) not in programs:
            loss = loss_of(step, is_nccl=links.is_nccl) if reads_loss else "no"
            programs[id(step)] = make_program(step, overlap=overlap, sums_in_backward=sums_in_backward, loss=loss)
        program, key = programs[id(step)], (id(step), id(own))
        if key not in seconds:
            seconds[key] = [own.seconds(record, step.storages) for record in step.operators]
        share = None if halo_shares is None else halo_shares[rank]
        ranks.append(_Given(step, program, seconds[key], own, is_captured[rank], share))
    names = [step.device for step in steps] if names is None else names
    return _replayed(ranks, _Exchanges(links, ranks, rows_between, Wire(gradient_wire)), num_steps, names)


def replay_parts(
    work: PredictedWork,
    parts: Sequence[PartSizes],
    *,
    halo_shares: Sequence[float] | None = None,
    rows_between: Floats | None = None,
    num_steps: int = 1,
    names: Sequence[str] | None = None,
) -> Timeline:
    """`replay` with the devices, links and overlap of a work model, and with seconds from its tables: for many ranks.

    Args:
        work: Of as many devices.
        parts: Of each.
        halo_shares: As for `replay`.
        rows_between: Likewise.
        num_steps: Likewise.
        names: Likewise.

    Raises:
        TraceError: As `replay`; sizes do not fit a trace.
        ValueError: There are not as many parts as devices.
    """
    for what, given in (("parts", parts), ("halo_shares", halo_shares)):
        if given is not None and len(given) != work.num_devices:
            raise ValueError(
                f"{what} has {counted(len(given), 'entry', 'entries')}; the work model has "
                f"{counted(work.num_devices, 'device')}"
            )
    ranks: list[_Given] = []
    known: dict[tuple[int, int, PartSizes], tuple[Program, list[float]]] = {}
    for rank, (device, sizes) in enumerate(zip(work.devices, parts, strict=True)):
        key = id(device.trace), id(device.times), sizes
        if key not in known:
            known[key] = work.program(rank).at(sizes), work.record_seconds(rank, sizes).tolist()
        share = halo_share_of(sizes) if halo_shares is None else halo_shares[rank]
        ranks.append(_Given(device.trace, *known[key], device.times, device.is_captured, share, sizes.edges))
    names = [device.device for device in work.devices] if names is None else names
    return _replayed(ranks, _Exchanges(work.links, ranks, rows_between, work.gradient_wire), num_steps, names)


@dataclass(frozen=True, eq=False, slots=True)
class _Given:
    """What a rank has to do, and how long it takes its device; the same objects for ranks that do the same.

    Args:
        step: Its trace; dimensions may be formulas if ``halo_share`` and ``num_edges`` are given.
        program: Of the step, with numbers.
        seconds: Of each record.
        times: Of its operators.
        is_captured: Whether steps run as CUDA graphs.
        halo_share: Of the edges, those from halo rows; None to tell from each sum.
        num_edges: Likewise.
    """

    step: StepTrace
    program: Program
    seconds: Sequence[float]
    times: OperatorTimes
    is_captured: bool
    halo_share: float | None
    num_edges: int | None = None

    @property
    def key(self) -> Hashable:
        """Equal for ranks that do the same, in the same time."""
        return id(self.program), id(self.seconds), id(self.times), self.is_captured, self.halo_share, self.num_edges


def _replayed(ranks: Sequence[_Given], exchanges: _Exchanges, num_steps: int, names: Sequence[str]) -> Timeline:
    """Ranks that do the same, whose exchanges take as long, do so at the same time: one of each is followed."""
    if len(ranks) > 1 and (alone := [number for number, rank in enumerate(ranks) if rank.step.ranks == 1]):
        raise TraceError(f"the step of rank {alone[0]} was recorded on one device, so it has no exchanges")
    _check_same_exchanges([rank.program for rank in ranks])
    latencies, passings = exchanges.seconds()
    number_of: dict[Hashable, int] = {}
    place = []
    of_wires = np.concatenate([latencies, passings]).T
    for rank, (given, own) in enumerate(zip(ranks, np.ascontiguousarray(of_wires), strict=True)):
        key = given.key, exchanges.key_of(rank), own.tobytes()
        place.append(number_of.setdefault(key, len(number_of)))
    first = [place.index(number) for number in range(len(number_of))]
    followed = [exchanges.rank_on(rank, ranks[rank]) for rank in first]
    _follow(followed, latencies[:, first], passings[:, first], exchanges.burst_seconds, num_steps)
    events, ends = [tuple(each.events) for each in followed], [each.end for each in followed]
    return Timeline(tuple(names), tuple(events[number] for number in place), tuple(ends[number] for number in place))


def _follow(ranks: Sequence[_Rank], latencies: Floats, passings: Floats, burst_seconds: float, num_steps: int) -> None:
    """Some steps of ranks, whose exchanges have these ``(X, P)`` seconds."""
    rested = Rested(burst_seconds, len(ranks))
    for _ in range(num_steps):
        for exchange, (latency, passing) in enumerate(zip(latencies, passings, strict=True)):
            ready = [rank.run_to(exchange) for rank in ranks]
            begin = max(ready)
            seconds = latency + rested.left(begin, passing)
            for rank, come, took in zip(ranks, ready, seconds.tolist(), strict=True):
                rank.exchanged(exchange, come, begin, took)
        for rank in ranks:
            rank.finish()


@dataclass
class _Rank:
    """One rank on its way through its program.

    Args:
        step: Its trace; dimensions may be formulas if ``halo_share`` and ``num_edges`` are given.
        program: Of the step.
        seconds: Of each record.
        launched: Of each instruction, how many operators the host launches for it.
        launch_seconds: Of the host.
        halo_share: Of the edges, those from halo rows; None to tell from each sum.
        num_edges: Likewise.
        taken: What each exchange takes from computing beside it.
        blocks_host: Whether the host waits where the device waits for an exchange.
        time: Of its device.
    """

    step: StepTrace
    program: Program
    seconds: Sequence[float]
    launched: Sequence[int]
    launch_seconds: float
    halo_share: float | None
    num_edges: int | None
    taken: Sequence[float]
    blocks_host: bool
    time: RankTime
    events: list[Event] = field(default_factory=list)
    _host: float = 0.0
    _at: int = 0
    _free: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    """When a process group has done what it was given: that of sums beside backward, and the others."""
    _begun: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """When each exchange could begin here, began on all ranks, and ended here."""

    @property
    def end(self) -> float:
        return max(self._host, self.time.device)

    def run_to(self, exchange: int) -> float:
        """Go on until ``exchange`` may begin here: when that is."""
        while (instruction := self.program.instructions[self._at]) != self._begin_of(exchange):
            self._do(instruction)
        self._at += 1
        return max(self.end, self._free[self.program.exchanges[exchange].is_aside])

    def exchanged(self, exchange: int, ready: float, begin: float, took: float) -> None:
        """It began on all ranks, and took so long here."""
        what = self.program.exchanges[exchange]
        self._begun[exchange] = ready, begin, begin + took
        self._free[what.is_aside] = begin + took
        self.time.travels(begin, begin + took, self.taken[exchange])
        phase = self.step.operators[what.record].phase if what.record >= 0 else "loss"
        if begin > ready:
            self.events.append(Event(what.name, WAIT, phase, "wire", ready, begin - ready, what.clock))
        self.events.append(Event(what.name, what.kind, phase, "wire", begin, took, what.clock))

    def finish(self) -> None:
        """Go on to the end of the step."""
        while self._at < len(self.program.instructions):
            self._do(self.program.instructions[self._at])
        self._at = 0
        self.time.rests.begin_step()
        if self.step.family == "graph":
            self._host = self.time.device = self.end

    def _begin_of(self, exchange: int) -> Instruction:
        return Instruction(Do.BEGIN, exchange, self.program.exchanges[exchange].clock)

    def _do(self, instruction: Instruction) -> None:
        do, which, clock = instruction
        if do == Do.WAIT:
            self._wait(which)
        else:
            assert do != Do.BEGIN, f"exchange {which} begins before its turn"
            record = self.step.operators[which]
            first, count = self._host, self.launched[self._at]
            if count and self.launch_seconds:
                launching = count * self.launch_seconds
                self.events.append(Event(record.name, "launch", record.phase, "host", self._host, launching))
                first, self._host = self._host + self.launch_seconds, self._host + launching
            took = self.seconds[which] * self._share(do, which)
            # several operators in a row, each as long: the device begins with the first, and ends after the last
            start = max(self.time.device, first, self._host - took * (1 - 1 / max(count, 1)))
            took = self.time.computes(start, took)
            self.events.append(Event(record.name, record.kind, record.phase, "device", start, took, clock))
        self._at += 1

    def _share(self, do: Do, which: int) -> float:
        if do == Do.RUN:
            return 1.0
        record = self.step.operators[which]
        share = _halo_share(record) if self.halo_share is None else self.halo_share
        if do in (Do.RUN_EARLY, Do.RUN_LATE):
            num_edges = number(record.sizes["edges"]) if self.num_edges is None else self.num_edges
            share = 1.0 - early_share(self.program.exchanges[self.program.early[which]], num_edges, share)
        return share if do in (Do.RUN_HALO, Do.RUN_LATE) else 1.0 - share

    def _wait(self, exchange: int) -> None:
        what, (ready, begin, end) = self.program.exchanges[exchange], self._begun[exchange]
        phase = self.step.operators[what.record].phase if what.record >= 0 else "loss"
        since = max(self.time.device, ready)
        for kind, until in ((WAIT, begin), (TRANSFER, end)):
            if until > since:
                self.events.append(Event(what.name, kind, phase, "device", since, until - since, what.clock))
                since = until
        self.time.waits(end)
        if self.blocks_host:
            self._host = max(self._host, self.time.device)


def _halo_share(record: OperatorRecord) -> float:
    """Of the edges of a sum over neighbours, those from halo rows, as `halo_share_of` says of a part."""
    rows, sources = number(record.sizes["rows"]), number(record.sizes["sources"])
    inner, local = sorted((rows, sources))
    return (local - inner) / max(local, 1)


class _Exchanges:
    """Seconds of the exchanges of a step, of which ranks share programs."""

    def __init__(self, links: Links, ranks: Sequence[_Given], rows_between: Floats | None, gradient_wire: Wire) -> None:
        self._links, self._rows_between, self._gradient_wire = links, rows_between, gradient_wire
        programs = {id(rank.program): rank.program for rank in ranks}
        self._programs, numbers = list(programs.values()), {known: number for number, known in enumerate(programs)}
        self._program_of = np.array([numbers[id(rank.program)] for rank in ranks])
        self._known: dict[bytes, tuple[Floats, Floats]] = {}

    @property
    def burst_seconds(self) -> float:
        return self._links.burst_seconds

    def key_of(self, rank: int) -> Hashable:
        """Equal for ranks from which exchanges take the same, and for whose hosts they are as much work."""
        links = self._links
        return links.core_seconds_per_byte.get(links.hosts[rank]), links.blocks_host(rank)

    def rank_on(self, rank: int, given: _Given) -> _Rank:
        """A rank before its first step."""
        times, wire, program = given.times, self._gradient_wire, given.program
        return _Rank(
            given.step,
            program,
            given.seconds,
            launched=program.launched(given.step, is_captured=given.is_captured),
            launch_seconds=host_seconds_of_launch(times, is_captured=given.is_captured),
            halo_share=given.halo_share,
            num_edges=given.num_edges,
            taken=[taken_seconds(each, self._links, rank, times, wire) for each in program.exchanges],
            blocks_host=self._links.blocks_host(rank),
            time=RankTime(Rests.of_step(times.after_rest, sum(given.seconds))),
        )

    def seconds(self) -> tuple[Floats, Floats]:
        """``(X, P)`` of each exchange and rank its latency, and while bytes travel over links that had no rest."""
        found = [self._of(exchange) for exchange in range(len(self._programs[0].exchanges))]
        shape = (len(found), len(self._program_of))
        latencies, passings = (np.array([each[i] for each in found], np.float64).reshape(shape) for i in (0, 1))
        return latencies, passings

    def _of(self, exchange: int) -> tuple[Floats, Floats]:
        each = [program.exchanges[exchange] for program in self._programs]
        if not each[0].is_halo:
            most = max(each, key=lambda one: number(one.row_bytes) * number(one.sent))
            whole = collective_seconds(most, self._links, self._gradient_wire)
            passing = collective_passing_seconds(most, self._links, self._gradient_wire)
            count = len(self._program_of)
            return np.full(count, whole - passing), np.full(count, passing)
        per_byte, latency = self._of_rows(each)
        return latency, per_byte * max(number(one.row_bytes) for one in each)

    def _of_rows(self, each: Sequence[Exchange]) -> tuple[Floats, Floats]:
        """Of rows of one byte, and the latency: those that go home take as long as those that came."""
        is_fetch = each[0].kind == "fetch"
        sent, received = np.array([(number(one.sent), number(one.received)) for one in each]).T[:, self._program_of]
        owners, readers = (sent, received) if is_fetch else (received, sent)
        key = owners.tobytes() + readers.tobytes()
        if key not in self._known:
            links, table = self._links, self._rows_between
            self._known[key] = (
                links.spread_seconds(owners, readers)
                if table is None
                else (links.transfer_seconds(table), links.latency_of(table))
            )
        return self._known[key]


def _check_same_exchanges(programs: Sequence[Program]) -> None:
    """Raises TraceError."""
    first, checked = programs[0].exchanges, {id(programs[0])}
    for rank, program in enumerate(programs):
        if id(program) in checked:
            continue
        checked.add(id(program))
        for place, (one, other) in enumerate(zip(first, program.exchanges, strict=False)):
            if _what(one) != _what(other):
                raise TraceError(f"exchange {place} is {_said(one)} on rank 0 and {_said(other)} on rank {rank}")
        if len(first) != len(program.exchanges):
            raise TraceError(
                f"rank 0 makes {counted(len(first), 'exchange')} in a step and rank {rank} {len(program.exchanges)}"
            )


def _what(exchange: Exchange) -> tuple[object, ...]:
    """What has to be the same on all ranks."""
    return exchange.kind, exchange.width, exchange.sent if exchange.kind == "all_reduce" else 0


def _said(exchange: Exchange) -> str:
    values = exchange.sent if exchange.kind == "all_reduce" else exchange.width
    return f"{exchange.kind} of {exchange.name} ({counted(values, 'value')})"
