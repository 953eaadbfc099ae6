"""From shares to shards: what every way of starting ranks does before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from nugnn._counted import counted
from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.partition.assign import ArrayLike, Method, partition_nodes
from nugnn.partition.cache import cached_shards
from nugnn.partition.order import OrderChoice
from nugnn.partition.shard import Shard, build_shard, iter_shards
from nugnn.partition.store import load_meta, write_shards

PARTITIONERS = ("auto", "metis", "clusters", "kaminpar", "random")


def checked_shares(shares: Sequence[float] | None, workers: int, data: GraphData, what: str = "nodes") -> list[float]:
    """One positive number for each worker; equal when ``shares`` is None.

    Raises:
        ValueError: There are more or fewer shares than workers, or more workers than nodes.
    """
    weights = [1.0] * workers if shares is None else list(shares)
    if workers < 1 or len(weights) != workers:
        raise ValueError(f"shares: {counted(len(weights), 'number')} for {counted(workers, 'worker')}")
    if workers > data.num_nodes:
        raise ValueError(f"{counted(workers, 'worker')} for {data.num_nodes} {what}; each worker needs at least one")
    return weights


def checked_partitioner(name: str) -> str:
    """``name``, if there is a partitioner of it.

    Raises:
        ValueError: There is none.
    """
    if name not in PARTITIONERS:
        raise ValueError(
            f"partitioner {name!r} is not known; give {', '.join(PARTITIONERS[:-1])} or {PARTITIONERS[-1]}"
        )
    return name


def method_for_shares(partitioner: str) -> Method:
    """What cuts a graph once by shares that are known: METIS for ``auto``."""
    return "metis" if partitioner == "auto" else cast(Method, partitioner)


def whole_shard(data: GraphData, order: str, notes: list[str]) -> Shard:
    """All of ``data`` as the shard of a single rank; what is to be said of its order goes to ``notes``."""
    shard = build_shard(
        data, partition_nodes(data.num_nodes, data.src, data.dst, [1.0]), 0, order=cast(OrderChoice, order)
    )
    notes.extend(shard.order.notes)
    return shard


def own_shard(
    data: GraphData,
    ranks: Ranks,
    shares: Sequence[float],
    *,
    method: str = "metis",
    order: str = "none",
    seed: int = 0,
    given: ArrayLike | None = None,
) -> tuple[Shard, tuple[str, ...]]:
    """This rank's shard of ``data``, which every rank holds, with notes about it; collective.

    Rank 0 alone partitions: a native library need not give two processes the same answer. Its ``given`` part of each
    node is taken where there is one.

    Raises:
        ValueError: The data or shares do not fit.
        RuntimeError: Rank 0 failed; it raises its own error.
    """
    parts = torch.full((data.num_nodes,), -1)
    notes: tuple[str, ...] = ()
    try:
        if ranks.rank == 0:
            how: dict[str, Any] = (
                {"method": method_for_shares(method)} if given is None else {"method": "given", "parts": given}
            )
            chosen = partition_nodes(data.num_nodes, data.src, data.dst, shares, seed=seed, **how)
            parts, notes = chosen.part.to(torch.int64).clone(), tuple(chosen.notes)
    finally:
        ranks.broadcast_(parts)  # also after a failure: the others wait for it
    if len(parts) and int(parts[0]) < 0:
        raise RuntimeError("worker 0 could not partition the graph; it says why")
    same = partition_nodes(data.num_nodes, data.src, data.dst, shares, method="given", parts=parts)
    own = build_shard(data, same, ranks.rank, order=cast(OrderChoice, order))
    return own, (*notes, *own.order.notes)


def shards_on_disk(
    data: GraphData,
    shares: Sequence[float],
    partitioner: str,
    order: str,
    cache_folder: Path | None,
    own_folder: Path,
    given: ArrayLike | None = None,
    on_stage: Callable[[str], Any] = lambda _: None,
) -> tuple[Path, tuple[str, ...]]:
    """A folder of shards, in the cache if there is one, and what was noted when they were made.

    Args:
        data: The graph.
        shares: Of each part.
        partitioner: What makes parts.
        order: Of the rows inside a part.
        cache_folder: Where to look and keep.
        own_folder: Where they go without a cache, in a folder that exists.
        given: ``(N,)`` the part of each node, in place of a partitioner.
        on_stage: Gets ``partition``, ``parts_planned`` where parts are given, or ``parts_cached``.
    """
    stage = "partition" if given is None else "parts_planned"
    method = method_for_shares(partitioner)
    how: dict[str, Any] = {"method": method} if given is None else {"method": "given", "parts": given}
    if cache_folder is None:
        on_stage(stage)
        assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, **how)
        shards = iter_shards(data, assignment, order=cast(OrderChoice, order))
        own_folder.mkdir(exist_ok=True)  # not its parents: the run may have ended meanwhile and taken its folder away
        return own_folder, write_shards(own_folder, shards, key="private", versions={}, notes=assignment.notes).notes
    how |= {"order": order, "on_found": lambda is_there: on_stage("parts_cached" if is_there else stage)}
    made = cached_shards(cache_folder, data, shares, **how)
    return made, tuple(load_meta(made).notes)
