"""Cases on two ranks: both parts of a random graph, or both shares of a batch, and where their operators are timed."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from replay_cases import NUM_CLASSES, Case, Setting, Sizes, drawn, graph_setting, sample_setting
from replay_mixed import Drawn, configurations, settings_of
from torch import Tensor

from nugnn import seam
from nugnn.comm.groups import Ranks
from nugnn.graph_family import GraphFamily
from nugnn.partition.shard import Shard
from nugnn.planning.measured_times import MeasuredTimes
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.times_of_steps import times_of
from nugnn.random_data import random_part, random_samples
from nugnn.sample_family import SampleFamily
from nugnn.shard_graph import ShardGraph
from nugnn.timed_place import Place
from nugnn.traced_step import LonePart
from nugnn.trainer import Trainer

NUM_RANKS = 2
_IN_FEATURES, _GRAPH_CLASSES = 100, 47
_BATCH = {"mlp": 512, "cnn": 24, "transformer": 16}


def cases_of(samples: int, graphs: int, seed: int, scale: float, mixed: int = 0) -> list[Case | Drawn]:
    """What is drawn; each test of a case is what one of the ranks has.

    Args:
        samples: Configurations of samples.
        graphs: Of graphs.
        seed: Of all.
        scale: Factor on batches and graphs.
        mixed: Configurations of samples whose operators have formats of their own.
    """
    batch = {kind: max(4, int(n * scale)) for kind, n in _BATCH.items()}
    sizes = Sizes(int(12_000 * scale), int(120_000 * scale), NUM_RANKS, NUM_RANKS, is_random=True, batch=batch)
    of_samples = drawn(samples, seed, ["samples"], ["fp32"], sizes)
    of_formats = configurations(mixed, seed, NUM_RANKS, 1.0, "cpu", batch)
    return [*of_samples, *of_formats, *drawn(graphs, seed, ["graph"], ["fp32"], sizes)]


def agreed(tests: Sequence[PartSizes]) -> tuple[PartSizes, PartSizes]:
    """Sizes of two parts of one graph: a rank receives what the other one sends.

    >>> one, other = agreed([PartSizes(inner=90, halo=40, edges=95), PartSizes(inner=30, halo=50, edges=60)])
    >>> (one.halo, other.sent), (other.halo, one.sent)
    ((30, 30), (50, 50))
    """
    first, second = tests
    read = min(first.halo, second.inner), min(second.halo, first.inner)
    return (
        dataclasses.replace(first, halo=read[0], sent=read[1], edges=max(first.edges, read[0])),
        dataclasses.replace(second, halo=read[1], sent=read[0], edges=max(second.edges, read[1])),
    )


def two_parts(sizes: Sequence[PartSizes]) -> tuple[Shard, Shard]:
    """Both parts of one random graph, of sizes as `agreed` gives them."""
    parts = [random_part(each, _IN_FEATURES, _GRAPH_CLASSES, multilabel=False, num_parts=2) for each in sizes]
    counts = {"num_nodes_global": "inner", "num_edges_global": "edges", "num_train_global": "train"}
    of_whole: dict[str, Any] = {name: sum(getattr(each, count) for each in sizes) for name, count in counts.items()}
    uses = [torch.bincount(part.indices.long(), minlength=part.num_local) for part in parts]
    found = []
    for rank, own in enumerate(parts):
        peer = 1 - rank
        other, own_uses, other_uses = parts[peer], uses[rank], uses[peer]
        nodes_before, edges_before = rank * sizes[0].inner, rank * sizes[0].edges
        splits = {"send_splits": len(own.send_rows), "recv_splits": own.num_halo}
        found.append(
            dataclasses.replace(
                own, rank=rank, **of_whole, **{name: (n, 0) if rank else (0, n) for name, n in splits.items()},
                global_node_ids=own.global_node_ids + nodes_before,
                halo_global_ids=other.send_rows + peer * sizes[0].inner,
                global_edge_ids=own.global_edge_ids + edges_before, edge_starts=own.edge_starts + edges_before,
                out_degrees=own_uses[: own.num_inner].index_add(0, own.send_rows, other_uses[other.num_inner :]),
            )
        )  # fmt: skip
    return found[0], found[1]


@dataclasses.dataclass(eq=False)
class Pair:
    """A case on two ranks.

    Args:
        setting: Of what is trained.
        sizes: Of each rank.
        timed: In whose steps operators are timed.
    """

    setting: Setting
    sizes: tuple[PartSizes, PartSizes]
    timed: tuple[Setting, ...]

    @classmethod
    def of(cls, case: Case | Drawn) -> Pair:
        if isinstance(case, Drawn):
            step = settings_of(case, "cpu", NUM_RANKS)
            return cls(step.mixed, (step.mixed.tests[0], step.mixed.tests[1]), (step.single, step.half))
        if case.family == "graph":
            setting = graph_setting(case, "cpu", NUM_RANKS, None)
            return cls(setting, agreed(setting.tests), (setting,))
        setting = sample_setting(case, "cpu", NUM_RANKS)
        return cls(setting, (setting.tests[0], setting.tests[1]), (setting,))

    def places(self) -> list[list[Place]]:
        """Where operators are timed, by setting, warm. A batch of one is no place: batch norm needs more."""
        found = [
            [Place(setting.trainer(each), each) for each in setting.ladder if each.batch != 1] for setting in self.timed
        ]
        for place in itertools.chain(*found):
            place.warm_up()
        return found

    def table(self, places: Sequence[Sequence[Place]]) -> MeasuredTimes:
        """Of the operators that were timed there."""
        laps = [[(place.sizes, place.laps) for place in each] for each in places]
        device = places[0][0].device
        tables = [times_of(setting.trace, each, device) for setting, each in zip(self.timed, laps, strict=True)]
        return tables[0].joined(tables[1:])

    def trainer(self, ranks: Ranks) -> Trainer:
        """Of this rank; a collective call."""
        setting = self.setting
        if not setting.sample:
            seam.install()
            shard = two_parts(self.sizes)[ranks.rank]
            return setting.trainer(LonePart(ShardGraph(shard, ranks), shard.train_rows))
        batches = [each.batch for each in self.sizes]
        data = random_samples(setting.sample, 4 * sum(batches), NUM_CLASSES)
        family = SampleFamily(copy.deepcopy(setting.model), data, ranks, sizes=batches)
        return Trainer(family, check_replicas=0)


def stepped(trainer: Trainer) -> Callable[[], Tensor | float]:
    """What makes one step of the trainer and gives its loss: of a graph, whose step is an epoch, that over all ranks.

    Of samples, which are read beforehand and whose loss is summed once an epoch, it is the rank's own share.
    """
    if isinstance(trainer.family, GraphFamily):
        return trainer.train_epoch
    works = itertools.cycle(list(trainer.family.steps(0)))
    trainer.model.train()
    return lambda: trainer.step(next(works))
