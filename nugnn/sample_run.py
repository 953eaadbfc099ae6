"""What ``nugnn train`` does for samples alone: load them, build a network, say what came out."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from nugnn.augmentation import ShiftAndFlip
from nugnn.datasets.samples.registry import load_samples
from nugnn.datasets.samples.sample_data import SampleData, num_samples
from nugnn.datasets.whole_file import write_whole
from nugnn.fit_result import FitResult
from nugnn.networks import CNN, MLP, TransformerClassifier
from nugnn.options import ConfigError, flag_of
from nugnn.sample_config import TORCHVISION_MODELS, SampleConfig

STAGES = {
    "plan": "planning for {workers}",
    "plan_read": "reading the plan for {workers}",
    "plan_resumed": "reading the plan of the run that goes on",
    "check": "comparing a few samples in one part and in two",
    "start": "starting {workers}",
    "train": "training",
    "stop": "finishing this step and writing a checkpoint; Ctrl-C again ends at once",
}
_USUAL = {"mlp": 128, "cnn": 32, "transformer": 128}
_TAKES = {"mlp": ("image", "table"), "cnn": ("image",), "transformer": ("text",)}
_OPTIONS = ("layers", "hidden", "heads", "norm", "dropout")


def prepare(config: SampleConfig, on_download: Callable[[int, int | None], None] | None = None) -> SampleData:
    """The samples that ``config`` names, in their three parts.

    Args:
        config: The settings.
        on_download: Called with bytes and total (None where unknown) while a file is downloaded.
    """
    data = load_samples(
        config.dataset or "",
        config.data_dir,
        seed=config.seed,
        progress=on_download,
        val_fraction=config.val_fraction,
        test_fraction=config.test_fraction,
        image_size=config.image_size,
        tokens=config.tokens,
        vocabulary_size=config.vocabulary_size,
        max_length=config.max_length,
    )
    if (config.shift or config.flip) and data.kind != "image":
        raise ConfigError(f"--shift and --flip change images, and {data.name} is {data.kind}s; leave them out")
    if config.predictions and num_samples(data.test) == 0:
        raise ValueError(f"--predictions: {data.name} has no test samples to predict; leave it out")
    return data


def build_model(config: SampleConfig, data: SampleData) -> nn.Module:
    """The network of ``config`` for ``data``.

    Raises:
        ValueError: It takes samples of another kind, or torchvision is not installed.
    """
    given = {name: getattr(config, name) for name in _OPTIONS if getattr(config, name) is not None}
    if config.model_file is not None:
        return _own_model(config, data, given)
    if config.network in TORCHVISION_MODELS:
        return _torchvision_model(config.network, data)
    takes = _TAKES[config.network]
    if data.kind not in takes:
        fitting = next(name for name, kinds in _TAKES.items() if data.kind in kinds)
        raise ConfigError(
            f"--model {config.network} takes {' and '.join(f'{kind}s' for kind in takes)}, and {data.name} is "
            f"{data.kind}s; use --model {'cnn' if data.kind == 'image' else fitting}"
        )
    hidden = given.pop("hidden", _USUAL[config.network])
    if config.network == "cnn":
        widths = [hidden * 2**pair for pair in range(given.pop("layers", 2))]
        return CNN(data.input_shape[0], data.num_classes, widths=widths, **given)
    if config.network == "mlp":
        return MLP(math.prod(data.input_shape), data.num_classes, hidden=hidden, **given)
    heads = given.get("heads", 4)
    if hidden % heads:
        raise ConfigError(f"--hidden {hidden} cannot be divided among --heads {heads}; choose a multiple")
    return TransformerClassifier(
        data.vocabulary_size, data.num_classes, width=hidden, max_length=data.input_shape[0], **given
    )


def _torchvision_model(name: str, data: SampleData) -> nn.Module:
    try:
        models = importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # the second from one that belongs to another torch
        raise ConfigError(
            f"--model {name} needs the package torchvision in the version that belongs to this torch ({error}): "
            "pip install 'nugnn[vision]', or use --model cnn"
        ) from error
    if data.kind != "image" or data.input_shape[0] != 3:
        has = f"images of {data.input_shape[0]} channel(s)" if data.kind == "image" else f"{data.kind}s"
        raise ConfigError(f"--model {name} takes images of 3 channels, and {data.name} is {has}; use another --model")
    return getattr(models, name)(num_classes=data.num_classes)  # type: ignore[no-any-return]


def _own_model(config: SampleConfig, data: SampleData, given: dict[str, Any]) -> nn.Module:
    """``Class(width, num_classes, ...)``: channels of an image, features of a row, or tokens that there are."""
    from nugnn.models import load_user_class, make_user_model, refuse_unused

    make = load_user_class(config.model)
    refuse_unused(make, {flag_of(name): (name, value) for name, value in given.items()})
    width = data.vocabulary_size if data.kind == "text" else data.input_shape[0]
    return make_user_model(make, width, data.num_classes, input_shape=data.input_shape, **given)


def fit_arguments(config: SampleConfig) -> dict[str, Any]:
    """The settings that `nugnn.fit.fit` takes."""
    names = (
        *("epochs", "patience", "evaluate_every", "lr", "weight_decay", "seed", "precision"),
        *("cuda_graphs", "grad_sync_hosts", "check_replicas", "timeline"),
        *("schedule", "warmup_epochs", "decay_epochs", "label_smoothing", "batch_norm"),
        *("optimizer", "momentum", "clip_norm", "batch_size", "batch_split", "micro_batches", "drop_last"),
    )
    return {name: getattr(config, name) for name in names} | {
        "grad_sync": config.gradients,
        "workers": config.workers,
        "shares": config.fit_shares,
        "plan": config.plan,
        "cluster": config.cluster,
        "device": config.device,
        "limits": config.limits,
        "timeout": config.timeout,
        "num_data_workers": config.data_workers,
        "augment": ShiftAndFlip(config.shift, config.flip) if config.shift or config.flip else None,
        "checkpoint_folder": config.out_dir / "checkpoint",
        "checkpoint_every": config.checkpoint_every,
        "checkpoint_steps": config.checkpoint_steps,
        "resume": config.resume,
        "settings": config.fixed_settings(),
    }


def facts(config: SampleConfig, data: SampleData, result: FitResult) -> dict[str, Any]:
    """What ``result.json`` says of samples."""
    return {
        "model": config.model if config.model_file else config.network,
        "kind": data.kind,
        "input_shape": list(data.input_shape),
        "num_classes": data.num_classes,
        "num_samples": {name: num_samples(part) for name, part in data.parts},
        "workers": config.workers,
        "batch_size": config.batch_size,
        "batch_split": list(result.batch_split),
        "samples_per_second": result.samples_per_second,
    }


def write_more(out: Path, data: SampleData) -> None:
    """``preparation.json``: what predictions on further samples need."""
    data.save_preparation(out / "preparation.json")


def write_predictions(path: Path, result: FitResult, data: SampleData) -> None:
    """The class of each test sample, in their order."""
    write_whole(path, lambda file: np.save(file, result.logits.argmax(1).numpy()))
