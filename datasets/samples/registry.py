"""From what a user typed to samples: a built-in or published set of images, or a path of the user's own."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nugnn.datasets.cache_location import cache_folder
from nugnn.datasets.data_folder import data_folder
from nugnn.datasets.download import Progress
from nugnn.datasets.samples.digits_images import digits_images
from nugnn.datasets.samples.division import TEST_FRACTION, VAL_FRACTION
from nugnn.datasets.samples.image_arrays import load_image_set
from nugnn.datasets.samples.image_folder import load_image_folder
from nugnn.datasets.samples.image_sources import IMAGE_SETS
from nugnn.datasets.samples.sample_data import SampleData
from nugnn.datasets.samples.table import load_table
from nugnn.datasets.samples.text import load_text
from nugnn.datasets.sources import normalised
from nugnn.sample_sets import BUILT_IN_IMAGES, KNOWN, NAMES, PATH_KINDS

_OPTION_USERS = {
    "image_size": "imagefolder:PATH",
    "tokens": "text:PATH",
    "vocabulary_size": "text:PATH",
    "max_length": "text:PATH",
}


def load_samples(
    spec: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    cache: str | os.PathLike[str] | None = None,
    val_fraction: float | None = None,
    test_fraction: float | None = None,
    image_size: int | None = None,
    tokens: str | None = None,
    vocabulary_size: int | None = None,
    max_length: int | None = None,
) -> SampleData:
    """Load samples of one of these kinds.

    - ``digits-images``: built in.
    - ``mnist``, ``fashion-mnist``, ``cifar10``: in ``data_dir``, or in the cache folder, or downloaded there.
    - ``imagefolder:PATH``, ``text:PATH``, ``csv:PATH``: a file or folder; a relative one that is not there is looked
      for in ``data_dir``.

    Parts that the data have are kept. Where there is no val part, it is drawn from the training samples, where there is
    no part at all, test as well: class by class, the same for one seed on every machine.

    Args:
        spec: What the user typed; case and ``-``/``_`` of names do not matter.
        data_dir: Folder to look in, ``$NUGNN_DATA`` when None; never written to.
        seed: Of what is drawn.
        progress: Called with bytes and total of a download, or with files looked at and their number.
        cache: Folder for downloads; default `nugnn.datasets.cache_folder`.
        val_fraction: Of the samples that val is drawn from, default 0.1; 0 leaves val empty.
        test_fraction: Of all samples, default 0.2, for data without parts.
        image_size: Pixels of a side, for ``imagefolder``; None when all images have one size.
        tokens: ``words``, byte ``pairs``, or ``auto``, the default, for ``text``; see `TextEncoder.learn`.
        vocabulary_size: Tokens at most, for ``text``; default 30,000 words or 8,000 pairs.
        max_length: Tokens of a sample, for ``text``; default as long as the longest of train, at most 128.

    Raises:
        ImportError: Pillow or ``tokenizers`` is not installed and needed; names the extra.
        ValueError: an unknown name, an option that does not belong to the data, missing or broken files.
    """
    numbers = {"image_size": image_size, "vocabulary_size": vocabulary_size, "max_length": max_length}
    options: dict[str, Any] = numbers | {"tokens": tokens}
    fractions = {"val_fraction": val_fraction, "test_fraction": test_fraction}
    store = cache_folder() if cache is None else Path(cache)
    try:
        return _load(spec, data_folder(data_dir), store, seed, progress, options, fractions)
    except OSError as error:  # of a file or folder that may not be read, or on a disk that is gone
        where = error.filename or spec
        raise ValueError(f"{where} cannot be read: {error.strerror or error}; see to that first") from error


def _load(
    spec: str,
    folder: Path | None,
    store: Path,
    seed: int,
    progress: Progress | None,
    options: Mapping[str, Any],
    fractions: Mapping[str, float | None],
) -> SampleData:
    kind, colon, rest = spec.partition(":")
    name = normalised(kind)
    if (name in PATH_KINDS) != bool(colon) or name not in (*NAMES, *PATH_KINDS):
        raise ValueError(_unknown(spec, name, bool(colon)))
    _refuse_others_options(name, options)
    if name == "imagefolder":
        path, size = _path(rest, spec, folder), options["image_size"]
        return load_image_folder(path, image_size=size, seed=seed, progress=progress, **fractions)
    if name == "text":
        return load_text(
            _path(rest, spec, folder),
            vocabulary_size=options["vocabulary_size"],
            max_length=options["max_length"],
            tokens=options["tokens"],
            seed=seed,
            **fractions,
        )
    if name == "csv":
        return load_table(_path(rest, spec, folder), seed=seed, **fractions)
    val_fraction, test_fraction = fractions["val_fraction"], fractions["test_fraction"]
    val = VAL_FRACTION if val_fraction is None else val_fraction
    if name == BUILT_IN_IMAGES:
        return digits_images(seed, val, TEST_FRACTION if test_fraction is None else test_fraction)
    if test_fraction is not None:
        raise ValueError(f"{name} has test images of its own; leave --test-fraction out")
    return load_image_set(IMAGE_SETS[name], folder, store, seed=seed, val_fraction=val, progress=progress)


def _path(text: str, spec: str, folder: Path | None) -> Path:
    if not text:
        raise ValueError(f"{spec!r} names no path; write {spec}PATH")
    path = Path(text).expanduser()
    if not path.exists() and not path.is_absolute() and folder is not None:
        if (folder / path).exists():
            return folder / path
        raise ValueError(f"{text}: no such file or folder, neither here nor in {folder}")
    return path


def _refuse_others_options(name: str, given: Mapping[str, Any]) -> None:
    for option, value in given.items():
        user = _OPTION_USERS[option]
        if value is not None and not user.startswith(f"{name}:"):
            raise ValueError(f"--{option.replace('_', '-')} belongs to {user}, not to {name}; leave it out")


def _unknown(spec: str, name: str, has_path: bool) -> str:
    if name in PATH_KINDS:
        return f"{spec!r} names no path; write {name}:PATH"
    if has_path and name in NAMES:
        return f"{spec!r}: {name} takes no path; put its files into the folder that --data-dir names"
    close = difflib.get_close_matches(name, (*NAMES, *PATH_KINDS), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown samples {spec!r}: {hint}Known are {', '.join(KNOWN)}"
