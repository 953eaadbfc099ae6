"""The sets of a cluster's devices that share a graph best, by counts: all looked at roughly, the best ones closely."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nugnn.planning.baselines import baseline_shares
from nugnn.planning.counted_shares import CountedShares, Tried
from nugnn.planning.host_subsets import HostSubsets, Ranks, Units
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.plan import BASELINES

_BEST = 3
"""Sets of devices whose shares are looked at closely."""
_SETS = 80_000
"""What may be spent on finding sets: ranks in all forecasts, see `CountedShares.price_among`; some seconds."""


class LikelySets:
    """The search over sets of devices.

    Args:
        every: All devices.
        subsets: Of them.
        precision: For shares by FLOP/s.
    """

    def __init__(self, every: CountedShares, subsets: HostSubsets, precision: str) -> None:
        self._every, self._subsets, self._precision = every, subsets, precision
        self._found: dict[object, tuple[Ranks, Tried] | None] = {}
        self._spent = 0

    def best(self) -> list[tuple[CountedShares, Tried]]:
        """Sets with their improved shares, the one first that was fastest before; all devices are not among them."""
        for units in self._subsets.sensible(self._seconds):
            self._seconds(units)
        if len(self._subsets.all) > 1:
            self._walk()
        sets = sorted((each for each in self._found.values() if each), key=lambda each: each[1].step_seconds)[:_BEST]
        searches = [(self._every.among(ranks), start) for ranks, start in sets if len(ranks) < self._every.count]
        return [(search, self.improved(search, start)) for search, start in searches]

    def improved(self, search: CountedShares, start: Tried) -> Tried:
        """Shares of a set from the best of ``start`` and the baselines."""
        profiles = [search.cluster.profiles[rank] for rank in search.ranks]
        names = BASELINES if len(set(search.group_of)) > 1 else ()
        starts = [start, *(search.of(baseline_shares(name, profiles, self._precision)) for name in names)]
        fitting = [each for each in starts if each.fits] or [start]
        return search.improved(min(fitting, key=lambda each: each.step_seconds))

    def among_all(self, search: CountedShares, shares: Sequence[float]) -> Tried:
        """Shares of a set as those of all devices, each of which holds a node at least."""
        found = dict(zip(search.ranks, shares, strict=True))
        return self._every.of([found.get(rank, 0.0) for rank in range(self._every.count)])

    def _seconds(self, units: Units) -> float:
        """Of a set alone with level shares; infinite where it does not hold the graph, or there is no time to look."""
        name = self._subsets.name(units)
        if name not in self._found:
            ranks = self._subsets.ranks(units)
            is_every = len(ranks) == self._every.count
            if not is_every:  # which is looked at in any case, and alone costs more where there are many
                price = self._every.price_among(ranks)
                if self._spent + price > _SETS:
                    return math.inf
                self._spent += price
            search = self._every if is_every else self._every.among(ranks)
            try:
                found = search.level()
                self._found[name] = (ranks, found) if found.fits else None
            except DoesNotFitError:
                self._found[name] = None
        known = self._found[name]
        return math.inf if known is None else known[1].step_seconds

    def _walk(self) -> None:
        """From the best set to better ones near it."""
        fitting = [each for each in self._found.values() if each is not None]
        if not fitting:
            return
        at = set(min(fitting, key=lambda each: each[1].step_seconds)[0])
        best = frozenset(unit for unit in self._subsets.all if at.issuperset(self._subsets.ranks(frozenset({unit}))))
        while (next_ := min(self._subsets.near(best), key=self._seconds, default=best)) != best and self._seconds(
            next_
        ) < self._seconds(best):
            best = next_
