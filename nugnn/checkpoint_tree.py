"""Trees of tensors and plain values as one file: tensors as safetensors, the rest as JSON in its header."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Tree = Any
"""Tensors and plain values (None, bool, int, float, str) in dictionaries, lists, tuples and counters."""


def write_tree(path: Path, tree: Tree) -> None:
    """Write ``tree`` as one file.

    Raises:
        ValueError: Something in it is neither a tensor nor a plain value; says where.
        OSError, SafetensorError: The file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    plain = encode(tree, "", tensors)
    save_file(tensors, path, metadata={"nugnn": json.dumps(plain)})


def read_tree(path: Path, names: Container[str] | None = None) -> Tree:
    """What `write_tree` wrote, tensors on the CPU; of a dictionary the entries in ``names``, all when None.

    Raises:
        ValueError: The file cannot be read, or is none of those.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            plain = json.loads((file.metadata() or {})["nugnn"])
            if names is not None:
                plain["dict"] = [[name, value] for name, value in plain["dict"] if name in names]
            return decode(plain, file.get_tensor)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is incomplete or not part of a checkpoint ({error})") from None


def encode(value: Tree, where: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON, its tensors moved to ``tensors`` under the path that leads to them."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise ValueError(f"{where} is a tensor of layout {value.layout}, which a checkpoint cannot hold")
        name = where
        while name in tensors:  # "a.b" and "a" -> "b"
            name += "'"
        tensors[name] = _own_memory(value, tensors)
        return {"tensor": name}
    if type(value) is list:
        return [encode(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [encode(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, (dict, Counter)):
        for key in value:
            if type(key) not in (int, str):
                raise ValueError(f"{where} has the key {key!r}; a checkpoint holds texts and whole numbers as keys")
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[k, encode(v, f"{where}.{k}" if where else str(k), tensors)] for k, v in value.items()]}
    raise ValueError(f"{where} is a {type(value).__name__}; a checkpoint holds tensors and plain values only")


def decode(value: Any, get_tensor: Callable[[str], Tensor]) -> Tree:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(item, get_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return get_tensor(content)
    if kind == "tuple":
        return tuple(decode(item, get_tensor) for item in content)
    pairs = {key: decode(item, get_tensor) for key, item in content}
    return {"dict": dict, "counter": Counter}[kind](pairs)


def _own_memory(value: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """On the CPU, contiguous, and in memory that no other tensor of the file shares: safetensors asks for that."""
    plain = value.detach().cpu().contiguous()
    is_whole = plain.untyped_storage().nbytes() == plain.numel() * plain.element_size()
    is_shared = any(plain.data_ptr() == other.data_ptr() for other in tensors.values())
    return plain if is_whole and not is_shared else plain.clone()
