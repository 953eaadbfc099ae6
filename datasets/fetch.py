"""Published data sets in the cache folder: downloaded and extracted once, by whichever process is the first."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from nugnn.datasets.archive import extract
from nugnn.datasets.cache_location import cache_folder
from nugnn.datasets.download import DownloadError, Progress, RemoteFile, download, locked
from nugnn.datasets.on_disk import in_cache, is_archive
from nugnn.datasets.sources import PUBLISHED, Published, normalised
from nugnn.datasets.unknown_names import unknown_name


def prepare(name: str, *, cache: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Download a published data set into the cache folder, unless it is there.

    Of processes that ask at once, one downloads and the others wait for it.

    Args:
        name: In any spelling.
        cache: As in `nugnn.datasets.load`.
        progress: As in `nugnn.datasets.load`.

    Returns:
        The folder that now holds it.

    Raises:
        ValueError: an unknown name, a name without a source, or a download that failed; says what to put where.
    """
    store = cache_folder() if cache is None else Path(cache)
    entry = PUBLISHED.get(normalised(name))
    if entry is None:
        raise ValueError(unknown_name(name, normalised(name), None))
    found = in_cache(entry.name, store)
    if found is not None and not is_archive(found):
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
    found = in_cache(entry.name, folder.parent)
    if found is not None and not is_archive(found):
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
        missing = [remote.url for remote in files if not (folder / remote.file_name).is_file()]
        if len(missing) < 2:
            raise
        which = f"all {len(files)} files" if len(missing) == len(files) else f"{len(missing)} of the {len(files)} files"
        lines = [
            error.what,
            f"{which} are missing; fetch them by hand or on another machine, from",
            *(f"  {url}" for url in missing),
            "and put them here into",
            f"  {folder}",
        ]
        raise DownloadError("\n".join(lines), error.what) from error


def _check_space_twice(entry: Published, store: Path) -> None:
    """Refuse an archive whose content, compressed again file by file, would not fit beside it."""
    needed = 2 * (entry.source.num_bytes or 0) if entry.source else 0
    free = shutil.disk_usage(store).free
    if needed > free:
        raise ValueError(
            f"{entry.name} needs about {needed / 1e9:.1f} GB, for its archive and what is in it, and {store} has "
            f"{free / 1e9:.1f} GB free; free some, or name another cache folder with NUGNN_CACHE"
        )
