"""Where in the user's own code an error came from."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

_PACKAGES = ("", ".comm", ".datasets", ".kernels", ".partition", ".planning", ".precision")


def place_of_error(error: BaseException) -> str:
    """`` (FILE, line N)``: the innermost place in code that is neither nuGNN's nor a library's; empty without one."""
    for place in reversed(traceback.extract_tb(error.__traceback__)):
        if not place.filename.startswith("<") and not is_library(Path(place.filename).resolve()):
            return f" ({place.filename}, line {place.lineno})"
    return ""


def place_of_raise(error: BaseException) -> str:
    """The same where the user's code raised ``error`` itself, and not something that it called; empty otherwise."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = place_of_error(error)
    return place if last and place == f" ({last[0].filename}, line {last[0].lineno})" else ""


def is_library(path: Path) -> bool:
    """Whether lines of this file say nothing about a user's mistake."""
    installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return installed or any(path.is_relative_to(folder) for folder in _folders())


def _folders() -> list[Path]:
    """Of what is loaded, which is all that lines of a traceback can be of: a worker that fails imports nothing."""
    loaded = (sys.modules.get(f"nugnn{name}") for name in _PACKAGES)
    own = [Path(str(module.__file__)).resolve().parent for module in loaded if module is not None]
    return [*own, Path(sysconfig.get_path("stdlib")).resolve()]
