"""Shares of a graph at hand, with its cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from nugnn.partition.assign import partition_nodes
from nugnn.partition.ids import ArrayLike, edge_arrays, ids_array
from nugnn.partition.metis import SymmetricGraph, symmetric_graph
from nugnn.partition.repeated_cuts import RepeatedCuts
from nugnn.planning.baselines import baseline_shares
from nugnn.planning.cluster import Cluster
from nugnn.planning.counted_cut import GraphOnCluster
from nugnn.planning.cut_among_sets import best_among_sets
from nugnn.planning.draft import Draft, all_fit, are_alike, as_baseline, asked_shares, check_fits, usable_bytes
from nugnn.planning.draft_counts import draft_from_counts
from nugnn.planning.forecast import StepModel
from nugnn.planning.host_subsets import HostSubsets
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.left_out import notes_of_left_out
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.partition_loop import partition_to_fit
from nugnn.planning.partition_rounds import Round
from nugnn.planning.partition_search import LoopMethod
from nugnn.planning.plan import BASELINES, CutBy, SharesBy
from nugnn.planning.search_aims import FasterStep
from nugnn.planning.share_curves import Halo, relaxed_sizes
from nugnn.planning.shares import check_whole

_FEW_EDGES = 2_000_000
"""A graph with at most so many is cut in a second or two."""
_ROUNDS = {
    "work": "by work",
    "nodes": "by nodes",
    "even": "evenly",
    "flops": "by FLOP/s",
    "bandwidth": "by bandwidth",
    "counts": "as its counts foresee",
    "targets": "for corrected shares",
    "moves": "single nodes, since memory is lacking",
    "relief": "single nodes, for want of memory alone",
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
    partitioner: CutBy = "metis",
    precision: str = "fp32",
    seed: int = 0,
    halo: Halo = 0.5,
    row_bytes: float = 1024.0,
    symmetric: SymmetricGraph | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Draft:
    """Shares of a graph with its cut: counted, and for ``auto`` not slower than any baseline by the forecast.

    Where all devices are alike, one cut that balances work is made, beside ones of equal shares where the graph is
    small; there are no other shares to find, and the baselines are equal shares. Baselines that were not cut are ideal
    parts, and say so. Otherwise
    `nugnn.planning.partition_loop.partition_to_fit` starts from all baselines. For ``auto`` sets of devices are then
    weighed by counts, and the graph is cut among the few likely ones (`nugnn.planning.cut_among_sets`); of all cuts
    the fastest by the forecast is kept.

    Args:
        model: What a step costs.
        num_nodes: N.
        src: ``(E,)`` source of each edge.
        dst: ``(E,)`` destination.
        train_nodes: Distinct ids of the training nodes.
        cluster: The devices.
        shares_by: ``auto``, a baseline, or ``given``.
        shares: For ``given``.
        partitioner: What cuts; for ``auto`` one that keeps to targets, so not ``random``.
        precision: For the baseline by FLOP/s.
        seed: Of the partitioner.
        halo: Expected before the first cut.
        row_bytes: Of a halo row in an exchange, for placing parts that much traffic is between on one host.
        symmetric: What `nugnn.partition.metis.symmetric_graph` makes of the edges, for callers that have it.
        on_stage: Called with what is done next.

    Raises:
        DoesNotFitError: The memories do not hold the graph.
        ValueError: There are more devices than nodes, or arrays are malformed.
    """
    count = len(cluster.devices)
    asked = {name: baseline_shares(name, cluster.profiles, precision) for name in BASELINES}
    same_as = {name: next(n for n, other in asked.items() if np.allclose(each, other)) for name, each in asked.items()}
    src_E, dst_E = edge_arrays(src, dst, num_nodes)
    train = ids_array(train_nodes, num_nodes, "train_nodes")
    whole = PartSizes(num_nodes, len(src_E), 0, 0, len(train))
    check_whole(whole, count)
    graph = GraphOnCluster(model=model, src=src_E, dst=dst_E, train_nodes=train, cluster=cluster, row_bytes=row_bytes)
    subsets, notes = HostSubsets(cluster), tuple[str, ...]()
    rounds: Mapping[str, Round] = {}
    if count > 1 and shares_by == "auto":
        is_quick = are_alike(cluster)
        others = {name: each for name, each in asked.items() if same_as[name] == name != "even"}
        also = {} if is_quick else others
        if not is_quick:  # where devices wait for each other, balance of what each does alone is not all
            on_stage("weighing shares")
            with contextlib.suppress(DoesNotFitError):  # with as much halo as is expected; the cut may have less
                also["counts"] = draft_from_counts(model, whole, cluster, halo=halo, precision=precision).shares
        method = cast(LoopMethod, partitioner)  # checked by `partition_to_fit`
        lists = symmetric_graph(num_nodes, src_E, dst_E, None) if symmetric is None else symmetric
        cuts = RepeatedCuts(lists, seed)
        fitted = partition_to_fit(
            num_nodes,
            src_E,
            dst_E,
            model.work,
            usable_bytes(cluster),
            train_nodes=train,
            method=method,
            rounds=0 if is_quick else 6,
            seed=seed,
            halo_fraction=halo,
            also=also,
            only_work=is_quick and len(src_E) > _FEW_EDGES,
            symmetric=cuts,
            aim=FasterStep(lambda sizes: model.forecast(sizes).step_seconds, subsets.group_of),
            on_round=lambda name: on_stage(f"cutting the graph: {_ROUNDS.get(name, name)}"),
        )
        rounds = {each.name: each for each in reversed(fitted.rounds)}
        on_stage("counting what parts exchange")
        over_all = graph.counted(fitted.assignment.part.numpy(), fitted.assignment.notes)
        cut = best_among_sets(
            graph,
            over_all,
            subsets,
            cuts,
            halo=halo,
            partitioner=method,
            precision=precision,
            seed=seed,
            on_stage=on_stage,
        )
        notes = notes_of_left_out(
            cut.shares, cut.step_seconds, cluster, subsets, lambda ranks: graph.seconds_among(cut, ranks)
        )
    elif count > 1:
        on_stage(f"cutting the graph by {shares_by} shares")
        chosen = asked_shares(shares_by, shares, cluster, precision)
        made = partition_nodes(num_nodes, src_E, dst_E, chosen, method=partitioner, seed=seed)
        on_stage("counting what parts exchange")
        cut = over_all = graph.counted(made.part.numpy(), made.notes)
    else:
        on_stage("counting what it holds")
        cut = over_all = graph.counted(np.zeros(num_nodes, np.int32))
    check_fits(cut.bytes, usable_bytes(cluster), shares_by, cluster)
    per_node = sum(each.halo for each in over_all.sizes) / num_nodes
    baselines = []
    for name, each in asked.items():
        if (known := rounds.get(same_as[name])) is not None:  # cut as well
            baselines.append(as_baseline(name, each, known.makespan, fits=known.lacking_bytes == 0))
        elif same_as[name] == same_as.get(shares_by):  # this is the cut
            baselines.append(as_baseline(name, each, cut.step_seconds, fits=cut.fits))
        else:  # with as much halo as the cut over all devices has
            parts = [relaxed_sizes(whole, share, per_node, count) for share in each]
            need = [model.work.bytes(rank, size) for rank, size in enumerate(parts)]
            seconds = model.forecast(parts).step_seconds
            fits = all_fit(need, usable_bytes(cluster))
            baselines.append(as_baseline(name, each, seconds, fits=fits, is_ideal=count > 1))
    return Draft(
        shares_by=shares_by,
        sizes=cut.sizes,
        bytes=cut.bytes,
        forecast=cut.forecast,
        baselines=tuple(baselines),
        halo="counted" if count > 1 else "none",
        sent_rows=cut.sent_rows,
        part=cut.part,
        notes=(*cut.notes, *notes),
        left_out=notes,
    )
