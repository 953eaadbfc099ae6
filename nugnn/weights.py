"""Weights into a model: strict, and with every name that does not fit in the message."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from nugnn.checkpoint import CheckpointError, newest_checkpoint, open_checkpoint

_NUM_SHOWN = 6


def load_weights(model: nn.Module, weights: Mapping[str, Tensor] | str | Path, *, source: str = "the weights") -> None:
    """Load every tensor of ``weights`` into the tensor of ``model`` of that name, each on its own device.

    The prefixes that ``torch.compile`` (``_orig_mod.``) and ``DistributedDataParallel`` (``module.``) put before names
    do not count, on either side.

    Args:
        model: Changed in place, or not at all.
        weights: Names and tensors, or a path for `read_weights`.
        source: Where ``weights`` come from, for messages.

    Raises:
        CheckpointError: Names are missing or unexpected, or a tensor has another shape; all of them are listed.
    """
    if isinstance(weights, (str, Path)):
        source, weights = str(weights), read_weights(Path(weights))
    own = model.state_dict()
    given_names, own_names = _plain_names(weights), _plain_names(own)
    fitting = {own_names[plain]: weights[given_names[plain]] for plain in given_names.keys() & own_names.keys()}
    problems = mismatches(
        {plain: own[name].shape for plain, name in own_names.items() if isinstance(own[name], Tensor)},
        {plain: weights[name].shape for plain, name in given_names.items() if isinstance(weights[name], Tensor)},
    )
    if not fitting:
        problems.insert(0, "no name fits at all")
    if problems:
        raise CheckpointError(f"{source} do not fit {type(model).__name__}: {'; '.join(problems)}")
    model.load_state_dict(fitting, strict=True)


def mismatches(own: Mapping[str, object], given: Mapping[str, object]) -> list[str]:
    """Sentences on the names that are missing, unexpected, or of another shape (any value that can be compared)."""
    listed = {
        "missing": [name for name in own if name not in given],
        "unexpected": [name for name in given if name not in own],
        "reshaped": [
            f"{name} ({_shape(given[name])}, the model has {_shape(own[name])})"
            for name in own
            if name in given and given[name] != own[name]
        ],
    }
    return [f"{what}: {_some(names)}" for what, names in listed.items() if names]


def read_weights(path: Path, *, which: Literal["best", "last"] = "best") -> dict[str, Tensor]:
    """The weights in a file or folder, on the CPU; rows of node embeddings in original node order.

    Args:
        path: A ``.safetensors`` file, one checkpoint, or a folder of checkpoints (its newest intact one counts).
        which: Of a checkpoint: the weights of the best epoch so far, or of the last.

    Raises:
        CheckpointError: It is missing, incomplete, or holds no weights.
    """
    if path.is_dir():
        if not (path / "checkpoint.json").is_file():
            newest, _ = newest_checkpoint(path)
            if newest is None:
                raise CheckpointError(f"{path} holds no checkpoint")
            return _of_checkpoint(newest.folder, which)
        return _of_checkpoint(path, which)
    try:
        state: dict[str, Tensor] = load_file(path, device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, SafetensorError) as error:
        instead = _instead(path)
        raise CheckpointError(f"{path} is incomplete or not a safetensors file ({error}){instead}") from None
    if not state:
        raise CheckpointError(f"{path} holds no tensor")
    return state


def _of_checkpoint(folder: Path, which: str) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    shared = checkpoint.read_shared()
    key = "best_model" if which == "best" and shared["best_epoch"] else "model"
    state = {name: value for name, value in shared[key].items() if isinstance(value, Tensor)}
    for rank in range(checkpoint.num_parts):
        own = checkpoint.read_rank(rank)
        for name, rows in own[key].items():
            if name not in state:
                state[name] = rows.new_empty((shared["num_nodes"], *rows.shape[1:]))
            state[name][own["node_ids"]] = rows
    return state


def _instead(path: Path) -> str:
    """An offer of the newest intact checkpoint near a file that cannot be read."""
    for folder in (path.parent / "checkpoint", path.parent, path.parent.parent):
        try:
            newest, _ = newest_checkpoint(folder)
        except (CheckpointError, OSError):
            continue
        if newest is not None:
            return f"; the newest intact checkpoint is {newest.folder}"
    return ""


def _plain_names(state: Mapping[str, object]) -> dict[str, str]:
    """Name without wrappers -> name; as they are when two names would become one."""
    plain = {_without_wrappers(name): name for name in state}
    return plain if len(plain) == len(state) else {name: name for name in state}


def _without_wrappers(name: str) -> str:
    pieces = [piece for piece in name.split(".") if piece != "_orig_mod"]
    while len(pieces) > 1 and pieces[0] == "module":
        pieces = pieces[1:]
    return ".".join(pieces)


def _shape(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more
