"""What a device's computing loses to sums that travel beside it, whose transport works on the same cores."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class CoresTaken:
    """Of one device, from sums in the order in which they begin, one after the other.

    A sum takes its part of the cores evenly from when it begins until it ends, and nothing where nobody computes.

    >>> taken = CoresTaken()
    >>> taken.add(1.0, 3.0, 0.5)  # a quarter of the time from 1 to 3
    >>> taken.seconds(0.0, 1.0), taken.seconds(1.0, 1.5), taken.seconds(2.0, 1.75), taken.seconds(5.0, 1.0)
    (1.0, 2.0, 2.0, 1.0)
    """

    _sums: list[tuple[float, float, float]] = field(default_factory=list)
    """Begin, end, and what it takes of the time between."""

    def add(self, begin: float, end: float, taken: float) -> None:
        """A sum that takes ``taken`` seconds from computing beside it; not more than it lasts."""
        if taken > 0 and end > begin:
            assert not self._sums or begin >= self._sums[-1][1], f"a sum begins at {begin}, within {self._sums[-1]}"
            self._sums.append((begin, end, min(taken / (end - begin), 1.0)))

    def seconds(self, start: float, alone: float) -> float:
        """How long computing lasts that begins at ``start``, and takes ``alone`` where no sum travels; in order."""
        while self._sums and self._sums[0][1] <= start:
            del self._sums[0]
        now, left = start, alone
        for begin, end, part in self._sums:
            before = max(begin - now, 0.0)
            if left <= before:
                break
            now, left = now + before, left - before
            beside = (1 - part) * (end - now)
            if left <= beside:
                return now + left / (1 - part) - start
            now, left = end, left - beside
        return now - start + left
