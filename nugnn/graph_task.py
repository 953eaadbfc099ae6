"""Training on a graph: check, partition, and the shards that ranks train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nugnn.activations import refuse_needless_offload
from nugnn.call_inputs import checked_inputs
from nugnn.comm.groups import Ranks
from nugnn.fingerprint import graph_facts, run_identity
from nugnn.fit_options import FitOptions, checked_options
from nugnn.graph_part import GraphPart, StoredShards
from nugnn.inductive import visible_in_training
from nugnn.model_on_shard import refuse_empty_features
from nugnn.partition.shard import may_be_reordered
from nugnn.seam import install
from nugnn.shares import checked_partitioner, checked_shares, own_shard, shards_on_disk, whole_shard
from nugnn.task import Stage

if TYPE_CHECKING:
    from nugnn.plan_training import TrainingPlan
    from nugnn.rebalance import PlannedBalance


class GraphTask:
    """A `nugnn.task.Task`; the arguments are those of `nugnn.fit`."""

    worker = "nugnn.graph_worker"

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        workers: int,
        shares: Sequence[float] | None,
        options: Mapping[str, Any],
        others: Sequence[str],
        partitioner: str,
        order: str,
        check: bool,
        cache_folder: Path | None,
        inductive: bool,
    ) -> None:
        install()
        self.model, self.data = model, checked_inputs("nugnn.fit", model, data)
        self.options: FitOptions = checked_options(options, self.data, others)
        if self.data.features is not None:
            refuse_empty_features(self.data.features)
        self._seen = visible_in_training(model, self.data) if inductive else self.data
        self._shares = checked_shares(shares, workers, self._seen, "training nodes" if inductive else "nodes")
        self._partitioner, self._order, self._check = checked_partitioner(partitioner), order, check
        self._cache_folder, self._inductive = cache_folder, inductive
        self.plan: TrainingPlan | None = None
        self.said = self.options.without_effect(workers)

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        more = {"inductive": self._inductive} | dict(settings)
        return run_identity(self.model, graph_facts(self.data), self.options, more)

    def check_devices(self, devices: Sequence[torch.device]) -> None:
        refuse_needless_offload(self.options.activations, devices)

    def use_plan(self, plan: TrainingPlan) -> None:
        plan.prepare_graph(self.model, self.options, self._seen)
        self.plan = plan

    def stored(self, folder: Path, stage: Stage) -> tuple[GraphPart, list[str]]:
        self._compare_parts(stage)
        given, said = self._divide(stage)
        how = (self._shares, self._partitioner, self._order, self._cache_folder)
        shards, notes = shards_on_disk(self._seen, *how, folder / "shards", given, stage)
        whole = None
        if self._inductive:
            whole = StoredShards(shards_on_disk(self.data, *how, folder / "whole")[0])
        return GraphPart(StoredShards(shards), whole, self._planned()), [*self.said, *said, *notes]

    def _planned(self) -> PlannedBalance | None:
        """What nodes move by while it trains, where there is a plan; that is made by now."""
        return None if self.plan is None else self.plan.balance()

    def _divide(self, stage: Stage) -> tuple[Any, list[str]]:
        """Take over what the plan says: the part of each node where it knows that, and notes."""
        if self.plan is None:
            return None, []
        found = self.plan.shares_of(self._seen, self._partitioner, self.options.precision, self._cache_folder, stage)
        self._shares = list(found.shares)
        return found.part, [*self.plan.notes, *found.notes]

    def here(self, stage: Stage) -> tuple[GraphPart, list[str]]:
        notes = [*self.said, *self._divide(stage)[1]]
        order = self._order
        if order != "none" and self._check and may_be_reordered(self.data):
            stage("check")
            if (fault := self._depends_on_rows()) is not None:
                order = "none"
                notes.append(f"Nodes in the order of their ids, since the model seems to depend on it: {fault}")
        whole = (lambda _: whole_shard(self.data, order, [])) if self._inductive else None
        return GraphPart(lambda _: whole_shard(self._seen, order, notes), whole), notes

    def joined(self, ranks: Ranks, stage: Stage) -> tuple[GraphPart, list[str]]:
        """Rank 0 partitions and tells the others; each cuts its own part out of the graph."""
        if self._cache_folder is not None:
            raise ValueError("--partition-cache is not for processes started by torchrun: each cuts its part itself")
        given: Any = None
        first_notes = list(self.said)
        if ranks.rank == 0:
            self._compare_parts(stage)
        if self.plan is not None:
            given, notes_of_plan = self._divide_together(ranks, stage)
            first_notes += notes_of_plan
        if ranks.rank == 0:
            stage("partition" if given is None else "parts_planned")
        how: dict[str, Any] = {"method": self._partitioner, "order": self._order}
        shards, notes = [], []  # lists, so that nobody keeps a shard that training has turned into a graph
        for graph in [self._seen, self.data] if self._inductive else [self.data]:
            shard, said = own_shard(graph, ranks, self._shares, **how, given=given)
            shards.append(shard)
            notes.append([*first_notes, *said])
            given, first_notes = None, []
        del shard
        taken = lambda _: shards.pop(0)  # noqa: E731
        return GraphPart(taken, taken if self._inductive else None, self._planned()), list(notes[0])

    def _divide_together(self, ranks: Ranks, stage: Stage) -> tuple[Any, list[str]]:
        """As `_divide`, by rank 0 for all; a collective call."""
        given: Any = None
        notes: list[str] = []
        shares = torch.full((ranks.world_size,), -1.0, dtype=torch.float64)
        try:
            if ranks.rank == 0:
                given, notes = self._divide(stage)
                shares = torch.tensor(self._shares, dtype=torch.float64)
        finally:
            ranks.broadcast_(shares)  # also after a failure: the others wait for it
        if float(shares[0]) < 0:
            raise RuntimeError("worker 0 could not plan shares; it says why")
        self._shares = shares.tolist()
        return given, notes

    def _compare_parts(self, stage: Stage) -> None:
        if self._check:
            from nugnn.check import check_model

            stage("check")
            check_model(self.model, self.data, loss=self.options.loss, regularizer=self.options.regularizer)

    def _depends_on_rows(self) -> str | None:
        """What the check says against a model, such as one with a row for each node in the order of ids; or None."""
        from nugnn.check import ModelDiffers, ModelFails, check_model

        try:
            check_model(self.model, self.data, loss=self.options.loss, regularizer=self.options.regularizer)
        except (ModelDiffers, ModelFails) as error:
            return str(error)
        return None
