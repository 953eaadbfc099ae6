"""How long each rank computes is measured, and where that pays nodes move between them: for `nugnn.fit` and own loops.

Shape suffixes: N inner nodes, P ranks.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nugnn.comm.groups import Ranks, stacked
from nugnn.node_move import NodeMove, move_nodes
from nugnn.partition.growth import nodes_to_give
from nugnn.planning import device_facts
from nugnn.planning.imbalance import Levelling, RankLoad, RebalanceRules, flows
from nugnn.planning.imbalance_watch import ImbalanceWatch, Shortfall
from nugnn.planning.part_sizes import PartSizes
from nugnn.process_state import host_memory, process_state
from nugnn.shard_graph import ShardGraph

_SECONDS_BETWEEN_LOOKS = 0.1
"""Ranks have to tell each other their seconds, which takes an exchange; so not after each of many short epochs."""
_SETTLING = 3
"""Epochs after a move that say nothing: kernels and buffers are made anew, then compressed rows are measured."""
_USABLE = 0.9
"""Of the memory that is free, for parts that grow."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """Where nodes should go.

    Args:
        destination: ``(N,)`` int64, the rank that each of this rank's nodes goes to.
        level: What was measured, and is predicted.
        began: When the choice began, by `time.perf_counter`.
        arranged_as: ``(M,)`` ids in the order of this rank's rows afterwards; as a move has them when None.
    """

    destination: Tensor
    level: Levelling
    began: float
    arranged_as: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _WayBack:
    """Of the last move: its graph, where each of its nodes was, and which nodes this rank had, in their order."""

    graph: weakref.ref[ShardGraph]
    came_from: Tensor
    old_ids: Tensor


class Balancer:
    """Watches over the epochs of a run; every rank has one and makes the same calls.

        balancer = nugnn.Balancer(ranks)
        for epoch in range(epochs):
            with balancer.epoch():
                ...  # forward, backward, step
            move = balancer.move(graph, epochs - epoch - 1)
            if move is not None:
                graph, features, labels = move.graph, move.rows(features), move.rows(labels)
                move.parameters(model, optimizer)
                interceptor = nugnn.intercept(model, graph)

    Args:
        ranks: Who takes part.
        rules: When to act; those of ``nugnn.fit(rebalance="auto")`` when None.

    Raises:
        ValueError: The rules leave out a rank that there is not.
    """

    def __init__(self, ranks: Ranks, rules: RebalanceRules | None = None) -> None:
        self._ranks, self._rules = ranks, rules or RebalanceRules()
        if unknown := sorted(self._rules.left_out - set(range(ranks.world_size))):
            raise ValueError(f"left_out has rank {unknown[0]}; ranks are 0 to {ranks.world_size - 1}")
        self._watch = ImbalanceWatch(self._rules)
        self._num_epochs, self._looked_at, self._next_look = 0, 0, 1
        self._computed: list[float] = []
        self._passed: list[float] = []
        self._first_passed: float | None = None
        self._num_settling = 1
        self._proposed: Proposal | None = None
        self._way_back: _WayBack | None = None

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Around all that is computed in an epoch."""
        clock = self._ranks.clock
        clock.take()
        begin = time.perf_counter()
        yield
        self._ranks.synchronize()
        passed = time.perf_counter() - begin
        self.note(passed - sum(clock.take()), passed)

    def note(self, computed: float, passed: float) -> None:
        """In place of `epoch`: this rank's seconds of computing in an epoch, and those that passed."""
        self._num_epochs += 1
        if self._first_passed is None:  # it compiles, and fills caches
            self._first_passed = passed
        if self._num_settling:
            self._num_settling -= 1
            return
        self._computed = [*self._computed, computed][-self._rules.window :]
        self._passed = [*self._passed, passed][-self._rules.window :]

    def move(self, graph: ShardGraph, epochs_left: int, splits: Mapping[str, Tensor] | None = None) -> NodeMove | None:
        """Move nodes if that pays by now, or back where epochs are longer since; a collective call, after each epoch.

        Args:
            graph: From `nugnn.shard`, or from the last move.
            epochs_left: Of the run.
            splits: As for `nugnn.move_nodes`.

        Returns:
            What was moved, or None. The graph that was given is of no use after a move.
        """
        proposal = self.propose(graph, epochs_left)
        if proposal is None:
            return None
        made = move_nodes(graph, proposal.destination, splits, arranged_as=proposal.arranged_as)
        self.has_moved(made)
        return made

    def propose(self, graph: ShardGraph, epochs_left: int) -> Proposal | None:
        """Where nodes should go, or None for no move; a collective call.

        Whoever moves them says so by `has_moved`.
        """
        is_due = self._num_epochs >= self._next_look and len(self._computed) >= self._rules.window
        if not self._ranks.is_split or not is_due:
            return None
        began = time.perf_counter()
        way_back, self._way_back = self._way_back, None  # the first look after a move takes it back, or none does
        if way_back is not None and way_back.graph() is not graph:
            way_back = None
        level = self._decided(graph, epochs_left, can_return=way_back is not None)
        if level is None:
            return None
        if level.is_return:
            assert way_back is not None
            self._proposed = Proposal(way_back.came_from, level, began, way_back.old_ids)
        else:
            self._proposed = Proposal(self._chosen(graph, level), level, began)
        return self._proposed

    def take_shortfall(self) -> Shortfall | None:
        """What came of the last move, where that is too little; told once, and on rank 0 alone, which compares."""
        found, self._watch.shortfall = self._watch.shortfall, None
        return found

    def has_moved(self, move: NodeMove) -> tuple[Levelling, float, float]:
        """The nodes are where `propose` wanted them: what was measured before says nothing any more.

        Args:
            move: As it was made.

        Returns:
            What had been measured, and is predicted; the seconds since `propose` began; and those that passed in an
            epoch before. The same on every rank; a collective call.
        """
        assert self._proposed is not None
        level = self._proposed.level
        if not level.is_return:
            self._way_back = _WayBack(weakref.ref(move.graph), move.came_from(), move.old_ids)
        own = [time.perf_counter() - self._proposed.began, statistics.median(self._passed)]
        seconds, epoch_seconds = self._ranks.max_(torch.tensor(own, dtype=torch.float64)).tolist()
        self._watch.moved(level, seconds)
        self._proposed, self._first_passed, self._computed, self._passed = None, None, [], []
        self._num_settling = _SETTLING
        return level, seconds, epoch_seconds

    # -- what all ranks find together ------------------------------------------------------------------------------

    def _decided(self, graph: ShardGraph, epochs_left: int, *, can_return: bool) -> Levelling | None:
        """What rank 0 makes of all ranks' seconds."""
        loads = self._loads(graph)
        size, found = self._ranks.world_size, None
        answer = torch.zeros(2 + 4 * size, dtype=torch.float64)
        if self._ranks.rank == 0:
            passed = statistics.median(self._passed)
            found = self._watch.look(
                loads,
                num_epochs=self._num_epochs - self._looked_at,
                epochs_left=epochs_left,
                slow_start=(self._first_passed or 0.0) - passed,
                can_return=can_return,
            )
            answer[1] = max(1, round(_SECONDS_BETWEEN_LOOKS / max(passed, 1e-9)))
            if found is not None:
                answer[0] = 2 if found.is_return else 1
                parts = (found.seconds, found.predicted, found.given, found.node_work)
                answer[2:] = torch.tensor(parts, dtype=torch.float64).flatten()
        self._ranks.broadcast_(answer)
        self._looked_at = self._num_epochs
        self._next_look = self._num_epochs + int(answer[1])
        if not bool(answer[0]):
            return None
        seconds, predicted, given, node_work = map(tuple, answer[2:].view(4, size).tolist())
        is_return = int(answer[0]) == 2
        return Levelling(seconds=seconds, predicted=predicted, given=given, node_work=node_work, is_return=is_return)

    def _loads(self, graph: ShardGraph) -> list[RankLoad]:
        plan = graph.index.plan
        own = (
            statistics.median(self._computed), graph.num_nodes(), graph.num_edges(), plan.num_halo,
            len(plan.send_rows), most_growth(self._ranks), *self._passed,
        )  # fmt: skip
        return [
            RankLoad(
                seconds=seconds,
                sizes=PartSizes(inner=int(inner), edges=int(edges), halo=int(halo), sent=int(sent)),
                most_growth=growth,
                passed=tuple(passed),
            )
            for seconds, inner, edges, halo, sent, growth, *passed in stacked(
                self._ranks, torch.tensor(own, dtype=torch.float64)
            ).tolist()
        ]

    def _chosen(self, graph: ShardGraph, level: Levelling) -> Tensor:
        """Nodes of this rank that come to what it has to give, by part."""
        structure, plan, rank = graph.index.structure, graph.index.plan, self._ranks.rank
        sent = stacked(self._ranks, torch.tensor(plan.send_splits))
        amounts = flows(level.given, (sent + sent.T).tolist())[rank]
        return nodes_to_give(
            structure.indptr.cpu(), structure.indices.cpu(), plan.recv_splits, plan.send_rows.cpu(), plan.send_splits,
            own=rank, amounts=amounts, node_work=level.node_work[rank],
        )  # fmt: skip


def most_growth(ranks: Ranks) -> float:
    """Factor by which this rank's part may grow in the memory that there is; infinite where that is not known."""
    if ranks.device.type == "cuda":
        free, ours = torch.cuda.mem_get_info(ranks.device)[0], torch.cuda.memory_reserved(ranks.device)
        room = min(free + ours, device_facts.memory_bytes(ranks.device))
        return max(1.0, _USABLE * room / max(torch.cuda.max_memory_allocated(ranks.device), 1))
    memory, own = host_memory(), process_state(os.getpid())
    if memory is None or own is None:
        return math.inf
    sharing = ranks.hosts.count(ranks.hosts[ranks.rank]) if ranks.hosts else ranks.world_size
    unused = max(memory.limit_bytes - memory.used_bytes, 0) / max(sharing, 1)
    return 1.0 + _USABLE * min(unused, device_facts.free_bytes(ranks.device)) / max(own.resident_bytes, 1)
