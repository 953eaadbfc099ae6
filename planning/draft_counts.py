"""Shares of a graph of which only counts are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nugnn.planning.apportioned import apportioned, one_each
from nugnn.planning.baselines import baseline_shares
from nugnn.planning.cluster import Cluster
from nugnn.planning.draft import (
    HARDLY,
    Draft,
    all_fit,
    as_baseline,
    asked_shares,
    by_kind,
    check_fits,
    usable_bytes,
)
from nugnn.planning.forecast import Forecast, StepModel
from nugnn.planning.host_subsets import HostSubsets, Units
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import BASELINES, SharesBy
from nugnn.planning.shares import (
    DoesNotFitError,
    Halo,
    check_whole,
    flooded,
    level,
    relaxed_curves,
    relaxed_sizes,
    what_is_lacking,
)

_REACH, _LEAST_REACH = 0.4, 0.02
"""How far a share grows or shrinks at first and in the end, in its logarithm."""
_CLEARLY = 0.95
"""Of the time; fewer devices that take less of it are worth a word."""
_ROOM = (1.0, 0.99, 0.96)
"""Of the memories, tried in turn: between the samples of a curve a part may need more than the curve says."""
_BEST = 3
"""Sets of devices whose shares are looked at closely."""
_MOST_FORECASTS = 60
"""Of one set's shares."""
_SETS, _SHARES, _AT_LEAST = 80_000, 60_000, 400
"""What may be spent on finding sets, and on the shares of each: pairs of ranks in all forecasts, of which each counts
as some pairs at least; a second or two."""


def draft_from_counts(
    model: StepModel,
    whole: PartSizes,
    cluster: Cluster,
    *,
    halo: Halo,
    shares_by: SharesBy = "auto",
    shares: Sequence[float] | None = None,
    precision: str = "fp32",
) -> Draft:
    """Shares of a graph of which only counts are known.

    ``auto`` looks at sets of devices (`nugnn.planning.host_subsets`): in each, all devices get as much as lets them,
    each for itself, take as long, and a node where they are not in it. From the best ones, and from the baselines, the
    share of each kind of device grows and shrinks as long as that makes a step faster. Devices that are alike and on
    the same host have equal shares, whatever is faster.

    Args:
        model: What a step costs.
        whole: Of the graph.
        cluster: The devices.
        halo: Expected, see `nugnn.planning.shares.plan_shares`.
        shares_by: ``auto`` for the fastest step.
        shares: For ``given``, of each device.
        precision: For the baseline by FLOP/s.

    Raises:
        DoesNotFitError: The memories do not hold the graph.
        ValueError: There are more devices than nodes.
    """
    subsets = HostSubsets(cluster)
    search = _Counted(model, whole, cluster, halo, range(len(cluster.devices)), subsets.group_of)
    tried = {name: search.of(baseline_shares(name, cluster.profiles, precision)) for name in BASELINES}
    notes: tuple[str, ...] = ()
    if shares_by == "auto":
        found, notes = _Sets(search, subsets, precision).best(list(tried.values()))
    else:
        if search.count > whole.inner:
            raise ValueError(f"{search.count} devices for {whole.inner} nodes; every device needs at least one")
        found = search.of(asked_shares(shares_by, shares, cluster, precision))
        check_fits(found.bytes, search.limits, shares_by, cluster)
    sizes = search.whole_numbers(found.shares)
    return Draft(
        shares_by=shares_by,
        sizes=sizes,
        bytes=tuple(int(x) for x in by_kind(model.work.bytes, sizes, cluster.kinds)),
        forecast=found.forecast,
        baselines=tuple(
            as_baseline(name, each.shares, each.step_seconds, fits=each.fits) for name, each in tried.items()
        ),
        halo="expected" if search.count > 1 else "none",
        notes=notes,
    )


@dataclass(frozen=True, eq=False)
class _Tried:
    """Shares, and what they come to."""

    shares: tuple[float, ...]
    bytes: tuple[float, ...]
    fits: bool
    forecast: Forecast

    @property
    def step_seconds(self) -> float:
        return self.forecast.step_seconds


class _Counted:
    """Shares of a graph by counts among some devices, judged by forecasts of a run of these alone.

    Args:
        model: Of all devices.
        whole: Of the graph.
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
        self._known: dict[tuple[PartSizes, ...], _Tried] = {}

    @property
    def price(self) -> int:
        """Of a forecast, in pairs of ranks."""
        return max(self.count**2, _AT_LEAST)

    def among(self, ranks: Sequence[int]) -> _Counted:
        """The same for others of the cluster's devices."""
        return _Counted(self.all, self.whole, self.cluster, self.halo, ranks, self.group_of)

    def of(self, shares: Sequence[float]) -> _Tried:
        """What ``shares`` come to."""
        sizes = self.whole_numbers(shares)
        if sizes not in self._known:
            self._known[sizes] = self._of(shares, sizes)
        return self._known[sizes]

    def _of(self, shares: Sequence[float], sizes: Sequence[PartSizes]) -> _Tried:
        first = {group: size for group, size in zip(reversed(self._groups), reversed(sizes), strict=True)}
        alike = [
            first[group] if abs(first[group].inner - size.inner) <= 1 else size
            for group, size in zip(self._groups, sizes, strict=True)
        ]
        names = [str(group) for group in self._groups]
        held = by_kind(self.model.work.bytes, alike, names)
        return _Tried(tuple(shares), held, all_fit(held, self.limits), self.model.forecast(alike))

    def level(self, *, says_why: bool = False) -> _Tried:
        """Shares at which all devices, each for itself, take as long.

        Raises:
            DoesNotFitError: The memories do not hold the graph; without a word on what would do unless ``says_why``.
        """
        if len(set(self._groups)) == 1 and (even := self.of([1 / self.count] * self.count)).fits:
            return even
        check_whole(self.whole, self.count)
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

    def improved(self, start: _Tried) -> _Tried:
        """After shares of one kind of device after the other grew or shrank, as long as that helps."""
        best, reach = start, _REACH
        groups = list(dict.fromkeys(self._groups))
        left = min(_MOST_FORECASTS, _SHARES // self.price) if len(groups) > 1 else 0
        masks = [np.array([own == group for own in self._groups]) for group in groups]
        while left > 0 and reach > _LEAST_REACH:
            before = best
            for mask in masks:
                for factor in (math.exp(reach), math.exp(-reach)):
                    moved = np.where(mask, factor, 1.0) * np.asarray(best.shares)
                    tried = self.of((moved / moved.sum()).tolist())
                    left -= 1
                    if tried.fits and tried.step_seconds < best.step_seconds:
                        best = tried
                        break
            if best is before:
                reach /= 2
        return best

    def whole_numbers(self, shares: Sequence[float]) -> tuple[PartSizes, ...]:
        """Sizes that add up to the graph's."""
        return _divided(self.whole, shares, self.halo)


class _Sets:
    """The search over sets of devices.

    Args:
        every: All devices.
        subsets: Of them.
        precision: For shares by FLOP/s.
    """

    def __init__(self, every: _Counted, subsets: HostSubsets, precision: str) -> None:
        self._every, self._subsets, self._precision = every, subsets, precision
        self._found: dict[object, tuple[_Counted, _Tried] | None] = {}
        self._spent = 0

    def best(self, baselines: Sequence[_Tried]) -> tuple[_Tried, tuple[str, ...]]:
        """The shares, and which devices they leave out.

        Raises:
            DoesNotFitError: The memories do not hold the graph.
        """
        every = self._every
        whole = every.level(says_why=True)  # where this is refused, nothing fits
        for units in self._subsets.sensible(self._seconds):
            self._seconds(units)
        if len(self._subsets.all) > 1:
            self._walk()
        sets = sorted((each for each in self._found.values() if each), key=lambda each: each[1].step_seconds)[:_BEST]
        closer = [whole, *(each for each in baselines if each.fits)]
        for search, start in sets:
            if search is not every:
                closer.append(every.of(self._spread(search, self._improved(search, start).shares)))
        first = min([each for each in closer if each.fits] or [whole], key=lambda each: each.step_seconds)
        ends = [every.improved(first)]
        if first not in (whole, *baselines):
            ends.append(self._improved(every, whole))
        found = min(ends, key=lambda each: (not each.fits, each.step_seconds))
        return found, self._notes(found)

    def _seconds(self, units: Units) -> float:
        """Of a set alone with level shares; infinite where it does not hold the graph, or there is no time to look."""
        name = self._subsets.name(units)
        if name not in self._found:
            ranks = self._subsets.ranks(units)
            search = self._every if len(ranks) == self._every.count else self._every.among(ranks)
            if search is not self._every and self._spent + search.price > _SETS:
                return math.inf
            self._spent += search.price
            try:
                found = search.level()
                self._found[name] = (search, found) if found.fits else None
            except DoesNotFitError:
                self._found[name] = None
        known = self._found[name]
        return math.inf if known is None else known[1].step_seconds

    def _walk(self) -> None:
        """From the best set to better ones near it."""
        fitting = [each for each in self._found.values() if each is not None]
        if not fitting:
            return
        at = min(fitting, key=lambda each: each[1].step_seconds)[0].ranks
        best = frozenset(unit for unit in self._subsets.all if set(self._subsets.ranks(frozenset({unit}))) <= set(at))
        while (next_ := min(self._subsets.near(best), key=self._seconds, default=best)) != best and self._seconds(
            next_
        ) < self._seconds(best):
            best = next_

    def _improved(self, search: _Counted, start: _Tried) -> _Tried:
        profiles = [search.cluster.profiles[rank] for rank in search.ranks]
        names = BASELINES if len(set(search.group_of)) > 1 else ()
        starts = [start, *(search.of(baseline_shares(name, profiles, self._precision)) for name in names)]
        fitting = [each for each in starts if each.fits] or [start]
        return search.improved(min(fitting, key=lambda each: each.step_seconds))

    def _spread(self, search: _Counted, shares: Sequence[float]) -> list[float]:
        """Of all devices, 0 where they are not in the set."""
        found = dict(zip(search.ranks, shares, strict=True))
        return [found.get(rank, 0.0) for rank in range(self._every.count)]

    def _notes(self, found: _Tried) -> tuple[str, ...]:
        every, notes = self._every, []
        count, cluster = every.count, every.cluster
        used = [rank for rank, share in enumerate(found.shares) if share >= HARDLY / count]
        fewest = found.step_seconds
        if len(used) < count:
            idle = [rank for rank in range(count) if rank not in set(used)]
            total = math.fsum(found.shares[rank] for rank in used)
            without = every.among(used).of([found.shares[rank] / total for rank in used])
            them = "it" if len(idle) == 1 else "them"
            text = f"of {count} devices, {cluster.described(idle)} would hardly be used: over these links "
            text += "a larger share costs more than it brings"
            if without.fits:
                text += f". Without {them} an epoch would take {_milliseconds(without.step_seconds)} and with {them} "
                text += _milliseconds(found.step_seconds)
                if without.step_seconds <= found.step_seconds:
                    text += f": leave {them} out"
                elif len({cluster.devices[rank].host for rank in used}) == 1:
                    text += ", as sums overlap with more exchanges in runs over several hosts"
                fewest = min(fewest, without.step_seconds)
            notes.append(text)
        alone = [(one.of([1.0]), rank) for rank in self._subsets.single_devices() for one in [every.among([rank])]]
        fitting = [(one.step_seconds, rank) for one, rank in alone if one.fits]
        if fitting and min(fitting)[0] < _CLEARLY * fewest:
            seconds, rank = min(fitting)
            notes.append(
                f"of {count} devices, {cluster.described([rank])} alone would take {_milliseconds(seconds)} an epoch "
                f"in place of {_milliseconds(found.step_seconds)}: exchanges cost more than the others bring"
            )
        return tuple(notes)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _divided(whole: PartSizes, shares: Sequence[float], halo: Halo) -> tuple[PartSizes, ...]:
    """Whole numbers that add up to the graph's."""
    columns = {name: one_each(apportioned(getattr(whole, name), shares)) for name in ("inner", "edges", "train")}
    found = []
    for rank in range(len(shares)):
        inner = columns["inner"][rank]
        expected = relaxed_sizes(whole, inner / whole.inner, halo, alone=len(shares) == 1)
        found.append(replace(expected, inner=inner, edges=columns["edges"][rank], train=columns["train"][rank]))
    return tuple(found)
