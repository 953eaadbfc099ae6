"""What parts will hold after work has moved between them, and how long an epoch with its exchanges then takes.

Seconds of computing are in the proportions that a model predicts, from what was measured on each rank; seconds of
exchanges are those that the model predicts, as nothing measured says what they would be on other parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nugnn.planning.expected_halo import ExpectedHalo
from nugnn.planning.imbalance import Levelling, RankLoad
from nugnn.planning.part_sizes import PartSizes, bounded
from nugnn.planning.work_model import WorkModel

_FRACTIONS = (1.0, 0.5, 0.25, 0.125)
"""Of the work that would have all ranks end their computing together."""


def best_fraction(
    level: Levelling, loads: Sequence[RankLoad], computing: WorkModel, whole: WorkModel
) -> tuple[Levelling, float]:
    """As much of ``level`` as shortens the epoch most, and the seconds by which it does; negative where none does.

    Args:
        level: How computing would end together.
        loads: As it was found from.
        computing: What predicts seconds without exchanges, as they are measured.
        whole: The same with exchanges.
    """
    exchanges_now, scales = [], []
    for rank, load in enumerate(loads):
        predicted = computing.seconds(rank, load.sizes)
        exchanges_now.append(max(whole.seconds(rank, load.sizes) - predicted, 0.0))
        scales.append(load.seconds / predicted if predicted > 0 else 1.0)
    now = max(load.seconds + exchanges for load, exchanges in zip(loads, exchanges_now, strict=True))

    def saved(part: Levelling) -> float:
        ends = []
        for rank, sizes in enumerate(sizes_after(loads, part)):
            predicted = computing.seconds(rank, sizes)
            exchanges = max(whole.seconds(rank, sizes) - predicted, 0.0)
            ends.append(scales[rank] * predicted + exchanges)
        return now - max(ends)

    found = [(saved(part), part) for part in map(level.scaled, _FRACTIONS)]
    seconds, best = max(found, key=lambda each: each[0])
    return best, seconds


def sizes_after(loads: Sequence[RankLoad], level: Levelling) -> tuple[PartSizes, ...]:
    """Of each part, if the nodes that go have as many in-edges as those of the graph in the mean.

    Halo rows, and rows sent, become more or less as `ExpectedHalo` says of the part and of all others as one, from
    those that there are.
    """
    num_nodes, num_edges = (sum(getattr(load.sizes, name) for load in loads) for name in ("inner", "edges"))
    degree = num_edges / max(num_nodes, 1)
    found = []
    for load, given, node_work in zip(loads, level.given, level.node_work, strict=True):
        sizes, coming = load.sizes, -given / max(node_work + degree, 1e-300)
        inner = min(max(round(sizes.inner + coming), 1), num_nodes)
        now, then = sizes.inner / num_nodes, inner / num_nodes
        moved = replace(
            sizes,
            inner=inner,
            edges=max(round(sizes.edges + coming * degree), 0),
            halo=round(sizes.halo * _growth(now, then)),
            sent=round(sizes.sent * _growth(1 - now, 1 - then)),
            train=round(sizes.train * inner / max(sizes.inner, 1)),
        )
        found.append(bounded(moved, num_nodes, num_edges, len(loads)))
    return tuple(found)


def _growth(now: float, then: float) -> float:
    """Of the halo rows of a part that was the fraction ``now`` of the graph."""
    rows_now, rows_then = (ExpectedHalo()(fraction) * fraction if 0 < fraction < 1 else 0.0 for fraction in (now, then))
    return rows_then / rows_now if rows_now > 0 else 1.0
