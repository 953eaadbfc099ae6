"""Parts that end at the same time on unequal devices: partition, count, predict, correct the targets, keep the best.

A partitioner balances one weight for each node. What a device is busy with also depends on the halo, which is known
only when the cut is. So the parts of each round are counted and handed to the work model, and the next round aims
where that says. Between calls of the partitioner single nodes move, which balances what no node weight can say.

Axes: N nodes, P parts.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from nugnn.partition.assign import Assignment, partition_nodes, split_graph
from nugnn.partition.balance import Balance, Floats, Ints, normalise_shares, reachable_shares
from nugnn.partition.kaminpar import check_kaminpar
from nugnn.partition.metis import SymmetricGraph, check_index_width, symmetric_graph
from nugnn.planning.in_words import in_bytes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.shares import (
    DoesNotFitError,
    Halo,
    SharePlan,
    capacity,
    check_whole,
    checked_limits,
    curve_through,
    level,
    plan_shares,
    relaxed_curves,
    what_is_lacking,
)
from nugnn.planning.single_moves import WORTH_WHILE, SingleMoves, marginal_cost
from nugnn.planning.work_model import WorkModel, edge_arrays, ids_array, sizes_of, sizes_table

LoopMethod: TypeAlias = Literal["metis", "clusters", "kaminpar"]
WholeStep: TypeAlias = Callable[[Sequence[PartSizes]], float]
ArrayLike = Any  # tensor, NumPy array or sequence of integers

_DAMPING = 0.7
"""How much of the way to the new targets a round goes, in the logarithm of shares: the cut answers unpredictably."""
_PATIENCE = 2
"""Rounds in a row that bring nothing before the loop ends."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one way of splitting came to.

    Args:
        name: "work", "nodes", "even", "METIS work", "METIS nodes" or a name that the caller gave: tried at the start;
            "targets" where the partitioner ran again with corrected targets; "moves" where single nodes moved.
        shares: Targets of the partitioner; for "moves" those of the parts that were moved.
        sizes: Of each part.
        seconds: Predicted, of each part.
        bytes: Predicted, of each part.
        lacking_bytes: By how much limits are exceeded, added up.
        took_seconds: Wall-clock time of this round.
        step_seconds: Predicted, of all parts together, where that was asked for.
    """

    name: str
    shares: tuple[float, ...]
    sizes: tuple[PartSizes, ...]
    seconds: tuple[float, ...]
    bytes: tuple[int, ...]
    lacking_bytes: float
    took_seconds: float
    step_seconds: float | None = None

    @property
    def makespan(self) -> float:
        """Seconds of the slowest part; of a step of all of them, where that is known."""
        return max(self.seconds) if self.step_seconds is None else self.step_seconds

    @property
    def rank(self) -> tuple[float, float, float]:
        """What is kept is the least of these: memory first, then the slowest part, then all of them together."""
        return self.lacking_bytes, self.makespan, math.fsum(self.seconds)

    @property
    def idle_share(self) -> float:
        """Mean share of an epoch in which devices wait for the slowest."""
        return 1 - math.fsum(self.seconds) / (len(self.seconds) * self.makespan) if self.makespan > 0 else 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedParts:
    """The best split that was found.

    Args:
        assignment: Its parts, checked; ``shares_asked`` are the shares of nodes that they have.
        rounds: All that was tried, in order.
        best_round: Position of this split in ``rounds``.
        relaxed: What was expected before there was a cut; None where halo as expected did not fit the memories.
    """

    assignment: Assignment
    rounds: tuple[Round, ...]
    best_round: int
    relaxed: SharePlan | None

    @property
    def best(self) -> Round:
        return self.rounds[self.best_round]

    @property
    def sizes(self) -> tuple[PartSizes, ...]:
        return self.best.sizes

    @property
    def seconds(self) -> tuple[float, ...]:
        """Predicted for each part."""
        return self.best.seconds

    @property
    def makespan(self) -> float:
        return self.best.makespan


def partition_to_fit(
    num_nodes: int,
    src: ArrayLike,
    dst: ArrayLike,
    work: WorkModel,
    limits: Sequence[float],
    *,
    train_nodes: ArrayLike = (),
    method: LoopMethod = "metis",
    rounds: int = 6,
    seed: int = 0,
    imbalance: float = 0.02,
    halo_fraction: Halo = 0.5,
    also: Mapping[str, Sequence[float]] | None = None,
    moves: bool = True,
    beside_metis: bool = False,
    only_work: bool = False,
    symmetric: SymmetricGraph | None = None,
    whole_step: WholeStep | None = None,
    on_round: Callable[[str], None] | None = None,
) -> FittedParts:
    """Split a graph such that the slowest device, by the work model, is as fast as it gets within all memories.

    At the start the partitioner runs once for each of "work" (shares as :func:`~nugnn.planning.shares.plan_shares`
    gives them, of node weights in proportion to the model's cost of a node with its in-edges), "nodes" (the same shares
    of the nodes) and "even" (equal shares of the nodes), and for what ``also`` names. Each is counted and predicted,
    so the result is never worse, by the model, than any of them. Then rounds follow: nodes move from parts that take
    long, and the partitioner runs again for targets that are corrected by what was counted.

    Args:
        num_nodes: N, at least the number of parts.
        src: ``(E,)`` source of each edge.
        dst: ``(E,)`` destination of each edge.
        work: Seconds and bytes of a part on its device.
        limits: Bytes of memory of each device, infinite for no limit; there are as many parts.
        train_nodes: Distinct ids of the training nodes.
        method: The partitioner. "kaminpar" gives the same parts for a seed on a single thread only.
        rounds: Calls of the partitioner after the start, at most.
        seed: Of the partitioner; round r uses ``seed + r``.
        imbalance: Ends the loop when devices wait for less than this share of an epoch, on average.
        halo_fraction: Halo rows expected for each node of a part, or a function of the part's fraction of the graph;
            for the first shares only.
        also: Further shares of the nodes to start from, a dictionary by name, each in any unit: baselines that the
            result shall not be worse than.
        moves: Whether single nodes move. They need ``4 * N * P`` bytes; above 4 GiB they are left out.
        beside_metis: With another method, let METIS make "work" and "nodes", too, as "METIS work" and "METIS nodes", so
            that the result is not worse than those either.
        only_work: Start from "work" alone and from nothing else, for a moment's plan: the result is then not held
            against the others.
        symmetric: What `nugnn.partition.metis.symmetric_graph` makes of the edges, for callers that have it: of large
            graphs that are split several times.
        whole_step: Predicted seconds of a step of all parts, by which rounds are judged: parts that each end as early
            as the others still wait for each other in between. Where None, the slowest part decides.
        on_round: Called with the name of each round before it begins.

    Returns:
        The best split found, with all that was tried. Equal arguments give an equal one, times apart.

    Raises:
        DoesNotFitError: no split can fit, or the best one found does not; says what is lacking and what would do.
        ValueError: an argument is malformed or out of range.
    """
    memory = checked_limits(limits)
    num_parts = len(memory)
    if method not in get_args(LoopMethod):
        raise ValueError(f"unknown partition method {method!r}; choose 'metis', 'clusters' or 'kaminpar'")
    num_devices = getattr(work, "num_devices", num_parts)
    if num_devices != num_parts:
        raise ValueError(f"limits are of {num_parts} devices, and the work model is of {num_devices}")
    if rounds < 0:
        raise ValueError(f"rounds is {rounds}; it must be at least 0")
    if not imbalance >= 0:
        raise ValueError(f"imbalance is {imbalance}; it must be a number of at least 0")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it must be an integer of at least 0")
    if method == "kaminpar":
        check_kaminpar()
    src_E, dst_E = edge_arrays(src, dst, num_nodes)
    train = ids_array(train_nodes, num_nodes, "train_nodes")
    whole = PartSizes(num_nodes, len(src_E), 0, 0, len(train))
    check_whole(whole, num_parts)
    check_index_width(num_nodes, len(src_E))

    if symmetric is not None and symmetric.adjacency.shape != (num_nodes, num_nodes):
        raise ValueError(f"symmetric is a graph of {symmetric.adjacency.shape[0]} nodes; this one has {num_nodes}")

    relaxed, first_shares = _first_shares(work, whole, memory, halo_fraction)
    search = _Search(num_nodes, src_E, dst_E, train, work, memory, method, seed, symmetric, whole_step, on_round)
    weights_N = search.node_weights(first_shares)
    even_N = np.ones(num_nodes)
    search.partition("work", first_shares, weights_N, seed)
    if num_parts > 1 and not only_work:
        search.partition("nodes", first_shares, even_N, seed)
        search.partition("even", (1.0,) * num_parts, even_N, seed)
        if beside_metis and method != "metis":
            search.partition("METIS work", first_shares, weights_N, seed, "metis")
            search.partition("METIS nodes", first_shares, even_N, seed, "metis")
        for name, shares in (also or {}).items():
            if len(shares) != num_parts:
                raise ValueError(f"{name!r} has {len(shares)} shares for {num_parts} devices")
            search.partition(name, shares, even_N, seed)
    if num_parts > 1:
        search.refine(rounds, weights_N, imbalance, moves)
    return search.result(relaxed)


def _first_shares(
    work: WorkModel, whole: PartSizes, limits: Sequence[float], halo_fraction: Halo
) -> tuple[SharePlan | None, tuple[float, ...]]:
    """The relaxed plan; where memories hold the graph only with less halo than expected, shares in their proportion."""
    try:
        plan = plan_shares(work, whole, limits, halo_fraction=halo_fraction)
        return plan, plan.shares
    except DoesNotFitError:
        curves = relaxed_curves(work, whole, len(limits), 0.0)
        if level(curves, limits) is None:  # not even without halo
            raise
        expected = relaxed_curves(work, whole, len(limits), halo_fraction)
        caps = [max(capacity(curve, limit), 1 / whole.inner) for curve, limit in zip(expected, limits, strict=True)]
        return None, normalise_shares(caps)


class _Search:
    """The rounds of one call: the graph in the forms that they need, made once, and what they came to."""

    def __init__(
        self,
        num_nodes: int,
        src: npt.NDArray,
        dst: npt.NDArray,
        train: npt.NDArray,
        work: WorkModel,
        limits: tuple[float, ...],
        method: LoopMethod,
        seed: int,
        symmetric: SymmetricGraph | None,
        whole_step: WholeStep | None = None,
        on_round: Callable[[str], None] | None = None,
    ) -> None:
        self.num_nodes, self.src, self.dst, self.train = num_nodes, src, dst, train
        self.work, self.limits, self.method, self.seed = work, limits, method, seed
        self.whole_step = whole_step
        self.on_round = on_round or (lambda _: None)
        self.num_parts = len(limits)
        self.began = time.perf_counter()
        self.rounds: list[Round] = []
        self.parts: dict[int, npt.NDArray[np.int32]] = {}
        self.by_work = 0
        """The round whose targets, of the node weights, the next ones correct."""
        self.notes: list[str] = []
        self._graph = symmetric
        self.degrees = np.bincount(dst, minlength=num_nodes)
        self._moves = SingleMoves(src, dst, train, self.degrees, work, limits)

    # What is tried

    def partition(
        self, name: str, shares: Sequence[float], weights_N: Floats, seed: int, method: LoopMethod | None = None
    ) -> Round:
        """Let the partitioner split by ``shares`` of the node weights; where it misses them, that is taken as it is."""
        self.on_round(name)
        began = time.perf_counter()
        targets = reachable_shares(normalise_shares(shares), self.num_nodes)
        balance = Balance(weights_N[:, None], targets, 0.02)
        if self._graph is None:
            self._graph = symmetric_graph(self.num_nodes, self.src, self.dst, None)
        found: list[str] = []
        part_N, _ = split_graph(method or self.method, self._graph, balance, seed, found)
        self.notes += [f"{name}: {note}" for note in found]
        return self._keep(name, targets, part_N, began)

    def move(self, start: int) -> Round:
        """Move single nodes of the parts of round ``start``."""
        self.on_round("moves")
        began = time.perf_counter()
        part_N = self.parts[start].astype(np.int64)
        self._moves.improve(part_N, self.rounds[start].sizes)
        return self._keep("moves", self.rounds[start].shares, part_N, began)

    def refine(self, most_rounds: int, weights_N: Floats, imbalance: float, moves: bool) -> None:
        """Correct and move until devices hardly wait, or two calls of the partitioner in a row brought nothing."""
        if moves and not self._moves.has_room:
            moves = False
            self.notes.append("No single nodes were moved: the graph is too large for the table that needs.")
        if moves:
            self.move(self._best())
        idle_rounds = 0
        for number in range(1, most_rounds + 1):
            best = self.rounds[self._best()]
            if best.lacking_bytes == 0 and best.idle_share <= imbalance:
                break
            shares = self._corrected(self.by_work, weights_N)
            if max(abs(s / t - 1) for s, t in zip(shares, self.rounds[self.by_work].shares, strict=True)) < WORTH_WHILE:
                break
            self.partition("targets", shares, weights_N, self.seed + number)
            self.by_work = len(self.rounds) - 1
            if moves:
                self.move(self.by_work)
            now = self.rounds[self._best()]
            is_better = now.lacking_bytes < best.lacking_bytes or now.makespan < best.makespan * (1 - WORTH_WHILE)
            idle_rounds = 0 if is_better else idle_rounds + 1
            if idle_rounds >= _PATIENCE:
                break

    def result(self, relaxed: SharePlan | None) -> FittedParts:
        """The best round, checked by the partitioners' own door; refused if memory is lacking."""
        best = self._best()
        kept = self.rounds[best]
        if kept.lacking_bytes > 0:
            raise DoesNotFitError(self._lacking(kept))
        counts = [sizes.inner for sizes in kept.sizes]
        checked = partition_nodes(
            self.num_nodes, self.src, self.dst, [float(n) for n in counts], method="given", parts=self.parts[best]
        )
        if tuple(counts) != checked.node_counts or tuple(s.edges for s in kept.sizes) != checked.edge_counts:
            raise AssertionError(f"counted {kept.sizes}, the partitioners' check {checked}")
        if tuple(s.halo for s in kept.sizes) != checked.halo_rows:
            raise AssertionError(f"counted {kept.sizes}, the partitioners' check {checked.halo_rows} halo rows")
        assignment = dataclasses.replace(
            checked,
            method=self.method,
            seed=self.seed,
            seconds=time.perf_counter() - self.began,
            notes=tuple(dict.fromkeys(self.notes)),
        )
        return FittedParts(assignment=assignment, rounds=tuple(self.rounds), best_round=best, relaxed=relaxed)

    # How

    def node_weights(self, shares: Sequence[float]) -> Floats:
        """``alpha + beta * in_degree`` (and ``gamma`` for training nodes), as the devices' cost on average.

        Each device's costs are divided by those of an average node on it, so that a slow device does not decide what
        an edge costs beside a node, and count by its share.
        """
        totals = np.array([self.num_nodes, len(self.src), len(self.train)], np.float64)
        mixed = np.zeros(3)
        for part, share in enumerate(shares):
            inner = share * totals
            sizes = PartSizes(*(round(x) for x in (inner[0], inner[1], 0, 0, inner[2])))
            costs, _ = marginal_cost(self.work.seconds, part, sizes)
            costs = np.maximum(costs[[0, 1, 4]], 0)
            sum_of_all = float(costs @ totals)
            mixed += share * costs / sum_of_all if sum_of_all > 0 else 0
        weights = mixed[0] + mixed[1] * self.degrees
        weights[self.train] += mixed[2]
        if not weights.sum() > 0:
            return np.ones(self.num_nodes)
        return np.maximum(weights / weights.mean(), 1e-3)  # a node without any weight would be free to go anywhere

    def _keep(self, name: str, shares: Sequence[float], part_N: Ints, began: float) -> Round:
        sizes = sizes_of(sizes_table(self.src, self.dst, part_N, self.num_parts, self.train))
        if min(part.inner for part in sizes) < 1:
            raise AssertionError(f"{name}: a part without nodes: {sizes}")
        held = tuple(self.work.bytes(part, size) for part, size in enumerate(sizes))
        kept = Round(
            name=name,
            shares=tuple(shares),
            sizes=sizes,
            seconds=tuple(self.work.seconds(part, size) for part, size in enumerate(sizes)),
            bytes=held,
            lacking_bytes=math.fsum(max(b - limit, 0.0) for b, limit in zip(held, self.limits, strict=True)),
            took_seconds=time.perf_counter() - began,
            step_seconds=None if self.whole_step is None else self.whole_step(sizes),
        )
        self.rounds.append(kept)
        latest = len(self.rounds) - 1
        self.parts[latest] = part_N.astype(np.int32)
        self.parts = {n: parts for n, parts in self.parts.items() if n in (self._best(), self.by_work, latest)}
        return kept

    def _best(self) -> int:
        return min(range(len(self.rounds)), key=lambda number: self.rounds[number].rank)

    def _corrected(self, number: int, weights_N: Floats) -> tuple[float, ...]:
        """Targets after round ``number``: as if all sizes of a part grew and shrank with its share, and not too far."""
        before = self.rounds[number]
        loads = np.bincount(self.parts[number], weights=weights_N, minlength=self.num_parts)
        reached = loads / loads.sum()
        curves = [
            curve_through(self.work, part, sizes, float(share), self.num_nodes)
            for part, (sizes, share) in enumerate(zip(before.sizes, reached, strict=True))
        ]
        plan = level(curves, self.limits)
        if plan is None:  # with the halo of this cut; the next one may have less
            caps = [
                max(capacity(c, limit), float(c.fractions[0])) for c, limit in zip(curves, self.limits, strict=True)
            ]
            wanted = normalise_shares(caps)
        else:
            wanted = plan.shares
        asked = np.asarray(before.shares)
        # what was reached may differ from what was asked; the partitioner will miss by about as much again
        return normalise_shares((asked * (np.asarray(wanted) / reached) ** _DAMPING).tolist())

    def _lacking(self, kept: Round) -> str:
        total = np.array([part.of_graph for part in kept.sizes]).sum(axis=0)
        whole = PartSizes(int(total[0]), int(total[1]), 0, 0, int(total[4]))
        lines = ["no split was found that fits all memories; the best one:"]
        for device, (held, limit) in enumerate(zip(kept.bytes, self.limits, strict=True)):
            if held > limit:
                lacking = f"{in_bytes(held - limit)} are lacking"
                lines.append(f"Device {device} needs {in_bytes(held)} and has {in_bytes(limit)}: {lacking}.")
        halo = float(total[2]) / whole.inner
        curves = relaxed_curves(self.work, whole, self.num_parts, halo)
        if level(curves, self.limits) is None:
            lacking = what_is_lacking(self.work, curves, self.limits)
            lines.append(f"With {halo:.2f} halo rows for each node, as this cut has, {lacking}")
        else:
            lines.append("With less halo it would fit: another seed or method may find such a cut.")
        return "\n".join(lines)
