"""Where downloads and processed data are kept, unless somebody names another folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$NUGNN_CACHE``, else ``$XDG_CACHE_HOME/nugnn/datasets``, else ``~/.cache/nugnn/datasets``; may not exist."""
    if own := os.environ.get("NUGNN_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "nugnn" / "datasets"
