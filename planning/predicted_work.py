"""What a part costs a device, from the trace of a step: the work model that shares and partitions are made with.

A device's seconds are its own: its operators, and its exchanges as if all others were ready. Who waits for whom is for
`nugnn.planning.replay`, which needs all parts at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nugnn.comm.compression.wire import Wire
from nugnn.comm.early_rows import edges_begun_early
from nugnn.planning.after_rest import Rests
from nugnn.planning.links import Links
from nugnn.planning.measured_peaks import MeasuredPeaks
from nugnn.planning.operator_costs import number
from nugnn.planning.operator_times import OperatorTimes, host_seconds_of_launch
from nugnn.planning.part_memory import KeptStructure, PeakTable
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.process_memory import RUNTIME_BYTES
from nugnn.planning.profiles import DeviceKind
from nugnn.planning.rank_link import RankLink
from nugnn.planning.rank_time import RankTime
from nugnn.planning.rested import Rested
from nugnn.planning.seconds_table import SecondsTable
from nugnn.planning.step_program import Do, Exchange, Passes, Program, loss_of, make_program
from nugnn.planning.trace import StepTrace

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DeviceWork:
    """A device and the step that it makes.

    Args:
        trace: The step on this type of device; the same object for all devices that make the same, so that tables are
            shared.
        times: Of its operators; likewise.
        runtime_bytes: Of its memory that is in use whatever the part, NCCL's buffers included; those of
            `nugnn.planning.process_memory.RUNTIME_BYTES` when None.
        is_captured: Whether steps run as CUDA graphs: see `nugnn.planning.step_program.Program.launched`.
        kind: Of the device; the trace's when None. A CPU's trace may stand for that of a GPU which nobody here has.
        peaks: Memory that such steps took on it, which corrects what the trace says.
    """

    trace: StepTrace
    times: OperatorTimes
    runtime_bytes: int | None = None
    is_captured: bool = False
    kind: DeviceKind | None = None
    peaks: MeasuredPeaks | None = None

    @property
    def device(self) -> str:
        """Type of the device."""
        return self.kind or self.trace.device


class PredictedWork:
    """See `nugnn.planning.work_model.WorkModel`; sums, halo rows and memory of a training step on each device.

    Args:
        devices: One for each part; kept as an attribute, as are the links.
        links: Between them; those of a single device when None.
        overlap: Passes in which plain sums over neighbours run beside their exchange: see `make_program`.
        sums_in_backward: Whether sums of gradients travel beside backward.
        gradient_wire: How gradients travel, one of `nugnn.comm.compression.wire.WIRES`: see `collective_seconds`.
        steps_per_epoch: Optimizer steps; one of a graph.

    Raises:
        ValueError: There is no device, or there are not as many as the links connect.
        TraceError: A trace cannot be scaled.
    """

    def __init__(
        self,
        devices: Sequence[DeviceWork],
        links: Links | None = None,
        *,
        overlap: Passes = "none",
        sums_in_backward: bool = True,
        gradient_wire: str = "fp32",
        steps_per_epoch: int = 1,
        _known: dict[tuple[int, int, str, Passes, bool, bool], _Tables] | None = None,
    ) -> None:
        links = Links.alone() if links is None and len(devices) == 1 else links
        if not devices or links is None or links.num_ranks != len(devices):
            raise ValueError(f"{len(devices)} devices, and links between {links.num_ranks if links else 'no'} ranks")
        self.devices, self.links, self.gradient_wire = tuple(devices), links, Wire(gradient_wire)
        self._steps_per_epoch = steps_per_epoch
        self._overlap, self._sums_in_backward = overlap, sums_in_backward
        self._known = {} if _known is None else _known
        self._tables: list[_Tables] = []
        self._parts: list[_Part | None] = [None] * len(devices)
        for device in devices:
            key = id(device.trace), id(device.times), device.device, overlap, sums_in_backward, links.is_nccl
            if key not in self._known:
                alike = next((tables for known, tables in self._known.items() if known[:2] == key[:2]), None)
                self._known[key] = _Tables(device, overlap, sums_in_backward, is_nccl=links.is_nccl, alike=alike)
            self._tables.append(self._known[key])

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def among(self, ranks: Sequence[int], overlap: Passes | None = None) -> PredictedWork:
        """Of a run of some of the devices alone, numbered in the order given; it shares this one's tables.

        Args:
            ranks: Which devices.
            overlap: As for `PredictedWork`; this one's when None.
        """
        return PredictedWork(
            [self.devices[rank] for rank in ranks],
            self.links.among(ranks),
            overlap=self._overlap if overlap is None else overlap,
            sums_in_backward=self._sums_in_backward,
            gradient_wire=self.gradient_wire.name,
            steps_per_epoch=self._steps_per_epoch,
            _known=self._known,
        )

    def computing(self) -> PredictedWork:
        """The same devices, whose exchanges take no time: what the clock of a run counts as computing.

        What a device does for rows that travel counts, too: it picks them, and copies or adds what has come.
        """
        links = self.links
        free = Links.equal(links.num_ranks, math.inf, is_nccl=links.is_nccl)
        return PredictedWork(
            self.devices,
            free,
            overlap=self._overlap,
            sums_in_backward=self._sums_in_backward,
            gradient_wire=self.gradient_wire.name,
            steps_per_epoch=self._steps_per_epoch,
            _known=self._known,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """As it was made: what tables know is found anew, and they are shared by identities that do not travel."""
        how = self._overlap, self._sums_in_backward, self.gradient_wire.name, self._steps_per_epoch
        return _made, (self.devices, self.links, *how)

    def _part(self, rank: int) -> _Part:
        part = self._parts[rank]
        if part is None:
            part = self._parts[rank] = _Part(self.devices[rank], self._tables[rank], self, rank)
        return part

    def program(self, part: int) -> Program:
        """The step of a device, with formulas for what it exchanges."""
        return self._tables[part].program

    def record_seconds(self, part: int, sizes: PartSizes) -> Floats:
        """``(R,)`` seconds of each record of its trace.

        Raises:
            TraceError: As `seconds`.
        """
        self.devices[part].trace.check(sizes)
        return self._tables[part].seconds.seconds(sizes)

    def seconds(self, part: int, sizes: PartSizes) -> float:
        """Seconds of an epoch on the device, if it never has to wait for another one.

        Raises:
            TraceError: The sizes are of the other family of data, or have a halo and the trace has none.
        """
        return self._steps_per_epoch * self._part(part).seconds(sizes)

    def bytes(self, part: int, sizes: PartSizes) -> int:
        """Most bytes of its memory that are in use at once; the sum of `memory`."""
        return sum(self.memory(part, sizes).values())

    def memory(self, part: int, sizes: PartSizes) -> dict[str, int]:
        """Of them ``step`` (what the trace holds at its peak, corrected by what was measured), ``structure`` (kept
        beside it) and ``runtime``.
        """
        return self._part(part).memory(sizes)


def _made(
    devices: Sequence[DeviceWork], links: Links, overlap: Passes, sums_in_backward: bool, wire: str, steps: int
) -> PredictedWork:
    how: dict[str, Any] = {"overlap": overlap, "sums_in_backward": sums_in_backward}
    return PredictedWork(devices, links, gradient_wire=wire, steps_per_epoch=steps, **how)


def halo_share_of(sizes: PartSizes) -> float:
    """Of a part's edges, those from halo rows, where only its counts are known: as if all rows had as many edges."""
    return sizes.halo / max(sizes.local, 1)


def early_share(exchange: Exchange, num_edges: int, halo_share: float) -> float:
    """Of a sum over ``num_edges`` edges, how much of it is done before the halo rows of ``exchange`` are waited for.

    Args:
        exchange: With numbers.
        num_edges: All of the sum.
        halo_share: Of them, those from halo rows.
    """
    num_rows = max(number(exchange.sent), number(exchange.received))
    early = edges_begun_early(num_rows, number(exchange.row_bytes))
    return (1.0 - halo_share) * min(1.0, early / max(num_edges, 1))


class _Tables:
    """What devices share that make the same step in the same times.

    Tables of operators, which take long to fill, are those of ``alike``, where the step lets other passes overlap.
    """

    def __init__(
        self, device: DeviceWork, overlap: Passes, sums_in_backward: bool, *, is_nccl: bool, alike: _Tables | None
    ) -> None:
        trace = device.trace
        self.seconds: SecondsTable = SecondsTable(trace, device.times) if alike is None else alike.seconds
        self.peak: PeakTable = PeakTable(trace) if alike is None else alike.peak
        self.structure = KeptStructure(trace, overlap, device=device.device)
        how = loss_of(trace, is_nccl=is_nccl)
        self.program = make_program(trace, overlap=overlap, sums_in_backward=sums_in_backward, loss=how)


class _Part:
    def __init__(self, device: DeviceWork, tables: _Tables, work: PredictedWork, rank: int) -> None:
        trace, program, link = device.trace, tables.program, work.links.of_rank(rank)
        self.tables, self._trace, self._peaks = tables, trace, device.peaks
        self._wires = [_OwnExchange(exchange, work, link) for exchange in program.exchanges]
        self._aside = [(i, exchange) for i, exchange in enumerate(program.exchanges) if exchange.is_aside]
        self._fetches_beside = [program.exchanges[exchange] for exchange in program.early.values()]
        self._times = device.times
        self._how_taken = work.links, rank, device.times, work.gradient_wire
        launched = program.launched(trace, is_captured=device.is_captured)
        launch = host_seconds_of_launch(device.times, is_captured=device.is_captured)
        self._burst_seconds = work.links.burst_seconds
        self._walk = _Walk(program, launched, launch, blocks_host=work.links.blocks_host(rank))
        self._runtime = RUNTIME_BYTES[device.device] if device.runtime_bytes is None else device.runtime_bytes

    def seconds(self, sizes: PartSizes) -> float:
        self._trace.check(sizes)
        symbols = sizes.symbols()
        wires = [wire.seconds(symbols) for wire in self._wires]
        passing = [wire.passing_seconds(symbols) for wire in self._wires] if self._burst_seconds else []
        taken = {i: taken_seconds(exchange.at(symbols), *self._how_taken) for i, exchange in self._aside}
        of_record = self.tables.seconds.seconds(sizes)
        time = RankTime(Rests.of_step(self._times.after_rest, float(of_record.sum())))
        rested = Rested(self._burst_seconds, 1)
        halo_share = halo_share_of(sizes)
        early = [early_share(each.at(symbols), sizes.edges, halo_share) for each in self._fetches_beside]
        return self._walk.seconds(of_record, wires, halo_share, early, taken, time, rested, passing)

    def memory(self, sizes: PartSizes) -> dict[str, int]:
        self._trace.check(sizes)
        tables, step = self.tables, self.tables.peak.bytes(sizes)
        if self._peaks is not None:
            step = self._peaks.bytes(step)
        return {"step": step, "structure": tables.structure.bytes(sizes), "runtime": self._runtime}


def collective_seconds(exchange: Exchange, links: Links, gradient_wire: Wire) -> float:
    """Of an exchange that is none of halo rows, from when all ranks have come.

    Gradients that do not travel as they are go to their owners in few bits, and their sums back; all of them count as
    compressed, and what coding takes does not.

    Args:
        exchange: With numbers.
        links: Between the ranks.
        gradient_wire: Of gradients.
    """
    values = number(exchange.sent)
    if exchange.is_gradient and gradient_wire.name != "fp32":
        return links.coded_sum_seconds(gradient_wire.num_bytes(values))
    num_bytes = number(exchange.row_bytes) * values
    return links.collective_seconds(exchange.kind, num_bytes, is_aside=exchange.is_aside)


def collective_passing_seconds(exchange: Exchange, links: Links, gradient_wire: Wire) -> float:
    """Of what `collective_seconds` says, the part in which bytes are on their way; known of plain sums alone."""
    if exchange.kind != "all_reduce" or (exchange.is_gradient and gradient_wire.name != "fp32"):
        return 0.0
    return links.passing_seconds(number(exchange.row_bytes) * number(exchange.sent), is_aside=exchange.is_aside)


def taken_seconds(exchange: Exchange, links: Links, rank: int, times: OperatorTimes, gradient_wire: Wire) -> float:
    """What a sum of gradients that travels beside backward takes from computing on the same cores, at most.

    Args:
        exchange: With numbers; any other than such a sum takes nothing, and nor do gradients in few bits, of which
            nobody has measured it.
        links: Between the ranks.
        rank: Which of them computes.
        times: Of its operators. Those of a device with a host that launches them do not run on the host's cores.
        gradient_wire: Of gradients.
    """
    if not exchange.is_aside or gradient_wire.name != "fp32" or times.launch_seconds > 0:
        return 0.0
    return links.core_seconds(rank, number(exchange.row_bytes) * number(exchange.sent)) / times.multiprocessors


class _OwnExchange:
    """An exchange of one device whose peers are ready."""

    def __init__(self, exchange: Exchange, work: PredictedWork, link: RankLink) -> None:
        self._exchange, self._work, self._link = exchange, work, link
        is_fixed = not exchange.is_halo and isinstance(exchange.sent, int)
        self._fixed = collective_seconds(exchange, work.links, work.gradient_wire) if is_fixed else None

    def seconds(self, symbols: Mapping[str, int]) -> float:
        if self._fixed is not None:
            return self._fixed
        exchange = self._exchange.at(symbols)
        if not exchange.is_halo:
            return collective_seconds(exchange, self._work.links, self._work.gradient_wire)
        row_bytes = number(exchange.row_bytes)
        return self._link.seconds(row_bytes * number(exchange.sent), row_bytes * number(exchange.received))

    def passing_seconds(self, symbols: Mapping[str, int]) -> float:
        """Of them, those in which bytes are on their way."""
        exchange = self._exchange.at(symbols)
        if exchange.is_halo:
            seconds = self.seconds(symbols)
            return seconds - self._link.latency_seconds if seconds else 0.0
        return collective_passing_seconds(exchange, self._work.links, self._work.gradient_wire)


class _Walk:
    """Host and device of one rank with nobody to wait for, in a few array operations.

    Between exchanges the host launches one operator after the other, and the device runs each when it is launched and
    the one before has ended. When a stretch of operators ends follows from where host and device were at its begin: it
    is the later one of two sums, all operators after the device's time, and the largest of launches followed by
    operators after the host's. Several launches of an instruction are as many operators in a row, each as long; of
    these the first or the last decides.

    Args:
        program: Of the device.
        launched: Of each instruction, how many operators the host launches for it.
        launch_seconds: Of the host.
        blocks_host: Whether the host waits where the device waits for an exchange.
    """

    def __init__(self, program: Program, launched: Sequence[int], launch_seconds: float, *, blocks_host: bool) -> None:
        order: list[int] = []
        starts: list[int] = []
        firsts: list[int] = []
        launches: list[int] = []
        kinds: list[Do] = []
        self._steps: list[tuple[Do, int]] = []
        is_open = False
        for (do, which, _), count in zip(program.instructions, launched, strict=True):
            if do >= Do.BEGIN:
                self._steps.append((do, which))
            else:
                if not is_open:
                    self._steps.append((Do.RUN, len(starts)))
                    starts.append(len(order))
                before = launches[-1] if is_open else 0
                order.append(which)
                firsts.append(before + min(count, 1))
                launches.append(before + count)
                kinds.append(do)
            is_open = do < Do.BEGIN
        self._order, self._starts = np.array(order, np.intp), np.array(starts, np.intp)
        self._segment = np.repeat(np.arange(len(starts)), np.diff([*starts, len(order)]))
        self._first, self._launched = launch_seconds * np.array(firsts), launch_seconds * np.array(launches)
        counts = 1 + np.array(launches) - np.array(firsts)
        self._before_last = 1 - 1 / counts
        self._has_rows = launch_seconds > 0 and bool((counts > 1).any())
        self._of_host = self._launched[np.append(self._starts[1:], len(order)) - 1].tolist()
        self._inner, self._halo, self._early, self._late = (
            np.array([place for place, do in enumerate(kinds) if do == which], np.intp)
            for which in (Do.RUN_INNER, Do.RUN_HALO, Do.RUN_EARLY, Do.RUN_LATE)
        )
        self._blocks_host, self._num_exchanges = blocks_host, len(program.exchanges)

    def seconds(
        self,
        of_record: Floats,
        wires: Sequence[float],
        halo_share: float,
        early_shares: Sequence[float],
        taken: Mapping[int, float],
        time: RankTime,
        rested: Rested,
        passing: Sequence[float],
    ) -> float:
        """Until both have done all.

        Args:
            of_record: ``(R,)`` device seconds of each record.
            wires: Seconds of each exchange.
            halo_share: Of the edges, those from halo rows.
            early_shares: Of each sum that runs early in part, in their order, how much of it does.
            taken: What exchanges take from computing beside them; none where a host launches operators.
            time: Of the device, at the begin of a step.
            rested: How long its link has rested.
            passing: Seconds of each exchange in which bytes are on their way; none where a rested link saves nothing.
        """
        each = of_record[self._order]
        each[self._inner] *= 1.0 - halo_share
        each[self._halo] *= halo_share
        if early_shares:
            each[self._early] *= early_shares
            each[self._late] *= 1.0 - np.array(early_shares)
        totals = np.add.reduceat(each, self._starts)
        before = np.cumsum(each) - each
        rest = totals[self._segment] - (before - before[self._starts][self._segment])
        after_launch = self._first + rest
        if self._has_rows:
            after_launch = np.maximum(after_launch, self._launched + rest - self._before_last * each)
        after_host = np.maximum.reduceat(after_launch, self._starts).tolist()
        after_device = totals.tolist()
        host = free = 0.0
        ends = [0.0] * self._num_exchanges
        for do, which in self._steps:
            if do == Do.RUN:
                time.computes(time.device, after_device[which])
                time.device = max(time.device, host + after_host[which])
                host += self._of_host[which]
            elif do == Do.BEGIN:
                begin = max(time.device, free)
                saved = rested.saved(begin, passing[which]) if passing else 0.0
                free = ends[which] = begin + wires[which] - saved
                time.travels(begin, free, taken.get(which, 0.0))
            else:
                time.waits(ends[which])
                if self._blocks_host:
                    host = max(host, time.device)
        return max(host, time.device)
