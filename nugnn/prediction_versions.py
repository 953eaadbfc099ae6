"""Versions of what a prediction is made with: runs of other versions say nothing of how far off it is."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch

import nugnn.comm.early_rows
import nugnn.planning
from nugnn import __version__


def prediction_versions() -> dict[str, str]:
    """Of nugnn, of torch, and a digest of the code that predicts, as ``prediction``."""
    return {"nugnn": __version__, "torch": str(torch.__version__), "prediction": _code_digest()}


@functools.cache
def _code_digest() -> str:
    """Of the code that predicts: other code is off by other factors."""
    digest = hashlib.sha256()
    others = [Path(nugnn.comm.early_rows.__file__)]  # how much of a sum begins early
    for path in [*sorted(Path(nugnn.planning.__file__).parent.glob("*.py")), *others]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
