"""The rounds of a search for parts: a call of the partitioner or moves of single nodes, counted, predicted, corrected.

Axes: N nodes, P parts.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from nugnn.partition.assign import partition_nodes
from nugnn.partition.balance import Balance, Floats, Ints, normalise_shares, reachable_shares
from nugnn.partition.metis import symmetric_graph
from nugnn.partition.repeated_cuts import RepeatedCuts
from nugnn.planning.in_words import in_bytes
from nugnn.planning.lacking import DoesNotFitError, what_is_lacking
from nugnn.planning.levels import SharePlan, level
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.partition_rounds import FittedParts, Round
from nugnn.planning.search_aims import Aim, Counted, Devices
from nugnn.planning.share_curves import relaxed_curves
from nugnn.planning.single_moves import WORTH_WHILE, SingleMoves, marginal_cost
from nugnn.planning.work_model import WorkModel, sizes_of, sizes_table

LoopMethod: TypeAlias = Literal["metis", "clusters", "kaminpar"]

_PATIENCE = 2
"""Rounds in a row that bring nothing before the loop ends."""
_NO_ROOM = "No single nodes were moved: the graph is too large for the table that needs."


class PartitionSearch:
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
        cuts: RepeatedCuts | None,
        aim: Aim,
        on_round: Callable[[str], None] | None = None,
    ) -> None:
        self.num_nodes, self.src, self.dst, self.train = num_nodes, src, dst, train
        self.work, self.limits, self.method, self.seed = work, limits, method, seed
        self.aim, self.devices = aim, Devices(work, limits, num_nodes)
        self.on_round = on_round or (lambda _: None)
        self.num_parts = len(limits)
        self.began = time.perf_counter()
        self.rounds: list[Round] = []
        self.parts: dict[int, npt.NDArray[np.int32]] = {}
        self.by_work = 0
        """The round whose targets, of the node weights, the next ones correct."""
        self._next_seed = seed
        self.notes: list[str] = []
        self._cuts = cuts
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
        if self._cuts is None:
            self._cuts = RepeatedCuts(symmetric_graph(self.num_nodes, self.src, self.dst, None), self.seed)
        found: list[str] = []
        part_N = self._cuts.parts(method or self.method, balance, seed, found)
        self.notes += [f"{name}: {note}" for note in found]
        return self._keep(name, targets, part_N, began)

    def relieve(self, start: int) -> Round:
        """Move single nodes out of the parts of round ``start`` that lack memory."""
        return self._moved("relief", start, self._moves.relieve)

    def move(self, start: int) -> Round:
        """Move single nodes so that the parts of round ``start`` end together."""
        return self._moved("moves", start, self._moves.balance)

    def _moved(self, name: str, start: int, move: Callable[[Ints, Sequence[PartSizes]], None]) -> Round:
        self.on_round(name)
        began = time.perf_counter()
        part_N = self.parts[start].astype(np.int64)
        move(part_N, self.rounds[start].sizes)
        return self._keep(name, self.rounds[start].shares, part_N, began)

    def refine(self, most_rounds: int, weights_N: Floats, moves: bool) -> None:
        """Correct and move until the aim sees nothing more to try, or two calls of the partitioner in a row brought
        nothing. Where memory is lacking then, nodes move for its sake alone, and what is left of the rounds follows.
        """
        if moves:
            self._move_from(self._best())
        left = self._correct(most_rounds, weights_N, moves)
        if moves and self.rounds[self._best()].lacking_bytes > 0 and self._has_room():
            self.relieve(self._best())
            if self.rounds[self._best()].lacking_bytes == 0:
                self._correct(left, weights_N, moves)

    def _correct(self, most_rounds: int, weights_N: Floats, moves: bool) -> int:
        """Rounds of corrected targets; how many are left."""
        idle_rounds = 0
        for left in range(most_rounds, 0, -1):
            if idle_rounds >= _PATIENCE:
                return left
            best = self.rounds[self._best()]
            best_one, latest = (self._counted(number, weights_N) for number in (self._best(), self.by_work))
            shares = self.aim.targets(best_one, latest, self.devices)
            if shares is None:
                return left
            self._next_seed += 1
            self.partition("targets", shares, weights_N, self._next_seed)
            self.by_work = len(self.rounds) - 1
            if moves:
                self._move_from(self.by_work)
            now = self.rounds[self._best()]
            is_better = now.lacking_bytes < best.lacking_bytes or now.makespan < best.makespan * (1 - WORTH_WHILE)
            idle_rounds = 0 if is_better else idle_rounds + 1
        return 0

    def _move_from(self, start: int) -> None:
        """Move single nodes of the parts of round ``start``, if there is a reason and room to do so."""
        if (self.aim.is_of_parts or self.rounds[start].lacking_bytes > 0) and self._has_room():
            self.move(start)

    def _has_room(self) -> bool:
        if not self._moves.has_room and _NO_ROOM not in self.notes:
            self.notes.append(_NO_ROOM)
        return self._moves.has_room

    def _counted(self, number: int, weights_N: Floats) -> Counted:
        loads = np.bincount(self.parts[number], weights=weights_N, minlength=self.num_parts)
        return Counted(self.rounds[number], loads / loads.sum())

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
            step_seconds=self.aim.step_seconds(sizes),
        )
        self.rounds.append(kept)
        latest = len(self.rounds) - 1
        self.parts[latest] = part_N.astype(np.int32)
        self.parts = {n: parts for n, parts in self.parts.items() if n in (self._best(), self.by_work, latest)}
        return kept

    def _best(self) -> int:
        return min(range(len(self.rounds)), key=lambda number: self.rounds[number].rank)

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
