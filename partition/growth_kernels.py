"""A region that grows into a part, node by node, always where that costs least of the cut; in numba."""

from __future__ import annotations

import numpy as np
from numba import prange

from nugnn.kernels._jit import jit

NUM_BUCKETS = 512
"""Of gains between -1 and 1."""


_ODD = np.uint64(0x9E3779B97F4A7C15)


@jit(inline=True)
def _mixed(a, b):  # type: ignore[no-untyped-def]
    """64 bits of an ordered pair."""
    x = (np.uint64(a) << np.uint64(32)) ^ np.uint64(b)
    x = (x ^ (x >> np.uint64(31))) * _ODD
    x = (x ^ (x >> np.uint64(29))) * _ODD
    return x ^ (x >> np.uint64(32))


@jit(parallel=True)
def fingerprints(indptr, indices):  # type: ignore[no-untyped-def]
    """Sums over the edges between inner nodes, and over these edges turned round: equal where each has its reverse.

    They are equal by chance with probability 2^-64, which would cost some of the cut and nothing else.
    """
    num_inner = len(indptr) - 1
    forth = np.uint64(0)
    back = np.uint64(0)
    for node in prange(num_inner):
        for k in range(indptr[node], indptr[node + 1]):
            source = indices[k]
            if source < num_inner:
                forth += _mixed(source, node)
                back += _mixed(node, source)
    return forth, back


@jit()
def list_neighbours(indptr, indices, starts, neighbours):  # type: ignore[no-untyped-def]
    """Fills ``neighbours``: every edge between two inner nodes is listed at both ends, self-loops nowhere.

    ``starts``, ``(N + 1,)`` int64 zeros, becomes where each node's list begins; ``neighbours`` holds two for each edge,
    more than are used where there are halo sources or self-loops.
    """
    num_inner = len(starts) - 1
    for node in range(num_inner):
        for k in range(indptr[node], indptr[node + 1]):
            source = indices[k]
            if source < num_inner and source != node:
                starts[node + 1] += 1
                starts[source + 1] += 1
    for node in range(num_inner):
        starts[node + 1] += starts[node]
    place = starts[:-1].copy()
    for node in range(num_inner):
        for k in range(indptr[node], indptr[node + 1]):
            source = indices[k]
            if source < num_inner and source != node:
                neighbours[place[node]] = source
                place[node] += 1
                neighbours[place[source]] = node
                place[source] += 1


@jit(inline=True)
def _bucket(pull, kept, others):  # type: ignore[no-untyped-def]
    """Of a node with so many edges to the region, to the rest of its part, and elsewhere."""
    total = max(pull + kept + others, 1)
    return int((1.0 + (pull - kept) / total) * 0.5 * (NUM_BUCKETS - 1))


@jit(inline=True)
def _take_out(node, bucket_of, head, after, before):  # type: ignore[no-untyped-def]
    if before[node] >= 0:
        after[before[node]] = after[node]
    else:
        head[bucket_of[node]] = after[node]
    if after[node] >= 0:
        before[after[node]] = before[node]
    bucket_of[node] = -1


@jit(inline=True)
def _put_in(node, bucket, bucket_of, head, after, before):  # type: ignore[no-untyped-def]
    before[node] = -1
    after[node] = head[bucket]
    if head[bucket] >= 0:
        before[head[bucket]] = node
    head[bucket] = node
    bucket_of[node] = bucket


@jit()
def grow(starts, neighbours, own, target, pull, elsewhere, work, amount, most_nodes, part):  # type: ignore[no-untyped-def]
    """Gives nodes of part ``own`` to ``target`` until their work comes to ``amount``; returns how much it came to.

    Next goes the node whose edges lead most to the region and least into what stays, as a share of all its edges; of
    equal ones the one whose neighbour went last, at the start the lowest. A node that would overshoot by more than half
    of its work is passed over.

    ``starts`` and ``neighbours`` are from `list_neighbours`, or, where each edge has its reverse, in-edges as they are:
    halo sources and the node itself are passed over. ``pull``, ``(N,)`` int32, counts each node's edges to the
    target and follows; ``elsewhere``, ``(N,)``, those to all other parts; ``work``, ``(N,)`` float64. ``part``,
    ``(N,)`` int32, gets ``target`` where a node goes, at most ``most_nodes`` times.
    """
    num_inner = len(part)
    head = np.full(NUM_BUCKETS, -1, np.int32)
    after = np.full(num_inner, -1, np.int32)
    before = np.full(num_inner, -1, np.int32)
    bucket_of = np.full(num_inner, -1, np.int32)
    kept = np.zeros(num_inner, np.int32)
    top = 0
    for node in range(num_inner - 1, -1, -1):
        if part[node] != own:
            continue
        for k in range(starts[node], starts[node + 1]):
            other = neighbours[k]
            if other >= num_inner or other == node:
                continue
            if part[other] == own:
                kept[node] += 1
            elif part[other] == target:
                pull[node] += 1
        bucket = _bucket(pull[node], kept[node], elsewhere[node])
        _put_in(node, bucket, bucket_of, head, after, before)
        top = max(top, bucket)
    given = 0.0
    num_given = 0
    while top >= 0 and num_given < most_nodes and given < amount:
        node = head[top]
        if node < 0:
            top -= 1
            continue
        _take_out(node, bucket_of, head, after, before)
        if given + 0.5 * work[node] > amount:
            continue
        part[node] = target
        given += work[node]
        num_given += 1
        for k in range(starts[node], starts[node + 1]):
            other = neighbours[k]
            if other >= num_inner or other == node or part[other] != own:
                continue
            kept[other] -= 1
            pull[other] += 1
            if bucket_of[other] < 0:
                continue  # passed over
            bucket = _bucket(pull[other], kept[other], elsewhere[other])
            if bucket != bucket_of[other]:
                _take_out(other, bucket_of, head, after, before)
                _put_in(other, bucket, bucket_of, head, after, before)
                top = max(top, bucket)
    return given
