"""Shares of a graph by counts among some devices, judged by forecasts of a run of these alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nugnn.planning.apportioned import apportioned, one_each
from nugnn.planning.cluster import Cluster
from nugnn.planning.draft import all_fit, by_kind, usable_bytes
from nugnn.planning.forecast import Forecast, StepModel
from nugnn.planning.lacking import DoesNotFitError, what_is_lacking
from nugnn.planning.levels import flooded, level
from nugnn.planning.part_sizes import PartSizes, bounded
from nugnn.planning.share_curves import Halo, relaxed_curves, relaxed_sizes
from nugnn.planning.share_search import faster_shares

_REACH, _LEAST_REACH = 0.4, 0.02
"""How far a share grows or shrinks at first and in the end, in its logarithm."""
_ROOM = (1.0, 0.99, 0.96)
"""Of the memories, tried in turn: between the samples of a curve a part may need more than the curve says."""
_MOST_FORECASTS = 60
"""Of one set's shares."""
_SHARES = 60_000
"""What may be spent on the shares of a set: ranks in all forecasts, see `CountedShares.price_among`; some seconds."""
_OF_GROUP = 100
"""Ranks that are forecast in the time of one of another group: those that stand for each other take no replay each."""


@dataclass(frozen=True, eq=False)
class Tried:
    """Shares, and what they come to."""

    shares: tuple[float, ...]
    bytes: tuple[float, ...]
    fits: bool
    forecast: Forecast

    @property
    def step_seconds(self) -> float:
        return self.forecast.step_seconds


class CountedShares:
    """Shares of a graph by counts among some devices, judged by forecasts of a run of these alone.

    Args:
        model: Of all devices.
        whole: Of the graph; a node for each device at least.
        cluster: All devices.
        halo: Expected.
        ranks: Of the devices, ascending.
        group_of: Of each device of the cluster, equal for those that stand for each other: these have the same sizes.
    """

    def __init__(
        self,
        model: StepModel,
        whole: PartSizes,
        cluster: Cluster,
        halo: Halo,
        ranks: Sequence[int],
        group_of: Sequence[int],
    ) -> None:
        self.all, self.whole, self.cluster, self.halo, self.group_of = model, whole, cluster, halo, group_of
        self.ranks, self.count = tuple(ranks), len(ranks)
        self.model = model if self.count == len(cluster.devices) else model.among(self.ranks)
        self._groups = [group_of[rank] for rank in self.ranks]
        usable = usable_bytes(cluster)
        self.limits = [usable[rank] for rank in self.ranks]
        self._known: dict[tuple[PartSizes, ...], Tried] = {}

    def price_among(self, ranks: Sequence[int]) -> int:
        """Of a forecast of some of the cluster's devices, by the time that it takes: in ranks."""
        return len(ranks) + _OF_GROUP * len({self.group_of[rank] for rank in ranks})

    def among(self, ranks: Sequence[int]) -> CountedShares:
        """The same for others of the cluster's devices."""
        return CountedShares(self.all, self.whole, self.cluster, self.halo, ranks, self.group_of)

    def of(self, shares: Sequence[float]) -> Tried:
        """What ``shares`` come to."""
        sizes = self.whole_numbers(shares)
        if sizes not in self._known:
            self._known[sizes] = self._of(shares, sizes)
        return self._known[sizes]

    def _of(self, shares: Sequence[float], sizes: Sequence[PartSizes]) -> Tried:
        first = {group: size for group, size in zip(reversed(self._groups), reversed(sizes), strict=True)}
        alike = [
            first[group] if abs(first[group].inner - size.inner) <= 1 else size
            for group, size in zip(self._groups, sizes, strict=True)
        ]
        names = [str(group) for group in self._groups]
        held = by_kind(self.model.work.bytes, alike, names)
        return Tried(tuple(shares), held, all_fit(held, self.limits), self.model.forecast(alike))

    def level(self, *, says_why: bool = False) -> Tried:
        """Shares at which all devices, each for itself, take as long.

        Raises:
            DoesNotFitError: The memories do not hold the graph; without a word on what would do unless ``says_why``.
        """
        if len(set(self._groups)) == 1 and (even := self.of([1 / self.count] * self.count)).fits:
            return even
        work = self.model.work
        curves = relaxed_curves(work, self.whole, self.count, self.halo, self._groups)
        found = None
        for room in _ROOM:
            plan = flooded(curves, [room * limit for limit in self.limits])
            if plan is not None:
                found = self.of(plan.shares)
            if found is None or found.fits:
                break
        if found is not None:
            return found
        if not says_why:
            raise DoesNotFitError
        if (plan := level(curves, self.limits)) is not None:
            return self.of(plan.shares)
        names = [self.cluster.described([rank], has_count=False) for rank in self.ranks]
        raise DoesNotFitError(what_is_lacking(work, curves, self.limits, names))

    def improved(self, start: Tried) -> Tried:
        """After shares of one kind of device after the other grew or shrank, as long as that helps."""

        def seconds(shares: Sequence[float]) -> float:
            tried = start if shares == start.shares else self.of(shares)
            return tried.step_seconds if tried.fits or tried is start else math.inf

        most = min(_MOST_FORECASTS, _SHARES // self.price_among(self.ranks))
        best = faster_shares(start.shares, self._groups, seconds, most=most, reach=_REACH, least_reach=_LEAST_REACH)
        return start if best == start.shares else self.of(best)

    def whole_numbers(self, shares: Sequence[float]) -> tuple[PartSizes, ...]:
        """Sizes that add up to the graph's."""
        return _divided(self.whole, shares, self.halo)


def _divided(whole: PartSizes, shares: Sequence[float], halo: Halo) -> tuple[PartSizes, ...]:
    """Whole numbers that add up to the graph's."""
    columns = [one_each(apportioned(getattr(whole, name), shares)) for name in ("inner", "edges", "train")]
    known: dict[tuple[int, ...], PartSizes] = {}
    for counts in zip(*columns, strict=True):
        if counts not in known:
            inner, edges, train = counts
            expected = relaxed_sizes(whole, inner / whole.inner, halo, len(shares))
            own = replace(expected, inner=inner, edges=edges, train=train)
            known[counts] = bounded(own, whole.inner, whole.edges, len(shares))
    return tuple(known[counts] for counts in zip(*columns, strict=True))
