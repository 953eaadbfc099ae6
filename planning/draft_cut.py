"""Shares of a graph at hand, with its cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nugnn.partition.assign import partition_nodes
from nugnn.planning.baselines import baseline_shares
from nugnn.planning.cluster import Cluster
from nugnn.planning.draft import (
    Draft,
    all_fit,
    are_alike,
    as_baseline,
    asked_shares,
    check_fits,
    usable_bytes,
)
from nugnn.planning.draft_counts import draft_from_counts
from nugnn.planning.forecast import StepModel
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.partition_loop import ArrayLike, LoopMethod, Round, partition_to_fit
from nugnn.planning.placement import place, traffic_rows
from nugnn.planning.plan import BASELINES, SharesBy
from nugnn.planning.shares import DoesNotFitError, Halo, relaxed_sizes
from nugnn.planning.work_model import count_sizes, ids_array

_LARGE_EDGES = 30_000_000
"""From so many on a cut takes minutes: one is made, one more for corrected shares, and no single nodes move."""
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
    baselines; of a large graph from shares by work alone, and baselines are predicted with as much halo as the result.

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
    whole = PartSizes(num_nodes, len(arrays[0]), 0, 0, len(train_nodes))
    notes: tuple[str, ...] = ()
    rounds: Mapping[str, Round] = {}
    if count == 1:
        part = np.zeros(num_nodes, np.int32)
    elif shares_by == "auto":
        is_quick, is_large = are_alike(cluster), len(arrays[0]) >= _LARGE_EDGES
        others = {name: each for name, each in asked.items() if same_as[name] == name != "even"}
        also = {} if is_quick or is_large else others
        if not (is_quick or is_large):  # where devices wait for each other, balance of what each does alone is not all
            on_stage("weighing shares")
            with contextlib.suppress(DoesNotFitError):  # with as much halo as is expected; the cut may have less
                also["counts"] = draft_from_counts(model, whole, cluster, halo=halo, precision=precision).shares
        fitted = partition_to_fit(
            num_nodes,
            *arrays,
            work,
            limits,
            train_nodes=train_nodes,
            method=partitioner,
            rounds=0 if is_quick else 1 if is_large else 6,
            seed=seed,
            halo_fraction=halo,
            also=also,
            only_work=is_quick or is_large,
            moves=not is_large,
            whole_step=lambda sizes: model.forecast(sizes).step_seconds,
            on_round=lambda name: on_stage(f"cutting the graph: {_ROUNDS.get(name, name)}"),
        )
        part = fitted.assignment.part.numpy()
        rounds = {each.name: each for each in reversed(fitted.rounds)}
        notes = fitted.assignment.notes
    else:
        on_stage(f"cutting the graph by {shares_by} shares")
        chosen = asked_shares(shares_by, shares, cluster, precision)
        made = partition_nodes(num_nodes, *arrays, chosen, method=partitioner, seed=seed)
        part, notes = made.part.numpy(), made.notes
    on_stage("counting what parts exchange")
    part, sent_rows = _placed(part, arrays, cluster, row_bytes)
    sizes = count_sizes(*arrays, part, count, train_nodes)
    held = tuple(int(work.bytes(rank, each)) for rank, each in enumerate(sizes))
    check_fits(held, limits, shares_by, cluster)
    per_node = sum(each.halo for each in sizes) / num_nodes
    baselines = []
    for name, each in asked.items():
        if (cut := rounds.get(same_as[name])) is not None:  # cut as well
            baselines.append(as_baseline(name, each, cut.makespan, fits=cut.lacking_bytes == 0))
        else:  # with as much halo as this cut has
            parts = [relaxed_sizes(whole, share, per_node, alone=count == 1) for share in each]
            need = [work.bytes(rank, size) for rank, size in enumerate(parts)]
            seconds = model.forecast(parts).step_seconds
            baselines.append(as_baseline(name, each, seconds, fits=all_fit(need, limits)))
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
