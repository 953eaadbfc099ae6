"""Modules that ``NUGNN_WITHOUT`` names cannot be imported, as if they had been deleted."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

NAMES = frozenset(filter(None, os.environ.get("NUGNN_WITHOUT", "").split(",")))


class _Deleted(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name in NAMES:
            raise ModuleNotFoundError(f"{name} was deleted", name=name)


if NAMES:
    sys.meta_path.insert(0, _Deleted())
