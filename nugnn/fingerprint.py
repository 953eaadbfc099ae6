"""What makes two runs the same run: the values that a resumed run has to share with its checkpoint."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nugnn._counted import counted
from nugnn.checkpoint import Checkpoint, CheckpointError
from nugnn.weights import mismatches

if TYPE_CHECKING:
    from nugnn.datasets.graph_data import GraphData
    from nugnn.train_options import TrainOptions

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def run_identity(
    model: nn.Module, facts: Mapping[str, Any], options: TrainOptions, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Plain JSON types that say which run this is; independent of the number of workers and their shares.

    Args:
        model: Before training.
        facts: On the data, such as `graph_facts`: names and plain values.
        options: Of these, what decides the weights; epochs and patience may change.
        settings: Further names and plain values that have to stay, such as those of the command line.
    """
    training = {
        "seed": options.seed,
        "precision": options.precision,
        "grad_sync": str(options.compression),
        "evaluate_every": options.evaluate_every,
        "epochs of the schedule": options.schedule_epochs,
        "metric": options.metric,
        "loss": _name(options.loss),
        "regularizer": _name(options.regularizer),
        "class_weights": None if options.class_weights is None else _digest(options.class_weights),
    }
    shapes = {name: _shape(value) for name, value in model.state_dict().items()}
    return {
        "settings": training | options.deciding() | dict(settings or {}),
        "data": dict(facts),
        "tensors": shapes,
        "architecture": _ADDRESS.sub("", repr(model)).splitlines(),
    }


def graph_facts(data: GraphData) -> dict[str, Any]:
    """Sizes of the whole graph and a hash of all its bytes."""
    return {
        "nodes": data.num_nodes,
        "edges": data.num_edges,
        "classes": data.num_classes,
        "content": data.content_hash()[:16],
    }


def check_same_run(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        CheckpointError: Lists the name, the earlier and the present value of everything that differs.
    """
    before = checkpoint.identity
    changes = differences("", before.get("settings", {}), identity["settings"])
    kind = "graph" if "nodes" in identity["data"] else "samples"
    changes += differences(f"{kind}: ", before.get("data", {}), identity["data"])
    if not changes:  # otherwise they follow from those
        # as the checkpoint is what cannot change, the model is what has missing or unexpected names
        tensors = mismatches(identity["tensors"], before.get("tensors", {}))
        changes = [f"model: {change}" for change in tensors] or _changed_lines(
            before.get("architecture", []), identity["architecture"]
        )
    if changes:
        raise CheckpointError(
            f"{checkpoint.folder} is of another run: {'; '.join(changes)}. Give what was given then, or train without "
            "--resume to start anew"
        )


def differences(prefix: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``"lr was 0.01, is 0.02"`` for each value in both that differs; a name on one side only came with a version."""
    return [
        f"{prefix}{name} was {_shown(before[name])}, is {_shown(now[name])}"
        for name in now
        if name in before and not _equal(before[name], now[name])
    ]


def _changed_lines(before: list[str], now: list[str]) -> list[str]:
    for old, new in zip(before, now, strict=False):
        if old != new:
            return [f"model was {old.strip()}, is {new.strip()}"]
    if len(before) != len(now):
        return [f"model had {counted(len(before), 'line')} of description, has {len(now)}"]
    return []


def _name(function: object) -> str | None:
    """Of a function, its name; of an object that is called, its class's."""
    if function is None:
        return None
    return getattr(function, "__qualname__", type(function).__qualname__)


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous()
    return hashlib.sha256(f"{values.dtype}{tuple(values.shape)}{values.tolist()}".encode()).hexdigest()[:16]


def _shape(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _equal(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return isinstance(before, Tensor) and isinstance(now, Tensor) and torch.equal(before, now)
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(before) == len(now) and all(map(_equal, before, now))
    return bool(before == now)


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
