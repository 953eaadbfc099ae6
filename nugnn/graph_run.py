"""What ``nugnn train`` does for graphs alone: load and prepare one, build a model, say what came out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from nugnn.config import MODEL_OPTIONS, TrainConfig
from nugnn.datasets import load
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.transforms import make_undirected, normalize_features, self_loops
from nugnn.fit_result import FitResult
from nugnn.model_on_shard import refuse_empty_features
from nugnn.models import GNN, WithNodeEmbedding, load_user_class, make_user_model, own_defaults, refuse_unused
from nugnn.options import ConfigError, check, flag_of, option_default, option_spec
from nugnn.predictions import predicted_classes
from nugnn.predictions import write_predictions as write_rows

STAGES = {
    "plan": "planning for {workers}",
    "plan_read": "reading the plan for {workers}",
    "plan_resumed": "reading the plan of the run that goes on",
    "plan_cached": "taking the plan that was made before",
    "check": "comparing one part with three on a piece of the graph",
    "partition": "splitting the graph into {parts}",
    "parts_planned": "writing the {parts} of the plan",
    "parts_cached": "taking the {parts} from the folder of partitions",
    "start": "starting {workers}",
    "train": "training",
    "stop": "finishing this epoch and writing a checkpoint; Ctrl-C again ends at once",
}


def prepare(config: TrainConfig, on_download: Callable[[int, int | None], None] | None = None) -> GraphData:
    """The graph as ``config`` asks for it: split, direction, self-loops, feature scaling, in this order.

    Args:
        config: The settings.
        on_download: Called with bytes and total (None where unknown) while a file is downloaded.
    """
    data = load(config.dataset or "", config.data_dir, progress=on_download, num_nodes=config.num_nodes)
    data = data.with_split(config.split) if config.split else data
    data = make_undirected(data) if config.undirected else data
    data = self_loops(data, config.self_loops)  # type: ignore[arg-type]
    return normalize_features(data, config.feature_norm) if data.features is not None else data  # type: ignore[arg-type]


class Described(Protocol):
    """A graph as far as a model depends on it."""

    @property
    def num_nodes(self) -> int: ...

    @property
    def num_classes(self) -> int: ...

    @property
    def features(self) -> Tensor | None: ...


def with_own_defaults(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """The settings where a model class of the user's own has defaults: those stand for options that were not given.

    Args:
        config: Whose model is a ``FILE.py:Class``.
        given: Names of the settings that somebody gave.

    Raises:
        ValueError: The class cannot be loaded.
    """
    entries = {entry.name: entry for entry in fields(config)}
    own = {}
    for name, default in own_defaults(load_user_class(config.model)).items():
        if name in MODEL_OPTIONS and name not in given and _is_value_of(entries[name], default):
            own[name] = default
    return config.replaced(**own)


def _is_value_of(entry: Field[Any], value: Any) -> bool:
    try:
        check(flag_of(entry.name), value, option_spec(entry))
    except ConfigError:
        return False
    return True


def build_model(config: TrainConfig, data: Described) -> nn.Module:
    """The model of ``config``; learnable node rows as wide as a hidden layer stand in for missing features."""
    if data.features is not None:
        refuse_empty_features(data.features)
    width = config.hidden if data.features is None else data.features.shape[1]
    options = {name: getattr(config, name) for name in MODEL_OPTIONS if name != "aggregator" or config.aggregator}
    if config.model_file is None and config.model not in ("gat", "gatv2"):
        del options["heads"], options["attention_dropout"]
    if config.model_file is not None:
        make = load_user_class(config.model)
        entries = {entry.name: entry for entry in fields(config)}
        changed = {name: value for name, value in options.items() if value != option_default(entries[name])}
        refuse_unused(make, {flag_of(name): (name, value) for name, value in changed.items()})
        for name, default in own_defaults(make).items():  # one that no option can say, as a function, stands
            if name in options and name not in changed and not _is_value_of(entries[name], default):
                del options[name]
        model = make_user_model(make, width, data.num_classes, **options)
    else:
        model = GNN(config.model, width, data.num_classes, **options)
    if data.features is None:
        model = WithNodeEmbedding(data.num_nodes, width, model, seed=config.seed)
    return model


def fit_arguments(config: TrainConfig) -> dict[str, Any]:
    """The settings that `nugnn.fit.fit` takes."""
    return {
        "workers": config.workers,
        "shares": config.shares,
        "plan": config.plan,
        "cluster": config.cluster,
        "partitioner": config.partitioner,
        "device": config.device,
        "limits": config.limits,
        "order": config.order,
        "check": config.model_file is not None,  # the built-in ones are what the tests run
        "timeout": config.timeout,
        "epochs": config.epochs,
        "patience": config.patience,
        "evaluate_every": config.evaluate_every,
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "weight_decay_first_layer_only": config.weight_decay_first_layer_only,
        "schedule": config.schedule,
        "warmup_epochs": config.warmup_epochs,
        "decay_epochs": config.decay_epochs,
        "label_smoothing": config.label_smoothing,
        "seed": config.seed,
        "precision": config.precision,
        "grad_sync": config.gradients,
        "grad_sync_hosts": config.grad_sync_hosts,
        "check_replicas": config.check_replicas,
        "timeline": config.timeline,
        "recompute_inputs": config.recompute_inputs,
        "overlap": config.overlap,
        "cuda_graphs": config.cuda_graphs,
        "activations": config.activations,
        "halo_wire": config.halo_wire,
        "halo_feedback": config.halo_feedback,
        "halo_mode": config.halo_mode,
        "halo_target": config.halo_target,
        "rebalance": config.rebalance,
        "inductive": config.inductive,
        "cache_folder": None if config.partition_cache is None else Path(config.partition_cache),
        "checkpoint_folder": config.out_dir / "checkpoint",
        "checkpoint_every": config.checkpoint_every,
        "resume": config.resume,
        "settings": config.fixed_settings(),
    }


def facts(config: TrainConfig, data: GraphData, result: FitResult) -> dict[str, Any]:
    """What ``result.json`` says of a graph."""
    num_nodes = [report["nodes"] for report in result.rank_reports]
    return {
        "model": config.model,
        "num_features": data.num_features,
        "num_classes": data.num_classes,
        "workers": config.workers,
        "shares": [nodes / sum(num_nodes) for nodes in num_nodes],
    }


def write_more(out: Path, data: GraphData) -> None:
    """Nothing: a graph's predictions need its settings and weights alone."""


def write_predictions(path: Path, result: FitResult, data: GraphData) -> None:
    """The class of each node, in the order of the input."""
    write_rows(path, predicted_classes(result.logits, data), data)
