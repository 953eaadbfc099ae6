"""Shares of a graph of which only counts are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from nugnn.planning.baselines import baseline_shares
from nugnn.planning.cluster import Cluster
from nugnn.planning.counted_shares import CountedShares, Tried
from nugnn.planning.draft import Draft, as_baseline, asked_shares, by_kind, check_fits
from nugnn.planning.forecast import StepModel
from nugnn.planning.host_subsets import HostSubsets
from nugnn.planning.left_out import notes_of_left_out
from nugnn.planning.likely_sets import LikelySets
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import BASELINES, SharesBy
from nugnn.planning.share_curves import Halo
from nugnn.planning.shares import check_whole


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
    check_whole(whole, len(cluster.devices))
    subsets = HostSubsets(cluster)
    search = CountedShares(model, whole, cluster, halo, range(len(cluster.devices)), subsets.group_of)
    tried = {name: search.of(baseline_shares(name, cluster.profiles, precision)) for name in BASELINES}
    notes: tuple[str, ...] = ()
    if shares_by == "auto":
        found = _fastest(search, LikelySets(search, subsets, precision), list(tried.values()))
        notes = notes_of_left_out(found.shares, found.step_seconds, cluster, subsets, _among(search, found.shares))
    else:
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
        left_out=notes,
    )


def _fastest(every: CountedShares, sets: LikelySets, baselines: Sequence[Tried]) -> Tried:
    """The best shares of all devices, from those of sets, the baselines, and what lets all take as long.

    Raises:
        DoesNotFitError: The memories do not hold the graph.
    """
    whole = every.level(says_why=True)  # where this is refused, nothing fits
    closer = [whole, *(each for each in baselines if each.fits)]
    closer += [sets.among_all(search, found.shares) for search, found in sets.best()]
    first = min([each for each in closer if each.fits] or [whole], key=lambda each: each.step_seconds)
    ends = [every.improved(first)]
    if first not in (whole, *baselines):
        ends.append(sets.improved(every, whole))
    return min(ends, key=lambda each: (not each.fits, each.step_seconds))


def _among(every: CountedShares, shares: Sequence[float]) -> Callable[[Sequence[int]], float]:
    """Seconds of some ranks alone with shares in these proportions; infinite where they do not hold the graph."""

    def seconds(ranks: Sequence[int]) -> float:
        total = math.fsum(shares[rank] for rank in ranks)
        own = [1.0] if len(ranks) == 1 else [shares[rank] / total for rank in ranks]
        found = every.among(ranks).of(own)
        return found.step_seconds if found.fits else math.inf

    return seconds
