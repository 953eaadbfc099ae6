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

from nugnn._counted import counted
from nugnn.comm.compression.wire import Wire
from nugnn.comm.early_rows import edges_begun_early
from nugnn.planning.after_rest import Rests
from nugnn.planning.exchange_seconds import collective_passing_seconds, collective_seconds, taken_seconds
from nugnn.planning.links import Links
from nugnn.planning.lone_walk import LoneWalk
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
from nugnn.planning.step_program import Exchange, Passes, Program, loss_of, make_program
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
        gradient_wire: How gradients travel, one of `nugnn.comm.compression.wire.WIRES`: see
            `nugnn.planning.exchange_seconds.collective_seconds`.
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
            raise ValueError(
                f"{counted(len(devices), 'device')}, and links between {links.num_ranks if links else 'no'} ranks"
            )
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

    def among(self, ranks: Sequence[int], overlap: Passes | None = None, links: Links | None = None) -> PredictedWork:
        """Of a run of some of the devices alone, numbered in the order given; it shares this one's tables.

        Args:
            ranks: Which devices.
            overlap: As for `PredictedWork`; this one's when None.
            links: Between these ranks, where a caller has them.
        """
        return PredictedWork(
            [self.devices[rank] for rank in ranks],
            self.links.among(ranks) if links is None else links,
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
        self._wires = [_OwnExchange(exchange, work.links, work.gradient_wire, link) for exchange in program.exchanges]
        self._aside = [(i, exchange) for i, exchange in enumerate(program.exchanges) if exchange.is_aside]
        self._fetches_beside = [program.exchanges[exchange] for exchange in program.early.values()]
        self._times = device.times
        self._how_taken = work.links, rank, device.times, work.gradient_wire
        launched = program.launched(trace, is_captured=device.is_captured)
        launch = host_seconds_of_launch(device.times, is_captured=device.is_captured)
        self._burst_seconds = work.links.burst_seconds
        self._walk = LoneWalk(program, launched, launch, blocks_host=work.links.blocks_host(rank))
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


class _OwnExchange:
    """An exchange of one device whose peers are ready."""

    def __init__(self, exchange: Exchange, links: Links, gradient_wire: Wire, link: RankLink) -> None:
        self._exchange, self._link, self._how = exchange, link, (links, gradient_wire)
        is_fixed = not exchange.is_halo and isinstance(exchange.sent, int)
        self._fixed = collective_seconds(exchange, *self._how) if is_fixed else None

    def seconds(self, symbols: Mapping[str, int]) -> float:
        if self._fixed is not None:
            return self._fixed
        exchange = self._exchange.at(symbols)
        if not exchange.is_halo:
            return collective_seconds(exchange, *self._how)
        row_bytes = number(exchange.row_bytes)
        return self._link.seconds(row_bytes * number(exchange.sent), row_bytes * number(exchange.received))

    def passing_seconds(self, symbols: Mapping[str, int]) -> float:
        """Of them, those in which bytes are on their way."""
        exchange = self._exchange.at(symbols)
        if exchange.is_halo:
            seconds = self.seconds(symbols)
            return seconds - self._link.latency_seconds if seconds else 0.0
        return collective_passing_seconds(exchange, *self._how)
