"""A training step of a model, recorded at small sizes on one device, as a trace that holds for any.

The step is the trainer's own, on a part of a random graph or on random samples whose numbers mean nothing; other
devices are not there, and what they would send is zeros. It is the second step: the optimizer has its state by then,
and what is aggregated from the features once is known.

    trace = trace_graph_step(model, in_features=100, num_classes=47)
    trace.at(PartSizes(inner=1_224_515, halo=300_000, edges=62_000_000, train=98_000, sent=250_000)).peak_bytes()
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nugnn import __version__, seam
from nugnn.comm.lone_ranks import LoneRanks
from nugnn.graph_family import GraphFamily
from nugnn.partition.shard import Shard
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.recorder import Recorder
from nugnn.planning.told_sizes import told
from nugnn.planning.trace import SCHEMA, StepTrace
from nugnn.planning.trace_records import Category, OperatorRecord, TraceError
from nugnn.random_data import random_part, random_samples
from nugnn.sample_family import SampleFamily
from nugnn.shard_graph import ShardGraph
from nugnn.trainer import Trainer

GRAPH_SIZES = (
    PartSizes(inner=211, halo=83, edges=1013, train=97, sent=59),
    PartSizes(inner=251, halo=127, edges=1213, train=113, sent=73),
)
"""Where a graph's step is recorded: no two of N, H, L, E, T and S grow alike from the first to the second."""
SAMPLE_SIZES = (PartSizes(batch=7), PartSizes(batch=11))
_OF_TRAINER = frozenset(inspect.signature(Trainer).parameters) - {"family"}


def trace_graph_step(
    model: nn.Module | Callable[[int], nn.Module],
    *,
    in_features: int | None,
    num_classes: int,
    multilabel: bool = False,
    stored_features: int | None = None,
    ranks: int = 2,
    device: str = "cpu",
    **options: Any,
) -> StepTrace:
    """The step of a part of a graph.

    Args:
        model: As for `nugnn.fit`; a copy of it is trained. Or what makes one for a graph of so many nodes.
        in_features: Width of the features; None for a model that takes none.
        num_classes: Of the labels.
        multilabel: Whether a label is a row of zeros and ones.
        stored_features: Values that a row of sparse features has stored, in the mean over nodes; None for dense ones.
            Work on stored values is told as so many for each node.
        ranks: Devices that share the graph; 1 for a whole graph, without halo.
        device: To record on: on a GPU other operators run than on a CPU.
        **options: Of `nugnn.graph_family.GraphFamily` and `nugnn.trainer.Trainer`.

    Raises:
        TraceError: Which operators run depends on the sizes or the graph.
    """
    how: dict[str, Any] = {"in_features": in_features, "num_classes": num_classes, "multilabel": multilabel}
    how |= {"stored_features": stored_features, "ranks": ranks, "device": device}
    first, second = (_without_halo(sizes) if ranks == 1 else sizes for sizes in GRAPH_SIZES)
    recorded = [record_graph_step(model, sizes, **how, **options) for sizes in (first, second)]
    return told(recorded[0], first, recorded[1], second)


def trace_sample_step(
    model: nn.Module, sample: Sequence[Tensor], *, num_classes: int, ranks: int = 1, device: str = "cpu", **options: Any
) -> StepTrace:
    """The step of a batch of samples.

    Args:
        model: As for `nugnn.fit`; a copy of it is trained.
        sample: What the model is called with for one sample, without the axis of samples: tensors whose shapes and
            types count. Whole numbers go up to the largest of them.
        num_classes: Of the labels.
        ranks: Devices that share a batch.
        device: To record on.
        **options: Of `nugnn.sample_family.SampleFamily` and `nugnn.trainer.Trainer`.

    Raises:
        TraceError: Which operators run depends on the number of samples.
    """
    how: dict[str, Any] = {"num_classes": num_classes, "ranks": ranks, "device": device}
    first, second = SAMPLE_SIZES
    recorded = [record_sample_step(model, sample, sizes, **how, **options) for sizes in (first, second)]
    return told(recorded[0], first, recorded[1], second)


_UNRECORDED = {"cuda_graphs": "off"}
"""A trainer that may record steps as CUDA graphs also fills a table of keys, which is no operator of the step."""


def record_graph_step(model: nn.Module | Callable[[int], nn.Module], sizes: PartSizes, **arguments: Any) -> StepTrace:
    """The step at these sizes, with numbers for dimensions; arguments as for `trace_graph_step`."""
    return record_step(graph_trainer(model, sizes, **_UNRECORDED | arguments)).trace


def record_sample_step(model: nn.Module, sample: Sequence[Tensor], sizes: PartSizes, **arguments: Any) -> StepTrace:
    """The step at these sizes, with numbers for dimensions; arguments as for `trace_sample_step`."""
    return record_step(sample_trainer(model, sample, sizes, **_UNRECORDED | arguments)).trace


def graph_trainer(
    model: nn.Module | Callable[[int], nn.Module],
    part: PartSizes | Shard | LonePart,
    *,
    in_features: int | None,
    num_classes: int,
    multilabel: bool = False,
    stored_features: int | None = None,
    ranks: int = 2,
    device: str = "cpu",
    **options: Any,
) -> Trainer:
    """What trains a copy of ``model`` on a random part of these sizes, or on one that is there.

    Args:
        model: As for `trace_graph_step`, as all that is not named here.
        part: Sizes; or a part, which says itself how many ranks there are, where it lies, and what its columns hold.
        in_features: Of a random part.
        num_classes: Likewise.
        multilabel: Likewise.
        stored_features: Likewise.
        ranks: Likewise.
        device: To train on; a `LonePart` has its own.
        **options: Of family and trainer.
    """
    if isinstance(part, PartSizes):
        how: dict[str, Any] = {"multilabel": multilabel, "num_parts": ranks, "stored_features": stored_features}
        part = random_part(part, in_features, num_classes, **how)
    graph, train_rows = lone_part(part, device) if isinstance(part, Shard) else part
    placed = graph.ranks.device
    own = copy.deepcopy(model) if isinstance(model, nn.Module) else model(graph.num_nodes_global())
    options = {"overlap": "off", **options}  # an exchange is a record of its own; when it runs is for who predicts
    of_trainer, of_family = _divided(options)
    family = GraphFamily(own.to(placed), graph, {"train": train_rows}, **of_family)
    return Trainer(family, check_replicas=0, **of_trainer)


class LonePart(NamedTuple):
    """A part as a model sees it, whose peers send zeros; several models may be traced or timed on it in turn."""

    graph: ShardGraph
    train_rows: Tensor


def lone_part(shard: Shard, device: str = "cpu") -> LonePart:
    """Of a part that is there, on ``device``."""
    seam.install()
    alone = LoneRanks.of(shard.num_parts, _numbered(device), shard.rank)
    return LonePart(ShardGraph(shard, alone, keep_edge_ids=False), shard.train_rows.to(alone.device))


def sizes_of(part: Shard | LonePart) -> PartSizes:
    """Counts of a part that is there."""
    if isinstance(part, Shard):
        counts = part.num_inner, part.num_halo, part.num_edges, len(part.train_rows), len(part.send_rows)
    else:
        index = part.graph.index
        plan = index.plan
        counts = (
            plan.num_inner, plan.num_halo, index.structure.num_edges, len(part.train_rows), len(plan.send_rows)
        )  # fmt: skip
    inner, halo, edges, train, sent = counts
    return PartSizes(inner=inner, halo=halo, edges=edges, train=train, sent=sent)


def sample_trainer(
    model: nn.Module,
    sample: Sequence[Tensor],
    sizes: PartSizes,
    *,
    num_classes: int,
    ranks: int = 1,
    device: str = "cpu",
    **options: Any,
) -> Trainer:
    """What trains a copy of ``model`` on random samples like ``sample``; as for `trace_sample_step`."""
    alone = LoneRanks.of(ranks, _numbered(device))
    data = random_samples(sample, 4 * sizes.batch * ranks, num_classes)
    of_trainer, of_family = _divided(options)
    family = SampleFamily(copy.deepcopy(model).to(alone.device), data, alone, sizes=[sizes.batch] * ranks, **of_family)
    return Trainer(family, check_replicas=0, **of_trainer)


def run_steps(trainer: Trainer, count: int) -> list[Tensor]:
    """``count`` optimizer steps, unrecorded; this rank's shares of their losses."""
    trainer.model.train()
    return [trainer.step(works) for works in itertools.islice(_steps(trainer), count)]


class Recorded(NamedTuple):
    """The trace of a trainer's second step, and the losses of the three that it made."""

    trace: StepTrace
    losses: list[Tensor]


def record_step(trainer: Trainer) -> Recorded:
    """Three steps of a trainer that has made none: one before, one that is recorded, one that tells what is saved.

    Args:
        trainer: Of either family; from `graph_trainer` or `sample_trainer`, or one that has its peers.

    Raises:
        TraceError: The third step is not the same operators as the second.
    """
    family = trainer.family
    assert isinstance(family, (GraphFamily, SampleFamily))
    interceptor = family.net.interceptor if isinstance(family, GraphFamily) else family.interceptor
    steps = _steps(trainer)
    trainer.model.train()
    losses, found = [trainer.step(next(steps))], []
    for marks_saved in (False, True):
        recorder = Recorder(trainer.model, trainer.optimizer, marks_saved=marks_saved)
        works = next(steps)
        with recorder.recording(interceptor, _known(trainer, works)):
            losses.append(trainer.step(works))
        found.append((recorder.operators, recorder.storages()))
    (operators, storages), (again, marked) = found
    _check_same_step(operators, again, len(storages), len(marked))
    saved = [s.model_copy(update={"is_saved": twin.is_saved}) for s, twin in zip(storages, marked, strict=True)]
    trace = StepTrace(
        schema=SCHEMA,
        family="graph" if isinstance(family, GraphFamily) else "samples",
        ranks=family.ranks.world_size,
        device=family.ranks.device.type,
        operators=tuple(operators),
        storages=tuple(saved),
        versions={"torch": torch.__version__, "nugnn": __version__},
    )
    return Recorded(trace, losses)


def _check_same_step(
    operators: Sequence[OperatorRecord], again: Sequence[OperatorRecord], num_storages: int, num_again: int
) -> None:
    """Raises TraceError; hooks on saved tensors make views of them, which do not count."""
    one, other = ([o for o in each if o.kind != "metadata"] for each in (operators, again))
    for a, b in itertools.zip_longest(one, other):
        if a is None or b is None or (a.name, a.op, a.sizes) != (b.name, b.op, b.sizes):
            said = " and ".join("nothing" if o is None else f"{o.name} ({o.op})" for o in (a, b))
            raise TraceError(f"two steps, one after the other, are not the same operators: {said} in the same place")
    if num_storages != num_again:
        raise TraceError(f"two steps, one after the other, touch {num_storages} and {num_again} storages")


def _steps(trainer: Trainer) -> Iterator[Sequence[Any]]:
    while True:
        yield from trainer.family.steps(0)


def _known(trainer: Trainer, works: Sequence[Any]) -> dict[Category, dict[str, Tensor]]:
    model, family = trainer.model, trainer.family
    state = {
        f"{number}.{name}": x
        for number, own in enumerate(trainer.optimizer.state.values())
        for name, x in own.items()
        if isinstance(x, Tensor)
    }
    data = {f"batch {i}": x for work in works for i, x in enumerate(family.tensors_of(work))}
    if isinstance(family, GraphFamily):
        structure = family.graph.index.structure
        data |= {name: x for name, x in family.graph.ndata.items() if isinstance(x, Tensor)}
        data |= {"indptr": structure.indptr, "indices": structure.indices}
    return {
        "parameter": dict(model.named_parameters()),
        "buffer": dict(model.named_buffers()),
        "gradient": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        "optimizer": state,
        "input": data,
    }


def _numbered(device: str) -> torch.device:
    """With the number that tensors on it have: DGL compares devices, and "cuda" is not "cuda:0"."""
    named = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if named.type == "cuda" and named.index is None else named


def _without_halo(sizes: PartSizes) -> PartSizes:
    return PartSizes(inner=sizes.inner, edges=sizes.edges, train=sizes.train)


def _divided(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the trainer, and those of the family."""
    of_trainer = {key: value for key, value in options.items() if key in _OF_TRAINER}
    return of_trainer, {key: value for key, value in options.items() if key not in _OF_TRAINER}
