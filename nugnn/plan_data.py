"""Data at hand as plans know it: its facts, and what is planned of a model on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import default_collate

from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.samples.sample_data import num_samples
from nugnn.datasets.sparse import stored_values
from nugnn.fit_options import FitOptions
from nugnn.plan_subject import PlanSubject, graph_subject
from nugnn.planning.cluster import Cluster
from nugnn.planning.plan import DataFacts
from nugnn.planning.profiles import DeviceKind
from nugnn.sample_options import SampleOptions
from nugnn.sample_part import SamplePart


def graph_data_facts(data: GraphData) -> DataFacts:
    """What a plan knows of a graph."""
    return DataFacts(
        name=data.name,
        content=data.content_hash(),
        nodes=data.num_nodes,
        edges=data.num_edges,
        train=len(data.train_nodes),
        features=data.num_features,
        classes=data.num_classes,
    )


def subject_of_graph(
    model: nn.Module, options: FitOptions, data: GraphData, facts: DataFacts, cluster: Cluster
) -> PlanSubject:
    """A model on a graph at hand, of which ``facts`` are known, to be planned for a cluster."""
    workers, is_nccl = len(cluster.devices), cluster.links.is_nccl
    return subject_of_graph_on(model, options, data, facts, cluster.device_kinds, workers, is_nccl=is_nccl)


def subject_of_graph_on(
    model: nn.Module,
    options: FitOptions,
    data: GraphData,
    facts: DataFacts,
    kinds: Sequence[DeviceKind],
    workers: int,
    *,
    is_nccl: bool = True,
) -> PlanSubject:
    """The same, of workers of which these kinds of device are known."""
    return graph_subject(
        model,
        options,
        facts,
        features=None if data.features is None else data.num_features,
        multilabel=data.is_multilabel,
        kinds=kinds,
        workers=workers,
        is_nccl=is_nccl,
        stored_features=stored_values(data.features),
    )


def looked_at_samples(
    part: SamplePart, options: SampleOptions, name: str, num_classes: int
) -> tuple[list[torch.Tensor], DataFacts]:
    """What a model is called with for the first sample, and what a plan knows of the samples."""
    collate = options.collate_fn or default_collate
    x, label = collate([part.train[0]])
    columns = [column[0] for column in (x if isinstance(x, (tuple, list)) else (x,))]
    if not num_classes and label.dim() == 1 and not label.is_floating_point():
        num_classes = int(label.max()) + 1
    facts = DataFacts(
        name=name, samples=num_samples(part.train), input_shape=tuple(columns[0].shape), classes=num_classes
    )
    return columns, facts
