"""What is said of a name that nothing was found for: what it may have meant, and what there is."""

from __future__ import annotations

import difflib
from pathlib import Path

from nugnn._regular_file import is_folder
from nugnn.datasets.on_disk import names_in
from nugnn.datasets.sources import BUILT_IN, PUBLISHED, normalised


def unknown_name(text: str, name: str, folder: Path | None) -> str:
    """The sentence that refuses a data set.

    Args:
        text: What the user typed.
        name: The same, normalised.
        folder: The user's data folder.
    """
    in_folder = sorted({*names_in(folder)} - {*BUILT_IN})
    looked = "no data folder was given (--data-dir)"
    if folder is not None:
        looked = f"it is not in {folder}"
    samples, kinds = _sample_names()
    close = difflib.get_close_matches(name, {*BUILT_IN, *PUBLISHED, *in_folder, *samples, *kinds}, n=3, cutoff=0.6)
    hint = f"did you mean {', '.join(f'{each}:PATH' if each in kinds else each for each in close)}? " if close else ""
    if name in samples:
        hint = f"{name} names samples, which nugnn.datasets.samples.load_samples reads, and takes no path; "
    if is_folder(Path(text)):
        hint += f"the folder of that name here is written ./{text}; "
    available = ", ".join([*BUILT_IN, *in_folder])
    return (
        f"unknown dataset {text!r:.200}: {hint}{looked}. Available: {available}, and the published ones that "
        "`nugnn datasets list` shows; or give the path of a file or folder. Of samples, which `nugnn train` and "
        f"load_samples take: {', '.join((*samples, *(f'{kind}:PATH' for kind in kinds)))}"
    )


def meant_kind(text: str) -> str:
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
