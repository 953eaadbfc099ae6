"""A number that is read later than it is asked for."""

from __future__ import annotations

import torch
from torch import Tensor


class HostNumber:
    """A number of a tensor on its way to the host; a GPU goes on meanwhile.

    Args:
        x: A scalar, which stays as it is until it is read.
    """

    def __init__(self, x: Tensor) -> None:
        self._arrived = None
        self._copy = x
        if x.device.type == "cuda":
            self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            self._arrived = torch.cuda.current_stream(x.device).record_event()

    def read(self) -> float:
        """Waits until it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._copy)
