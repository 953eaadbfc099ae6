"""From what a user typed to a graph: a path, a name in a folder or the cache, a built-in graph, or a download."""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nugnn._regular_file import is_folder, no_file, shown
from nugnn.datasets.archive import ARCHIVE_SUFFIXES, extract
from nugnn.datasets.digits import digits
from nugnn.datasets.download import DownloadError, Progress, RemoteFile, download, locked
from nugnn.datasets.graph_data import GraphData, Metric
from nugnn.datasets.layouts import FILE_SUFFIXES, holds_ogb, holds_planetoid, read_any
from nugnn.datasets.npz import is_graph_npz
from nugnn.datasets.sources import PUBLISHED, Published, normalised, source_of_file
from nugnn.datasets.synthetic import FULL_NODES, mixed_like, products_like

DEFAULT_SYNTHETIC_NODES = 100_000

_SYNTHETIC: dict[str, Callable[..., GraphData]] = {"products-like": products_like, "mixed-like": mixed_like}
_BUILT_IN = ("digits", *_SYNTHETIC)
_PACKAGE_SUFFIXES = ("-dgl", "-pyg", "")  # what the OGB package appends to its folders, and prefers

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
        data_dir: Folder to look in, which has to be there whatever is asked for; None to skip step 2. Never created or
            written to.
        cache: Folder for downloads and processed graphs; default :func:`cache_folder`. Made when first needed.
        progress: Called with bytes and total while a file is downloaded.
        num_nodes: N, for the path of a list of edges whose ids are rows, ``0 .. N - 1``; None for the ids that occur.

    Raises:
        ValueError: nothing of that name, with the closest names or where to put which file; no such data folder; the
            download failed; the file is broken; or ``num_nodes`` for data that know theirs.
    """
    text = os.fspath(name_or_path)
    store = cache_folder() if cache is None else Path(cache)
    folder = _data_folder(data_dir)
    path = _existing_path(text)
    if path is not None:
        return _read(path, path.name if path.is_dir() else _stem(path), store, num_nodes)
    if num_nodes is not None:
        raise ValueError(
            f"{text!r} is a name, and what is named knows how many nodes it has; the number of nodes (--num-nodes) is "
            "for the path of a list of edges"
        )
    name, *arguments = text.split(":")
    name = normalised(name)
    if not arguments:
        found = _look(folder, name)
        if found is not None:
            return _read_named(found, name, store)
    if name in _SYNTHETIC:
        return _synthetic(name, text, arguments)
    if name == "digits" and not arguments:
        return digits()
    if arguments or (name not in PUBLISHED and _look(store, name) is None):
        raise ValueError(_unknown(text, name, folder))
    place = prepare(name, cache=store, progress=progress) if name in PUBLISHED else _look(store, name)
    assert place is not None, name
    return _read_named(place, name, store)


def prepare(name: str, *, cache: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Download a published data set into the cache folder, unless it is there.

    Of processes that ask at once, one downloads and the others wait for it.

    Args:
        name: In any spelling.
        cache: As in :func:`load`.
        progress: As in :func:`load`.

    Returns:
        The folder that now holds it.

    Raises:
        ValueError: an unknown name, a name without a source, or a download that failed; says what to put where.
    """
    store = cache_folder() if cache is None else Path(cache)
    entry = PUBLISHED.get(normalised(name))
    if entry is None:
        raise ValueError(_unknown(name, normalised(name), None))
    found = _in_cache(entry.name, store)
    if found is not None and not _is_archive(found):
        return found
    if found is None and entry.source is None:
        raise ValueError(
            f"dataset {name!r} is not on this machine, and nuGNN knows no address to download it from: put the graph "
            f"as {entry.folder}.npz into {store} or into the folder that --data-dir names, or give the path of the "
            "file. nugnn.datasets.write_npz makes such a file"
        )
    folder = store / entry.folder
    try:
        store.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            return _fill(entry, folder, progress)
    except DownloadError:
        raise
    except OSError as error:
        raise ValueError(
            f"the cache folder {store} cannot be written ({error.strerror or error}); name another with NUGNN_CACHE"
        ) from error


def _fill(entry: Published, folder: Path, progress: Progress | None) -> Path:
    """Download and extract what is missing; the caller holds the lock."""
    found = _in_cache(entry.name, folder.parent)
    if found is not None and not _is_archive(found):
        return found
    if found is not None:
        extract(found, folder)
        return folder
    assert entry.source is not None, entry.name
    try:
        if entry.source.kind == "files":
            _download_files(entry.source.files, folder, progress)
        else:
            (remote,) = entry.source.files
            _check_space_twice(entry, folder.parent)
            archive = download(remote, folder.parent / remote.file_name, progress=progress, lock=False)
            extract(archive, folder)
            archive.unlink()
    finally:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return folder


def _download_files(files: tuple[RemoteFile, ...], folder: Path, progress: Progress | None) -> None:
    """All the files; who has to fetch one by hand is told of all that are missing."""
    try:
        for remote in files:
            download(remote, folder / remote.file_name, progress=progress, lock=False)
    except DownloadError as error:
        missing = [remote.file_name for remote in files if not (folder / remote.file_name).is_file()]
        if len(missing) < 2:
            raise
        raise DownloadError(
            f"{error}. {len(missing)} of the {len(files)} files are still missing in {folder}: {', '.join(missing)}"
        ) from error


def _check_space_twice(entry: Published, store: Path) -> None:
    """Refuse an archive whose content, compressed again file by file, would not fit beside it."""
    needed = 2 * (entry.source.num_bytes or 0) if entry.source else 0
    free = shutil.disk_usage(store).free
    if needed > free:
        raise ValueError(
            f"{entry.name} needs about {needed / 1e9:.1f} GB, for its archive and what is in it, and {store} has "
            f"{free / 1e9:.1f} GB free; free some, or name another cache folder with NUGNN_CACHE"
        )


def cache_folder() -> Path:
    """``$NUGNN_CACHE``, else ``$XDG_CACHE_HOME/nugnn/datasets``, else ``~/.cache/nugnn/datasets``; may not exist."""
    if own := os.environ.get("NUGNN_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "nugnn" / "datasets"


def list_datasets(
    data_dir: str | os.PathLike[str] | None = None, *, cache: str | os.PathLike[str] | None = None
) -> list[DatasetEntry]:
    """Every data set that can be named: those under ``data_dir``, the built-in and the published ones, by name.

    Looks at names of files and folders only; nothing is read, downloaded or made.

    Raises:
        ValueError: no such data folder.
    """
    folder = _data_folder(data_dir)
    store = cache_folder() if cache is None else Path(cache)
    names = {*_BUILT_IN, *PUBLISHED, *_names_in(folder)}
    return sorted((_entry(name, folder, store) for name in names), key=lambda entry: entry.name)


def info(
    name: str, data_dir: str | os.PathLike[str] | None = None, *, cache: str | os.PathLike[str] | None = None
) -> DatasetEntry:
    """What is known of one data set, without loading or downloading it.

    Raises:
        ValueError: unknown name, with the closest ones; or no such data folder.
    """
    folder = _data_folder(data_dir)
    store = cache_folder() if cache is None else Path(cache)
    key = normalised(name)
    if key not in {*_BUILT_IN, *PUBLISHED} and _look(folder, key) is None and _look(store, key) is None:
        raise ValueError(_unknown(name, key, folder))
    return _entry(key, folder, store)


def _data_folder(data_dir: str | os.PathLike[str] | None) -> Path | None:
    """The user's data folder; one that is not there is refused even where it is not needed, as nothing that a user
    says is ignored.
    """
    if data_dir is None:
        return None
    folder = Path(data_dir).expanduser()
    if not is_folder(folder):
        found = no_file(folder) or "is a file"
        problem = "does not exist" if found.startswith("no such file") else found.split(", not a file")[0]
        raise ValueError(
            f"the data folder {shown(folder)} {problem}; correct --data-dir or NUGNN_DATA, or leave it out"
        )
    return folder


def _entry(name: str, folder: Path | None, store: Path) -> DatasetEntry:
    published = PUBLISHED.get(name)
    if (path := _look(folder, name)) is not None:
        return DatasetEntry(name=name, where="local", path=path, published=published)
    if name in _BUILT_IN:
        return DatasetEntry(name=name, where="built-in")
    if (path := _in_cache(name, store)) is not None:
        return DatasetEntry(name=name, where="cache", path=path, published=published)
    where: Where = "download" if published and published.source else "by hand"
    return DatasetEntry(name=name, where=where, published=published)


def _existing_path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # ~NOBODY
        raise ValueError(f"{text}: no such file ({error})") from None
    looks_like_path = path.name != text or path.name.lower().endswith((*FILE_SUFFIXES, *ARCHIVE_SUFFIXES, ".json"))
    known = normalised(text) in {*_BUILT_IN, *PUBLISHED}
    problem = no_file(path)
    if problem is None and not known:
        return path
    if is_folder(path):
        return path if looks_like_path else None
    if problem is not None and (looks_like_path or not problem.startswith("no such file")):
        raise ValueError(f"{shown(Path(text))}: {problem}{_meant_kind(text)}")
    return None


def _meant_kind(text: str) -> str:
    """What ``imagefold:PATH`` may have meant."""
    kind, colon, rest = text.partition(":")
    close = difflib.get_close_matches(normalised(kind), _sample_names()[1], n=1, cutoff=0.6) if colon else []
    return f"; did you mean {close[0]}:{rest:.100}?" if close else ""


def _sample_names() -> tuple[list[str], list[str]]:
    """Data sets of samples, and kinds of paths to such, which a graph's name may be mistaken for."""
    # they are read by a module that needs this one
    from nugnn.datasets.samples.image_sources import IMAGE_SETS
    from nugnn.datasets.samples.registry import BUILT_IN, PATH_KINDS

    return [BUILT_IN, *IMAGE_SETS], list(PATH_KINDS)


def _look(folder: Path | None, name: str) -> Path | None:
    """The file, folder or archive of that name in a folder; a file comes first, then what the OGB package would write.

    The folder itself is returned when it holds the Planetoid files of that graph.
    """
    if folder is None or not folder.is_dir():
        return None
    known = name in PUBLISHED or name in _BUILT_IN
    entries = sorted(folder.iterdir())
    for suffix in (".npz",) if known else FILE_SUFFIXES:
        for entry in entries:
            if entry.name.lower().endswith(suffix) and normalised(entry.name[: -len(suffix)]) == name:
                if entry.is_file() and (name not in _BUILT_IN or _holds_graph(entry, name)):
                    return entry
    if name in _BUILT_IN:
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


def _is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ARCHIVE_SUFFIXES) and path.is_file()


def _in_cache(name: str, store: Path) -> Path | None:
    """What the cache holds of that name, complete or by the user's own hand; None when a download has to go on."""
    found = _look(store, name)
    source = PUBLISHED[name].source if name in PUBLISHED else None
    if found is None or source is None or source.kind == "archive" or found != store / PUBLISHED[name].folder:
        return found
    complete = all((found / remote.file_name).is_file() for remote in source.files)
    own = any(normalised(file.stem) == name for file in found.glob("*.npz"))
    return found if complete or own or holds_ogb(found) else None


def _names_in(folder: Path | None) -> Iterator[str]:
    """Names under which :func:`_look` would find a graph, told by names of files alone."""
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
    if _is_archive(path):
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


def _stem(path: Path) -> str:
    for suffix in (*ARCHIVE_SUFFIXES, *FILE_SUFFIXES):
        if path.name.lower().endswith(suffix):
            return path.name[: -len(suffix)]
    return path.stem


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


def _unknown(text: str, name: str, folder: Path | None) -> str:
    in_folder = sorted({*_names_in(folder)} - {*_BUILT_IN})
    looked = "no data folder was given (--data-dir)"
    if folder is not None:
        looked = f"it is not in {folder}"
    samples, kinds = _sample_names()
    close = difflib.get_close_matches(name, {*_BUILT_IN, *PUBLISHED, *in_folder, *samples, *kinds}, n=3, cutoff=0.6)
    hint = f"did you mean {', '.join(f'{each}:PATH' if each in kinds else each for each in close)}? " if close else ""
    if name in samples:
        hint = f"{name} names samples, which nugnn.datasets.samples.load_samples reads, and takes no path; "
    if is_folder(Path(text)):
        hint += f"the folder of that name here is written ./{text}; "
    available = ", ".join([*_BUILT_IN, *in_folder])
    return (
        f"unknown dataset {text!r:.200}: {hint}{looked}. Available: {available}, and the published ones that "
        "`nugnn datasets list` shows; or give the path of a file or folder. Of samples, which `nugnn train` and "
        f"load_samples take: {', '.join((*samples, *(f'{kind}:PATH' for kind in kinds)))}"
    )
