"""Communication between ranks: groups, halo exchange, differentiable collectives, gradient sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nugnn.comm.compression.ddp import compress as compress

__all__ = ["compress"]


def __getattr__(name: str) -> Any:
    if name != "compress":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nugnn.comm.compression.ddp import compress

    return compress
