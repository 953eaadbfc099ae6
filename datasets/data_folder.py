"""The folder in which a user's data lie, which has to be there once it is named."""

from __future__ import annotations

import os
from pathlib import Path

from nugnn._regular_file import is_folder, no_file, shown


def data_folder(data_dir: str | os.PathLike[str] | None) -> Path | None:
    """The user's data folder: ``data_dir``, else ``$NUGNN_DATA``, else none. One that is not there is refused even
    where it is not needed, as nothing that a user says is ignored.

    Raises:
        ValueError: Something else than a folder is there, or nothing.
    """
    given = os.environ.get("NUGNN_DATA") or None if data_dir is None else data_dir
    if given is None:
        return None
    named = Path(given)
    try:
        folder = named.expanduser()
    except RuntimeError:  # ~NOBODY
        problem = "is in the home of a user who is not known here"
    else:
        if is_folder(folder):
            return folder
        named, found = folder, no_file(folder) or "is a file"
        problem = "does not exist" if found.startswith("no such file") else found.split(", not a file")[0]
        problem = problem.replace("a link to nothing", "is a link to nothing")
    raise ValueError(f"the data folder {shown(named)} {problem}; correct --data-dir or NUGNN_DATA, or leave it out")
