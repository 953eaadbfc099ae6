"""A run from settings to a folder of results: what ``nugnn train`` does."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import json
import math
import platform
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from nugnn.config import TrainConfig, flag_of, option_default
from nugnn.datasets import load
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.transforms import make_undirected, normalize_features, self_loops
from nugnn.fit import FitResult, fit
from nugnn.models import GNN, WithNodeEmbedding, load_user_class, make_user_model
from nugnn.options import ConfigError
from nugnn.predictions import predicted_classes, write_predictions
from nugnn.trainer import Epoch

if TYPE_CHECKING:
    from nugnn.tensorboard import ScalarLog

_STAGES = {
    "check": "comparing one part with three on a piece of the graph",
    "partition": "splitting the graph into {workers} parts",
    "start": "starting {workers} workers",
    "train": "training",
}


def run_from_config(
    config: TrainConfig,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    train: Callable[..., FitResult] = fit,
) -> dict[str, Any]:
    """Load, prepare, train, and write ``config.out_dir``.

    The folder afterwards holds ``config.yaml``, ``metrics.jsonl`` (an object per epoch), ``result.json``,
    ``model.safetensors`` (best validation epoch), ``predictions.npy`` when asked for (of the same epoch) and ``logs/``
    when there were workers. Results of an earlier run in it are replaced.

    Args:
        config: The settings.
        on_event: Gets ``{"kind": "stage", "text": ...}`` and ``{"kind": "epoch", "epoch": ..., "loss": ...,
            "val": ...}``.
        train: `nugnn.fit.fit`, or what stands in for it when the processes were started by others.

    Returns:
        What ``result.json`` holds.
    """
    emit = on_event or (lambda _: None)
    emit({"kind": "stage", "text": f"reading {config.dataset}"})
    data = prepare(config)
    torch.manual_seed(config.seed)
    model = build_model(config, data)
    out = config.out_dir
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror or error}") from error
    for stale in ("result.json", "metrics.jsonl", "model.safetensors", "predictions.npy"):
        (out / stale).unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        metrics = stack.enter_context((out / "metrics.jsonl").open("w", encoding="utf-8"))
        scalars = _scalar_log(config, data, stack)

        def note(epoch: Epoch) -> None:
            metrics.write(json.dumps(asdict(epoch)) + "\n")
            metrics.flush()
            if scalars is not None:
                scalars.add(epoch)
            event = {"kind": "epoch", "epoch": epoch.number, "loss": epoch.loss, "train": epoch.train}
            emit(event | ({} if math.isnan(epoch.val) else {"val": epoch.val}))

        result = train(
            model,
            data,
            **fit_arguments(config),
            on_epoch=note,
            on_stage=lambda name: emit({"kind": "stage", "text": _STAGES[name].format(workers=config.workers)}),
            log_folder=out / "logs" if config.workers > 1 else None,
            cache_folder=None if config.partition_cache is None else Path(config.partition_cache),
        )
    save_file({k: v.contiguous() for k, v in result.model.state_dict().items()}, out / "model.safetensors")
    if config.predictions:
        write_predictions(out / "predictions.npy", predicted_classes(result.logits, data), data)
    summary = summarise(config, data, result)
    _write(out / "result.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _scalar_log(config: TrainConfig, data: GraphData, stack: contextlib.ExitStack) -> ScalarLog | None:
    if not config.tensorboard:
        return None
    from nugnn.tensorboard import ScalarLog

    return stack.enter_context(ScalarLog(config.out_dir / "tensorboard", data.metric))


def take_part(config: TrainConfig, train: Callable[..., Any]) -> None:
    """What a process other than rank 0 does when ``torchrun`` started it: the same, showing and writing nothing."""
    data = prepare(config)
    torch.manual_seed(config.seed)
    train(build_model(config, data), data, **fit_arguments(config))


def fit_arguments(config: TrainConfig) -> dict[str, Any]:
    """The settings that `nugnn.fit.fit` takes."""
    return {
        "workers": config.workers,
        "shares": config.fractions,
        "partitioner": config.partitioner,
        "check": config.model_file is not None,  # the built-in ones are what the tests run
        "timeout": config.timeout,
        "epochs": config.epochs,
        "patience": config.patience,
        "evaluate_every": config.evaluate_every,
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "weight_decay_first_layer_only": config.weight_decay_first_layer_only,
        "seed": config.seed,
    }


def prepare(config: TrainConfig) -> GraphData:
    """The graph as ``config`` asks for it: split, direction, self-loops, feature scaling, in this order."""
    data = load(config.dataset or "", config.data_dir)
    data = data.with_split(config.split) if config.split else data
    data = make_undirected(data) if config.undirected else data
    data = self_loops(data, config.self_loops)  # type: ignore[arg-type]
    return normalize_features(data, config.feature_norm) if data.features is not None else data  # type: ignore[arg-type]


def build_model(config: TrainConfig, data: GraphData) -> nn.Module:
    """The model of ``config``; learnable node rows as wide as a hidden layer stand in for missing features."""
    width = config.hidden if data.features is None else data.features.shape[1]
    options: dict[str, Any] = {
        "layers": config.layers,
        "hidden": config.hidden,
        "norm": config.norm,
        "residual": config.residual,
        "activation": config.activation,
        "dropout": config.dropout,
        "input_dropout": config.input_dropout,
    }
    if config.model in ("gat", "gatv2") or config.model_file is not None:
        options |= {"heads": config.heads, "attention_dropout": config.attention_dropout}
    if config.aggregator is not None:
        options["aggregator"] = config.aggregator
    if config.model_file is not None:
        make = load_user_class(config.model)
        _refuse_unused(config, make, options)
        model = make_user_model(make, width, data.num_classes, **options)
    else:
        model = GNN(config.model, width, data.num_classes, **options)
    if data.features is None:
        model = WithNodeEmbedding(data.num_nodes, width, model, seed=config.seed)
    return model


def _refuse_unused(config: TrainConfig, make: type[nn.Module], options: dict[str, Any]) -> None:
    """An option that was set but that the user's class does not take would be ignored."""
    parameters = inspect.signature(make).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    defaults = {entry.name: option_default(entry) for entry in fields(config)}
    for name, value in options.items():
        if name not in parameters and value != defaults[name]:
            raise ConfigError(
                f"{flag_of(name)} {value} would have no effect: {make.__name__}{inspect.signature(make)} has no "
                f"parameter {name!r}; leave the option out, or add the parameter"
            )


def summarise(config: TrainConfig, data: GraphData, result: FitResult) -> dict[str, Any]:
    """``result.json``: plain types; a metric without rows is null."""
    best, last = result.best, result.history[-1]
    return {
        "dataset": data.name,
        "model": config.model,
        "num_features": data.num_features,
        "num_classes": data.num_classes,
        "workers": config.workers,
        "shares": [report["nodes"] / data.num_nodes for report in result.rank_reports],
        "device": "cpu",
        "metric": data.metric,
        "best_epoch": best.number,
        "val": _number(best.val),
        "test": _number(best.test),
        "last_test": _number(last.test),
        "epoch_seconds": result.epoch_seconds,
        "time_to_best_seconds": result.time_to_best_seconds,
        "peak_memory_bytes": [report["peak_memory_bytes"] for report in result.rank_reports],
        "ranks": result.rank_reports,
        "notes": list(result.notes),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # with its build, +cpu or +cu130
            **{name: importlib.metadata.version(name) for name in ("nugnn", "dgl", "numpy", "pymetis")},
        },
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
