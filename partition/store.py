"""Shards on disk: one safetensors file per rank beside one JSON file that says what belongs together.

A folder is written shard by shard, each to a temporary name that is then renamed, and ``meta.json`` last: a folder
without it is unfinished and never read. Nothing is pickled, and everything read is checked as if a stranger wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nugnn._counted import counted
from nugnn.datasets.sparse import csr_matrix
from nugnn.datasets.whole_file import whole_file
from nugnn.partition.check import check_exchange_counts, check_shard
from nugnn.partition.order import BY_ID, OrderReport
from nugnn.partition.shard import Shard

SCHEMA_VERSION = 2
"""Of ``meta.json`` and the shard files; raised whenever a file written before would be misread."""

_TENSORS = (
    "global_node_ids",
    "global_edge_ids",
    "edge_starts",
    "indptr",
    "indices",
    "halo_global_ids",
    "send_rows",
    "out_degrees",
    "train_rows",
    "val_rows",
    "test_rows",
)
_SCALARS: dict[str, type] = {
    "rank": int,
    "num_parts": int,
    "num_nodes_global": int,
    "num_edges_global": int,
    "num_train_global": int,
    "num_val_global": int,
    "num_test_global": int,
    "num_classes": int,
    "multilabel": bool,
    "metric": str,
    "name": str,
}
_REMEDY = "delete the folder and partition again"


class ShardFileError(ValueError):
    """A shard folder that cannot be used: missing, damaged, or mixed from different runs."""


@dataclass(frozen=True, kw_only=True)
class PartMeta:
    """What ``meta.json`` records of one rank's file."""

    num_nodes: int
    num_halo: int
    num_edges: int
    num_train: int
    num_val: int
    num_test: int
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    file_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class StoreMeta:
    """What ``meta.json`` records of a whole folder; ``parts[rank]`` is one rank's file."""

    key: str
    versions: dict[str, str]
    notes: tuple[str, ...]
    num_nodes: int
    num_edges: int
    parts: tuple[PartMeta, ...]
    order: OrderReport

    @property
    def num_parts(self) -> int:
        return len(self.parts)


def shard_file_name(rank: int, num_parts: int) -> str:
    """Name of one rank's file inside a shard folder."""
    return f"shard-{rank:05d}-of-{num_parts:05d}.safetensors"


def write_shards(
    folder: str | os.PathLike[str],
    shards: Iterable[Shard],
    *,
    key: str,
    versions: Mapping[str, str],
    notes: Iterable[str] = (),
) -> StoreMeta:
    """Write every shard of one graph, in the order of ranks; an iterator holds only one at a time in memory.

    Args:
        folder: Made if missing. Its ``meta.json`` goes first and comes back last, so an interrupted write leaves
            a folder that is refused, not a mixture.
        shards: All of them, ranks ascending: ``iter_shards(data, assignment)`` or a list.
        key: What the shards were made from and how; see ``nugnn.partition.cache.partition_key``.
        versions: Tools that made them, recorded for people.
        notes: Sentences to keep with them, such as ``assignment.notes``; one on their order is added where the nodes
            were reordered.

    Returns:
        What was written to ``meta.json``.

    Raises:
        ValueError: the shards are not all ranks in order, or one breaks a law of shards.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)
    parts: list[PartMeta] = []
    num_parts = num_nodes = num_edges = 0
    order = BY_ID
    for shard in shards:  # not enumerate: it holds on to an item until the next is made, so two would be in memory
        rank = len(parts)
        if rank == 0:
            num_parts, num_nodes, num_edges = shard.num_parts, shard.num_nodes_global, shard.num_edges_global
            order = shard.order
        if (shard.rank, shard.num_parts) != (rank, num_parts):
            raise ValueError(
                f"expected rank {rank} of {num_parts}, got rank {shard.rank} of {shard.num_parts}: "
                "give all shards of one graph in the order of their ranks"
            )
        check_shard(shard)
        path = folder / shard_file_name(rank, num_parts)
        with whole_file(path, is_durable=True) as unfinished:
            _save(shard, key, unfinished)
        parts.append(
            PartMeta(
                num_nodes=shard.num_inner,
                num_halo=shard.num_halo,
                num_edges=shard.num_edges,
                num_train=len(shard.train_rows),
                num_val=len(shard.val_rows),
                num_test=len(shard.test_rows),
                send_splits=shard.send_splits,
                recv_splits=shard.recv_splits,
                file_bytes=path.stat().st_size,
                sha256=_sha256(path),
            )
        )
        del shard
    meta = StoreMeta(
        key=key,
        versions=dict(versions),
        notes=(*notes, *order.notes),
        num_nodes=num_nodes,
        num_edges=num_edges,
        parts=tuple(parts),
        order=order,
    )
    if len(parts) != num_parts or not parts:
        raise ValueError(f"got {len(parts)} of {num_parts} shards; give all shards of one graph")
    _check_meta(meta)
    text = json.dumps({"schema_version": SCHEMA_VERSION, **_plain(meta)}, indent=1)
    with whole_file(folder / "meta.json", is_durable=True) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return meta


def load_meta(folder: str | os.PathLike[str]) -> StoreMeta:
    """Read and check ``meta.json`` alone.

    Raises:
        ShardFileError: it is missing, not of this schema version, malformed, or contradicts itself.
    """
    path = Path(folder) / "meta.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ShardFileError(f"{path} does not exist: no finished set of shards lies there; partition first") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ShardFileError(f"{path} cannot be read ({error}); {_REMEDY}") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise ShardFileError(f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}; {_REMEDY}")
    try:
        meta = StoreMeta(
            key=_typed(raw, "key", str),
            versions={str(tool): str(number) for tool, number in _typed(raw, "versions", dict).items()},
            notes=tuple(str(note) for note in _typed(raw, "notes", list)),
            num_nodes=_typed(raw, "num_nodes", int),
            num_edges=_typed(raw, "num_edges", int),
            parts=tuple(_part_meta(part) for part in _typed(raw, "parts", list)),
            order=_order_report(_typed(raw, "order", dict)),
        )
        _check_meta(meta)
    except ValueError as error:
        raise ShardFileError(f"{path}: {error}; {_REMEDY}") from error
    return meta


def load_shard(folder: str | os.PathLike[str], rank: int) -> Shard:
    """Read one rank's shard; of the folder, only ``meta.json`` and that rank's file are opened.

    Raises:
        ShardFileError: the file is missing, damaged, of another run than ``meta.json``, or breaks a law of shards.
    """
    meta = load_meta(folder)
    if not 0 <= rank < meta.num_parts:
        raise ShardFileError(f"{folder} holds shards of {counted(meta.num_parts, 'part')}, there is no rank {rank}")
    path, part = Path(folder) / shard_file_name(rank, meta.num_parts), meta.parts[rank]
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ShardFileError(f"{path} is missing; {_REMEDY}") from None
    if size != part.file_bytes:
        raise ShardFileError(
            f"{path} has {counted(size, 'byte')}, meta.json lists {part.file_bytes}: it is cut short or of "
            f"another run; {_REMEDY}"
        )
    if _sha256(path) != part.sha256:
        raise ShardFileError(f"{path} is not the file meta.json lists: it is damaged or of another run; {_REMEDY}")
    try:
        shard, key = _load(path)
        if key != meta.key:
            raise ValueError(
                f"it was made with key {key}, meta.json with {meta.key}: the parts come from different runs"
            )
        if (shard.rank, shard.num_parts) != (rank, meta.num_parts):
            raise ValueError(f"it holds rank {shard.rank} of {shard.num_parts}")
        check_shard(shard)
        _check_against_meta(shard, meta)
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ShardFileError(f"{path} cannot be used: {error}; {_REMEDY}") from error
    return shard


def _save(shard: Shard, key: str, path: Path) -> None:
    """One shard as safetensors; sparse tensors become three, and the header's JSON says which and how wide."""
    tensors = {name: getattr(shard, name) for name in _TENSORS}
    layouts: dict[str, dict[str, list[int] | None]] = {}
    for kind in ("node_data", "edge_data"):
        layouts[kind] = {}
        for name, rows in getattr(shard, kind).items():
            sparse = rows.layout == torch.sparse_csr
            layouts[kind][name] = list(rows.shape) if sparse else None
            for piece, tensor in _pieces(rows).items():
                tensors[f"{kind}:{name}:{piece}"] = tensor
    header = {name: getattr(shard, name) for name in _SCALARS}
    header |= {"schema_version": SCHEMA_VERSION, "key": key, "sparse_shapes": layouts}
    header |= {"send_splits": shard.send_splits, "recv_splits": shard.recv_splits, "order": vars(shard.order)}
    # safetensors refuses views that share storage with another tensor
    owned = {name: tensor.contiguous() if _owns_storage(tensor) else tensor.clone() for name, tensor in tensors.items()}
    save_file(owned, path, metadata={"nugnn": json.dumps(header)})


def _load(path: Path) -> tuple[Shard, str]:
    with safe_open(path, framework="pt") as file:
        header = json.loads((file.metadata() or {})["nugnn"])
        if not isinstance(header, dict) or header.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"its header is not of schema version {SCHEMA_VERSION}")
        data: dict[str, dict[str, Tensor]] = {"node_data": {}, "edge_data": {}}
        for kind, rows_by_name in data.items():
            for name, shape in _typed(_typed(header, "sparse_shapes", dict), kind, dict).items():
                if shape is None:
                    rows_by_name[name] = file.get_tensor(f"{kind}:{name}:dense")
                    continue
                crow, col, values = (file.get_tensor(f"{kind}:{name}:{piece}") for piece in ("crow", "col", "values"))
                size = tuple(_counts(shape, f"shape of {name}"))
                rows_by_name[name] = csr_matrix(crow, col, values, size, is_checked=False)
        shard = Shard(
            **{name: file.get_tensor(name) for name in _TENSORS},
            **{name: _typed(header, name, kind) for name, kind in _SCALARS.items()},
            send_splits=_counts(_typed(header, "send_splits", list), "send_splits"),
            recv_splits=_counts(_typed(header, "recv_splits", list), "recv_splits"),
            node_data=data["node_data"],
            edge_data=data["edge_data"],
            order=_order_report(_typed(header, "order", dict)),
        )
    return shard, _typed(header, "key", str)


def _pieces(rows: Tensor) -> dict[str, Tensor]:
    if rows.layout == torch.sparse_csr:
        return {"crow": rows.crow_indices(), "col": rows.col_indices(), "values": rows.values()}
    return {"dense": rows}


def _owns_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _part_meta(raw: object) -> PartMeta:
    if not isinstance(raw, dict):
        raise ValueError("an entry of parts is not an object")
    names = ("num_nodes", "num_halo", "num_edges", "num_train", "num_val", "num_test", "file_bytes")
    return PartMeta(
        **{name: _typed(raw, name, int) for name in names},
        send_splits=_counts(_typed(raw, "send_splits", list), "send_splits"),
        recv_splits=_counts(_typed(raw, "recv_splits", list), "recv_splits"),
        sha256=_typed(raw, "sha256", str),
    )


def _order_report(raw: Mapping[str, Any]) -> OrderReport:
    method = _typed(raw, "method", str)
    if method not in ("none", "clusters"):
        raise ValueError(f"order is {method!r:.80}, a method that this program does not know")
    return OrderReport(
        method=method,  # type: ignore[arg-type]  # checked above
        num_clusters=_typed(raw, "num_clusters", int),
        near_before=_typed(raw, "near_before", float),
        near_after=_typed(raw, "near_after", float),
        seconds=_typed(raw, "seconds", float),
        reason=_typed(raw, "reason", str),
    )


def _check_meta(meta: StoreMeta) -> None:
    """The counts of all parts together: they cover the graph, and what is sent is what is received."""
    if not meta.parts:
        raise ValueError("it lists no parts")
    for rank, part in enumerate(meta.parts):
        for name in ("num_nodes", "num_halo", "num_edges", "num_train", "num_val", "num_test", "file_bytes"):
            if getattr(part, name) < 0:
                raise ValueError(f"{name} of rank {rank} is negative")
        if part.num_halo != sum(part.recv_splits):
            raise ValueError(
                f"rank {rank} has {counted(part.num_halo, 'halo node')} but receives "
                f"{counted(sum(part.recv_splits), 'row')}"
            )
    for name, total in (("num_nodes", meta.num_nodes), ("num_edges", meta.num_edges)):
        summed = sum(getattr(part, name) for part in meta.parts)
        if summed != total:
            raise ValueError(f"{name} of the parts sum to {summed}, of the graph it is {total}")
    check_exchange_counts([part.recv_splits for part in meta.parts], [part.send_splits for part in meta.parts])


def _check_against_meta(shard: Shard, meta: StoreMeta) -> None:
    part = meta.parts[shard.rank]
    pairs = {
        "num_nodes": (shard.num_inner, part.num_nodes),
        "num_halo": (shard.num_halo, part.num_halo),
        "num_edges": (shard.num_edges, part.num_edges),
        "num_train": (len(shard.train_rows), part.num_train),
        "num_val": (len(shard.val_rows), part.num_val),
        "num_test": (len(shard.test_rows), part.num_test),
        "num_train_global": (shard.num_train_global, sum(other.num_train for other in meta.parts)),
        "num_val_global": (shard.num_val_global, sum(other.num_val for other in meta.parts)),
        "num_test_global": (shard.num_test_global, sum(other.num_test for other in meta.parts)),
        "num_nodes_global": (shard.num_nodes_global, meta.num_nodes),
        "num_edges_global": (shard.num_edges_global, meta.num_edges),
        "order": (shard.order, meta.order),
        "send_splits": (shard.send_splits, part.send_splits),
        "recv_splits": (shard.recv_splits, part.recv_splits),
    }
    for name, (found, listed) in pairs.items():
        if found != listed:
            raise ValueError(f"{name} is {found} in the file and {listed} in meta.json")


def _typed(raw: Mapping[str, Any], name: str, kind: type) -> Any:
    """Entry ``name`` if it is there and of that type; a bool is no int."""
    value = raw.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name} must be of type {kind.__name__}, it is {value!r:.80}")
    return value


def _counts(values: list[Any], name: str) -> tuple[int, ...]:
    if any(not isinstance(value, int) or isinstance(value, bool) or value < 0 for value in values):
        raise ValueError(f"{name} must be counts, it is {values!r:.80}")
    return tuple(values)


def _plain(meta: StoreMeta) -> dict[str, Any]:
    return {**vars(meta), "parts": [vars(part) for part in meta.parts], "order": vars(meta.order)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
