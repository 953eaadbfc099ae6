"""Shares of a graph of which only counts are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nugnn.planning.baselines import baseline_shares
from nugnn.planning.cluster import Cluster
from nugnn.planning.draft import Draft, SharesBy, as_baseline, asked_shares, by_kind, check_fits, usable_bytes
from nugnn.planning.forecast import Forecast, StepModel
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import BASELINES
from nugnn.planning.shares import Halo, plan_shares, relaxed_sizes

_REACH, _LEAST_REACH = 0.4, 0.02
"""How far a share grows or shrinks at first and in the end, in its logarithm."""
_HARDLY = 0.05
"""Of an even share; a device with less is not worth its exchanges."""
_MOST_FORECASTS, _MOST_PAIRS = 60, 100_000
"""Of a search, and in all of them the pairs of ranks: some seconds."""


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

    ``auto`` begins with the best of the baselines and of the shares at which all devices, each for itself, take as
    long, and lets the share of each kind of device grow and shrink as long as that makes a step faster.

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
    search = _Counted(model, whole, cluster, halo)
    tried = {name: search.of(baseline_shares(name, cluster.profiles, precision)) for name in BASELINES}
    if shares_by == "auto":
        first = plan_shares(model.work, whole, search.limits, halo_fraction=halo, kinds=cluster.kinds).shares
        fitting = [search.of(first), *(each for each in tried.values() if each.fits)]
        found = search.improved(min(fitting, key=lambda each: each.step_seconds))
    else:
        if search.count > whole.inner:
            raise ValueError(f"{search.count} devices for {whole.inner} nodes; every device needs at least one")
        found = search.of(asked_shares(shares_by, shares, cluster, precision))
        check_fits(found.bytes, search.limits, shares_by)
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
        notes=_idle_notes(found.shares, cluster) if shares_by == "auto" else (),
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
    """Shares of a graph by counts, judged by forecasts; devices that are alike have the same sizes in these."""

    def __init__(self, model: StepModel, whole: PartSizes, cluster: Cluster, halo: Halo) -> None:
        self._model, self._whole, self._halo, self._kinds = model, whole, halo, cluster.kinds
        self.count, self.limits = len(cluster.devices), usable_bytes(cluster)
        self._known: dict[tuple[PartSizes, ...], _Tried] = {}

    def of(self, shares: Sequence[float]) -> _Tried:
        """What ``shares`` come to."""
        sizes = self.whole_numbers(shares)
        if sizes not in self._known:
            self._known[sizes] = self._of(shares, sizes)
        return self._known[sizes]

    def _of(self, shares: Sequence[float], sizes: Sequence[PartSizes]) -> _Tried:
        first = {kind: size for kind, size in zip(reversed(self._kinds), reversed(sizes), strict=True)}
        alike = [
            first[kind] if abs(first[kind].inner - size.inner) <= 1 else size
            for kind, size in zip(self._kinds, sizes, strict=True)
        ]
        held = by_kind(self._model.work.bytes, alike, self._kinds)
        fits = all(need <= limit for need, limit in zip(held, self.limits, strict=True))
        return _Tried(tuple(shares), held, fits, self._model.forecast(alike))

    def improved(self, start: _Tried) -> _Tried:
        """After shares of one kind of device after the other grew or shrank, as long as that helps."""
        best, reach = start, _REACH
        kinds = list(dict.fromkeys(self._kinds))
        left = min(_MOST_FORECASTS, _MOST_PAIRS // self.count**2) if len(kinds) > 1 else 0
        masks = [np.array([own == kind for own in self._kinds]) for kind in kinds]
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
        return _divided(self._whole, shares, self._halo)


def _idle_notes(shares: Sequence[float], cluster: Cluster) -> tuple[str, ...]:
    """Which devices bring hardly anything."""
    idle: dict[str, int] = {}
    for share, profile in zip(shares, cluster.profiles, strict=True):
        if share < _HARDLY / len(shares):
            idle[profile.name] = idle.get(profile.name, 0) + 1
    return tuple(
        f"{count} x {name} would hardly be used: over these links it costs more than it brings; leave it out"
        for name, count in idle.items()
    )


def _divided(whole: PartSizes, shares: Sequence[float], halo: Halo) -> tuple[PartSizes, ...]:
    """Whole numbers that add up to the graph's."""
    columns = {name: _whole_numbers(getattr(whole, name), shares) for name in ("inner", "edges", "train")}
    found = []
    for rank in range(len(shares)):
        inner = columns["inner"][rank]
        expected = relaxed_sizes(whole, inner / whole.inner, halo, alone=len(shares) == 1)
        found.append(replace(expected, inner=inner, edges=columns["edges"][rank], train=columns["train"][rank]))
    return tuple(found)


def _whole_numbers(total: int, shares: Sequence[float]) -> list[int]:
    """By largest remainder; of nodes each part keeps at least one where there are enough."""
    exact = [total * share for share in shares]
    counts = [math.floor(x) for x in exact]
    for rank in sorted(range(len(shares)), key=lambda rank: counts[rank] - exact[rank])[: total - sum(counts)]:
        counts[rank] += 1
    for rank, count in enumerate(counts):
        if count == 0 and total >= len(shares):
            counts[counts.index(max(counts))] -= 1
            counts[rank] = 1
    return counts
