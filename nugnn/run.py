"""A run from settings to a folder of results: what ``nugnn train`` does."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import json
import math
import platform
import shlex
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from safetensors.torch import save_file
from torch import nn

from nugnn.checkpoint import list_checkpoints
from nugnn.config import TrainConfig, flag_of, option_default
from nugnn.datasets import load
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.transforms import make_undirected, normalize_features, self_loops
from nugnn.datasets.whole_file import write_whole
from nugnn.failure import EXIT_WORKER_LOST
from nugnn.fit import fit
from nugnn.fit_result import FitResult
from nugnn.interrupt import Interrupted
from nugnn.launch import WorkerFailed
from nugnn.model_on_shard import refuse_empty_features
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
    "stop": "finishing this epoch and writing a checkpoint; Ctrl-C again ends at once",
}


def run_from_config(
    config: TrainConfig,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    train: Callable[..., FitResult] = fit,
) -> dict[str, Any]:
    """Load, prepare, train, and write ``config.out_dir``.

    The folder afterwards holds ``config.yaml``, ``metrics.jsonl`` (an object per epoch), ``result.json``,
    ``model.safetensors`` (best validation epoch), ``predictions.npy`` when asked for (of the same epoch),
    ``checkpoint/`` and ``logs/`` when there were workers. Results of an earlier run in it are replaced, or continued
    with ``config.resume``.

    Args:
        config: The settings.
        on_event: Gets ``{"kind": "stage", "text": ...}``, ``{"kind": "note", "text": ...}``, ``{"kind": "download",
            "bytes": ..., "total": ...}`` and ``{"kind": "epoch", "epoch": ..., "loss": ..., "val": ...}``.
        train: `nugnn.fit.fit`, or what stands in for it when the processes were started by others.

    Returns:
        What ``result.json`` holds.

    Raises:
        ValueError: Settings, data or a checkpoint do not fit; the text says which.
        nugnn.launch.WorkerFailed: A worker died, timed out, or found the input wrong.
        nugnn.interrupt.Interrupted: A signal asked for the end; the text says how to go on.
    """
    emit = on_event or (lambda _: None)
    emit({"kind": "stage", "text": f"reading {config.dataset}"})
    data = prepare(config, lambda done, total: emit({"kind": "download", "bytes": done, "total": total}))
    torch.manual_seed(config.seed)
    model = build_model(config, data)
    out = config.out_dir
    if not config.resume and list_checkpoints(out / "checkpoint") and not (out / "result.json").exists():
        text = f"{out} holds a checkpoint of an unfinished run, which is replaced; --resume would go on from it"
        emit({"kind": "note", "text": text})
    log = _EpochLog(out / "metrics.jsonl", _scalar_log(config, data))

    def begin(epochs_before: list[Epoch]) -> None:
        """Replace the results of an earlier run, now that nothing speaks against this one."""
        try:
            out.mkdir(parents=True, exist_ok=True)
            _write(out / "config.yaml", config.replaced(resume=False).to_yaml())
            for stale in ("result.json", "model.safetensors", "predictions.npy"):
                (out / stale).unlink(missing_ok=True)
            log.restart(epochs_before)
        except OSError as error:
            raise ValueError(f"--out {out} cannot be written: {error.strerror or error}") from error

    def note(epoch: Epoch) -> None:
        log.add(epoch)
        event = {"kind": "epoch", "epoch": epoch.number, "loss": epoch.loss, "train": epoch.train}
        emit(event | ({} if math.isnan(epoch.val) else {"val": epoch.val}))

    try:
        with contextlib.closing(log):
            result = train(
                model,
                data,
                **fit_arguments(config),
                on_epoch=note,
                on_stage=lambda name: emit({"kind": "stage", "text": _STAGES[name].format(workers=config.workers)}),
                log_folder=out / "logs" if config.workers > 1 else None,
                on_begin=begin,
                on_note=lambda text: emit({"kind": "note", "text": text}),
            )
    except Interrupted as stop:
        raise Interrupted(
            f"interrupted after epoch {stop.epoch} of {config.epochs}, checkpoint written; {how_to_go_on(out)}",
            stop.epoch,
        ) from None
    except WorkerFailed as failed:
        if failed.exit_code != EXIT_WORKER_LOST or not list_checkpoints(out / "checkpoint"):
            raise
        raise WorkerFailed(failed.exit_code, f"{failed.message}\n{how_to_go_on(out)}") from None
    save_file({k: v.contiguous() for k, v in result.model.state_dict().items()}, out / "model.safetensors")
    if config.predictions:
        write_predictions(out / "predictions.npy", predicted_classes(result.logits, data), data)
    summary = summarise(config, data, result)
    _write(out / "result.json", json.dumps(summary, indent=2) + "\n")
    return summary


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
        "device": config.device,
        "order": config.order,
        "check": config.model_file is not None,  # the built-in ones are what the tests run
        "timeout": config.timeout,
        "epochs": config.epochs,
        "patience": config.patience,
        "evaluate_every": config.evaluate_every,
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "weight_decay_first_layer_only": config.weight_decay_first_layer_only,
        "seed": config.seed,
        "precision": config.precision,
        "recompute_inputs": config.recompute_inputs,
        "overlap": config.overlap,
        "activations": config.activations,
        "inductive": config.inductive,
        "cache_folder": None if config.partition_cache is None else Path(config.partition_cache),
        "checkpoint_folder": config.out_dir / "checkpoint",
        "checkpoint_every": config.checkpoint_every,
        "resume": config.resume,
        "settings": config.fixed_settings(),
    }


def _scalar_log(config: TrainConfig, data: GraphData) -> Callable[[int], ScalarLog] | None:
    if not config.tensorboard:
        return None
    from nugnn.tensorboard import ScalarLog

    return lambda first: ScalarLog(config.out_dir / "tensorboard", data.metric, first_epoch=first)


def how_to_go_on(out: Path) -> str:
    """The command that resumes a run, where it has a checkpoint; empty otherwise."""
    if not list_checkpoints(out / "checkpoint"):
        return ""
    return f"go on with: nugnn train --config {shlex.quote(str(out / 'config.yaml'))} --resume"


class _EpochLog:
    """``metrics.jsonl``, an object for each epoch, on the disk as soon as the epoch is over; TensorBoard beside it.

    Args:
        path: Of ``metrics.jsonl``.
        scalars: Makes the TensorBoard log when given; gets the number of the first epoch.
    """

    def __init__(self, path: Path, scalars: Callable[[int], ScalarLog] | None) -> None:
        self._path, self._make_scalars = path, scalars
        self._file: TextIO | None = None
        self._scalars: ScalarLog | None = None

    def restart(self, epochs: list[Epoch]) -> None:
        """Begin with ``epochs``, whatever the file held."""
        _write(self._path, "".join(_line(epoch) for epoch in epochs))
        self._file = self._path.open("a", encoding="utf-8")
        if self._make_scalars is not None:
            self._scalars = self._make_scalars(len(epochs) + 1)

    def add(self, epoch: Epoch) -> None:
        assert self._file is not None
        self._file.write(_line(epoch))
        self._file.flush()
        if self._scalars is not None:
            self._scalars.add(epoch)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._scalars is not None:
            self._scalars.close()


def _line(epoch: Epoch) -> str:
    return json.dumps(asdict(epoch)) + "\n"


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


def build_model(config: TrainConfig, data: GraphData) -> nn.Module:
    """The model of ``config``; learnable node rows as wide as a hidden layer stand in for missing features."""
    if data.features is not None:
        refuse_empty_features(data.features)
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
        "shares": [
            report["nodes"] / sum(each["nodes"] for each in result.rank_reports) for report in result.rank_reports
        ],
        "device": ", ".join(dict.fromkeys(report["device"] for report in result.rank_reports)),
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
    write_whole(path, lambda file: file.write(text.encode()))
