"""Communication between ranks: groups, halo exchange, differentiable collectives, gradient sums."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nugnn.comm.compression.ddp import compress as compress
    from nugnn.comm.compression.settings import Compression as Compression

__all__ = ["Compression", "compress"]
_WHERE = {"Compression": "settings", "compress": "ddp"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"nugnn.comm.compression.{_WHERE[name]}"), name)
