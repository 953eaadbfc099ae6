"""Shards cut on the GPU that has the graph: a second for a split of full size, where the host takes a minute."""

from __future__ import annotations

import torch
from torch import Tensor

from nugnn.comm.groups import Ranks
from nugnn.datasets.synthetic_device import DeviceGraph
from nugnn.partition.shard import Shard


def device_shard(graph: DeviceGraph, part: Tensor, rank: int, num_parts: int) -> Shard:
    """What `nugnn.partition.shard.build_shard` makes of the same graph and parts, on the graph's device.

    Edges have no ids, and rows are in the order of the nodes' ids.

    Args:
        graph: Symmetric where there are several parts, so that who reads a node is known from its own in-edges.
        part: ``(N,)`` integers, the part of each node, on the device.
        rank: This part.
        num_parts: P.
    """
    device, num_nodes = part.device, graph.num_nodes
    own = part == rank
    node_ids = own.nonzero().flatten()
    starts, counts = graph.indptr[node_ids], graph.degrees[node_ids]
    indptr = torch.zeros(len(node_ids) + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts, 0, out=indptr[1:])
    rows = torch.arange(len(node_ids), dtype=torch.int32, device=device)
    row_of_edge = torch.repeat_interleave(rows, counts)
    places = torch.arange(int(indptr[-1]), device=device) + (starts - indptr[:-1])[row_of_edge]
    sources = graph.indices[places]
    del places
    needed = torch.zeros(num_nodes, dtype=torch.bool, device=device)
    needed[sources] = True
    halo = (needed & ~own).nonzero().flatten()
    owners = part[halo].long()
    halo = halo[torch.sort(owners, stable=True).indices]
    row_of = torch.zeros(num_nodes, dtype=torch.int32, device=device)
    row_of[node_ids] = rows
    row_of[halo] = len(node_ids) + torch.arange(len(halo), dtype=torch.int32, device=device)
    part_of_source, sent = part[sources], []
    for peer in range(num_parts):
        is_read = torch.zeros(len(node_ids), dtype=torch.bool, device=device)
        if peer != rank:
            is_read[row_of_edge[part_of_source == peer]] = True
        sent.append(is_read.nonzero().flatten())
    rows_of = {name: row_of[ids[own[ids]]].long() for name, ids in _sets(graph).items()}
    return Shard(
        rank=rank,
        num_parts=num_parts,
        num_nodes_global=num_nodes,
        num_edges_global=graph.num_edges,
        global_node_ids=node_ids,
        global_edge_ids=torch.zeros(0, dtype=torch.int64),
        edge_starts=starts,
        indptr=indptr,
        indices=row_of[sources],
        halo_global_ids=halo,
        recv_splits=tuple(torch.bincount(owners, minlength=num_parts).tolist()),
        send_rows=torch.cat(sent),
        send_splits=tuple(len(each) for each in sent),
        out_degrees=torch.bincount(graph.indices, minlength=num_nodes)[node_ids],
        node_data={"feat": graph.features[node_ids], "label": graph.labels[node_ids]},
        train_rows=rows_of["train"],
        val_rows=rows_of["val"],
        test_rows=rows_of["test"],
        num_train_global=len(graph.train_nodes),
        num_val_global=len(graph.val_nodes),
        num_test_global=len(graph.test_nodes),
        num_classes=graph.num_classes,
        multilabel=False,
        metric="accuracy",
        name=graph.name,
    )


def by_clusters(graph: DeviceGraph, ranks: Ranks) -> DeviceGraph:
    """The graph with its nodes numbered by nested clusters, which rank 0 finds; a collective call."""
    from nugnn.partition.clusters import unweighted_lists
    from nugnn.partition.order import locality_order, rows_in_cache

    order = torch.zeros(graph.num_nodes, dtype=torch.int64)
    if ranks.rank == 0:
        lists = unweighted_lists(graph.indptr.cpu().numpy(), graph.indices.cpu().numpy())
        order = torch.from_numpy(locality_order(lists, rows_in_cache(400))[0])
    ranks.broadcast_(order)
    new_ids = torch.empty_like(order)
    new_ids[order] = torch.arange(len(order))
    return graph.renumbered(new_ids.to(ranks.device))


def _sets(graph: DeviceGraph) -> dict[str, Tensor]:
    return {"train": graph.train_nodes, "val": graph.val_nodes, "test": graph.test_nodes}
