"""What is said of a name that nothing was found for: what it may have meant, and where all names are shown."""

from __future__ import annotations

import difflib
from pathlib import Path

from nugnn._regular_file import is_folder
from nugnn.datasets.on_disk import names_in
from nugnn.datasets.sources import BUILT_IN, PUBLISHED, normalised
from nugnn.sample_sets import NAMES, PATH_KINDS


def unknown_name(text: str, name: str, folder: Path | None) -> str:
    """The sentence that refuses a data set.

    Args:
        text: What the user typed.
        name: The same, normalised.
        folder: The user's data folder.
    """
    looked, listed = "no data folder was given (--data-dir)", "`nugnn datasets list`"
    if folder is not None:
        looked, listed = f"it is not in {folder}", f"{listed}, with the same --data-dir,"
    known = {*BUILT_IN, *PUBLISHED, *names_in(folder), *NAMES, *PATH_KINDS}
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    meant = ", ".join(f"{each}:PATH" if each in PATH_KINDS else each for each in close)
    hint = f"did you mean {meant}? " if close else ""
    if name in NAMES:
        hint = f"{name} names samples, which nugnn.datasets.samples.load_samples reads, and takes no path; "
    if is_folder(Path(text)):
        hint += f"the folder of that name here is written ./{text}; "
    return (
        f"unknown dataset {text!r:.200}: {hint}{looked}. {listed} shows all names; or give the path of a file or folder"
    )


def meant_kind(text: str) -> str:
    """What ``imagefold:PATH`` may have meant."""
    kind, colon, rest = text.partition(":")
    close = difflib.get_close_matches(normalised(kind), PATH_KINDS, n=1, cutoff=0.6) if colon else []
    return f"; did you mean {close[0]}:{rest:.100}?" if close else ""
