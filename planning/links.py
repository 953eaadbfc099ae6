"""Seconds of exchanges among the ranks of a run: how fast bytes go between each two of them, and what they share.

Axes: P ranks. A matrix has senders as rows and receivers as columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nugnn._counted import counted
from nugnn.comm.direct_sums import is_small
from nugnn.planning.peer_classes import WaysToClasses, fitted, num_peers, ways_to_classes
from nugnn.planning.profiles import LinkProfile
from nugnn.planning.rank_link import RankLink

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Sums:
    """The ring in which gloo adds up over the ranks of a host, as it was measured.

    Args:
        bytes_per_second: That each rank passes on. Sums are made in memory that is kept, in pieces that follow each
            other, so this is not the rate of an exchange.
        latency_seconds: Of one of its ``2 (P - 1)`` messages, as if it had no bytes.
        few_seconds: Of a sum of few values, which does not go through the ring but from each rank to each other one;
            None where it does.
        core_seconds_per_byte: That gloo's threads take from a rank's cores for each byte that it passes on; None where
            nobody has measured it.
    """

    bytes_per_second: float
    latency_seconds: float
    few_seconds: float | None = None
    core_seconds_per_byte: float | None = None

    @classmethod
    def of(cls, link: LinkProfile) -> Sums | None:
        """As the link has it."""
        if link.sum_bytes_per_second is None or link.sum_latency_seconds is None:
            return None
        of_cores = link.sum_core_seconds_per_byte
        return cls(link.sum_bytes_per_second, link.sum_latency_seconds, link.few_seconds, of_cores)


@dataclass(frozen=True, eq=False)
class Links:
    """Between all ranks of a run.

    An exchange takes the busiest of what it passes: a rank's own way out or in, on which transfers to several peers
    follow each other; a host's network card, which its ranks share; copies between a device and its host's memory where
    the transport does not take them from the device. The two ends of a pair may see it differently: one that is limited
    takes longer until it has what the other one has long sent.

    Args:
        bytes_per_second: ``(P, P)`` of the row's rank with the column's, as the former sees it: one way, while the
            other way is as busy; the diagonal does not count.
        latency_seconds: ``(P, P)`` of an exchange without bytes; likewise.
        hosts: Number of each rank's host.
        host_bytes_per_second: Of each host's network card, one way, by the host's number; those that are left out have
            no limit of their own.
        staging_seconds_per_byte: ``(P,)`` of a copy between device and host memory, on its way out and again on its way
            in; zeros when None.
        is_nccl: Whether the transport is NCCL, which begins a sum at once, and not gloo, whose sums are a chain of
            messages.
        sums_inside: Over the ranks of each host, by the host's number; where a host is left out, and between hosts,
            sums go at the rate and the latency of exchanges.
        burst_seconds: What an exchange takes less after a link has rested for as long: a rested link lets some bytes
            pass at once. `exchange_seconds` and its like are of links that had no rest; see
            `nugnn.planning.rested.Rested`.
        core_seconds_per_byte: That gloo's threads take from a rank's cores for each byte of a sum that it passes on, by
            the host's number; hosts on which nobody has measured it are left out.

    Raises:
        ValueError: Sizes do not fit; a rate is not positive, or a latency negative.
    """

    bytes_per_second: Floats
    latency_seconds: Floats
    hosts: tuple[int, ...]
    host_bytes_per_second: Mapping[int, float]
    staging_seconds_per_byte: Floats | None = None
    is_nccl: bool = False
    sums_inside: Mapping[int, Sums] = field(default_factory=dict)
    burst_seconds: float = 0.0
    core_seconds_per_byte: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(self.hosts), len(self.hosts))
        for name, is_allowed in (("bytes_per_second", np.greater), ("latency_seconds", np.greater_equal)):
            table = getattr(self, name)
            if table.shape != shape:
                raise ValueError(f"{name} has the shape {table.shape}; {counted(shape[0], 'rank')} need {shape}")
            is_fine = is_allowed(table, 0)
            np.fill_diagonal(is_fine, val=True)
            if not is_fine.all():
                raise ValueError("a rate between ranks is not positive, or a latency is negative")
        if any(not rate > 0 for rate in self.host_bytes_per_second.values()):
            raise ValueError("the rate of a host's network card is not positive")

    @classmethod
    def alone(cls) -> Links:
        """Of a single rank."""
        return cls.equal(1, math.inf)

    @classmethod
    def equal(
        cls, num_ranks: int, bytes_per_second: float, latency_seconds: float = 0.0, *, is_nccl: bool = False
    ) -> Links:
        """The same between all ranks of one host."""
        shape = (num_ranks, num_ranks)
        rates, latencies = np.full(shape, float(bytes_per_second)), np.full(shape, float(latency_seconds))
        return cls(rates, latencies, (0,) * num_ranks, {}, is_nccl=is_nccl)

    @classmethod
    def of_host(cls, num_ranks: int, link: LinkProfile) -> Links:
        """Between ranks of one host, all of them connected as ``link`` was measured; nothing is copied to get there."""
        even = cls.equal(num_ranks, link.bytes_per_second, link.latency_seconds, is_nccl=link.via == "nccl")
        sums, cores = Sums.of(link), link.sum_core_seconds_per_byte
        return replace(
            even,
            sums_inside={} if sums is None else {0: sums},
            burst_seconds=link.burst_seconds or 0.0,
            core_seconds_per_byte={} if cores is None else {0: cores},
        )

    def among(self, ranks: Sequence[int]) -> Links:
        """Between some of the ranks alone, in the order given, over the same transport."""
        hosts, staging = tuple(self.hosts[rank] for rank in ranks), self.staging_seconds_per_byte
        there = set(hosts)
        cards = {host: rate for host, rate in self.host_bytes_per_second.items() if host in there}
        return Links(
            self.bytes_per_second.take(ranks, 0).take(ranks, 1),
            self.latency_seconds.take(ranks, 0).take(ranks, 1),
            hosts,
            cards,
            None if staging is None else staging[list(ranks)],
            self.is_nccl,
            {host: sums for host, sums in self.sums_inside.items() if host in there},
            self.burst_seconds,
            {host: seconds for host, seconds in self.core_seconds_per_byte.items() if host in there},
        )

    # -- seconds -------------------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        return len(self.hosts)

    @property
    def stages(self) -> tuple[bool, ...]:
        """Of each rank, whether what it sends passes its host's memory first."""
        return tuple(self._is_staged(rank) for rank in range(self.num_ranks))

    def blocks_host(self, rank: int) -> bool:
        """Whether the rank's host waits where its device waits for an exchange: all but NCCL's are the host's work."""
        return not self.is_nccl or self._is_staged(rank)

    def _is_staged(self, rank: int) -> bool:
        return self.staging_seconds_per_byte is not None and bool(self.staging_seconds_per_byte[rank] > 0)

    def exchange_seconds(self, sent_bytes: Floats) -> Floats:
        """``(P,)`` seconds until each rank has sent and received all of its own, from when all have begun.

        Args:
            sent_bytes: ``(P, P)``; the diagonal does not travel.
        """
        sent = sent_bytes * ~np.eye(self.num_ranks, dtype=bool)
        return self.transfer_seconds(sent) + self.latency_of(sent)

    def latency_of(self, sent: Floats) -> Floats:
        """``(P,)`` of what `exchange_seconds` says, the part that does not grow with the bytes."""
        has_any = ((sent > 0) | (sent.T > 0)) & ~np.eye(self.num_ranks, dtype=bool)
        return np.where(has_any, self.latency_seconds, 0.0).max(1, initial=0.0)

    def transfer_seconds(self, sent: Floats) -> Floats:
        """``(P,)`` the same without latencies: proportional to ``sent (P, P)``, whose diagonal is 0."""
        going, coming = (each / self.bytes_per_second for each in (sent, sent.T))
        seconds = np.maximum(going.sum(1), coming.sum(1))
        if self.host_bytes_per_second:
            own = self._host_places
            across = np.where(own[:, None] != own[None, :], sent, 0.0)
            seconds = np.maximum(seconds, self._card_seconds(across.sum(1), across.sum(0)))
        if self.staging_seconds_per_byte is not None:
            seconds = seconds + self.staging_seconds_per_byte * (sent.sum(0) + sent.sum(1))
        return np.asarray(seconds, np.float64)

    def _card_seconds(self, out: Floats, back: Floats) -> Floats:
        """``(P,)`` until each rank's host has sent ``out (P,)`` of each of its ranks, and received ``back (P,)``."""
        own = self._host_places
        busiest = np.maximum(np.bincount(own, out), np.bincount(own, back))
        cards = np.array([self.host_bytes_per_second.get(host, math.inf) for host in sorted(set(self.hosts))])
        return np.where(out + back > 0, (busiest / cards)[own], 0.0)

    @cached_property
    def _host_places(self) -> npt.NDArray[np.intp]:
        """``(P,)`` of each rank's host among the numbers of hosts, ascending."""
        return np.unique(np.array(self.hosts), return_inverse=True)[1]

    def all_reduce_seconds(self, num_bytes: float, *, is_aside: bool = False) -> float:
        """Until the sum over ranks of ``num_bytes`` is everywhere, from when all have begun.

        In a ring in the order of ranks every rank passes ``2 (P - 1)`` pieces of a P-th each on. gloo does so one
        message after the other; NCCL's latency grows with the depth of a tree.

        Args:
            num_bytes: Of each rank.
            is_aside: Whether ranks do something else meanwhile: then the sum is the process group's, however few its
                values.
        """
        if self.num_ranks == 1:
            return 0.0
        if not is_aside and (few := self._few_seconds(num_bytes)) is not None:
            return few + (self.num_ranks - 1) * num_bytes / self._ring[0]
        slowest, latency = self._ring
        pieces = 2 * (self.num_ranks - 1)
        steps = 2 * math.ceil(math.log2(self.num_ranks)) if self.is_nccl else pieces
        staging = self.staging_seconds_per_byte
        copied = 0.0 if staging is None else 2 * num_bytes * float(staging.max())
        return steps * latency + pieces * num_bytes / self.num_ranks / slowest + copied

    def passing_seconds(self, num_bytes: float, *, is_aside: bool = False) -> float:
        """Of what `all_reduce_seconds` says, the part in which bytes are on their way: proportional to them."""
        if self.num_ranks == 1:
            return 0.0
        is_direct = not is_aside and self._few_seconds(num_bytes) is not None
        copies = self.num_ranks - 1 if is_direct else self._share_passed_on
        return copies * num_bytes / self._ring[0]

    def core_seconds(self, rank: int, num_bytes: float) -> float:
        """That the sum of ``num_bytes`` over a ring of gloo takes from the cores of ``rank`` while it travels."""
        if self.is_nccl or self.num_ranks == 1:
            return 0.0
        return self.core_seconds_per_byte.get(self.hosts[rank], 0.0) * self._share_passed_on * num_bytes

    @property
    def _share_passed_on(self) -> float:
        """Of the bytes of a sum, how many each rank passes on in a ring."""
        return 2 * (self.num_ranks - 1) / self.num_ranks

    def _few_seconds(self, num_bytes: float) -> float | None:
        """Of the sum, apart from its bytes, where ranks send it each other directly."""
        sums = self.sums_inside.get(self.hosts[0]) if len(set(self.hosts)) == 1 else None
        return None if sums is None or not is_small(num_bytes, self.num_ranks) else sums.few_seconds

    @cached_property
    def _ring(self) -> tuple[float, float]:
        """Bytes a second of the slowest link of a ring in the order of ranks, and the longest latency in it."""
        ranks = np.arange(self.num_ranks)
        after = np.roll(ranks, -1)
        rates = np.minimum(self.bytes_per_second[ranks, after], self.bytes_per_second[after, ranks])
        latencies = np.maximum(self.latency_seconds[ranks, after], self.latency_seconds[after, ranks])
        hosts = np.array(self.hosts)
        across = hosts != hosts[after]
        for host, sums in self.sums_inside.items():
            inside = ~across & (hosts == host)
            rates[inside], latencies[inside] = sums.bytes_per_second, sums.latency_seconds
        for host, rate in self.host_bytes_per_second.items():
            for out in (hosts == host, hosts[after] == host):
                leaving = across & out
                rates[leaving] = np.minimum(rates[leaving], rate / max(int(leaving.sum()), 1))
        return float(rates.min()), float(latencies.max())

    def collective_seconds(self, kind: str, num_bytes: float, *, is_aside: bool = False) -> float:
        """Of a collective by its name: ``all_reduce``; ``gather`` of so many bytes of each; ``broadcast``.

        ``is_aside``: see `all_reduce_seconds`.

        Raises:
            ValueError: There is no such.
        """
        if kind == "all_reduce":
            return self.all_reduce_seconds(num_bytes, is_aside=is_aside)
        if kind == "gather":
            return self._all_to_all_seconds(num_bytes)
        if kind == "broadcast":
            return self.all_reduce_seconds(num_bytes, is_aside=True) / 2  # the process group's, too
        raise ValueError(f"no seconds are known of a collective {kind!r}")

    def coded_sum_seconds(self, coded_bytes: float) -> float:
        """The same of gradients that travel in fewer bits: chunks to their owners, and their sums back.

        Args:
            coded_bytes: Of all chunks as they travel.
        """
        return 2 * self._all_to_all_seconds(coded_bytes / self.num_ranks)

    def _all_to_all_seconds(self, num_bytes: float) -> float:
        """Until every rank has ``num_bytes`` of every other one."""
        totals = np.full(self.num_ranks, (self.num_ranks - 1) * num_bytes)
        seconds, latency = self.spread_seconds(totals, totals)
        return float((seconds + latency).max())

    def spread(self, sent: Sequence[float], received: Sequence[float]) -> Floats:
        """``(P, P)`` who sends how much to whom, where only totals are known: as if nobody preferred any peer.

        Args:
            sent: ``(P,)`` of each rank.
            received: ``(P,)``; its sum is that of ``sent`` where both are counts of one graph's parts.

        Returns:
            Rows add up to ``sent``; columns to ``received`` as far as that can be.
        """
        rows, columns = np.asarray(sent, np.float64), np.asarray(received, np.float64)
        if self.num_ranks == 1:
            return np.zeros((1, 1))
        return fitted(rows, columns, num_peers(np.ones(self.num_ranks)))

    def spread_seconds(self, sent: npt.ArrayLike, received: npt.ArrayLike) -> tuple[Floats, Floats]:
        """`transfer_seconds` and `latency_of` of what `spread` says, of many ranks from those whose totals differ.

        Args:
            sent: ``(P,)`` of each rank.
            received: ``(P,)``.
        """
        totals = np.array([sent, received], np.float64)
        classes, first, class_of = np.unique(totals, axis=1, return_index=True, return_inverse=True)
        if self.num_ranks == 1:
            return np.zeros(1), np.zeros(1)
        if 2 * classes.shape[1] >= self.num_ranks:
            table = self.spread(*totals)
            return self.transfer_seconds(table), self.latency_of(table)
        order = np.argsort(first)  # as they come, so that the same classes have the same numbers whatever their totals
        return self._seconds_of_classes(classes[:, order], np.argsort(order)[class_of.reshape(-1)])

    def _seconds_of_classes(self, totals: Floats, class_of: Ints) -> tuple[Floats, Floats]:
        """The same of K classes of ranks that send and receive as much.

        Args:
            totals: ``(2, K)`` that each rank of a class sends, and receives.
            class_of: ``(P,)`` of each rank.
        """
        ways, counts = self._ways_to(class_of), np.bincount(class_of)
        peers = num_peers(counts)
        table = fitted(totals[0], totals[1], peers)
        going, coming = table[class_of], table.T[class_of]
        seconds = np.maximum((going * ways.seconds_per_byte).sum(1), (coming * ways.seconds_per_byte).sum(1))
        if self.host_bytes_per_second:
            own = self._host_places
            here = np.zeros((own.max() + 1, len(counts)))
            np.add.at(here, (own, class_of), 1.0)
            elsewhere = (counts - here)[own]
            out, back = (going * elsewhere).sum(1), (coming * elsewhere).sum(1)
            seconds = np.maximum(seconds, self._card_seconds(out, back))
        if self.staging_seconds_per_byte is not None:
            seconds = seconds + self.staging_seconds_per_byte * ((going + coming) * peers[class_of]).sum(1)
        return seconds, np.where((going > 0) | (coming > 0), ways.latency_seconds, 0.0).max(1)

    def _ways_to(self, class_of: Ints) -> WaysToClasses:
        """From each rank to its peers of each class."""
        key = class_of.tobytes()
        if key not in self._known_ways:
            self._known_ways[key] = ways_to_classes(self.bytes_per_second, self.latency_seconds, class_of)
        return self._known_ways[key]

    @cached_property
    def _known_ways(self) -> dict[bytes, WaysToClasses]:
        """By the class of each rank."""
        return {}

    def of_rank(self, rank: int) -> RankLink:
        """What leads from ``rank`` to its peers, each of which it sends and gets as much, as they all do."""
        if self.num_ranks == 1:
            return RankLink(0.0, 0.0, 0.0)
        per_byte, latencies = self._to_all
        staged = 0.0 if self.staging_seconds_per_byte is None else float(self.staging_seconds_per_byte[rank])
        return RankLink(float(per_byte[rank]) - 2 * staged, staged, float(latencies[rank]))

    @cached_property
    def _to_all(self) -> tuple[Floats, Floats]:
        """Of each rank, seconds of a byte that goes to all peers in equal parts, and the longest latency."""
        return self._seconds_of_classes(np.ones((2, 1)), np.zeros(self.num_ranks, np.intp))
