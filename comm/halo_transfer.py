"""One transfer of halo rows between ranks: who sends which rows to whom, as they are or in fewer bits, all or some.

Shape suffixes: N inner, H halo, S rows sent.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nugnn.comm.byte_exchange import Work, begin_exchange
from nugnn.comm.clock import is_recording
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_feedback import HaloFeedback
from nugnn.comm.halo_stale import Arriving
from nugnn.comm.halo_wire import HaloWire, RowIds, Travel
from nugnn.kernels.take_rows import take_rows


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """Which inner rows go to whom, and where received rows land.

    Args:
        num_inner: N.
        send_rows: ``(S,)`` int64 inner rows, concatenated by peer, on the device of the rank.
        send_splits: Rows sent to each rank, length P.
        recv_splits: Rows received from each rank, length P; halo rows are ordered by owner.
        ranks: Groups the exchange runs on.
        version: Grows when re-balancing replaces the plan.
        row_ids: Who the rows are to the rounding of a wire of few bits; no such wire where None.
    """

    num_inner: int
    send_rows: Tensor
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    ranks: Ranks
    version: int = 0
    row_ids: RowIds | None = None

    @property
    def num_halo(self) -> int:
        return sum(self.recv_splits)

    @property
    def num_local(self) -> int:
        return self.num_inner + self.num_halo

    def verify(self) -> None:
        """Compare counts with every peer; a mismatch raises on every rank, naming the pair and both counts."""
        if not self.ranks.is_split:
            return
        table = torch.zeros(2, self.ranks.world_size, self.ranks.world_size, dtype=torch.int64)
        if len(self.send_splits) == len(self.recv_splits) == self.ranks.world_size:
            table[0, self.ranks.rank] = torch.tensor(self.send_splits)
            table[1, :, self.ranks.rank] = torch.tensor(self.recv_splits)
        else:
            table[:, self.ranks.rank] = -1
        self.ranks.sum_(table)
        wrong = (table[0] != table[1]).nonzero()
        if len(wrong):
            sender, receiver = wrong[0].tolist()
            raise ValueError(
                f"halo plan: rank {sender} plans to send {int(table[0, sender, receiver])} rows to rank {receiver}, "
                f"which plans to receive {int(table[1, sender, receiver])}. "
                "The shards come from different runs; partition again into an empty folder."
            )


class HaloExchangeError(RuntimeError):
    """An exchange of halo rows failed or did not finish in time; says where and who was waited for."""


@dataclass(frozen=True)
class Route:
    """Between whom rows travel.

    Args:
        out_splits: Rows, or bytes, received from each rank.
        splits: Those sent to each rank.
        ranks: Who takes part, in the same order of exchanges.
        label: What travels, for error messages.
    """

    out_splits: tuple[int, ...]
    splits: tuple[int, ...]
    ranks: Ranks
    label: str


class Exchange:
    """Rows on their way: ``splits[r]`` of them go to each rank r, and ``out`` fills; any dtype, as bytes.

    Args:
        out: ``(sum of out_splits, ...)`` contiguous; neither read nor written before `finish`.
        rows: ``(sum of splits, ...)``, in the dtype of ``out``.
        route: Its splits are of ``out`` and ``rows``.
        travel: Counts the exchange; nobody does when None.
    """

    def __init__(self, out: Tensor, rows: Tensor, route: Route, travel: Travel | None = None) -> None:
        self._out, self._ranks = out, route.ranks
        counted = None if travel is None else travel.counted
        self._took = None if counted is None else counted.took
        self._work: Work | None = None
        row_bytes = out.element_size() * out.shape[1:].numel()
        if row_bytes == 0:
            return
        self._begin = time.perf_counter()
        self._ranks.clock.halo_rounds += 1
        self._number, self._label = self._ranks.clock.halo_rounds, route.label
        counts = zip(route.out_splits, route.splits, strict=True)
        self._peers = [str(rank) for rank, both in enumerate(counts) if any(both)]
        with self._failing(), self._ranks.clock.measure("halo", out.device, route.label, self._took):
            self._sent: Tensor | None = self._ranks.on_wire(rows).contiguous()
            if counted is not None:
                num_bytes = self._sent.numel() * self._sent.element_size()
                self._ranks.clock.count(out.device, functools.partial(counted.begun, num_bytes))
            is_direct = self._sent.device == out.device
            self._received = out if is_direct else torch.empty(out.shape, dtype=out.dtype)
            assert self._ranks.halo is not None
            self._work = begin_exchange(
                self._ranks.halo,
                _bytes_of(self._received),
                _bytes_of(self._sent),
                [n * row_bytes for n in route.out_splits],
                [n * row_bytes for n in route.splits],
            )

    def finish(self) -> Tensor:
        """``out``, filled.

        Raises:
            HaloExchangeError: A peer failed, or did not take part before the timeout.
        """
        if self._work is not None:
            clock, pulse = self._ranks.clock, self._ranks.pulse
            waiting = pulse.waiting(f"halo exchange {self._number} ({self._label})")
            with self._failing(), clock.measure("halo", self._out.device, self._label, self._took), waiting:
                self._work.wait()
                if self._received is not self._out:
                    self._out.copy_(self._received)
            self._work = self._sent = None
        return self._out

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise HaloExchangeError(
                f"rank {self._ranks.rank}: halo exchange {self._number} of this run ({self._label}) failed after "
                f"{time.perf_counter() - self._begin:.1f} s. It exchanges rows with rank{'s' * (len(self._peers) > 1)} "
                f"{', '.join(self._peers) or 'none'}; one of them stopped, is slow, or made other calls than this "
                f"rank. The transport says: {error}"
            ) from error


def _bytes_of(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8).view(-1) if rows.numel() else rows.new_empty(0, dtype=torch.uint8)


class _InFewBits(Exchange):
    """Rows on their way as bytes, which `finish` decodes.

    Args:
        out: ``(sum of out_splits, ...)``, contiguous; a matrix may have more columns than travel.
        coded_out: Takes the bytes.
        coded: The bytes of the rows.
        route: Its splits are of ``coded_out`` and ``coded``.
        travel: What rows travel in.
        width: Columns of matrices that travel; zeros stand behind them.
    """

    def __init__(self, out: Tensor, coded_out: Tensor, coded: Tensor, route: Route, travel: Travel, width: int) -> None:
        self._whole, self._width, self._is_decoded = out, width, False
        super().__init__(coded_out, coded, route, travel)

    def finish(self) -> Tensor:
        coded = super().finish()
        if not self._is_decoded:
            rows = _as_matrix(self._whole)  # a view: the rows of `out` are contiguous
            self._decode(coded, rows[:, : self._width])
            rows[:, self._width :] = 0
            self._is_decoded = True
        return self._whole

    def _decode(self, coded: Tensor, rows: Tensor) -> None:
        raise NotImplementedError


class _Coded(_InFewBits):
    """All rows in the form of one wire.

    Args:
        out: As above.
        rows: ``(sum of splits, ...)``, of which ``width`` columns travel.
        route: Its splits are of ``out`` and ``rows``.
        travel: Its wire compresses these rows.
        row_ids: Who ``rows`` are to the rounding; None where nothing is drawn.
        feedback: Encodes them in place of the wire alone.
        width: As above.
    """

    def __init__(
        self,
        out: Tensor,
        rows: Tensor,
        route: Route,
        travel: Travel,
        row_ids: Tensor | None,
        feedback: HaloFeedback | None,
        width: int,
    ) -> None:
        self._wire = travel.wire
        rows = _as_matrix(rows)[:, :width]
        if feedback is None:
            coded = self._wire.encode(rows, travel.key, row_ids)
        else:
            coded = feedback.encode(travel.name, rows, self._wire)
        if _is_measured(travel, rows):
            owed = None if feedback is None else feedback.owed(travel.name, rows)
            travel.counted.measured(_rounded(rows, coded, self._wire, owed), travel.bits)
        coded_out = coded.new_empty((len(out), coded.shape[1]))
        super().__init__(out, coded_out, coded, route, travel, width)

    def _decode(self, coded: Tensor, rows: Tensor) -> None:
        self._wire.decode(coded, rows)


class _CodedByPeer(_InFewBits):
    """For each peer in the form that ``travel`` says; the arguments are those of `_Coded`."""

    def __init__(
        self, out: Tensor, rows: Tensor, route: Route, travel: Travel, row_ids: Tensor | None, width: int
    ) -> None:
        self._counts = route.out_splits
        here, peers = route.ranks.rank, range(len(route.splits))
        wires = [travel.wire_of(here, peer) for peer in peers]
        self._wires = [travel.wire_of(peer, here) for peer in peers]
        parts = _as_matrix(rows)[:, :width].split(route.splits)
        ids = [None] * len(parts) if row_ids is None else row_ids.split(route.splits)
        coded = [_coded(x, wire, travel, of_x) for x, wire, of_x in zip(parts, wires, ids, strict=True)]
        if _is_measured(travel, rows):
            pairs = (_rounded(*each) for each in zip(parts, coded, wires, strict=True))
            travel.counted.measured(itertools.chain.from_iterable(pairs), travel.bits)
        sizes = (n * wire.row_bytes(width, out.dtype) for n, wire in zip(self._counts, self._wires, strict=True))
        self._sizes = tuple(sizes)
        in_bytes = replace(route, out_splits=self._sizes, splits=tuple(map(len, coded)))
        super().__init__(out, coded[0].new_empty(sum(self._sizes)), torch.cat(coded), in_bytes, travel, width)

    def _decode(self, coded: Tensor, rows: Tensor) -> None:
        for some, part, wire in zip(coded.split(self._sizes), rows.split(self._counts), self._wires, strict=True):
            if not len(part):
                continue
            aligned = some.clone().view(len(part), -1)  # whose values lie at multiples of their sizes
            if wire.compresses(rows.shape[1], part.dtype):
                wire.decode(aligned, part)
            else:
                part[:] = aligned.view(part.dtype)


def _coded(x: Tensor, wire: HaloWire, travel: Travel, row_ids: Tensor | None) -> Tensor:
    """The bytes of rows, one row after the other."""
    if wire.compresses(x.shape[1], x.dtype):
        return wire.encode(x, travel.key, row_ids).flatten()
    return _bytes_of(x.detach().contiguous())


_VALUES_OF_A_LOOK = 1 << 20
"""So many are decoded at once where rounding is measured: the step needs no more memory than others."""


def _is_measured(travel: Travel, rows: Tensor) -> bool:
    return travel.counted.is_due(travel.step, travel.bits) and not is_recording(rows.device)


def _rounded(
    rows_nD: Tensor, coded: Tensor, wire: HaloWire, owed_nD: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """What was to be sent and what arrives, in blocks of rows.

    Args:
        rows_nD: ``(n, D)`` floating.
        coded: Their bytes.
        wire: That made them, unless rows are longer in it.
        owed_nD: Was added to the rows first; nothing when None.
    """
    rows_nD, (num_rows, width) = rows_nD.detach(), rows_nD.shape
    wide = torch.promote_types(rows_nD.dtype, torch.float32)
    block = max(16, _VALUES_OF_A_LOOK // width // 16 * 16)  # values lie at multiples of their sizes
    coded = coded.view(num_rows, -1) if num_rows else coded
    for start in range(0, num_rows, block):
        span = slice(start, start + block)
        arrived = rows_nD[span]
        if wire.compresses(width, rows_nD.dtype):
            arrived = arrived.new_empty(arrived.shape)
            wire.decode(coded[span], arrived)
        wanted = rows_nD[span].to(wide)
        yield wanted if owed_nD is None else wanted + owed_nD[span], arrived.to(wide)


def _as_matrix(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), rows.shape[1:].numel())


class _Spread:
    """The rows that travel in this step, scaled, at their places in ``out``; zeros elsewhere.

    Args:
        out: Contiguous; filled by `finish`.
        places: Of the rows that travel.
        scale: Of their values.
        rows: Those that travel.
    """

    def __init__(self, out: Tensor, places: Tensor, scale: float, rows: Exchange) -> None:
        self._out, self._places, self._scale, self._rows = out, places, scale, rows

    def finish(self) -> Tensor:
        return self._out.zero_().index_copy_(0, self._places, self._rows.finish() * self._scale)


def begin_transfer(
    x: Tensor, out: Tensor, plan: HaloPlan, label: str, travel: Travel | None, width: int | None, *, goes_home: bool
) -> Arriving:
    """Send what this step sends; ``out`` fills with what it reads, which was sent in the step before if stale."""

    def send(rows: Tensor) -> Arriving:
        return _begin_now(x, rows, plan, label, travel, width, goes_home=goes_home)

    if travel is None or travel.stale is None:
        return send(out)
    return travel.stale.begin(travel.name, out, plan, send, repeats=travel.direction != "gradient")


def _begin_now(
    x: Tensor, out: Tensor, plan: HaloPlan, label: str, travel: Travel | None, width: int | None, *, goes_home: bool
) -> Arriving:
    """Send those rows that travel in this step; ``x`` holds halo rows if these go home, and inner rows otherwise."""
    if travel is None or travel.sample is None:
        rows = x if goes_home else take_rows(x, plan.send_rows)
        splits = (plan.send_splits, plan.recv_splits) if goes_home else (plan.recv_splits, plan.send_splits)
        return _send(rows, out, Route(*splits, plan.ranks, label), plan, travel, width, None, goes_home=goes_home)
    sample = travel.sample
    if goes_home:
        going, coming, splits = sample.read, sample.sent, (sample.send_splits, sample.recv_splits)
        rows = take_rows(x, going)
    else:
        going, coming, splits = sample.sent, sample.read, (sample.recv_splits, sample.send_splits)
        rows = take_rows(x, plan.send_rows.index_select(0, going))
    part = out.new_empty((len(coming), *out.shape[1:]))
    route = Route(*splits, plan.ranks, label)
    exchange = _send(rows, part, route, plan, travel, width, going, goes_home=goes_home)
    return _Spread(out, coming, sample.scale, exchange)


def _send(
    rows: Tensor,
    out: Tensor,
    route: Route,
    plan: HaloPlan,
    travel: Travel | None,
    width: int | None,
    places: Tensor | None,
    *,
    goes_home: bool,
) -> Exchange:
    """``places``: of ``rows`` among all that may travel; None for all of them."""
    num_values = out.shape[1:].numel() if width is None else width
    ids: Tensor | None = None
    if travel is not None and travel.bits is not None:
        if travel.watch is not None:
            travel.watch.see(travel.name, _as_matrix(rows)[:, :num_values], route.splits)
        if travel.bits.is_plain(travel.name):  # between all ranks: as they are, with what pads them
            travel.counted.left_nothing_out()
            return Exchange(out, rows, route, travel)
        ids = _row_ids(plan, route.label, places, goes_home=goes_home)
        return _CodedByPeer(out, rows, route, travel, ids, num_values)
    if travel is None or not travel.wire.compresses(num_values, out.dtype):
        if travel is not None:
            travel.counted.left_nothing_out()
        return Exchange(out, rows, route, travel)
    feedback = None if goes_home else travel.feedback
    if travel.wire.is_random and feedback is None:
        ids = _row_ids(plan, route.label, places, goes_home=goes_home)
    return _Coded(out, rows, route, travel, ids, feedback, num_values)


def _row_ids(plan: HaloPlan, label: str, places: Tensor | None, *, goes_home: bool) -> Tensor:
    if plan.row_ids is None:
        raise ValueError(f"{label}: a wire of few bits needs a plan that knows who its rows are")
    ids = plan.row_ids.returned if goes_home else plan.row_ids.sent
    return ids if places is None else ids.index_select(0, places)
