"""A smaller part that looks like a real one: the first rows of a shard with their in-edges."""

from __future__ import annotations

import dataclasses

import torch

from nugnn.datasets.sparse import select_rows
from nugnn.partition.shard import Shard


def piece_of(shard: Shard, share: float) -> Shard:
    """The first rows of ``shard`` as a part of the same graph, for measuring what smaller parts take.

    Where the graph is split, sources that are not among these rows become halo, of the next rank: rows lie as near each
    other as in the shard, and in-degrees are the same. A whole graph has no halo, so these edges are left out.

    Args:
        shard: Of any rank.
        share: Of its inner rows, above 0 and at most 1.

    Raises:
        ValueError: ``share`` is out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of a part is {share}, must be above 0 and at most 1")
    rows = max(1, round(share * shard.num_inner))
    if rows == shard.num_inner:
        return shard
    end = int(shard.indptr[rows])
    sources = shard.indices[:end].long()
    is_inside = sources < rows
    is_kept = is_inside if shard.num_parts == 1 else torch.ones_like(is_inside)
    outside = torch.unique(sources[~is_inside]) if shard.num_parts > 1 else sources[:0]
    ids = torch.cat([shard.global_node_ids, shard.halo_global_ids])
    outside = outside[ids[outside].argsort()]  # halo rows of a peer are in the order of ids
    inside = torch.arange(rows, device=sources.device)
    place = torch.empty(shard.num_local, dtype=torch.int64, device=sources.device)
    place[:rows] = inside
    place[outside] = torch.arange(rows, rows + len(outside), device=sources.device)
    destination = torch.repeat_interleave(inside, shard.indptr[: rows + 1].diff())
    degrees = torch.bincount(destination[is_kept], minlength=rows)
    sent = [run[run < rows] for run in shard.send_rows.split(list(shard.send_splits))]
    received = [0] * shard.num_parts
    if shard.num_parts > 1:
        received[(shard.rank + 1) % shard.num_parts] = len(outside)
    splits = {name: getattr(shard, name) for name in ("train_rows", "val_rows", "test_rows")}
    kept_edges = is_kept.nonzero().flatten()
    return dataclasses.replace(
        shard,
        global_node_ids=shard.global_node_ids[:rows],
        global_edge_ids=shard.global_edge_ids[kept_edges] if len(shard.global_edge_ids) else shard.global_edge_ids,
        edge_starts=shard.edge_starts[:rows],
        indptr=torch.cat([degrees.new_zeros(1), degrees.cumsum(0)]),
        indices=place[sources[is_kept]].to(shard.indices.dtype),
        halo_global_ids=ids[outside],
        recv_splits=tuple(received),
        send_rows=torch.cat([shard.send_rows[:0], *sent]),
        send_splits=tuple(len(run) for run in sent),
        out_degrees=shard.out_degrees[:rows],
        node_data={name: select_rows(x, inside) for name, x in shard.node_data.items()},
        edge_data={name: select_rows(x, kept_edges) for name, x in shard.edge_data.items()},
        **{name: x[x < rows] for name, x in splits.items()},
    )
