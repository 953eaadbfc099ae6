"""Who gets how much: shares of a graph before or with its cut, and of a batch, beside shares by one number.

Whatever is compared is compared by the same forecast of a whole step (`nugnn.planning.forecast`): parts that each end
as early as the others still wait for each other at exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from nugnn.partition.assign import partition_nodes
from nugnn.planning.baselines import baseline_shares
from nugnn.planning.batch_shares import check_split_fits, fastest_split, split_by_shares
from nugnn.planning.cluster import Cluster
from nugnn.planning.forecast import Forecast, StepModel
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.partition_loop import ArrayLike, LoopMethod, Round, partition_to_fit
from nugnn.planning.placement import place, traffic_rows
from nugnn.planning.plan import BASELINES, Baseline
from nugnn.planning.shares import DoesNotFitError, Halo, in_bytes, plan_shares, relaxed_sizes
from nugnn.planning.work_model import count_sizes, ids_array

SharesBy = Literal["auto", "even", "flops", "bandwidth", "given"]

USABLE = 0.95
"""Of a device's memory: fragments between tensors, and what a prediction of the peak is off by."""
_REACH, _LEAST_REACH = 0.4, 0.02
"""How far a share by counts grows or shrinks at first and in the end, in its logarithm."""
_HARDLY = 0.05
"""Of an even share; a device with less is not worth its exchanges."""
_MOST_FORECASTS, _MOST_PAIRS = 60, 100_000
"""Of a search, and in all of them the pairs of ranks: some seconds."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Draft:
    """Parts of a graph or a batch, not yet a plan.

    Args:
        shares_by: What asked for them.
        sizes: Of each part.
        bytes: Expected at the peak of each device.
        forecast: Of a step.
        baselines: Shares by one number beside it, by the same forecast.
        halo: How halo rows are known.
        sent_rows: ``(P, P)`` rows of the row's part that the column's part reads; None where there is no cut.
        part: ``(N,)`` int32, where there is a cut.
        notes: What had to be said.
    """

    shares_by: SharesBy
    sizes: tuple[PartSizes, ...]
    bytes: tuple[int, ...]
    forecast: Forecast
    baselines: tuple[Baseline, ...] = ()
    halo: Literal["counted", "expected", "none"] = "none"
    sent_rows: npt.NDArray[np.int64] | None = None
    part: npt.NDArray[np.int32] | None = None
    notes: tuple[str, ...] = ()

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the nodes, or of a batch."""
        counts = [size.inner or size.batch for size in self.sizes]
        return tuple(count / sum(counts) for count in counts)


def usable_bytes(cluster: Cluster) -> tuple[float, ...]:
    """Of each device's memory, for a step."""
    return tuple(USABLE * memory for memory in cluster.memory_bytes)


def are_alike(cluster: Cluster) -> bool:
    """Whether no device differs from the others, so that only the cut can make one wait."""
    return len(set(cluster.kinds)) == 1


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
        found = search.of(_asked_shares(shares_by, shares, cluster, precision))
        _check_fits(found.bytes, search.limits, shares_by)
    sizes = search.whole_numbers(found.shares)
    return Draft(
        shares_by=shares_by,
        sizes=sizes,
        bytes=tuple(int(x) for x in _by_kind(model.work.bytes, sizes, cluster.kinds)),
        forecast=found.forecast,
        baselines=tuple(
            _baseline(name, each.shares, each.step_seconds, fits=each.fits) for name, each in tried.items()
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
        held = _by_kind(self._model.work.bytes, alike, self._kinds)
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


def draft_with_cut(
    model: StepModel,
    num_nodes: int,
    src: ArrayLike,
    dst: ArrayLike,
    train_nodes: ArrayLike,
    cluster: Cluster,
    *,
    shares_by: SharesBy = "auto",
    shares: Sequence[float] | None = None,
    partitioner: LoopMethod = "metis",
    precision: str = "fp32",
    seed: int = 0,
    halo: Halo = 0.5,
    row_bytes: float = 1024.0,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Draft:
    """Shares of a graph with its cut: counted, and for ``auto`` not slower than any baseline by the forecast.

    Where all devices are alike, one cut that balances work is made and refined; there is nothing else to find out, and
    the baselines are equal shares. Otherwise `nugnn.planning.partition_loop.partition_to_fit` starts from all
    baselines.

    Args:
        model: What a step costs.
        num_nodes: N.
        src: ``(E,)`` source of each edge.
        dst: ``(E,)`` destination.
        train_nodes: Distinct ids of the training nodes.
        cluster: The devices.
        shares_by: ``auto``, a baseline, or ``given``.
        shares: For ``given``.
        partitioner: What cuts.
        precision: For the baseline by FLOP/s.
        seed: Of the partitioner.
        halo: Expected before the first cut.
        row_bytes: Of a halo row in an exchange, for placing parts that much traffic is between on one host.
        on_stage: Called with what is done next.

    Raises:
        DoesNotFitError: The memories do not hold the graph.
        ValueError: There are more devices than nodes, or arrays are malformed.
    """
    work, count, limits = model.work, len(cluster.devices), usable_bytes(cluster)
    asked = {name: baseline_shares(name, cluster.profiles, precision) for name in BASELINES}
    same_as = {name: next(n for n, other in asked.items() if np.allclose(each, other)) for name, each in asked.items()}
    arrays = ids_array(src, num_nodes, "src"), ids_array(dst, num_nodes, "dst")
    notes: tuple[str, ...] = ()
    rounds: Mapping[str, Round] = {}
    if count == 1:
        part = np.zeros(num_nodes, np.int32)
    elif shares_by == "auto":
        is_quick = are_alike(cluster)
        also = {} if is_quick else {name: each for name, each in asked.items() if same_as[name] == name != "even"}
        if not is_quick:  # where devices wait for each other, balance of what each does alone is not all
            on_stage("weighing shares")
            whole = PartSizes(num_nodes, len(arrays[0]), 0, 0, len(train_nodes))
            also["counts"] = draft_from_counts(model, whole, cluster, halo=halo, precision=precision).shares
        fitted = partition_to_fit(
            num_nodes,
            *arrays,
            work,
            limits,
            train_nodes=train_nodes,
            method=partitioner,
            rounds=0 if is_quick else 6,
            seed=seed,
            halo_fraction=halo,
            also=also,
            only_work=is_quick,
            whole_step=lambda sizes: model.forecast(sizes).step_seconds,
            on_round=lambda name: on_stage(f"cutting the graph: {_ROUNDS.get(name, name)}"),
        )
        part = fitted.assignment.part.numpy()
        rounds = {each.name: each for each in reversed(fitted.rounds)}
        notes = fitted.assignment.notes
    else:
        on_stage(f"cutting the graph by {shares_by} shares")
        chosen = _asked_shares(shares_by, shares, cluster, precision)
        made = partition_nodes(num_nodes, *arrays, chosen, method=partitioner, seed=seed)
        part, notes = made.part.numpy(), made.notes
    on_stage("counting what parts exchange")
    part, sent_rows = _placed(part, arrays, cluster, row_bytes)
    sizes = count_sizes(*arrays, part, count, train_nodes)
    held = tuple(int(work.bytes(rank, each)) for rank, each in enumerate(sizes))
    _check_fits(held, limits, shares_by)
    whole = PartSizes(num_nodes, len(arrays[0]), 0, 0, sum(each.train for each in sizes))
    per_node = sum(each.halo for each in sizes) / num_nodes
    baselines = []
    for name, each in asked.items():
        if (cut := rounds.get(same_as[name])) is not None:  # cut as well
            baselines.append(_baseline(name, each, cut.makespan, fits=cut.lacking_bytes == 0))
        else:  # with as much halo as this cut has
            parts = [relaxed_sizes(whole, share, per_node, alone=count == 1) for share in each]
            need = [work.bytes(rank, size) for rank, size in enumerate(parts)]
            fits = all(x <= limit for x, limit in zip(need, limits, strict=True))
            baselines.append(_baseline(name, each, model.forecast(parts).step_seconds, fits=fits))
    is_placed = len(set(cluster.links.hosts)) > 1  # otherwise all is compared as if nobody preferred any peer
    return Draft(
        shares_by=shares_by,
        sizes=sizes,
        bytes=held,
        forecast=model.forecast(sizes, sent_rows if is_placed else None),
        baselines=tuple(baselines),
        halo="counted" if count > 1 else "none",
        sent_rows=sent_rows,
        part=part,
        notes=notes,
    )


def draft_of_batch(
    model: StepModel,
    batch: int,
    cluster: Cluster,
    *,
    shares_by: SharesBy = "auto",
    shares: Sequence[float] | None = None,
    precision: str = "fp32",
) -> Draft:
    """How a batch of samples is divided.

    Args:
        model: What a step costs; parts have ``batch`` alone.
        batch: Samples of all together.
        cluster: The devices.
        shares_by: ``auto`` for the fastest step; never slower, by the forecast, than any baseline that fits.
        shares: For ``given``.
        precision: For the baseline by FLOP/s.

    Raises:
        DoesNotFitError: The memories do not hold the batch.
        ValueError: There are fewer samples than devices.
    """
    work, limits, kinds = model.work, usable_bytes(cluster), cluster.kinds

    def tried(split: Sequence[int]) -> tuple[Forecast, bool]:
        parts = [PartSizes(batch=count) for count in split]
        held = _by_kind(work.bytes, parts, kinds)
        return model.forecast(parts), all(need <= limit for need, limit in zip(held, limits, strict=True))

    splits = {n: split_by_shares(batch, baseline_shares(n, cluster.profiles, precision)) for n in BASELINES}
    known = {split: tried(split) for split in dict.fromkeys(splits.values())}
    if shares_by == "auto":
        fastest = fastest_split(work, batch, limits, kinds, list(splits.values()))
        known.setdefault(fastest, tried(fastest))
        split = min((s for s, (_, fits) in known.items() if fits), key=lambda s: known[s][0].step_seconds)
    else:
        split = split_by_shares(batch, _asked_shares(shares_by, shares, cluster, precision))
        check_split_fits(work, split, limits)
        known.setdefault(split, tried(split))
    sizes = tuple(PartSizes(batch=count) for count in split)
    return Draft(
        shares_by=shares_by,
        sizes=sizes,
        bytes=tuple(int(x) for x in _by_kind(work.bytes, sizes, kinds)),
        forecast=known[split][0],
        baselines=tuple(
            _baseline(name, [n / batch for n in each], known[each][0].step_seconds, fits=known[each][1])
            for name, each in splits.items()
        ),
    )


_ROUNDS = {
    "work": "by work",
    "nodes": "by nodes",
    "even": "evenly",
    "flops": "by FLOP/s",
    "bandwidth": "by bandwidth",
    "counts": "as its counts foresee",
    "targets": "for corrected shares",
    "moves": "single nodes",
}


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


def _asked_shares(
    shares_by: SharesBy, shares: Sequence[float] | None, cluster: Cluster, precision: str
) -> tuple[float, ...]:
    if shares_by != "given":
        return baseline_shares(shares_by, cluster.profiles, precision)
    if shares is None or len(shares) != len(cluster.devices):
        count = "no" if shares is None else len(shares)
        raise ValueError(f"{count} shares for {len(cluster.devices)} devices; give one for each")
    return tuple(share / math.fsum(shares) for share in shares)


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


def _by_kind(
    cost: Callable[[int, PartSizes], float], sizes: Sequence[PartSizes], kinds: Sequence[str]
) -> tuple[float, ...]:
    """The cost of each part, asked for once where device and sizes are the same."""
    known: dict[tuple[str, PartSizes], float] = {}
    found = []
    for rank, (kind, each) in enumerate(zip(kinds, sizes, strict=True)):
        if (kind, each) not in known:
            known[kind, each] = cost(rank, each)
        found.append(known[kind, each])
    return tuple(found)


def _baseline(name: str, shares: Sequence[float], step_seconds: float, *, fits: bool) -> Baseline:
    return Baseline.model_validate({"name": name, "shares": tuple(shares), "step_seconds": step_seconds, "fits": fits})


def _check_fits(held: Sequence[float], limits: Sequence[float], shares_by: SharesBy) -> None:
    lacking = [
        f"device {rank} needs {in_bytes(need)} and has {in_bytes(limit)}"
        for rank, (need, limit) in enumerate(zip(held, limits, strict=True))
        if need > limit
    ]
    if lacking:
        more = "" if len(lacking) <= 8 else f"; and {len(lacking) - 8} more"
        instead = "" if shares_by == "auto" else "; --shares auto keeps to the memories"
        raise DoesNotFitError(f"shares by {shares_by} do not fit: {'; '.join(lacking[:8])}{more}{instead}")


def _placed(
    part: npt.NDArray[np.int32], arrays: tuple[npt.NDArray, npt.NDArray], cluster: Cluster, row_bytes: float
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Parts renumbered so that heavy traffic stays on fast links, and the traffic between them."""
    count = len(cluster.devices)
    rows = traffic_rows(*arrays, part, count)
    found = place(rows, row_bytes, cluster.links, [device.kind for device in cluster.devices])
    if found.is_identity:
        return part, rows
    rank_of = np.asarray(found.rank_of, np.int32)
    part_at = np.argsort(rank_of)
    return rank_of[part], rows[np.ix_(part_at, part_at)]
