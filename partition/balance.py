"""Target loads of the parts, the check that an assignment meets them, and moves that repair it where it doesn't.

Axes: N nodes, P parts, K node-weight columns (constraints). Loads are float64.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import sparse

from nugnn._counted import counted

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def normalise_shares(shares: Sequence[float]) -> tuple[float, ...]:
    """Positive shares scaled to sum to 1.

    Raises:
        ValueError: no share is given, or one is not a positive finite number.
    """
    values = [float(share) for share in shares]
    if not values:
        raise ValueError("shares is empty; give one positive number per part")
    for rank, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"share {rank} is {value:g}; every share must be a positive finite number")
    largest = max(values)  # divided first: a sum of huge shares would overflow, of tiny ones vanish
    total = math.fsum(value / largest for value in values)
    normal = tuple(value / largest / total for value in values)
    for rank, value in enumerate(normal):
        if value == 0.0:
            raise ValueError(f"share {rank} is {values[rank]:g}, too small to represent beside {largest:g}")
    return normal


def reachable_shares(shares: Sequence[float], num_nodes: int) -> tuple[float, ...]:
    """Shares raised to at least one average node each, the others giving up the difference in proportion.

    Every part must hold a node, so a part asked for 0.1 nodes can only be given 1.
    """
    floor = 1.0 / num_nodes
    raised: set[int] = set()
    while True:
        free = [rank for rank in range(len(shares)) if rank not in raised]
        rest = 1.0 - floor * len(raised)
        free_total = math.fsum(shares[rank] for rank in free)
        scale = rest / free_total if free else 0.0
        below = [rank for rank in free if shares[rank] * scale < floor]
        if not below or len(below) == len(free):
            break
        raised.update(below)
    result = [floor if rank in raised else share * scale for rank, share in enumerate(shares)]
    total = math.fsum(result)
    return tuple(share / total for share in result)


@dataclass(frozen=True, eq=False)
class Balance:
    """What each part should weigh, and how far off it may be.

    A part is within tolerance when, for every weight column,
    ``|load - target| <= max(tolerance * target, heaviest single node)``: nodes are indivisible, so the second term is
    what ``heaviest_first`` reaches for one column.

    Args:
        node_weights: ``(N, K)`` non-negative; every column has a positive sum.
        shares: Target share of each part, positive, summing to 1.
        tolerance: Allowed relative deviation from the target.
    """

    node_weights: Floats
    shares: tuple[float, ...]
    tolerance: float

    @property
    def num_parts(self) -> int:
        return len(self.shares)

    @cached_property
    def totals_K(self) -> Floats:
        return self.node_weights.sum(axis=0)

    @cached_property
    def targets_PK(self) -> Floats:
        return np.asarray(self.shares)[:, None] * self.totals_K

    @cached_property
    def slack_PK(self) -> Floats:
        # The last term is the rounding of the sums themselves: N additions, each off by at most eps * total.
        rounding_K = len(self.node_weights) * np.finfo(np.float64).eps * self.totals_K
        return np.maximum(self.tolerance * self.targets_PK, self.node_weights.max(axis=0)) + rounding_K

    @cached_property
    def combined_N(self) -> Floats:
        """One weight per node, for a partitioner that takes only one: the columns summed, each scaled to sum to 1."""
        return (self.node_weights / self.totals_K).sum(axis=1)

    def loads_PK(self, part_N: Ints) -> Floats:
        columns = [np.bincount(part_N, weights=column, minlength=self.num_parts) for column in self.node_weights.T]
        return np.stack(columns, axis=1)

    def violations(self, part_N: Ints) -> list[str]:
        """One sentence for each part that is empty, or outside its tolerance in some column; empty when all is well."""
        counts_P = np.bincount(part_N, minlength=self.num_parts)
        found = [f"part {rank} is empty" for rank in np.flatnonzero(counts_P == 0)]
        loads_PK, targets_PK, totals_K = self.loads_PK(part_N), self.targets_PK, self.totals_K
        for rank, column in np.argwhere(np.abs(loads_PK - targets_PK) > self.slack_PK):
            asked, reached = targets_PK[rank, column] / totals_K[column], loads_PK[rank, column] / totals_K[column]
            weight = "the node weight" if len(totals_K) == 1 else f"node weight column {column}"
            found.append(f"part {rank} has {reached:.2%} of {weight} where {asked:.2%} was asked for")
        return found


def split_in_order(order_N: Ints, balance: Balance) -> Ints:
    """Cut a node order into one run per part, each boundary at the node nearest to its target; no run is empty."""
    num_nodes, num_parts = len(order_N), balance.num_parts
    cumulative = np.cumsum(balance.combined_N[order_N])
    rounding = num_nodes * np.finfo(np.float64).eps * cumulative[-1]  # of the running sum; ties go to the earlier part
    bounds = [0]
    for rank in range(num_parts - 1):
        target = math.fsum(balance.shares[: rank + 1]) * cumulative[-1]
        after = int(np.searchsorted(cumulative, target))  # cumulative[after - 1] < target <= cumulative[after]
        before = cumulative[after - 1] if after else 0.0
        upward = cumulative[min(after, num_nodes - 1)] - target <= target - before + rounding
        nearest = after + 1 if upward else after
        bounds.append(min(max(nearest, bounds[-1] + 1), num_nodes - (num_parts - 1 - rank)))
    bounds.append(num_nodes)
    part_N = np.empty(num_nodes, np.int64)
    part_N[order_N] = np.repeat(np.arange(num_parts), np.diff(bounds))
    return part_N


def heaviest_first(balance: Balance) -> Ints:
    """Give each node, heaviest first, to the part that is furthest below its target; no part stays empty.

    With one column every load ends within the heaviest node of its target, unless the lightest nodes had to be spent
    on parts that would have stayed empty. Ignores edges.
    """
    combined_N, num_parts = balance.combined_N, balance.num_parts
    part_N = np.empty(len(combined_N), np.int64)
    total = float(combined_N.sum())
    deficits = [(-share * total, rank) for rank, share in enumerate(balance.shares)]
    heapq.heapify(deficits)
    empty = set(range(num_parts))
    for num_given, node in enumerate(np.argsort(-combined_N, kind="stable").tolist()):
        if len(combined_N) - num_given == len(empty):  # one node left for each part without any
            deficits = [entry for entry in deficits if entry[1] in empty]
            heapq.heapify(deficits)
        deficit, rank = heapq.heappop(deficits)
        part_N[node] = rank
        empty.discard(rank)
        heapq.heappush(deficits, (deficit + float(combined_N[node]), rank))
    return part_N


def settle(part_N: Ints, balance: Balance, adjacency: sparse.csr_array | None, notes: list[str]) -> Ints:
    """The assignment itself if within tolerance, else repaired, else made anew heaviest first; says so in ``notes``."""
    violations = balance.violations(part_N)
    if not violations:
        return part_N
    repaired_N, num_moved = repair(part_N, balance, adjacency)
    if not balance.violations(repaired_N):
        notes.append(f"Repaired by moving {counted(num_moved, 'node')}: {violations[0]}.")
        return repaired_N
    notes.append(f"Could not be repaired ({violations[0]}); gave out the nodes heaviest first.")
    return repair(heaviest_first(balance), balance, adjacency)[0]


def repair(part_N: Ints, balance: Balance, adjacency: sparse.csr_array | None) -> tuple[Ints, int]:
    """Move nodes, those that lengthen the cut least first, until every part is within tolerance or no move helps.

    Each round moves nodes from one part to another and lowers ``sum((load - target)^2 / share)``, so it ends.

    Args:
        part_N: Part of each node, in ``[0, P)``; parts may be empty. Not modified.
        balance: The targets.
        adjacency: Symmetric ``(N, N)`` arc weights, or None for a graph without edges.

    Returns:
        The repaired assignment (still outside tolerance if no move helped) and the number of nodes that changed part.
    """
    before_N, part_N = part_N, part_N.copy()
    fill_empty_parts(part_N, balance, adjacency)
    shares_P = np.asarray(balance.shares)
    num_parts = balance.num_parts
    for _ in range(50 + 20 * num_parts):  # pairs settle after a few rounds each; the cap only bounds the time
        excess_PK = balance.loads_PK(part_N) - balance.targets_PK
        if (np.abs(excess_PK) <= balance.slack_PK).all():
            break
        pressure_PK = excess_PK / balance.totals_K / shares_P[:, None]
        difference_PP = ((pressure_PK[:, None, :] - pressure_PK[None, :, :]) ** 2).sum(axis=2)
        pairs = np.argsort(-difference_PP, axis=None, kind="stable")
        # With one column a pair is looked at from both ends; the wrong way round finds no candidate and costs little.
        if not any(_relieve(part_N, balance, adjacency, excess_PK, *divmod(int(pair), num_parts)) for pair in pairs):
            break
    return part_N, int((part_N != before_N).sum())


def fill_empty_parts(part_N: Ints, balance: Balance, adjacency: sparse.csr_array | None) -> None:
    """Give every empty part the node nearest to its target weight, from the part that is most above its own.

    Of equally near ones it gets the one with the fewest neighbours: all of them are halo of a part of a single node.
    """
    counts_P = np.bincount(part_N, minlength=balance.num_parts)
    shares_P, combined_N = np.asarray(balance.shares), balance.combined_N
    for empty in np.flatnonzero(counts_P == 0):
        loads_P = np.bincount(part_N, weights=combined_N, minlength=balance.num_parts)
        excess_P = np.where(counts_P >= 2, loads_P / shares_P, -np.inf)
        donor = int(excess_P.argmax())
        nodes = np.flatnonzero(part_N == donor)
        distances = np.abs(combined_N[nodes] - shares_P[empty] * combined_N.sum())
        nearest = nodes[distances == distances.min()]
        chosen = nearest[0 if adjacency is None else np.diff(adjacency.indptr)[nearest].argmin()]
        part_N[chosen] = empty
        counts_P[donor] -= 1
        counts_P[empty] += 1


def _relieve(
    part_N: Ints, balance: Balance, adjacency: sparse.csr_array | None, excess_PK: Floats, giver: int, taker: int
) -> bool:
    """Move a batch of nodes from ``giver`` to ``taker`` if that brings both nearer to their targets."""
    if giver == taker:
        return False
    totals_K = balance.totals_K
    share_giver, share_taker = balance.shares[giver], balance.shares[taker]
    nodes = np.flatnonzero(part_N == giver)
    weights_VK = balance.node_weights[nodes] / totals_K
    giver_K, taker_K = excess_PK[giver] / totals_K, excess_PK[taker] / totals_K

    def penalty(moved: Floats) -> Floats:
        return ((giver_K - moved) ** 2 / share_giver + (taker_K + moved) ** 2 / share_taker).sum(axis=-1)

    unmoved = penalty(np.zeros_like(totals_K))
    helpful = penalty(weights_VK) < unmoved
    if not helpful.any() or len(nodes) < 2:
        return False
    candidates, weights_VK = nodes[helpful], weights_VK[helpful]
    batch = len(nodes) - 1  # the giver keeps a node
    if adjacency is not None:
        taken_N = (part_N == taker).astype(np.float64)
        to_taker = (adjacency @ taken_N)[candidates]
        gain = to_taker - (adjacency @ (part_N == giver).astype(np.float64))[candidates]
        order = np.argsort(-gain, kind="stable")
        candidates, weights_VK = candidates[order], weights_VK[order]
        # A layer of boundary nodes at a time, so that the next layer's gains are fresh; 2 % at least, to get done.
        batch = min(batch, max(int((to_taker > 0).sum()), len(nodes) // 50, 1))
    candidates, weights_VK = candidates[:batch], weights_VK[:batch]
    moved_VK = np.cumsum(weights_VK, axis=0)
    slack_PK = balance.slack_PK / totals_K
    settled = (np.abs(giver_K - moved_VK) <= slack_PK[giver]) & (np.abs(taker_K + moved_VK) <= slack_PK[taker])
    after = penalty(moved_VK)
    enough = np.flatnonzero(settled.all(axis=1) & (after < unmoved))
    last = int(enough[0]) if len(enough) else int(after.argmin())
    if not after[last] < unmoved:
        return False
    part_N[candidates[: last + 1]] = taker
    return True
