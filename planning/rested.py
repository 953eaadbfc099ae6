"""What a link saves an exchange after a rest: some bytes pass at once, as a token bucket lets them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(eq=False)
class Rested:
    """How long each rank's link has rested, and what it saves an exchange: a token bucket, in seconds.

    Args:
        burst_seconds: That it saves at most; after so long a rest, or before anything was sent.
        num_ranks: P.
    """

    burst_seconds: float
    num_ranks: int

    def __post_init__(self) -> None:
        self._saved, self._since = (np.full(self.num_ranks, value) for value in (self.burst_seconds, 0.0))

    def left(self, begin: float, passing: Floats) -> Floats:
        """Of ``passing (P,)`` seconds of an exchange that begins at ``begin``, what it takes; exchanges in order."""
        self._saved = np.minimum(self.burst_seconds, self._saved + np.maximum(begin - self._since, 0.0))
        at_once = np.minimum(self._saved, passing)
        self._saved = self._saved - at_once
        self._since = np.maximum(self._since, begin + passing - at_once)
        return np.asarray(passing - at_once, np.float64)

    def saved(self, begin: float, passing: float) -> float:
        """Of an exchange of one rank alone, what `left` takes off."""
        return float((passing - self.left(begin, np.array([passing])))[0])
