"""How long each rank computes is measured, and where that pays nodes move between them: for `nugnn.fit` and own loops.

Shape suffixes: N inner nodes, P ranks.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from nugnn.comm.groups import Ranks, stacked
from nugnn.node_move import NodeMove, move_nodes
from nugnn.partition.growth import nodes_to_give
from nugnn.planning import device_facts
from nugnn.planning.imbalance import ImbalanceWatch, Levelling, RankLoad, RebalanceRules, flows
from nugnn.planning.part_sizes import PartSizes
from nugnn.process_state import host_memory, process_state
from nugnn.shard_graph import ShardGraph

_SECONDS_BETWEEN_LOOKS = 0.1
"""Ranks have to tell each other their seconds, which takes an exchange; so not after each of many short epochs."""
_USABLE = 0.9
"""Of the memory that is free, for parts that grow."""


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
    """

    def __init__(self, ranks: Ranks, rules: RebalanceRules | None = None) -> None:
        self._ranks, self._rules = ranks, rules or RebalanceRules()
        self._watch = ImbalanceWatch(self._rules)
        self._num_epochs, self._looked_at, self._next_look = 0, 0, 1
        self._computed: list[float] = []
        self._passed: list[float] = []
        self._first_passed: float | None = None
        self._proposed: tuple[Levelling, float] | None = None

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
            return
        self._computed = [*self._computed, computed][-self._rules.window :]
        self._passed = [*self._passed, passed][-self._rules.window :]

    def move(self, graph: ShardGraph, epochs_left: int, splits: Mapping[str, Tensor] | None = None) -> NodeMove | None:
        """Move nodes if that pays by now; a collective call, after each epoch.

        Args:
            graph: From `nugnn.shard`, or from the last move.
            epochs_left: Of the run.
            splits: As for `nugnn.move_nodes`.

        Returns:
            What was moved, or None. The graph that was given is of no use after a move.
        """
        destination = self.propose(graph, epochs_left)
        if destination is None:
            return None
        made = move_nodes(graph, destination, splits)
        self.has_moved()
        return made

    def propose(self, graph: ShardGraph, epochs_left: int) -> Tensor | None:
        """``(N,)`` int64, the rank that each node should go to, or None for no move; a collective call.

        Whoever moves them says so by `has_moved`.
        """
        least = self._rules.least_epochs if self._watch.has_moved else self._rules.window  # at first nothing is warm
        is_due = self._num_epochs >= self._next_look and len(self._computed) >= least
        if not self._ranks.is_split or not is_due:
            return None
        began = time.perf_counter()
        level = self._decided(graph, epochs_left)
        if level is None:
            return None
        destination = self._chosen(graph, level)
        self._proposed = level, began
        return destination

    def take_shortfall(self) -> tuple[float, float] | None:
        """Seconds of an epoch that the last move promised and brought, where that is less than half; told once.

        On rank 0 alone, which compares them.
        """
        found, self._watch.shortfall = self._watch.shortfall, None
        return found

    def has_moved(self) -> tuple[Levelling, float, float]:
        """The nodes are where `propose` wanted them: what was measured before says nothing any more.

        Returns:
            What had been measured, and is predicted; the seconds since `propose` began; and those that passed in an
            epoch before. The same on every rank; a collective call.
        """
        assert self._proposed is not None
        level, began = self._proposed
        own = [time.perf_counter() - began, statistics.median(self._passed)]
        seconds, epoch_seconds = self._ranks.max_(torch.tensor(own, dtype=torch.float64)).tolist()
        self._watch.moved(level, seconds)
        self._proposed, self._first_passed, self._computed, self._passed = None, None, [], []
        return level, seconds, epoch_seconds

    # -- what all ranks find together ------------------------------------------------------------------------------

    def _decided(self, graph: ShardGraph, epochs_left: int) -> Levelling | None:
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
            )
            answer[1] = max(1, round(_SECONDS_BETWEEN_LOOKS / max(passed, 1e-9)))
            if found is not None:
                answer[0] = 1
                parts = (found.seconds, found.predicted, found.given, found.node_work)
                answer[2:] = torch.tensor(parts, dtype=torch.float64).flatten()
        self._ranks.broadcast_(answer)
        self._looked_at = self._num_epochs
        self._next_look = self._num_epochs + int(answer[1])
        if not bool(answer[0]):
            return None
        seconds, predicted, given, node_work = map(tuple, answer[2:].view(4, size).tolist())
        return Levelling(seconds=seconds, predicted=predicted, given=given, node_work=node_work)

    def _loads(self, graph: ShardGraph) -> list[RankLoad]:
        plan = graph.index.plan
        own = (
            statistics.median(self._computed), graph.num_nodes(), graph.num_edges(), plan.num_halo,
            len(plan.send_rows), most_growth(self._ranks),
        )  # fmt: skip
        return [
            RankLoad(
                seconds=seconds,
                sizes=PartSizes(inner=int(inner), edges=int(edges), halo=int(halo), sent=int(sent)),
                most_growth=growth,
            )
            for seconds, inner, edges, halo, sent, growth in stacked(
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
