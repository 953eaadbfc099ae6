"""What `links.py` measures: a row for each way at each rate, the model beside it, and where two ways cross."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PAYLOAD_SHARE = 1448 / 1514
"""Of what the token bucket counts: frames of 1,514 bytes carry 1,448 of TCP with time stamps."""
PEER_WAYS = ("ddp", "ddp fp16", "ddp powersgd")
"""Of torch's DistributedDataParallel; what they send is counted at the interface."""


def predicted_seconds(local: float, num_bytes: float, gbit_per_second: float | None) -> float:
    """Of a step that computes and encodes for ``local`` seconds and sends ``num_bytes``; without a limit when None.

    >>> round(predicted_seconds(0.5, 1448 / 1514 * 12.5e6, 0.1), 9)
    1.5
    """
    return local if gbit_per_second is None else local + 8 * num_bytes / (PAYLOAD_SHARE * 1e9 * gbit_per_second)


def predicted_crossover(exact: tuple[float, float], short: tuple[float, float]) -> float:
    """Gb/s below which ``short`` is faster, each ``(local seconds, bytes)``; infinite for always, 0 for never."""
    more_local, fewer_bytes = short[0] - exact[0], exact[1] - short[1]
    if more_local <= 0:
        return math.inf if fewer_bytes >= 0 else 0.0
    return max(0.0, 8 * fewer_bytes / (PAYLOAD_SHARE * 1e9 * more_local))


def measured_crossover(exact: Mapping[float, float], short: Mapping[float, float]) -> float:
    """Gb/s below which ``short`` was faster, of seconds by rate; infinite where it was at all rates, 0 at none.

    Between the two rates where it changes, the logarithm of the ratio is a straight line over that of the rate.

    >>> measured_crossover({0.1: 8, 1: 4}, {0.1: 4, 1: 8})
    0.31622776601683794
    """
    won = math.inf
    rates = sorted(exact)
    gains = [math.log(exact[rate] / short[rate]) for rate in rates]
    if gains[0] <= 0:
        return 0.0
    for at in range(1, len(rates)):
        if gains[at] <= 0:
            part = gains[at - 1] / (gains[at - 1] - gains[at])
            won = rates[at - 1] * (rates[at] / rates[at - 1]) ** part
            break
    return won


def spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile.

    >>> spread([5, 1, 2, 3, 4])
    (3, 2, 4)
    """
    ordered, last = sorted(seconds), len(seconds) - 1
    return statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)]


@dataclass(frozen=True)
class Row:
    """One way at one rate.

    Args:
        model: Its name in `links.py`.
        ranks: P.
        rate: Gb/s of each rank; None without a limit.
        link_rate: Gb/s of payload that a bare exchange reached.
        way: Of `link_ways`; ``compute`` is a step without other ranks.
        seconds: Median over rounds of the slowest rank; ``p20`` and ``p80`` likewise.
        rounds: That were timed.
        sent_bytes: A rank hands over in a step, by our reports, the mean over ranks; of which halo rows
            ``halo_bytes``. Of a peer, what its interface sent.
        interface_bytes: That the interface of a rank sent in a step.
        local_seconds: Compute and codec of the slowest rank, by its processor, as measured without a limit; None where
            ``auto`` chose what is not among the ways.
        predicted_seconds: By the model.
        chosen: What ``auto`` chose; of a graph for gradients and for most of the rows.
    """

    model: str
    ranks: int
    rate: float | None
    link_rate: float
    way: str
    seconds: float
    p20: float
    p80: float
    rounds: int
    sent_bytes: float
    halo_bytes: float
    interface_bytes: float
    local_seconds: float | None
    predicted_seconds: float | None
    chosen: str | None = None


def communication_share(cell: Mapping[str, Row]) -> float | None:
    """Of the float32 step at one rate: what it takes beyond computation."""
    exact = cell.get("fp32")
    if exact is None or exact.local_seconds is None:
        return None
    return max(0.0, 1 - exact.local_seconds / exact.seconds)


def crossovers(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[float, float]]:
    """Gb/s below which 4 bits are faster, ``(measured, by the model)``, by ``(way of 4 bits, way of more)``."""
    cells = by_way(rows)
    unlimited = {row.way: row for row in rows if row.rate is None}
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for short in ("4bit", "int4"):
        for exact in ("fp32", "bf16"):
            if short not in cells or exact not in cells:
                continue
            sides = [(unlimited[way].local_seconds, unlimited[way].sent_bytes) for way in (exact, short)]
            seconds = [{rate: row.seconds for rate, row in cells[way].items()} for way in (exact, short)]
            found[short, exact] = measured_crossover(*seconds), predicted_crossover(*sides)  # type: ignore[arg-type]
    return found


def interface_ratios(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Least and most bytes of interfaces beside those of the reports, where these are many."""
    ratios = [row.interface_bytes / row.sent_bytes for row in rows if row.way not in PEER_WAYS and row.sent_bytes > 1e5]
    return (min(ratios), max(ratios)) if ratios else None


def by_way(rows: Sequence[Row]) -> dict[str, dict[float, Row]]:
    """By way and rate; none without a limit."""
    found: dict[str, dict[float, Row]] = {}
    for row in rows:
        if row.rate is not None:
            found.setdefault(row.way, {})[row.rate] = row
    return found
