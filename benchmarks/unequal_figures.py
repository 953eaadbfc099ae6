"""What epochs of a graph over two unequal devices come to beside bounds and each other."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from harness import Timing

from nugnn.planning.part_sizes import PartSizes

PLANNED = ("auto", "tuned")
"""Splits that a plan made; the others follow from one number of each device."""
PLANNER = "draft_with_cut"
"""What makes ``auto``: all that `nugnn train --shares auto` does. Rows without a planner are older, and their ``auto``
is of parts that each end as early as the other.
"""


@dataclass(frozen=True)
class Alone:
    """Of one device under one limit, for one graph and model.

    Args:
        whole_ms: An epoch of the whole graph.
    """

    whole_ms: float


def bound_ms(alone: list[Alone]) -> float:
    """Of any split, if nothing had to travel: devices together do what each does alone."""
    return 1 / sum(1 / each.whole_ms for each in alone)


def halo_bound_ms(alone: list[Alone], sizes: tuple[PartSizes, ...], row_seconds: float) -> float:
    """Of any split, if each device also spends ``row_seconds`` on every halo row it receives or sends in ``sizes``."""
    rows_ms = [1e3 * row_seconds * (size.halo + size.sent) for size in sizes]
    travelling = sum(ms / each.whole_ms for ms, each in zip(rows_ms, alone, strict=True))
    return (1 + travelling) * bound_ms(alone)


def figures(timings: dict[str, Timing], name: str, alone: list[Alone]) -> dict[str, Any]:
    """How a split compares with the others and with the bound.

    Returns:
        ``alone_ms``, ``bound_ms``, ``over_bound`` (1: as the bound), ``gain_share`` (0: as even shares, 1: as the
        bound) and ``best_static_ratio`` (above 1: faster than the best of the static splits).
    """
    bound, own, even = bound_ms(alone), timings[name].median_ms, timings["even"].median_ms
    static = min(timing.median_ms for other, timing in timings.items() if other not in PLANNED)
    return {
        "alone_ms": [each.whole_ms for each in alone],
        "bound_ms": bound,
        "over_bound": own / bound,
        "gain_share": (even - own) / (even - bound) if even > bound else None,
        "best_static_ratio": static / own,
    }


def verdict(found: dict[str, dict[str, Any]], timings: dict[str, Timing]) -> str:
    """Planned splits beside the best of the static ones, with the spread of their ratio over the turns."""
    best = min((name for name in timings if name not in PLANNED), key=lambda name: timings[name].median_ms)
    said = []
    for planned in PLANNED:
        if planned in timings:
            pairs = zip(found[best]["samples_ms"], found[planned]["samples_ms"], strict=True)
            ratios = sorted(static / own for static, own in pairs)
            last = len(ratios) - 1
            spread = f"{ratios[round(0.2 * last)]:.3f}-{ratios[round(0.8 * last)]:.3f}"
            said.append(f"{statistics.median(ratios):.3f} ({spread}) times as long as {planned}")
    ours = next(name for name in reversed(PLANNED) if name in timings)
    others = ", ".join(
        f"{name} {timings[name].median_ms / timings[ours].median_ms:.2f}" for name in timings if name not in PLANNED
    )
    return f"best static: {best}, {', '.join(said)}; {others}"


def line_of(row: dict[str, Any]) -> str:
    """A row for people."""
    head = f"{row['graph'].removesuffix('-like')} {row['model']} {row['sms']} {row['system']}"
    if "error" in row:
        return f"{head:32} {row['error']}"[:120]
    shares, waits = ("/".join(f"{value:.2f}" for value in row[name]) for name in ("shares", "waits"))
    gain = "" if row["gain_share"] is None else f"{row['gain_share']:.0%}"
    return (
        f"{head:32}{row['median_ms']:9.2f} ms {row['p20_ms']:.2f}-{row['p80_ms']:.2f}  shares {shares}  waits {waits}  "
        f"bound x {row['over_bound']:.3f}, {row['over_halo_bound']:.3f} with halo  gain {gain}"
    )
