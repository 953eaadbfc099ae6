"""A number that is read later than it is asked for."""

from __future__ import annotations

import torch
from torch import Tensor


class HostNumber:
    """A number of a tensor on its way to the host; a GPU goes on meanwhile.

    In a step that is recorded as a CUDA graph, `read` gives what it came to the last time that the step ran.

    Args:
        x: A scalar, which stays as it is until it is read.
        room: From `room_for`: where it arrives. Nobody else may use it before this one is read.
    """

    def __init__(self, x: Tensor, room: Tensor | None) -> None:
        self._copy, self._arrived = x, None
        if room is not None:
            self._copy = room.copy_(x, non_blocking=True)
            self._arrived = (
                torch.cuda.Event(external=True) if torch.cuda.is_current_stream_capturing() else torch.cuda.Event()
            )
            self._arrived.record(torch.cuda.current_stream(x.device))

    @staticmethod
    def room_for(device: torch.device) -> Tensor | None:
        """Where a float64 of ``device`` arrives; None where it needs no way."""
        return torch.empty((), dtype=torch.float64, pin_memory=True) if device.type == "cuda" else None

    def read(self) -> float:
        """Waits until it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._copy)
