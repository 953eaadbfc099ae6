"""From what a user typed to a graph: a path, a name in a folder or the cache, a built-in graph, or a download."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nugnn._regular_file import is_folder, no_file, shown
from nugnn.datasets.archive import ARCHIVE_SUFFIXES, extract
from nugnn.datasets.cache_location import cache_folder
from nugnn.datasets.data_folder import data_folder
from nugnn.datasets.digits import digits
from nugnn.datasets.download import Progress, locked
from nugnn.datasets.fetch import prepare
from nugnn.datasets.graph_data import GraphData, Metric
from nugnn.datasets.layouts import FILE_SUFFIXES, read_any
from nugnn.datasets.on_disk import in_cache, is_archive, look, names_in, stem
from nugnn.datasets.sources import BUILT_IN, PUBLISHED, Published, normalised, source_of_file
from nugnn.datasets.synthetic import FULL_NODES, mixed_like, products_like
from nugnn.datasets.unknown_names import meant_kind, unknown_name

DEFAULT_SYNTHETIC_NODES = 100_000

_SYNTHETIC: dict[str, Callable[..., GraphData]] = {"products-like": products_like, "mixed-like": mixed_like}

Where = Literal["built-in", "local", "cache", "download", "by hand"]

_log = logging.getLogger("nugnn.datasets")


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetEntry:
    """A data set that can be named, and where it would come from."""

    name: str
    where: Where
    """``download``: would be fetched. ``by hand``: known by name, but no source; see the error of :func:`load`."""
    path: Path | None = None
    """The file or folder, when it is on this machine."""
    published: Published | None = None
    """Counts, split, metric and source, for a published data set."""

    @property
    def download_bytes(self) -> int | None:
        """Size of the download, exact or rough; None when nobody states it or there is none."""
        source = self.published.source if self.published else None
        return source.num_bytes if source else None


def load(
    name_or_path: str | os.PathLike[str],
    data_dir: str | os.PathLike[str] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    num_nodes: int | None = None,
) -> GraphData:
    """Load a graph; the first of these that applies.

    1. The path of a file or folder in any format that nuGNN reads, or of a zip or tar of such a folder (a bare name
       counts as a path only when it ends like a file of a graph, so a folder that happens to be called like a data set
       is no obstacle).
    2. A name under ``data_dir``: ``NAME.npz``, ``NAME/``, ``NAME_dgl/``, ``NAME_pyg/``, or the published archive. Case
       and ``-``/``_`` do not matter.
    3. A built-in graph: ``digits``, ``products-like[:NODES[:ARCS[:SEED]]]``, ``mixed-like[:NODES[:ARCS[:SEED]]]``.
    4. A name in the cache folder, likewise.
    5. A published data set, downloaded into the cache folder.

    A published data set whose counts differ from the published ones is loaded with a warning in the log.

    Args:
        name_or_path: What the user typed.
        data_dir: Folder to look in, which has to be there whatever is asked for; ``$NUGNN_DATA`` when None, and without
            that step 2 is skipped. Never created or written to.
        cache: Folder for downloads and processed graphs; default :func:`cache_folder`. Made when first needed.
        progress: Called with bytes and total while a file is downloaded.
        num_nodes: N, for the path of a list of edges whose ids are rows, ``0 .. N - 1``; None for the ids that occur.

    Raises:
        ValueError: nothing of that name, with the closest names or where to put which file; no such data folder; the
            download failed; the file is broken; or ``num_nodes`` for data that know theirs.
    """
    text = os.fspath(name_or_path)
    store = cache_folder() if cache is None else Path(cache)
    folder = data_folder(data_dir)
    path = _existing_path(text)
    if path is not None:
        return _read(path, path.name if path.is_dir() else stem(path), store, num_nodes)
    if num_nodes is not None:
        raise ValueError(
            f"{text!r} is a name, and what is named knows how many nodes it has; the number of nodes (--num-nodes) is "
            "for the path of a list of edges"
        )
    name, *arguments = text.split(":")
    name = normalised(name)
    if not arguments:
        found = look(folder, name)
        if found is not None:
            return _read_named(found, name, store)
    if name in _SYNTHETIC:
        return _synthetic(name, text, arguments)
    if name == "digits" and not arguments:
        return digits()
    if arguments or (name not in PUBLISHED and look(store, name) is None):
        raise ValueError(unknown_name(text, name, folder))
    place = prepare(name, cache=store, progress=progress) if name in PUBLISHED else look(store, name)
    assert place is not None, name
    return _read_named(place, name, store)


def list_datasets(
    data_dir: str | os.PathLike[str] | None = None, *, cache: str | os.PathLike[str] | None = None
) -> list[DatasetEntry]:
    """Every data set that can be named: those under ``data_dir``, the built-in and the published ones, by name.

    Looks at names of files and folders only; nothing is read, downloaded or made.

    Raises:
        ValueError: no such data folder.
    """
    folder = data_folder(data_dir)
    store = cache_folder() if cache is None else Path(cache)
    names = {*BUILT_IN, *PUBLISHED, *names_in(folder)}
    return sorted((_entry(name, folder, store) for name in names), key=lambda entry: entry.name)


def info(
    name: str, data_dir: str | os.PathLike[str] | None = None, *, cache: str | os.PathLike[str] | None = None
) -> DatasetEntry:
    """What is known of one data set, without loading or downloading it.

    Raises:
        ValueError: unknown name, with the closest ones; or no such data folder.
    """
    folder = data_folder(data_dir)
    store = cache_folder() if cache is None else Path(cache)
    key = normalised(name)
    if key not in {*BUILT_IN, *PUBLISHED} and look(folder, key) is None and look(store, key) is None:
        raise ValueError(unknown_name(name, key, folder))
    return _entry(key, folder, store)


def _entry(name: str, folder: Path | None, store: Path) -> DatasetEntry:
    published = PUBLISHED.get(name)
    if (path := look(folder, name)) is not None:
        return DatasetEntry(name=name, where="local", path=path, published=published)
    if name in BUILT_IN:
        return DatasetEntry(name=name, where="built-in")
    if (path := in_cache(name, store)) is not None:
        return DatasetEntry(name=name, where="cache", path=path, published=published)
    where: Where = "download" if published and published.source else "by hand"
    return DatasetEntry(name=name, where=where, published=published)


def _existing_path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # ~NOBODY
        raise ValueError(f"{text}: no such file ({error})") from None
    looks_like_path = path.name != text or path.name.lower().endswith((*FILE_SUFFIXES, *ARCHIVE_SUFFIXES, ".json"))
    known = normalised(text) in {*BUILT_IN, *PUBLISHED}
    problem = no_file(path)
    if problem is None and not known:
        return path
    if is_folder(path):
        return path if looks_like_path else None
    if problem is not None and (looks_like_path or not problem.startswith("no such file")):
        raise ValueError(f"{shown(Path(text))}: {problem}{meant_kind(text)}")
    return None


def _read_named(path: Path, name: str, store: Path) -> GraphData:
    """Read what was found under a name, and compare it with what is published."""
    published = PUBLISHED.get(name)
    if published is not None and published.note:
        _log.warning("%s", published.note)
    own_name = path.stem if path.suffix == ".npz" else name
    data = _read(path, own_name, store)
    if published is not None:
        _compare(data, published)
    return data


def _read(path: Path, name: str, store: Path, num_nodes: int | None = None) -> GraphData:
    metric: Metric = PUBLISHED[normalised(name)].metric if normalised(name) in PUBLISHED else "auto"
    if is_archive(path):
        known = source_of_file(path.name)
        if known is not None:
            name, metric = known.name, known.metric
        path = _extracted(path, name, store)
    return read_any(path, name, metric, store / "processed", num_nodes)


def _extracted(archive: Path, name: str, store: Path) -> Path:
    """The content of an archive that the user put somewhere, in a folder of the cache; the archive stays."""
    about = archive.stat()
    key = hashlib.sha256(f"{archive.resolve()}\0{about.st_size}\0{about.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = store / "extracted" / f"{normalised(name).replace('-', '_')}-{key}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not folder.is_dir():
                extract(archive, folder)
    except OSError as error:
        raise ValueError(
            f"{archive} cannot be extracted into the cache folder {store} ({error.strerror or error}); extract it by "
            "hand, or name another cache folder with NUGNN_CACHE"
        ) from error
    return folder


def _compare(data: GraphData, published: Published) -> None:
    counts = {
        "nodes": (data.num_nodes, published.num_nodes),
        "edges": (data.num_edges, published.num_edges),
        "features": (data.num_features, published.num_features),
        "classes": (data.num_classes, published.num_classes),
    }
    if published.split is not None:
        pairs = zip(data.split, published.split, strict=True)
        counts |= {
            f"{part} nodes": (len(ids), size) for part, (ids, size) in zip(("train", "val", "test"), pairs, strict=True)
        }
    differing = [
        f"{found:,} {what} (published: {known:,})"
        for what, (found, known) in counts.items()
        if known and known != found
    ]
    if differing:
        _log.warning("%s is not the graph as published: it has %s", published.name, ", ".join(differing))


def _synthetic(name: str, text: str, arguments: list[str]) -> GraphData:
    pattern = f"{name}[:NODES[:ARCS[:SEED]]]"
    if len(arguments) > 3:
        raise ValueError(f"dataset {text!r}: too many parts; write {pattern}, e.g. {name}:{FULL_NODES}")
    try:
        numbers = [int(argument.replace("_", "").replace(",", "")) for argument in arguments]
    except ValueError:
        raise ValueError(
            f"dataset {text!r}: NODES, ARCS and SEED are whole numbers; write {pattern}, e.g. {name}:20000:400000:1"
        ) from None
    return _SYNTHETIC[name](*(numbers or [DEFAULT_SYNTHETIC_NODES]))
