"""Processed graphs on disk: plain ``.npy`` files beside one JSON file, found again by the content of their sources.

A graph is built in a folder of its own, checked, and renamed into place, so a reader sees all of it or nothing. The
key is a hash over the sources' contents, the options and the format version. A source is hashed again only when its
size or modification time has changed since; the hash is remembered under ``sources/``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nugnn.datasets.array_writers import ArrayWriter, MemoryArrays, NpyFolder
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.mapped import map_npy

FORMAT_VERSION = 1
"""Raised whenever a cache written before would be misread."""

Build = Callable[[ArrayWriter], Mapping[str, Any]]
"""Writes the arrays of a graph and returns ``name``, ``num_nodes`` and, where known, ``num_classes`` and ``metric``."""

_TIME_GRAIN_NS = 2_000_000_000  # a file changed within it after hashing may keep its modification time
_READ_BYTES = 1 << 22

_log = logging.getLogger("nugnn.datasets")


def cached_graph(
    cache: str | os.PathLike[str] | None, sources: Sequence[Path], options: Mapping[str, Any], build: Build
) -> GraphData:
    """The graph that ``build`` makes from ``sources``, out of the cache when it is there; hit and miss are logged.

    ``build`` names its arrays ``src``, ``dst``, ``feat``, ``label``, ``train``, ``val``, ``test``,
    ``node_data.NAME`` and ``edge_data.NAME``. From a cache they come memory-mapped: nothing is read before it is used,
    and a change in place stays in memory. Every array is compared with its checksum first, so a damaged cache is made
    again, with a line in the log. Several processes may ask at once: one builds and the others wait for it.

    Args:
        cache: Folder of all processed graphs, made if missing; None builds in memory.
        sources: Every file that ``build`` reads.
        options: Everything else that its result depends on, as plain JSON values.
        build: See ``Build``.

    Raises:
        ValueError: the sources make no graph (nothing is kept of it), or the folder cannot be written.
    """
    if cache is None:
        arrays = MemoryArrays()
        values = build(arrays)
        return _graph(values, arrays.tensors())
    folder = Path(cache)
    try:
        return _cached_graph(folder, sources, options, build)
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        raise ValueError(
            f"the cache {folder} cannot be used ({reason}); free space there or choose another cache folder"
        ) from error


def _cached_graph(cache: Path, sources: Sequence[Path], options: Mapping[str, Any], build: Build) -> GraphData:
    key = _key(cache, sources, options)
    target = cache / key
    data, reason = _load(target, key)
    if data is not None:
        _log.info("dataset cache hit: %s", target)
        return data
    from filelock import FileLock

    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{key}.lock"):
        data, reason = _load(target, key)  # another process may have built it while this one waited
        if data is not None:
            _log.info("dataset cache hit: %s", target)
            return data
        _log.info("dataset cache miss: %s (%s)", target, reason)
        with _build_folder(cache, key) as unfinished:
            writer = NpyFolder(unfinished)
            values = dict(build(writer))
            meta = {"format": FORMAT_VERSION, "key": key, "values": values, "arrays": writer.records}
            text = json.dumps(meta | {"sha256": _digest(meta)}, indent=1)
            (unfinished / "meta.json").write_text(text, encoding="utf-8")
            data = _graph(values, {name: map_npy(unfinished / f"{name}.npy") for name in writer.records})
            _flush(unfinished)
            _publish(unfinished, target)
    return data


def _key(cache: Path, sources: Sequence[Path], options: Mapping[str, Any]) -> str:
    contents = [(path.name, path.parent.name, _content_hash(cache, path)) for path in sorted(sources)]
    identity = {"format": FORMAT_VERSION, "sources": contents, "options": dict(options)}
    return _digest(identity)[:40]


def _content_hash(cache: Path, path: Path) -> str:
    """sha256 of the file, from the cache's notes while size and modification time are those of the last hashing."""
    path = path.resolve()
    note = cache / "sources" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:40]}.json"
    stat = path.stat()
    seen = {"path": os.fsdecode(path), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        noted = json.loads(note.read_text(encoding="utf-8"))
        content = noted.get("sha256") if isinstance(noted, dict) else None
        if isinstance(content, str) and noted == seen | {"sha256": content}:
            return content
    hashed_at = time.time_ns()
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    if hashed_at - stat.st_mtime_ns > _TIME_GRAIN_NS:
        with contextlib.suppress(OSError):  # a cache that cannot be written can still be read
            note.parent.mkdir(parents=True, exist_ok=True)
            temporary = note.with_name(f".{note.name}.{uuid.uuid4().hex}")
            temporary.write_text(json.dumps(seen | {"sha256": content}), encoding="utf-8")
            os.replace(temporary, note)
    return content


def _load(folder: Path, key: str) -> tuple[GraphData | None, str]:
    """The graph in a finished folder; or None and why not."""
    if not folder.exists():
        return None, "not there yet"
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        content = meta.pop("sha256")
        if meta["format"] != FORMAT_VERSION or meta["key"] != key or content != _digest(meta):
            raise ValueError("meta.json is not what was written")
        arrays = {name: _verified(folder / f"{name}.npy", record) for name, record in meta["arrays"].items()}
        return _graph(meta["values"], arrays), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        _log.warning("dataset cache %s is damaged (%s); it is built again", folder, error)
        return None, "damaged"


def _verified(path: Path, record: Mapping[str, Any]) -> Tensor:
    """The array, mapped, once size, type, shape and checksum agree with the record."""
    from isal import isal_zlib

    if path.stat().st_size != record["file_bytes"]:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {record['file_bytes']}")
    rows = map_npy(path, checked=True)
    array = rows[:0].numpy() if rows.dim() else rows.numpy()
    if array.dtype.str != record["dtype"] or list(rows.shape) != record["shape"]:
        raise ValueError(f"{path.name} is {array.dtype.str} {list(rows.shape)}")
    crc = 0
    with path.open("rb") as file:
        file.seek(record["file_bytes"] - rows.numel() * rows.element_size())
        while block := file.read(_READ_BYTES):
            crc = isal_zlib.crc32(block, crc)
    if crc != record["crc32"]:
        raise ValueError(f"{path.name} differs from what was written")
    return rows


def _graph(values: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> GraphData:
    further: dict[str, dict[str, Tensor]] = {"node_data": {}, "edge_data": {}}
    for name, rows in arrays.items():
        kind, dot, column = name.partition(".")
        if dot:
            further[kind][column] = rows
    no_nodes = torch.empty(0, dtype=torch.int64)
    return GraphData(
        name=values["name"],
        num_nodes=values["num_nodes"],
        src=arrays["src"],
        dst=arrays["dst"],
        features=arrays.get("feat"),
        labels=arrays.get("label"),
        num_classes=values.get("num_classes", 0),
        metric=values.get("metric", "auto"),
        train_nodes=arrays.get("train", no_nodes),
        val_nodes=arrays.get("val", no_nodes),
        test_nodes=arrays.get("test", no_nodes),
        node_data=further["node_data"],
        edge_data=further["edge_data"],
    )


@contextlib.contextmanager
def _build_folder(cache: Path, key: str) -> Iterator[Path]:
    """A fresh folder for one build, gone at the end unless published; so are those of builders that were killed."""
    for abandoned in cache.glob(f".{key}.*.unfinished"):  # whoever builds this key holds its lock: it is us
        shutil.rmtree(abandoned, ignore_errors=True)
    unfinished = cache / f".{key}.{uuid.uuid4().hex}.unfinished"
    unfinished.mkdir()
    try:
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _publish(unfinished: Path, target: Path) -> None:
    """Rename into place; a damaged folder there is moved away first, and who has it mapped keeps its files."""
    if target.exists():
        # named like an unfinished build, so that it is removed even when this process dies here
        damaged = target.with_name(f".{target.name}.{uuid.uuid4().hex}.unfinished")
        os.replace(target, damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        os.replace(unfinished, target)
    except OSError:
        if not (target / "meta.json").exists():  # without working locks another builder can be first: his is as good
            raise


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
