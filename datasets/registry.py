"""From what a user typed to a graph: a file, a name in a folder, or a built-in graph; nothing is downloaded."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from nugnn.datasets.digits import digits
from nugnn.datasets.graph_data import GraphData, Metric
from nugnn.datasets.npz import is_graph_npz, read_npz
from nugnn.datasets.synthetic import FULL_NODES, mixed_like, products_like

DEFAULT_SYNTHETIC_NODES = 100_000

_SYNTHETIC: dict[str, Callable[..., GraphData]] = {"products-like": products_like, "mixed-like": mixed_like}
_BUILT_IN = ("digits", *_SYNTHETIC)
_PUBLIC = (
    *("cora", "citeseer", "pubmed", "cora-full", "dblp", "wiki-cs", "reddit", "flickr", "yelp", "ppi", "wordnet"),
    *("amazon-computers", "amazon-photo", "coauthor-cs", "coauthor-physics", "blogcatalog-attr", "flickr-attr"),
    *("actor", "chameleon", "squirrel", "cornell", "texas", "wisconsin", "fb100-cornell5", "penn94", "facebook-pages"),
    *("roman-empire", "amazon-ratings", "minesweeper", "tolokers", "questions", "genius", "pokec"),
    *("ogbn-arxiv", "ogbn-products", "ogbn-proteins", "ogbn-mag", "ogbn-papers100m"),
)
_PUBLISHED_METRIC: dict[str, Metric] = {"minesweeper": "roc_auc", "tolokers": "roc_auc", "questions": "roc_auc"}

_log = logging.getLogger("nugnn.datasets")


def load(name_or_path: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None = None) -> GraphData:
    """Load a graph; the first of these that applies.

    1. The path of an ``.npz`` file, or of a folder ``NAME`` that holds ``NAME.npz`` (a folder counts as a path only
       when written with a separator, so a folder that happens to be called like a dataset is no obstacle).
    2. A name under ``data_dir``: ``NAME.npz`` or ``NAME/NAME.npz``. Case and ``-``/``_`` do not matter.
    3. A built-in graph: ``digits``, ``products-like[:NODES[:ARCS[:SEED]]]``, ``mixed-like[:NODES[:ARCS[:SEED]]]``.

    Args:
        name_or_path: What the user typed.
        data_dir: Folder to look in; None to skip step 2. Never created or written to.

    Raises:
        ValueError: nothing of that name, with the closest names or where to put which file; or the file is broken.
    """
    text = os.fspath(name_or_path)
    path = _existing_path(text)
    if path is not None:
        return _read(path)
    name, *arguments = text.split(":")
    name = _normalised(name)
    in_folder = dict(_graphs_in(None if data_dir is None else Path(data_dir)))
    if not arguments and name in in_folder:
        candidate = in_folder[name]
        if is_graph_npz(candidate) or name not in _BUILT_IN:
            return _read(candidate)
        _log.info("%s holds no graph; using the built-in %s", candidate, name)
    if name in _SYNTHETIC:
        return _synthetic(name, text, arguments)
    if name == "digits" and not arguments:
        return digits()
    graphs = [found for found, file in in_folder.items() if is_graph_npz(file)]
    raise ValueError(_not_found(text, name, data_dir, graphs))


def _existing_path(text: str) -> Path | None:
    path = Path(text).expanduser()
    looks_like_path = path.suffix == ".npz" or path.name != text
    if path.is_file():
        return path
    if path.is_dir() and looks_like_path:
        inside = path.resolve().name + ".npz"
        if (path / inside).is_file():
            return path / inside
        raise ValueError(f"{text} is a folder without {inside}; name the .npz file itself")
    if looks_like_path:
        raise ValueError(f"{text}: no such file")
    return None


def _read(path: Path) -> GraphData:
    return read_npz(path, metric=_PUBLISHED_METRIC.get(_normalised(path.stem), "auto"))


def _normalised(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _graphs_in(folder: Path | None) -> Iterator[tuple[str, Path]]:
    """Normalised names and files of ``NAME/NAME.npz``, then of ``NAME.npz``, which so has the last word."""
    if folder is None or not folder.is_dir():
        return
    entries = sorted(folder.iterdir())
    for entry in entries:
        if entry.is_dir():
            for file in sorted(entry.glob("*.npz")):
                if _normalised(file.stem) == _normalised(entry.name):
                    yield _normalised(entry.name), file
    for entry in entries:
        if entry.suffix == ".npz" and entry.is_file():
            yield _normalised(entry.stem), entry


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


def _not_found(text: str, name: str, data_dir: str | os.PathLike[str] | None, in_folder: list[str]) -> str:
    file = f"{name.replace('-', '_')}.npz"
    looked = "no data folder was given (--data-dir)"
    if data_dir is not None:
        folder = Path(data_dir)
        looked = f"looked for {folder / file} and {folder / file[:-4] / file}"
        if not folder.is_dir():
            looked = f"the data folder {folder} does not exist"
        elif other := [entry for entry in folder.iterdir() if entry.is_dir() and _normalised(entry.name) == name]:
            looked += f"; the folder {other[0]} is there, but other layouts than .npz (OGB, CSV) are not read yet"
    if name in _PUBLIC:
        return (
            f"dataset {text!r} is not on this machine: {looked}. Downloading is not built yet: put the graph as {file} "
            "into a folder and name that folder with --data-dir, or give the path of the file. "
            "nugnn.datasets.write_npz makes such a file"
        )
    close = difflib.get_close_matches(name, {*_BUILT_IN, *_PUBLIC, *in_folder}, n=3, cutoff=0.6)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    available = ", ".join([*_BUILT_IN, *(found for found in sorted(in_folder) if found not in _BUILT_IN)])
    return f"unknown dataset {text!r}: {hint}{looked}. Available: {available}; or the path of an .npz file"
