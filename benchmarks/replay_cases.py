"""Configurations drawn by a seed, and where the trainers come from whose steps are predicted and measured."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nugnn.datasets.registry import load
from nugnn.models import GNN
from nugnn.networks import CNN, MLP, TransformerClassifier
from nugnn.partition.assign import partition_nodes
from nugnn.partition.pieces import piece_of
from nugnn.partition.shard import Shard, build_shard
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.trace import StepTrace
from nugnn.size_ladder import ladder
from nugnn.traced_step import (
    LonePart,
    graph_trainer,
    lone_part,
    sample_trainer,
    sizes_of,
    trace_graph_step,
    trace_sample_step,
)
from nugnn.trainer import Trainer

NUM_CLASSES = 10
"""Of samples."""

_TOKENS, _IMAGE = 64, 32
_WIDTHS = (32, 64, 128, 256)
_DEGREES = (0.7, 0.85, 1.0, 1.0, 1.15, 1.3)
"""Edges for a node of a random graph that is predicted, beside those of the ladder."""
_SHARES = (1.0, 0.5, 0.25, 0.125, 1 / 64)
"""Pieces of a real graph whose operators are timed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration.

    Args:
        family: ``graph`` or ``samples``.
        kind: Of the model.
        options: Of its class.
        precision: Of training.
        largest: Sizes of the ladder's end; None where the graph has its own.
        tests: What is predicted: shares of the largest, and how many edges a node has beside it.
    """

    family: str
    kind: str
    options: dict[str, Any]
    precision: str
    largest: PartSizes | None
    tests: tuple[tuple[float, float], ...]

    @property
    def name(self) -> str:
        words = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.kind} {words} {self.precision}"


def drawn(count: int, seed: int, families: Sequence[str], precisions: Sequence[str], sizes: Sizes) -> list[Case]:
    """``count`` configurations of each family."""
    draw = random.Random(seed)
    cases = []
    for family, _ in itertools.product(families, range(count)):
        precision = draw.choice(list(precisions))
        tests = tuple((draw.uniform(0.15, 1.0), draw.choice(_DEGREES)) for _ in range(sizes.tests))
        if family == "graph":
            kind, hidden = draw.choice(("gcn", "sage", "gat", "gin")), draw.choice(_WIDTHS)
            options: dict[str, Any] = {"hidden": hidden, "layers": draw.choice((2, 3))}
            if kind == "gat":
                options |= {"heads": 4, "hidden": hidden // 4}
            elif draw.random() < 0.5:
                options["norm"] = draw.choice(("layer", "batch"))
            edges = int(sizes.edges * draw.choice((0.3, 0.6, 1.0)))
            nodes = min(int(sizes.nodes * draw.choice((0.3, 0.6, 1.0))), edges // 3)
            largest = PartSizes(inner=nodes, edges=edges, train=nodes // 10) if sizes.is_random else None
            if largest is not None and sizes.parts > 1:
                largest = dataclasses.replace(largest, halo=nodes // 4, sent=nodes // 5)
        else:
            kind = draw.choice(("mlp", "cnn", "transformer"))
            width, layers = draw.choice(_WIDTHS), draw.choice((2, 3))
            options = {"mlp": {"hidden": 4 * width, "layers": layers}, "cnn": {"widths": (width // 2, width)},
                       "transformer": {"width": width, "layers": layers}}[kind]  # fmt: skip
            largest = PartSizes(batch=int(sizes.batch[kind] * draw.choice((0.5, 1.0))))
        cases.append(Case(family, kind, options, precision, largest, tests))
    return cases


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What configurations are drawn for.

    Args:
        nodes: Of a graph, at most.
        edges: Likewise.
        parts: That share a graph.
        tests: Sizes that are predicted of each configuration.
        is_random: Whether a graph is a random one; it is there otherwise.
        batch: Samples of a batch by the kind of the model, at most.
    """

    nodes: int
    edges: int
    parts: int
    tests: int
    is_random: bool
    batch: dict[str, int]


@dataclasses.dataclass(eq=False)
class Setting:
    """Where the trainers of a case come from.

    Args:
        model: That is trained.
        trace: Of its step, in formulas.
        trainer: Makes one at a place, of a copy of the model.
        ladder: Places to time operators at.
        tests: Places to predict.
        sample: What a model of samples is called with for one; empty of a graph.
    """

    model: nn.Module
    trace: StepTrace
    trainer: Callable[..., Trainer]
    ladder: Sequence[Any]
    tests: Sequence[Any]
    sample: Sequence[Tensor] = ()


def graph_setting(case: Case, device: str, parts: int, real: RealGraph | None) -> Setting:
    in_features, classes = (100, 47) if real is None else (real.in_features, real.num_classes)
    torch.manual_seed(0)
    model = GNN(case.kind, in_features, classes, **case.options)
    how: dict[str, Any] = {"in_features": in_features, "num_classes": classes, "ranks": parts, "device": device}
    how |= {"multilabel": real is not None and real.shard.multilabel, "precision": case.precision}
    trace = trace_graph_step(model, **how)
    make = functools.partial(graph_trainer, model, **how)
    if real is not None:
        return Setting(model, trace, make, real.ladder, [real.piece(share) for share, _ in case.tests])
    assert case.largest is not None
    largest = case.largest
    tests = []
    for share, degree in case.tests:
        inner, halo = (int(n * share) for n in (largest.inner, largest.halo))
        edges = max(int(largest.edges * share * degree), inner, halo)
        train, sent = int(largest.train * share), int(largest.sent * share)
        tests.append(PartSizes(inner=inner, halo=halo, edges=edges, train=train, sent=sent))
    return Setting(model, trace, make, ladder(largest, trace), tests)


def sample_model(case: Case) -> tuple[nn.Module, list[Tensor]]:
    """Of a case of samples, and what it is called with for one."""
    torch.manual_seed(0)
    if case.kind == "mlp":
        options: dict[str, Any] = {"norm": "batch", "dropout": 0.3, **case.options}
        return MLP(784, NUM_CLASSES, **options), [torch.zeros(784)]
    if case.kind == "cnn":
        return CNN(3, NUM_CLASSES, **case.options), [torch.zeros(3, _IMAGE, _IMAGE)]
    model = TransformerClassifier(1000, NUM_CLASSES, max_length=_TOKENS, **case.options)
    return model, [torch.full((_TOKENS,), 999)]


def sample_setting(case: Case, device: str, ranks: int = 1) -> Setting:
    model, sample = sample_model(case)
    how: dict[str, Any] = {"num_classes": NUM_CLASSES, "device": device, "precision": case.precision, "ranks": ranks}
    trace = trace_sample_step(model, sample, **how)
    assert case.largest is not None
    tests = [PartSizes(batch=max(2, int(case.largest.batch * share))) for share, _ in case.tests]
    make = functools.partial(sample_trainer, model, sample, **how)
    return Setting(model, trace, make, ladder(case.largest), tests, sample)


class RealGraph:
    """A graph that is there, cut into pieces: on the device, made once for all cases."""

    def __init__(self, name: str, data_dir: str | None, parts: int, device: str) -> None:
        data = load(name, data_dir)
        assignment = partition_nodes(data.num_nodes, data.src, data.dst, [1 / parts] * parts)
        shard = build_shard(data, assignment, 0, order="auto")
        features = shard.node_data.get("feat")
        if features is None or features.layout is not torch.strided:  # how many values it has is no count of a part
            width = 128 if features is None else min(int(features.shape[1]), 256)
            random_ones = {"feat": torch.randn(shard.num_inner, width)}
            shard = dataclasses.replace(shard, node_data=shard.node_data | random_ones)
        labels = shard.node_data["label"]
        rows = (torch.ones(len(labels)) if labels.dim() > 1 else labels >= 0).nonzero().flatten()[::10]
        self.shard = dataclasses.replace(shard, train_rows=rows, num_train_global=len(rows) * parts)
        self._device = device
        self.in_features, self.num_classes = shard.node_data["feat"].shape[1], shard.num_classes
        self._made: dict[float, LonePart] = {}
        self.ladder = [self.piece(share) for share in _SHARES if share * shard.num_inner >= 32]

    def piece(self, share: float) -> LonePart:
        if share not in self._made:
            piece: Shard = piece_of(self.shard, share)
            self._made[share] = lone_part(piece, self._device)
        return self._made[share]


def at(setting: Setting, place: Any) -> StepTrace:
    """The step there, with numbers for dimensions."""
    return setting.trace.at(place if isinstance(place, PartSizes) else sizes_of(place))
