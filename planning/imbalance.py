"""How much work should go where for ranks that end an epoch at different times to end it together.

All of it is arithmetic on measured seconds. A part's seconds are taken to be in proportion to its work; a move of nodes
with their in-edges changes that work, and what the change is worth on each rank follows from its own seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.work_model import WorkModel

_LEAST_KEPT = 0.02
"""Of a part's work that stays: a rank that has nothing to do shows no more when it has become fast again."""
_BISECTIONS = 100


@dataclass(frozen=True, kw_only=True)
class RebalanceRules:
    """When nodes move between ranks.

    Args:
        least_imbalance: Part of the slowest rank's seconds that a move has to promise to save; below, nothing is done.
        window: Epochs whose median counts, so that less than half of them may be out of line. Below 3 no move is taken
            back, as nothing is known of how much epochs differ.
        least_gain_seconds: What the rest of the run has to gain, beside twice the cost of a move.
        node_work: Work of a node beside that of its in-edges, each of which counts 1: what layers compute of rows, for
            what they sum over edges. Where ``work`` is given, it says that.
        work: What predicts the seconds of computing of parts; its proportions are taken, not its seconds, which were
            measured.
        whole: The same with exchanges, whose seconds are taken as they are: a move that would make the epoch longer is
            not made, or less of it. Where there is none, exchanges are seen when a move has been made.
        left_out: Ranks that neither give nor take nodes, such as those that a plan leaves out.

    Raises:
        ValueError: A number is out of range, or there is ``whole`` and no ``work``.
    """

    least_imbalance: float = 0.1
    window: int = 5
    least_gain_seconds: float = 5.0
    node_work: float = 10.0
    work: WorkModel | None = None
    whole: WorkModel | None = None
    left_out: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 0 < self.least_imbalance < 1:
            raise ValueError(f"least_imbalance is {self.least_imbalance}, must be above 0 and below 1")
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window is {self.window!r}, must be a whole number from 1 up")
        for name in ("least_gain_seconds", "node_work"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}, must be 0 or more")
        if self.whole is not None and self.work is None:
            raise ValueError("whole is given and work is not, which says how much of it is computing; give both")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoad:
    """What a rank is busy with.

    Args:
        seconds: Of computing in an epoch, waiting left out.
        sizes: Of its part.
        most_growth: Largest factor by which its part may grow, such as its memory allows.
        passed: Seconds that passed in each of the epochs whose median ``seconds`` is, exchanges and waiting included.
    """

    seconds: float
    sizes: PartSizes
    most_growth: float = math.inf
    passed: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Levelling:
    """How all ranks would end together.

    Args:
        seconds: Of each rank in an epoch as it is.
        predicted: Of each rank afterwards.
        given: Work that leaves each rank, in in-edges of its own part; negative where work comes, in those of the
            giver's.
        node_work: Of a node on each rank, in the same unit.
        is_return: Whether nodes go back to where they were before the last move; ``given`` is 0 then, and
            ``predicted`` what was measured before that move.
    """

    seconds: tuple[float, ...]
    predicted: tuple[float, ...]
    given: tuple[float, ...]
    node_work: tuple[float, ...]
    is_return: bool = False

    @property
    def gain(self) -> float:
        """Seconds of an epoch that are saved."""
        return max(self.seconds) - max(self.predicted)

    def scaled(self, fraction: float) -> Levelling:
        """As much of it."""
        return replace(
            self,
            predicted=tuple(
                now + fraction * (then - now) for now, then in zip(self.seconds, self.predicted, strict=True)
            ),
            given=tuple(fraction * work for work in self.given),
        )

    def undone(self, seconds: Sequence[float]) -> Levelling:
        """The way back, from where ranks compute for ``seconds`` now."""
        return replace(
            self, seconds=tuple(seconds), predicted=self.seconds, given=(0.0,) * len(self.given), is_return=True
        )


def levelled(loads: Sequence[RankLoad], rules: RebalanceRules) -> Levelling:
    """What each rank would have to give or take for all to end together, as far as parts may grow.

    Nodes that go are taken to have as many in-edges as the graph's nodes have in the mean. With that, each rank has a
    price in seconds for a node; the common end is where as many nodes come as go.
    """
    num_nodes = sum(load.sizes.inner for load in loads)
    degree = sum(load.sizes.edges for load in loads) / max(num_nodes, 1)
    of_node, of_edge, prices, least, most = [], [], [], [], []
    for rank, load in enumerate(loads):
        node, edge, whole = _costs(rank, load.sizes, rules)
        of_node.append(node)
        of_edge.append(edge)
        price = load.seconds / whole * (node + edge * degree) if whole > 0 else 0.0
        prices.append(max(price, 1e-30))
        if rank in rules.left_out:
            least.append(0.0)
            most.append(0.0)
            continue
        held = (node * load.sizes.inner + edge * load.sizes.edges) / max(node + edge * degree, 1e-300)
        least.append(-(1 - _LEAST_KEPT) * held)
        most.append(max(load.most_growth - 1, 0.0) * held if math.isfinite(load.most_growth) else float(num_nodes))

    def coming(end: float) -> list[float]:
        wanted = ((end - load.seconds) / price for load, price in zip(loads, prices, strict=True))
        return [min(max(nodes, low), high) for nodes, low, high in zip(wanted, least, most, strict=True)]

    low, high = 0.0, max(load.seconds for load in loads)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(coming(middle)) < 0 else (low, middle)
    nodes = coming(high)
    predicted = tuple(load.seconds + price * n for load, price, n in zip(loads, prices, nodes, strict=True))
    node_work = tuple(node / edge if edge > 0 else rules.node_work for node, edge in zip(of_node, of_edge, strict=True))
    given = tuple(-n * (work + degree) for n, work in zip(nodes, node_work, strict=True))
    return Levelling(
        seconds=tuple(load.seconds for load in loads), predicted=predicted, given=given, node_work=node_work
    )


def _costs(rank: int, sizes: PartSizes, rules: RebalanceRules) -> tuple[float, float, float]:
    """Of one more node, of one more in-edge, and of the whole part, in one unit."""
    model = rules.work
    if model is None:
        return rules.node_work, 1.0, rules.node_work * sizes.inner + sizes.edges
    whole = model.seconds(rank, sizes)
    more_nodes, more_edges = max(sizes.inner // 64, 1), max(sizes.edges // 64, 1)
    of_nodes = model.seconds(rank, replace(sizes, inner=sizes.inner + more_nodes)) - whole
    of_edges = model.seconds(rank, replace(sizes, edges=sizes.edges + more_edges)) - whole
    return max(of_nodes, 0.0) / more_nodes, max(of_edges, 0.0) / more_edges, whole


def flows(given: Sequence[float], affinity: Sequence[Sequence[float]]) -> list[dict[int, float]]:
    """Of each rank, how much of its work goes to which others.

    Args:
        given: As in `Levelling`; what comes is scaled to what goes.
        affinity: ``affinity[p][q]``, how much parts p and q have to do with each other, such as halo rows: work goes to
            the neighbours first, since others would have to fetch what these have already.

    >>> flows([6, -4, -2], [[0, 1, 9], [1, 0, 0], [9, 0, 0]])
    [{2: 2.0, 1: 4.0}, {}, {}]
    """
    ranks = range(len(given))
    going, coming = [max(work, 0.0) for work in given], [max(-work, 0.0) for work in given]
    goes, comes = math.fsum(going), math.fsum(coming)
    going = [float(work) for work in going]
    coming = [work * goes / comes if comes > 0 else 0.0 for work in coming]
    found: list[dict[int, float]] = [{} for _ in ranks]
    pairs = [(p, q) for p in ranks for q in ranks if going[p] > 0 and coming[q] > 0]
    for p, q in sorted(pairs, key=lambda pair: (-affinity[pair[0]][pair[1]], pair)):
        amount = min(going[p], coming[q])
        if amount > 1e-9 * goes:
            found[p][q] = amount
            going[p] -= amount
            coming[q] -= amount
    return found
