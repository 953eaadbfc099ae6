"""How bytes get from a device to others and to its host, one way while the other way is as busy; how ranks add up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nugnn.comm.compression.link import Link
from nugnn.comm.direct_sums import MOST_BYTES
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_auto import rounds_of_pairs
from nugnn.comm.together import median_seconds, seconds_together
from nugnn.kernels.green_context import new_stream
from nugnn.planning.fitting import WrongResult, largest_that_fits
from nugnn.planning.links import Sums
from nugnn.planning.profiles import LinkProfile
from nugnn.planning.timing import seconds_of

_PROBE_BYTES = 1 << 20
_NCCL_BYTES, _GLOO_BYTES, _COPY_BYTES = 256 << 20, 64 << 20, 256 << 20
"""At most, of an exchange or a copy one way."""
_TINY_BYTES = 8
"""An exchange of nothing would not take place."""
_LATENCY_ROUNDS, _LEAST_ROUNDS, _MOST_ROUNDS = 20, 3, 30
_RESTED_ROUNDS = 5
_REST_SECONDS = 10e-3
"""A link that fills up more slowly is not told from one without a burst."""
_BURST_BYTES = tuple(1 << power for power in range(16, 21))
"""Exchanges in which a burst is looked for: 64 KiB to 1 MiB."""
_LEAST_SAVED = 0.25
"""Of what an exchange without a rest takes; less is noise."""
_SUMS_IN_A_ROW = 10
"""Which all ranks come to at once, as they do not after a meeting."""
_SAME = 1.1
"""Links whose rates differ by less are of one kind."""


@dataclass(frozen=True)
class Exchange:
    """Between two ranks, both sending.

    Args:
        ends: The ranks, the lower one first.
        bytes_per_second: One way.
        latency_seconds: Of 8 bytes each way.
        burst_seconds: What it takes less after a rest, at most.
    """

    ends: tuple[int, int]
    bytes_per_second: float
    latency_seconds: float
    burst_seconds: float = 0.0


def measure_copies(device: torch.device, *, seconds: float, on_note: Callable[[str], None]) -> tuple[float, float]:
    """Bytes a second one way between a GPU and pinned memory, and seconds of a copy of 8 bytes that is waited for."""
    return largest_that_fits(
        lambda size: _copies(size, device, seconds), _COPY_BYTES, _PROBE_BYTES, "copies to the host, bytes", on_note
    )


def _copies(size: int, device: torch.device, seconds: float) -> tuple[float, float]:
    sent, received = torch.ones(size, dtype=torch.uint8).pin_memory(), torch.zeros(size, dtype=torch.uint8).pin_memory()
    target, source = torch.zeros(size, dtype=torch.uint8, device=device), sent.to(device)
    up, down = new_stream(device), new_stream(device)

    def both_ways() -> None:
        with torch.cuda.stream(up):
            target.copy_(sent, non_blocking=True)
        with torch.cuda.stream(down):
            received.copy_(source, non_blocking=True)

    def tiny() -> None:
        target[:_TINY_BYTES].copy_(sent[:_TINY_BYTES], non_blocking=True)

    both_ways()
    first = seconds_of(both_ways, device)
    if not (bool((target == 1).all()) and bool((received == 1).all())):
        raise WrongResult("a copy between device and host differs")
    rounds = int(np.clip(seconds / max(first, 1e-6), _LEAST_ROUNDS, _MOST_ROUNDS))
    latency = statistics.median(seconds_of(tiny, device) for _ in range(_LATENCY_ROUNDS))
    taken = statistics.median(seconds_of(both_ways, device) for _ in range(rounds))
    return size / max(taken - latency, taken / 2), latency


def measure_exchanges(ranks: Ranks, *, seconds: float) -> tuple[Exchange, ...]:
    """Of every pair of ranks, as many pairs at once as there are; the same on every rank. A collective call.

    It goes through the exchange that halo rows and compressed sums take (`nugnn.comm.compression.link.Link`).

    Args:
        ranks: Who takes part, all idle.
        seconds: For all of it together.
    """
    link = Link.of(ranks, aside=True)
    most = _NCCL_BYTES if ranks.carries_cuda else _GLOO_BYTES
    turns = rounds_of_pairs(ranks.world_size)
    found: list[Exchange] = []
    with ranks.pulse.waiting("measuring exchanges"):
        for pairs in turns:
            taken = _Turn(link, ranks, dict([*pairs, *((b, a) for a, b in pairs)]))
            taken.check()
            latency_P = taken.seconds(_TINY_BYTES, _LATENCY_ROUNDS)
            probe = max(float(taken.seconds(_PROBE_BYTES, _LEAST_ROUNDS).max()), 1e-6)
            budget = seconds / len(turns)
            size = int(np.clip(_PROBE_BYTES * budget / 10 / probe, _PROBE_BYTES, most)) // 8 * 8
            rounds = int(np.clip(budget / (probe * size / _PROBE_BYTES), _LEAST_ROUNDS, _MOST_ROUNDS))
            taken_P = taken.seconds(size, rounds)
            rested = [] if ranks.carries_cuda else [taken.seconds(n, _RESTED_ROUNDS, rested=True) for n in _BURST_BYTES]
            for a, b in pairs:
                whole, latency = max(taken_P[a], taken_P[b]), float(max(latency_P[a], latency_P[b]))
                rate = float(size / max(whole - latency, whole / 2))
                burst = _burst_seconds(rate, latency, [float(max(taken_P[a], taken_P[b])) for taken_P in rested])
                found.append(Exchange((a, b), rate, latency, burst))
    return tuple(sorted(found, key=lambda exchange: exchange.ends))


def _burst_seconds(rate: float, latency: float, rested: Sequence[float]) -> float:
    """What exchanges after a rest saved at most.

    >>> _burst_seconds(1e8, 1e-3, [1e-3 + max(n / 1e8 - 2e-3, 0) for n in _BURST_BYTES])
    0.002
    >>> _burst_seconds(1e8, 1e-3, [1.1e-3 + 0.9 * n / 1e8 for n in _BURST_BYTES])
    0.0

    Args:
        rate: Bytes a second without a rest.
        latency: Without bytes.
        rested: Seconds of exchanges of ``_BURST_BYTES``, if there were such.
    """
    without = [num_bytes / rate for num_bytes in _BURST_BYTES]
    saved = [latency + long - took for long, took in zip(without, rested, strict=False)]
    seen = [each for each, long in zip(saved, without, strict=False) if each > _LEAST_SAVED * long]
    return round(max(seen, default=0.0), 9)


def measure_sums(ranks: Ranks, *, seconds: float) -> Sums | None:
    """Of all ranks together, as the gradients of a graph and statistics of batches are added up; a collective call.

    Args:
        ranks: Who takes part, all idle, on one host.
        seconds: For all of it.

    Returns:
        The same on every rank; None where NCCL adds up, or nobody does.
    """
    if ranks.carries_cuda or not ranks.is_split:
        return None

    def taken(num_values: int, rounds: int, in_a_row: int) -> float:
        x = torch.zeros(num_values)

        def run() -> None:
            for _ in range(in_a_row):
                ranks.sum_(x)

        run()
        return float(ranks.max_(torch.tensor(median_seconds(run, ranks, rounds), dtype=torch.float64))) / in_a_row

    few, least = None, 1
    with ranks.pulse.waiting("measuring sums"):
        if ranks.direct is not None:
            few, least = taken(1, _LATENCY_ROUNDS, _SUMS_IN_A_ROW), MOST_BYTES // (ranks.world_size - 1) // 4 + 1
        shortest = taken(least, _LATENCY_ROUNDS, _SUMS_IN_A_ROW)
        probe = max(taken(_PROBE_BYTES // 4, _LEAST_ROUNDS, 1), 1e-6)
        few_rounds = int(np.clip(seconds / (10 * probe), _LEAST_ROUNDS, _MOST_ROUNDS))
        core_seconds = _core_seconds(ranks, _PROBE_BYTES // 4, few_rounds)
        size = int(np.clip(_PROBE_BYTES * seconds / 10 / probe, _PROBE_BYTES, _GLOO_BYTES)) // 4
        whole = taken(size, int(np.clip(seconds / (probe * 4 * size / _PROBE_BYTES), _LEAST_ROUNDS, _MOST_ROUNDS)), 1)
    messages = 2 * (ranks.world_size - 1)
    passed_on = messages * 4 * size / ranks.world_size
    rate = passed_on * (1 - least / size) / max(whole - shortest, whole / 2)
    latency = max(shortest - messages * 4 * least / ranks.world_size / rate, 0.0) if least > 1 else shortest
    return Sums(rate, latency / messages, few, core_seconds / (messages * _PROBE_BYTES / ranks.world_size))


def _core_seconds(ranks: Ranks, num_values: int, rounds: int) -> float:
    """That other threads of a rank work for a sum while its own waits, of the busiest rank; a collective call."""
    x = torch.zeros(num_values)
    ranks.sum_(x)
    begin = time.process_time() - time.thread_time()
    for _ in range(rounds):
        ranks.sum_(x)
    others = max(time.process_time() - time.thread_time() - begin, 0.0)
    return float(ranks.max_(torch.tensor(others, dtype=torch.float64))) / rounds


@dataclass(frozen=True, eq=False)
class _Turn:
    """Each rank exchanges with its partner, ranks without one with nobody."""

    link: Link
    ranks: Ranks
    partners: Mapping[int, int]

    def seconds(self, num_bytes: int, rounds: int, *, rested: bool = False) -> np.ndarray:
        """Of each rank, the median, each time after a rest if asked; a collective call."""
        sizes = self._sizes(num_bytes)
        rows = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.ranks.device)
        taken = torch.zeros(self.ranks.world_size, dtype=torch.float64)

        def run() -> None:
            self.link.exchange(rows, sizes, sizes)

        run()
        found = []
        for _ in range(rounds):
            if rested:
                time.sleep(_REST_SECONDS)
            found.append(seconds_together(run, self.ranks))
        taken[self.ranks.rank] = statistics.median(found)
        result: np.ndarray = self.ranks.sum_(taken).numpy()
        return result

    def check(self) -> None:
        """All ranks fail where one has received something else than was sent; a collective call."""
        sizes = self._sizes(_PROBE_BYTES)
        own, other = self.ranks.rank + 1, self.partners.get(self.ranks.rank, -1) + 1
        rows = torch.full((sum(sizes),), own % 251, dtype=torch.uint8, device=self.ranks.device)
        is_wrong = bool((self.link.exchange(rows, sizes, sizes) != other % 251).any())
        if float(self.ranks.max_(torch.tensor([float(is_wrong)]))):
            raise WrongResult("bytes of an exchange between processes differ from what was sent")

    def _sizes(self, num_bytes: int) -> list[int]:
        partner = self.partners.get(self.ranks.rank)
        return [num_bytes if rank == partner else 0 for rank in range(self.ranks.world_size)]


def as_links(
    exchanges: Sequence[Exchange], names: Sequence[str], *, is_nccl: bool, sums: Sums | None = None
) -> tuple[LinkProfile, ...]:
    """One link for all pairs where their rates are the same within a tenth, else one for each pair.

    Args:
        exchanges: Of every pair.
        names: Of the devices, by rank.
        is_nccl: Whether NCCL carried them.
        sums: Of all ranks together; every link has them.

    >>> pairs = [Exchange((0, 1), 100.0, 1e-5), Exchange((0, 2), 104.0, 2e-5), Exchange((1, 2), 102.0, 3e-5)]
    >>> [(link.ends, link.bytes_per_second) for link in as_links(pairs, ["a", "b", "c"], is_nccl=True)]
    [((), 102.0)]
    >>> pairs[1] = Exchange((0, 2), 10.0, 2e-5)
    >>> [link.ends for link in as_links(pairs, ["a", "b", "c"], is_nccl=True)]
    [('a', 'b'), ('a', 'c'), ('b', 'c')]
    """
    rates = [exchange.bytes_per_second for exchange in exchanges]
    latencies = [exchange.latency_seconds for exchange in exchanges]
    bursts = [exchange.burst_seconds for exchange in exchanges]
    via = "nccl" if is_nccl else "gloo"
    if len(exchanges) > 1 and max(rates) < _SAME * min(rates):
        return (_link((), via, statistics.median(rates), statistics.median(latencies), min(bursts), sums),)
    return tuple(
        _link((names[exchange.ends[0]], names[exchange.ends[1]]), via, rate, latency, burst, sums)
        for exchange, rate, latency, burst in zip(exchanges, rates, latencies, bursts, strict=True)
    )


def _link(
    ends: tuple[()] | tuple[str, str], via: str, rate: float, latency: float, burst: float, sums: Sums | None
) -> LinkProfile:
    return LinkProfile(
        between="devices",
        ends=ends,
        via=via,  # type: ignore[arg-type]
        bytes_per_second=rate,
        latency_seconds=latency,
        burst_seconds=burst or None,
        few_seconds=None if sums is None else sums.few_seconds,
        sum_bytes_per_second=None if sums is None else sums.bytes_per_second,
        sum_latency_seconds=None if sums is None else sums.latency_seconds,
        sum_core_seconds_per_byte=None if sums is None else sums.core_seconds_per_byte,
    )
