"""Shards made once and found again: a key over everything they depend on, and the folder it names."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock
from torch import Tensor

from nugnn.partition.assign import ArrayLike, Method, NodeWeights, partition_nodes
from nugnn.partition.balance import normalise_shares
from nugnn.partition.kaminpar import check_kaminpar
from nugnn.partition.order import OrderChoice
from nugnn.partition.shard import iter_shards
from nugnn.partition.store import SCHEMA_VERSION, ShardFileError, load_meta, shard_file_name, write_shards

if TYPE_CHECKING:
    from nugnn.datasets.graph_data import GraphData

_LOG = logging.getLogger(__name__)


def tool_versions(method: Method = "metis") -> dict[str, str]:
    """Versions of everything that can change which node goes where.

    Raises:
        ValueError: ``method`` needs a package that is not installed.
    """
    if method == "kaminpar":
        check_kaminpar()
    names = ("nugnn", "pymetis", "numpy", "scipy", *(["kaminpar"] if method == "kaminpar" else []))
    return {name: importlib.metadata.version(name) for name in names}


def partition_key(
    data_hash: str,
    shares: Sequence[float],
    method: Method,
    seed: int,
    *,
    parts: ArrayLike | None = None,
    edge_weights: ArrayLike | None = None,
    node_weights: NodeWeights = "unit",
    tolerance: float = 0.02,
    order: OrderChoice = "none",
    versions: Mapping[str, str] | None = None,
) -> str:
    """Hash of all that decides what the shards hold: 64 hexadecimal digits.

    Args:
        data_hash: ``GraphData.content_hash()``; covers structure, features, labels and splits.
        shares: As all up to ``tolerance``, an argument of ``partition_nodes``.
        method: See there.
        seed: See there.
        parts: See there; arrays count by type, shape and content.
        edge_weights: See there.
        node_weights: See there.
        tolerance: See there.
        order: See ``iter_shards``.
        versions: Defaults to ``tool_versions(method)``.
    """
    options = {
        "schema_version": SCHEMA_VERSION,
        "data": data_hash,
        "shares": [share.hex() for share in normalise_shares(shares)],
        "method": method,
        "seed": int(seed),
        "parts": _fingerprint(parts),
        "edge_weights": _fingerprint(edge_weights),
        "node_weights": _fingerprint(node_weights),
        "tolerance": float(tolerance).hex(),
        "order": order,
        "versions": dict(versions if versions is not None else tool_versions(method)),
    }
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


def cached_shards(
    cache_folder: str | Path,
    data: GraphData,
    shares: Sequence[float],
    *,
    method: Method = "metis",
    seed: int = 0,
    parts: ArrayLike | None = None,
    edge_weights: ArrayLike | None = None,
    node_weights: NodeWeights = "unit",
    tolerance: float = 0.02,
    order: OrderChoice = "none",
    on_found: Callable[[bool], Any] = lambda _: None,
) -> Path:
    """The folder with the shards of ``data`` for these options, made if it isn't there; hit and miss are logged.

    Args:
        cache_folder: Parent of one folder per key.
        data: The graph.
        shares: As all that follow, an argument of ``partition_nodes``.
        method: See there.
        seed: See there.
        parts: See there.
        edge_weights: See there.
        node_weights: See there.
        tolerance: See there.
        order: See ``iter_shards``.
        on_found: Gets, before time is spent, whether they are there already.

    Returns:
        A folder for ``load_shard``. A folder of this key that is unfinished or malformed is made again.
    """
    versions = tool_versions(method)
    key = partition_key(
        data.content_hash(),
        shares,
        method,
        seed,
        parts=parts,
        edge_weights=edge_weights,
        node_weights=node_weights,
        tolerance=tolerance,
        order=order,
        versions=versions,
    )
    folder = Path(cache_folder) / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the folder of partitions {folder.parent} cannot be made: {error.strerror or error}; name another"
        ) from error
    # Of processes that want the same shards at once the first makes them; the system drops a dead process's lock.
    with FileLock(folder.with_name(f"{key}.lock")):
        reason = _unusable(folder, key)
        on_found(reason is None)
        if reason is None:
            _LOG.info("partition cache hit: %s", folder)
            return folder
        _LOG.info("partition cache miss: %s (%s)", folder, reason)
        assignment = partition_nodes(
            data.num_nodes,
            data.src,
            data.dst,
            shares,
            method=method,
            seed=seed,
            parts=parts,
            edge_weights=edge_weights,
            node_weights=node_weights,
            tolerance=tolerance,
        )
        write_shards(
            folder, iter_shards(data, assignment, order=order), key=key, versions=versions, notes=assignment.notes
        )
    return folder


def _unusable(folder: Path, key: str) -> str | None:
    """Why a cached folder cannot be used, or None. Contents are checked when a rank loads its file."""
    try:
        meta = load_meta(folder)
    except ShardFileError as error:
        return str(error)
    if meta.key != key:
        return f"it holds key {meta.key}"
    for rank, part in enumerate(meta.parts):
        path = folder / shard_file_name(rank, meta.num_parts)
        if not path.is_file() or path.stat().st_size != part.file_bytes:
            return f"{path.name} is missing or cut short"
    return None


def _fingerprint(values: ArrayLike | None) -> str | None:
    """None and names as they are; an array as its type, shape and a hash of its bytes."""
    if values is None or isinstance(values, str):
        return values
    array = np.ascontiguousarray(values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values))
    return f"{array.dtype.str}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
