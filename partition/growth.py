"""Which nodes a part gives away, decided from the part alone: those that the receiving parts attract.

From the nodes at the boundary the region that goes grows into the part, greedily, by the share of a node's edges that
lead there: the greedy graph growing of Karypis and Kumar, "A Fast and High Quality Multilevel Scheme for Partitioning
Irregular Graphs", SIAM J. Sci. Comput. 1998, from a boundary in place of a seed.

Shape suffixes: N inner nodes, H halo nodes, E edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


def nodes_to_give(
    indptr: Tensor,
    indices: Tensor,
    recv_splits: Sequence[int],
    send_rows: Tensor,
    send_splits: Sequence[int],
    *,
    own: int,
    amounts: Mapping[int, float],
    node_work: float,
) -> Tensor:
    """``(N,)`` int64, the part that each node goes to, ``own`` where it stays.

    Args:
        indptr: ``(N + 1,)`` int64, in-edges of the part, as in `nugnn.partition.shard.Shard`.
        indices: ``(E,)`` their sources: inner rows, then halo rows by owner.
        recv_splits: Halo rows of each part.
        send_rows: ``(S,)`` inner rows that other parts read.
        send_splits: How many of these each part reads.
        own: This part.
        amounts: Work that goes to each receiving part. At least one node stays, whatever is asked.
        node_work: Work of a node beside its in-edges, each of which counts 1.

    Equal arguments give equal nodes.
    """
    from nugnn.partition import growth_kernels as kernels

    starts_N, sources_E = indptr.numpy(), indices.numpy()
    num_inner = len(starts_N) - 1
    part_N = np.full(num_inner, own, np.int32)
    if not amounts or num_inner < 2:
        return torch.from_numpy(part_N).long()
    starts, neighbours = starts_N, sources_E
    forth, back = kernels.fingerprints(starts_N, sources_E)
    if forth != back:
        starts = np.zeros(num_inner + 1, np.int64)
        neighbours = np.empty(2 * len(sources_E), np.int32)
        kernels.list_neighbours(starts_N, sources_E, starts, neighbours)
    in_edges_PN, sent_PN = _edges_across(indptr, indices, recv_splits, send_rows, send_splits)
    # how often another part reads a node is not known here, only whether it does: taken as often as the other way
    pull_PN = in_edges_PN if forth == back else in_edges_PN + np.maximum(in_edges_PN, sent_PN)
    elsewhere_N = pull_PN.sum(0)
    work_N = np.diff(starts_N) + float(node_work)
    left = num_inner - 1
    for target in sorted(amounts, key=lambda part: (-amounts[part], part)):
        pull_N = pull_PN[target].astype(np.int32)
        others_N = np.maximum(elsewhere_N - pull_PN[target], 0).astype(np.int32)
        before = int((part_N != own).sum())
        kernels.grow(starts, neighbours, own, target, pull_N, others_N, work_N, float(amounts[target]), left, part_N)
        left -= int((part_N != own).sum()) - before
    return torch.from_numpy(part_N).long()


def _edges_across(
    indptr: Tensor, indices: Tensor, recv_splits: Sequence[int], send_rows: Tensor, send_splits: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """``(P, N)`` in-edges of each node from each other part, and whether that reads it, 0 or 1."""
    num_inner, num_parts = len(indptr) - 1, len(recv_splits)
    crossing = (indices >= num_inner).nonzero().flatten()
    rows = torch.searchsorted(indptr, crossing, right=True) - 1
    owner_H = torch.repeat_interleave(torch.arange(num_parts), torch.tensor(list(recv_splits)))
    owners = owner_H[indices.index_select(0, crossing).long() - num_inner]
    read_PN = torch.bincount(owners * num_inner + rows, minlength=num_parts * num_inner).view(num_parts, num_inner)
    readers = torch.repeat_interleave(torch.arange(num_parts), torch.tensor(list(send_splits)))
    sent_PN = torch.zeros_like(read_PN)
    sent_PN[readers, send_rows] = 1
    return read_PN.numpy(), sent_PN.numpy()
