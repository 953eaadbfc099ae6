"""What a folder of the user's, or the cache, holds under the name of a data set."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from nugnn.datasets.archive import ARCHIVE_SUFFIXES
from nugnn.datasets.layouts import FILE_SUFFIXES, holds_ogb, holds_planetoid
from nugnn.datasets.npz import is_graph_npz
from nugnn.datasets.sources import BUILT_IN, PUBLISHED, normalised

_PACKAGE_SUFFIXES = ("-dgl", "-pyg", "")  # what the OGB package appends to its folders, and prefers
_log = logging.getLogger("nugnn.datasets")


def look(folder: Path | None, name: str) -> Path | None:
    """The file, folder or archive of that name in a folder; a file comes first, then what the OGB package would write.

    The folder itself is returned when it holds the Planetoid files of that graph.
    """
    if folder is None or not folder.is_dir():
        return None
    known = name in PUBLISHED or name in BUILT_IN
    entries = sorted(folder.iterdir())
    for suffix in (".npz",) if known else FILE_SUFFIXES:
        for entry in entries:
            if entry.name.lower().endswith(suffix) and normalised(entry.name[: -len(suffix)]) == name:
                if entry.is_file() and (name not in BUILT_IN or _holds_graph(entry, name)):
                    return entry
    if name in BUILT_IN:
        inside = [file for _, file in _npz_folders(entries, name) if _holds_graph(file, name)]
        return inside[0].parent if inside else None
    for ending in _PACKAGE_SUFFIXES:
        for entry in entries:
            if entry.is_dir() and normalised(entry.name) == name + ending and (place := _inside(entry, name)):
                return place
    if holds_planetoid(folder, name):
        return folder
    return _archive_in(entries, name)


def _holds_graph(file: Path, name: str) -> bool:
    if is_graph_npz(file):
        return True
    _log.info("%s holds no graph; using the built-in %s", file, name)
    return False


def _inside(folder: Path, name: str) -> Path | None:
    """The folder, the archive that is all it holds, or None when it is empty."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    archive = _archive_in(entries, name)
    return archive if archive is not None and len(entries) == 1 else (folder if entries else None)


def _archive_in(entries: list[Path], name: str) -> Path | None:
    source = PUBLISHED[name].source if name in PUBLISHED else None
    published = source.files[0].file_name.lower() if source is not None and source.kind == "archive" else None
    for entry in entries:
        for suffix in ARCHIVE_SUFFIXES:
            if entry.name.lower().endswith(suffix) and entry.is_file():
                if entry.name.lower() == published or normalised(entry.name[: -len(suffix)]) == name:
                    return entry
    return None


def is_archive(path: Path) -> bool:
    """Whether a file is named like an archive."""
    return path.name.lower().endswith(ARCHIVE_SUFFIXES) and path.is_file()


def in_cache(name: str, store: Path) -> Path | None:
    """What the cache holds of that name, complete or by the user's own hand; None when a download has to go on."""
    found = look(store, name)
    source = PUBLISHED[name].source if name in PUBLISHED else None
    if found is None or source is None or source.kind == "archive" or found != store / PUBLISHED[name].folder:
        return found
    complete = all((found / remote.file_name).is_file() for remote in source.files)
    own = any(normalised(file.stem) == name for file in found.glob("*.npz"))
    return found if complete or own or holds_ogb(found) else None


def names_in(folder: Path | None) -> Iterator[str]:
    """Names under which `look` would find a graph, told by names of files alone."""
    if folder is None or not folder.is_dir():
        return
    entries = sorted(folder.iterdir())
    for entry in entries:
        if entry.suffix == ".npz" and entry.is_file() and is_graph_npz(entry):
            yield normalised(entry.stem)
        elif entry.is_dir() and (holds_ogb(entry) or (entry / "edges.csv").is_file()):
            ending = next(end for end in ("-dgl", "-pyg", "") if normalised(entry.name).endswith(end))
            yield normalised(entry.name).removesuffix(ending)
    for name, file in _npz_folders(entries, None):
        if is_graph_npz(file):
            yield name


def _npz_folders(entries: list[Path], name: str | None) -> Iterator[tuple[str, Path]]:
    """Each ``NAME/NAME.npz``, of that name or of any."""
    for entry in entries:
        if entry.is_dir() and name in (None, normalised(entry.name)):
            for file in sorted(entry.glob("*.npz")):
                if normalised(file.stem) == normalised(entry.name):
                    yield normalised(entry.name), file


def stem(path: Path) -> str:
    """The name of a file without what says its format."""
    for suffix in (*ARCHIVE_SUFFIXES, *FILE_SUFFIXES):
        if path.name.lower().endswith(suffix):
            return path.name[: -len(suffix)]
    return path.stem
