"""When a device has done what it was given: computing that waits for exchanges, and shares cores with some of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from nugnn.planning.after_rest import Rests
from nugnn.planning.cores_taken import CoresTaken


@dataclass(eq=False)
class RankTime:
    """Of one rank, from one operator to the next.

    Args:
        rests: When it stands still, and what it loses to that.
        device: Seconds at which its device has done all so far.

    >>> time = RankTime(Rests(0.0, 1.0))
    >>> time.travels(0.0, 2.0, 1.0)  # half of the cores for two seconds
    >>> time.computes(0.0, 0.5), time.device
    (1.0, 1.0)
    >>> time.waits(5.0)
    >>> time.computes(time.device, 1.0), time.device
    (1.0, 6.0)
    """

    rests: Rests
    device: float = 0.0
    _beside: CoresTaken = field(default_factory=CoresTaken)

    def computes(self, start: float, alone: float) -> float:
        """Work begins at ``start`` that takes ``alone`` seconds by itself, and the device has done it: what it took."""
        took = self._beside.seconds(start, alone + self.rests.lost())
        self.device = start + took
        return took

    def travels(self, begin: float, end: float, taken: float) -> None:
        """An exchange, of all the next to begin, takes ``taken`` seconds of the cores at most."""
        self._beside.add(begin, end, taken)

    def waits(self, until: float) -> None:
        """Nothing is computed before then."""
        self.rests.add(max(until - self.device, 0.0))
        self.device = max(self.device, until)
