"""The laws that a shard, and the shards of one graph together, must obey."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nugnn._counted import counted
from nugnn.kernels.rows import IdRuns
from nugnn.partition.shard import OF_THE_WHOLE, Shard


def check_shard(shard: Shard) -> None:
    """Verify what one shard says about itself: shapes, types, ranges, orders, sums.

    Raises:
        ValueError: names the rank, the field and what is wrong with it.
    """
    N, H, E, P = shard.num_inner, shard.num_halo, shard.num_edges, shard.num_parts

    def require(condition: object, what: str) -> None:
        if not condition:
            raise ValueError(f"shard of rank {shard.rank}: {what}")

    require(0 <= shard.rank < P, f"the rank must lie in 0 to {P - 1}")
    require(N >= 1, "it owns no node")
    int64 = {
        "global_node_ids": N,
        "global_edge_ids": E,
        "edge_starts": N,
        "indptr": N + 1,
        "halo_global_ids": H,
        "send_rows": sum(shard.send_splits),
        "out_degrees": N,
        "train_rows": len(shard.train_rows),
        "val_rows": len(shard.val_rows),
        "test_rows": len(shard.test_rows),
    }
    for name, length in int64.items():
        rows: Tensor = getattr(shard, name)
        require(
            rows.dtype == torch.int64 and rows.shape == (length,),
            f"{name} must be int64 of shape ({length},), it is {rows.dtype} of {tuple(rows.shape)}",
        )
    require(
        shard.indices.dtype in (torch.int32, torch.int64) and shard.indices.shape == (E,),
        f"indices must be int32 or int64 of shape ({E},), it is {shard.indices.dtype} of {tuple(shard.indices.shape)}",
    )
    for name, splits in (("recv_splits", shard.recv_splits), ("send_splits", shard.send_splits)):
        require(len(splits) == P and min(splits) >= 0, f"{name} must be {P} counts, it is {splits}")
        require(splits[shard.rank] == 0, f"{name} lists rows from the rank to itself")
    require(sum(shard.recv_splits) == H, f"recv_splits sum to {sum(shard.recv_splits)}, there are {H} halo nodes")

    require(int(shard.indptr[0]) == 0 and int(shard.indptr[-1]) == E, f"indptr must run from 0 to {E}")
    require((shard.in_degrees >= 0).all(), "indptr decreases")
    ranges = {
        "global_node_ids": shard.num_nodes_global,
        "global_edge_ids": shard.num_edges_global,
        "edge_starts": shard.num_edges_global + 1,
        "indices": shard.num_local,
        "halo_global_ids": shard.num_nodes_global,
        "send_rows": N,
        "out_degrees": shard.num_edges_global + 1,
        "train_rows": N,
        "val_rows": N,
        "test_rows": N,
    }
    for name, end in ranges.items():
        rows = getattr(shard, name)
        require(
            not len(rows) or (int(rows.min()) >= 0 and int(rows.max()) < end), f"{name} leaves the range 0..{end - 1}"
        )
    is_by_id = shard.order.method == "none"
    for name in ("train_rows", "val_rows", "test_rows", *(["global_node_ids"] if is_by_id else [])):
        require(_ascending(getattr(shard, name)), f"{name} is not strictly ascending")
    destination = torch.repeat_interleave(torch.arange(N), shard.in_degrees)
    same_destination = destination.diff() == 0
    require(
        (shard.global_edge_ids.diff()[same_destination] > 0).all(),
        "the in-edges of a node are not in the order of their global ids",
    )
    for run in shard.send_rows.split(list(shard.send_splits)):
        require(_ascending(run), "send_rows is not strictly ascending within a peer")
    if is_by_id:
        for run in shard.halo_global_ids.split(list(shard.recv_splits)):
            require(_ascending(run), "halo_global_ids is not strictly ascending within a peer")
    else:
        for name in ("global_node_ids", "halo_global_ids"):
            require(_ascending(getattr(shard, name).sort().values), f"{name} lists a node twice")
    require(
        not torch.isin(shard.halo_global_ids, shard.global_node_ids).any(), "a node is both inner and halo on this rank"
    )
    used = torch.zeros(shard.num_local, dtype=torch.bool)
    used[shard.indices.long()] = True
    require(used[N:].all(), "a halo node is the source of no edge")
    for kind, length, data in (("node", N, shard.node_data), ("edge", E, shard.edge_data)):
        for name, rows in data.items():
            require(
                rows.shape[0] == length,
                f"{kind}_data {name!r} has {counted(rows.shape[0], 'row')} for {length} {kind}s",
            )
    for which in ("train", "val", "test"):
        local, total = len(getattr(shard, f"{which}_rows")), getattr(shard, f"num_{which}_global")
        require(local <= total, f"{which}_rows lists {counted(local, 'node')}, the whole graph has {total}")


def check_exchange_counts(recv_splits: Sequence[Sequence[int]], send_splits: Sequence[Sequence[int]]) -> None:
    """Verify that what each rank plans to send is what its peer plans to receive.

    Args:
        recv_splits: ``recv_splits[p][q]``, rows that rank p expects from rank q.
        send_splits: ``send_splits[q][p]``, rows that rank q will send to rank p.

    Raises:
        ValueError: names the pair and both counts.
    """
    num_parts = len(recv_splits)
    for rank in range(num_parts):
        if len(recv_splits[rank]) != num_parts or len(send_splits[rank]) != num_parts:
            raise ValueError(
                f"rank {rank} lists {len(send_splits[rank])} send and {len(recv_splits[rank])} receive counts "
                f"for {counted(num_parts, 'rank')}"
            )
    for receiver in range(num_parts):
        for sender in range(num_parts):
            sent, expected = send_splits[sender][receiver], recv_splits[receiver][sender]
            if sent != expected:
                raise ValueError(
                    f"rank {sender} plans to send {counted(sent, 'row')} to rank {receiver}, which plans to "
                    f"receive {expected}; "
                    "the shards come from different partitions: partition again into an empty folder"
                )


def check_shards(shards: Sequence[Shard]) -> None:
    """Verify all shards of one graph, each alone and together.

    Together: every node and every edge lies in exactly one shard, sending and receiving match row by row, out-degrees
    are those of the whole graph, and the splits add up.

    Raises:
        ValueError: names what is wrong, and on which rank where that can be said.
    """
    for shard in shards:
        check_shard(shard)
    first = shards[0]
    if [shard.rank for shard in shards] != list(range(first.num_parts)):
        raise ValueError(f"expected ranks 0 to {first.num_parts - 1} in order, got {[shard.rank for shard in shards]}")
    for shard in shards:
        for name in OF_THE_WHOLE:
            if getattr(shard, name) != getattr(first, name):
                raise ValueError(
                    f"{name} is {getattr(shard, name)!r} on rank {shard.rank} and {getattr(first, name)!r} on rank 0"
                )
    _check_cover("node", torch.cat([shard.global_node_ids for shard in shards]), first.num_nodes_global)
    _check_cover("edge", torch.cat([shard.global_edge_ids for shard in shards]), first.num_edges_global)
    runs = [IdRuns(shard.edge_starts, shard.indptr).tensor() for shard in shards]
    _check_cover("position of an edge", torch.cat(runs), first.num_edges_global)
    check_exchange_counts([shard.recv_splits for shard in shards], [shard.send_splits for shard in shards])
    for sender in shards:
        outgoing = sender.global_node_ids[sender.send_rows].split(list(sender.send_splits))
        for receiver, rows in zip(shards, outgoing, strict=True):
            expected = receiver.halo_global_ids.split(list(receiver.recv_splits))[sender.rank]
            if not torch.equal(rows, expected):
                raise ValueError(f"rank {sender.rank} sends other nodes to rank {receiver.rank} than that one expects")
    degrees = torch.zeros(first.num_nodes_global, dtype=torch.int64)
    for shard in shards:
        local_ids = torch.cat([shard.global_node_ids, shard.halo_global_ids])
        degrees += torch.bincount(local_ids[shard.indices.long()], minlength=first.num_nodes_global)
    for shard in shards:
        if not torch.equal(shard.out_degrees, degrees[shard.global_node_ids]):
            raise ValueError(f"out_degrees on rank {shard.rank} are not those of the whole graph")
    for which in ("train", "val", "test"):
        counted = sum(len(getattr(shard, f"{which}_rows")) for shard in shards)
        total = getattr(first, f"num_{which}_global")
        if counted != total:
            raise ValueError(f"the shards hold {counted} {which} nodes, the whole graph {total}")


def _ascending(rows: Tensor) -> bool:
    return bool((rows.diff() > 0).all())


def _check_cover(kind: str, ids: Tensor, total: int) -> None:
    owners = torch.bincount(ids, minlength=total)
    wrong = (owners != 1).nonzero().flatten()
    if len(wrong):
        raise ValueError(
            f"{kind} {int(wrong[0])} lies in {int(owners[wrong[0]])} shards, it must lie in one ({len(wrong)} such ids)"
        )
