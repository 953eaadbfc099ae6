"""Who gets how much: shares of a graph before or with its cut, and of a batch, beside shares by one number.

A draft says sizes and memory of each part; `nugnn.planning.forecast` says what a step of them takes.
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
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.partition_loop import ArrayLike, LoopMethod, Round, partition_to_fit
from nugnn.planning.placement import place, traffic_rows
from nugnn.planning.plan import BASELINES, Baseline
from nugnn.planning.shares import DoesNotFitError, Halo, in_bytes, plan_shares, relaxed_sizes
from nugnn.planning.work_model import WorkModel, count_sizes, ids_array

SharesBy = Literal["auto", "even", "flops", "bandwidth", "given"]

USABLE = 0.95
"""Of a device's memory: fragments between tensors, and what a prediction of the peak is off by."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Draft:
    """Parts of a graph or a batch, not yet a plan.

    Args:
        shares_by: What asked for them.
        sizes: Of each part.
        bytes: Expected at the peak of each device.
        seconds: Of each device's step, by the work model.
        baselines: Shares by one number beside it, by the same model.
        halo: How halo rows are known.
        sent_rows: ``(P, P)`` rows of the row's part that the column's part reads; None where there is no cut.
        part: ``(N,)`` int32, where there is a cut.
        notes: What had to be said.
    """

    shares_by: SharesBy
    sizes: tuple[PartSizes, ...]
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    baselines: tuple[Baseline, ...] = ()
    halo: Literal["counted", "expected", "none"] = "none"
    sent_rows: npt.NDArray[np.int64] | None = None
    part: npt.NDArray[np.int32] | None = None
    notes: tuple[str, ...] = ()


def usable_bytes(cluster: Cluster) -> tuple[float, ...]:
    """Of each device's memory, for a step."""
    return tuple(USABLE * memory for memory in cluster.memory_bytes)


def are_alike(cluster: Cluster) -> bool:
    """Whether no device differs from the others, so that only the cut can make one wait."""
    return len(set(cluster.kinds)) == 1


def draft_from_counts(
    work: WorkModel,
    whole: PartSizes,
    cluster: Cluster,
    *,
    halo: Halo,
    shares_by: SharesBy = "auto",
    shares: Sequence[float] | None = None,
    precision: str = "fp32",
) -> Draft:
    """Shares of a graph of which only counts are known.

    Args:
        work: Seconds and bytes of a part on each device.
        whole: Of the graph.
        cluster: The devices.
        halo: Expected, see `nugnn.planning.shares.plan_shares`.
        shares_by: ``auto`` for the least slowest device.
        shares: For ``given``, of each device.
        precision: For the baseline by FLOP/s.

    Raises:
        DoesNotFitError: The memories do not hold the graph.
        ValueError: There are more devices than nodes.
    """
    count, limits, kinds = len(cluster.devices), usable_bytes(cluster), cluster.kinds
    if shares_by == "auto":
        chosen = plan_shares(work, whole, limits, halo_fraction=halo, kinds=kinds).shares
    else:
        chosen = _asked_shares(shares_by, shares, cluster, precision)
        if count > whole.inner:
            raise ValueError(f"{count} devices for {whole.inner} nodes; every device needs at least one")
    sizes = _divided(whole, chosen, halo)
    held = _by_kind(work.bytes, sizes, kinds)
    _check_fits(held, limits, shares_by)
    baselines = []
    for name in BASELINES:
        asked = baseline_shares(name, cluster.profiles, precision)
        parts = [relaxed_sizes(whole, share, halo, alone=count == 1) for share in asked]
        baselines.append(
            _baseline(name, asked, _by_kind(work.seconds, parts, kinds), _by_kind(work.bytes, parts, kinds), limits)
        )
    return Draft(
        shares_by=shares_by,
        sizes=sizes,
        bytes=tuple(int(x) for x in held),
        seconds=_by_kind(work.seconds, sizes, kinds),
        baselines=tuple(baselines),
        halo="expected" if count > 1 else "none",
    )


def draft_with_cut(
    work: WorkModel,
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
    """Shares of a graph with its cut: counted, and for ``auto`` not worse than any baseline by the model.

    Where all devices are alike, one cut that balances work is made and refined; there is nothing else to find out, and
    the baselines are equal shares. Otherwise `nugnn.planning.partition_loop.partition_to_fit` starts from all
    baselines.

    Args:
        work: Seconds and bytes of a part on each device.
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
    count, limits = len(cluster.devices), usable_bytes(cluster)
    asked = {name: baseline_shares(name, cluster.profiles, precision) for name in BASELINES}
    same_as = {name: next(n for n, other in asked.items() if np.allclose(each, other)) for name, each in asked.items()}
    arrays = ids_array(src, num_nodes, "src"), ids_array(dst, num_nodes, "dst")
    notes: tuple[str, ...] = ()
    rounds: Mapping[str, Round] = {}
    if shares_by == "auto":
        is_quick = count == 1 or are_alike(cluster)
        distinct = {} if is_quick else {name: each for name, each in asked.items() if same_as[name] == name != "even"}
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
            also=distinct,
            only_work=is_quick,
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
        if same_as[name] in rounds:  # cut as well
            seconds: Sequence[float] = rounds[same_as[name]].seconds
            memory: Sequence[float] = rounds[same_as[name]].bytes
        else:  # with as much halo as this cut has
            parts = [relaxed_sizes(whole, share, per_node, alone=count == 1) for share in each]
            seconds = [work.seconds(rank, size) for rank, size in enumerate(parts)]
            memory = [work.bytes(rank, size) for rank, size in enumerate(parts)]
        baselines.append(_baseline(name, each, seconds, memory, limits))
    return Draft(
        shares_by=shares_by,
        sizes=sizes,
        bytes=held,
        seconds=tuple(work.seconds(rank, each) for rank, each in enumerate(sizes)),
        baselines=tuple(baselines),
        halo="counted" if count > 1 else "none",
        sent_rows=sent_rows,
        part=part,
        notes=notes,
    )


def draft_of_batch(
    work: WorkModel,
    batch: int,
    cluster: Cluster,
    *,
    shares_by: SharesBy = "auto",
    shares: Sequence[float] | None = None,
    precision: str = "fp32",
) -> Draft:
    """How a batch of samples is divided.

    Args:
        work: Seconds and bytes of a part on each device; parts have ``batch`` alone.
        batch: Samples of all together.
        cluster: The devices.
        shares_by: ``auto`` for the least slowest device; never slower, by the model, than any baseline that fits.
        shares: For ``given``.
        precision: For the baseline by FLOP/s.

    Raises:
        DoesNotFitError: The memories do not hold the batch.
        ValueError: There are fewer samples than devices.
    """
    limits, kinds = usable_bytes(cluster), cluster.kinds
    by_name = {name: baseline_shares(name, cluster.profiles, precision) for name in BASELINES}
    splits = {name: split_by_shares(batch, each) for name, each in by_name.items()}
    if shares_by == "auto":
        split = fastest_split(work, batch, limits, kinds, list(splits.values()))
    else:
        split = split_by_shares(batch, _asked_shares(shares_by, shares, cluster, precision))
        check_split_fits(work, split, limits)
    sizes = tuple(PartSizes(batch=count) for count in split)
    baselines = []
    for name, counts in splits.items():
        parts = [PartSizes(batch=count) for count in counts]
        seconds, held = _by_kind(work.seconds, parts, kinds), _by_kind(work.bytes, parts, kinds)
        baselines.append(_baseline(name, [count / batch for count in counts], seconds, held, limits))
    return Draft(
        shares_by=shares_by,
        sizes=sizes,
        bytes=tuple(int(x) for x in _by_kind(work.bytes, sizes, kinds)),
        seconds=_by_kind(work.seconds, sizes, kinds),
        baselines=tuple(baselines),
    )


_ROUNDS = {
    "work": "by work",
    "nodes": "by nodes",
    "even": "evenly",
    "flops": "by FLOP/s",
    "bandwidth": "by bandwidth",
    "targets": "for corrected shares",
    "moves": "single nodes",
}


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


def _baseline(
    name: str, shares: Sequence[float], seconds: Sequence[float], held: Sequence[float], limits: Sequence[float]
) -> Baseline:
    return Baseline.model_validate(
        {
            "name": name,
            "shares": tuple(shares),
            "step_seconds": max(seconds),
            "fits": all(need <= limit for need, limit in zip(held, limits, strict=True)),
        }
    )


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
