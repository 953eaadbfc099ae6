"""Exact full-graph GNN training over unequal devices, built on DGL.

Importing the package loads neither torch nor DGL; public names are imported on first use. It also puts a hook in place
that lets a later ``import dgl`` work with torch versions newer than DGL's binaries (see ``nugnn._dgl_compat``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nugnn import _dgl_compat

if TYPE_CHECKING:
    from nugnn.config import TrainConfig as TrainConfig

_dgl_compat.install()

_EXPORTS = {
    "TrainConfig": "nugnn.config",
}
"""Public name -> module that defines it."""

__all__ = ["TrainConfig", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("nugnn")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps a public function that has its module's name: ``nugnn.fit`` is callable after ``import nugnn.fit``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _EXPORTS:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
