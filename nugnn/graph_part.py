"""This rank's part of a graph as a family, from shards in memory or on the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from nugnn.comm.groups import Ranks
from nugnn.fit_options import FitOptions
from nugnn.graph_family import GraphFamily
from nugnn.partition.shard import Shard
from nugnn.partition.store import load_shard
from nugnn.rebalance import PlannedBalance, checked_rules
from nugnn.shard_graph import ShardGraph


@dataclass(frozen=True)
class GraphPart:
    """A `nugnn.train_rank.Part`.

    Args:
        make_shard: Builds or loads it for a rank; called when training begins, so that nobody else keeps what that
            does not need.
        make_evaluation_shard: Of another graph, on which the metric is measured and predictions are made.
        planned: What a plan knows of moves of nodes; without one, counts of nodes and edges decide these.
    """

    make_shard: Callable[[Ranks], Shard]
    make_evaluation_shard: Callable[[Ranks], Shard] | None = None
    planned: PlannedBalance | None = None

    def __call__(self, ranks: Ranks, model: nn.Module, options: FitOptions) -> GraphFamily:
        """The family of ``model`` on it, on the device of this rank."""
        graph, rows, metric = _graph_of(self.make_shard, ranks)
        model.to(ranks.device)
        other = None if self.make_evaluation_shard is None else _graph_of(self.make_evaluation_shard, ranks)[:2]
        return GraphFamily(
            model,
            graph,
            rows,
            loss=options.loss,
            metric=options.metric or metric,
            class_weights=options.class_weights,
            label_smoothing=options.label_smoothing,
            seed=options.seed,
            precision=options.precision,
            recompute_inputs=options.recompute_inputs,
            overlap=options.overlap,
            activations=options.activations,
            halo_wire=options.halo_wire,
            halo_feedback=options.halo_feedback,
            halo_mode=options.halo_mode,
            halo_target=options.halo_target,
            rebalance=checked_rules(options.rebalance, self.planned),
            on_move=options.on_move,
            evaluate_on=other,
        )


@dataclass(frozen=True)
class StoredShards:
    """Loads a rank's shard from ``folder``."""

    folder: Path

    def __call__(self, ranks: Ranks) -> Shard:
        """The shard."""
        return load_shard(self.folder, ranks.rank)


def _graph_of(make_shard: Callable[[Ranks], Shard], ranks: Ranks) -> tuple[ShardGraph, dict[str, Tensor], str]:
    """The graph of a shard, its rows of the splits and its metric; the shard itself is dropped."""
    shard = make_shard(ranks)
    rows = {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}
    rows = {split: numbers.to(ranks.device) for split, numbers in rows.items()}
    return ShardGraph(shard, ranks, keep_edge_ids=False), rows, shard.metric
