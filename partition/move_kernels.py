"""What the parts of an assignment hold, counted in one pass over the edges; moves of single nodes, weighed exactly.

A node that is read by another part is sent to that part once, however many edges ask for it. So all counts follow from
``readers[u, p]``: how many distinct nodes of part p other than u have an in-edge from u.
"""

from __future__ import annotations

import numba
import numpy as np

from nugnn.kernels._jit import jit

_ONE = np.uint64(1)
INNER, EDGES, HALO, SENT, TRAIN = 0, 1, 2, 3, 4
"""Columns of a table of sizes, one row a part."""


@jit()
def count_parts(src, dst, part, masks, edges, rows):  # type: ignore[no-untyped-def]
    """Adds each part's edges to ``edges``, ``(P,)``, and nodes of part p that part q reads to ``rows[p, q]``, of int64.

    ``masks``, ``(N, ceil(P / 64))`` uint64, starts as 0.
    """
    for edge in range(len(src)):
        reader = part[dst[edge]]
        edges[reader] += 1
        masks[src[edge], reader >> 6] |= _ONE << np.uint64(reader & 63)
    for node in range(len(part)):
        own = part[node]
        for word in range(masks.shape[1]):
            bits = masks[node, word]
            while bits:
                low = bits & (~bits + _ONE)
                bits ^= low
                reader = word << 6
                while low > _ONE:
                    low >>= _ONE
                    reader += 1
                if reader != own:
                    rows[own, reader] += 1


@jit()
def count_readers(indptr, sources, part, readers, present):  # type: ignore[no-untyped-def]
    """Fills ``readers``, ``(N, P)`` zeros, from the distinct sources of each node, itself left out.

    ``present``, ``(N, ceil(P / 64))`` uint64 zeros, gets a bit for each part that has the node or reads it.
    """
    for node in range(len(part)):
        own = part[node]
        present[node, own >> 6] |= _ONE << np.uint64(own & 63)
        for k in range(indptr[node], indptr[node + 1]):
            readers[sources[k], own] += 1
            present[sources[k], own >> 6] |= _ONE << np.uint64(own & 63)


@jit(inline=True)
def _lacking(table, column, bytes_per_size, byte_constants, limits):  # type: ignore[no-untyped-def]
    """Of memory for a part of these sizes, relative to the limit."""
    held = byte_constants[column]
    for k in range(5):
        held += bytes_per_size[column, k] * table[column, k]
    return max(held - limits[column], 0.0) / max(limits[column], 1.0)


@jit(inline=True)
def _strain(table, column, per_size, constants, scale, power, bytes_per_size, byte_constants, limits, weight):  # type: ignore[no-untyped-def]
    """What a part of these sizes adds to the sum that is minimised: seconds to a high power, and bytes that lack."""
    seconds = constants[column]
    for k in range(5):
        seconds += per_size[column, k] * table[column, k]
    lacking = _lacking(table, column, bytes_per_size, byte_constants, limits)
    return (max(seconds, 0.0) * scale) ** power + weight * lacking


@jit()
def _strains(sizes, costs, aim):  # type: ignore[no-untyped-def]
    """What each part adds to the sum."""
    per_size, constants, bytes_per_size, byte_constants, limits = costs
    scale, power, weight = aim
    strains = np.empty(len(constants))
    for p in range(len(constants)):
        strains[p] = _strain(
            sizes, p, per_size, constants, scale, power, bytes_per_size, byte_constants, limits, weight
        )
    return strains


@jit()
def _room(num_parts):  # type: ignore[no-untyped-def]
    """What :func:`_best_move` works in, see there."""
    return (
        np.zeros(num_parts, np.bool_), np.zeros(num_parts, np.bool_), np.zeros((num_parts, num_parts), np.int64),
        np.zeros(num_parts, np.int64), np.zeros(num_parts, np.int64), np.empty((num_parts, 5)), np.empty(num_parts),
        np.empty(num_parts),
    )  # fmt: skip


@jit()
def _best_move(node, graph, part, readers, present, sizes, strains, costs, aim, room):  # type: ignore[no-untyped-def]
    """The part that a node should move to, or -1; what that gains; halo rows that its own part is then rid of.

    ``room`` then holds, of the sources' owners (the first), how many rows each has to send to each part that the node
    moves to, and need not send to its own any more; for each part the halo rows that come; last, strains of the best
    move. All of it is overwritten by the next call.
    """
    indptr, sources, degrees, is_train = graph
    per_size, constants, bytes_per_size, byte_constants, limits = costs
    scale, power, weight = aim
    owns, touched, sent_after, left_by, halo_after, after, new_strains, best_strains = room
    num_parts = len(constants)
    own = part[node]
    best, best_gain, left_halo = -1, 0.0, 0
    if sizes[own, INNER] < 2:
        return best, best_gain, left_halo
    owns[:] = False
    left_by[:] = 0
    halo_after[:] = 0
    for k in range(indptr[node], indptr[node + 1]):
        source = sources[k]
        owner = part[source]
        if not owns[owner]:
            owns[owner] = True
            sent_after[owner, :] = 0
        if owner != own and readers[source, own] == 1:  # nobody else of this part reads it
            left_halo += 1
            left_by[owner] += 1
        for word in range(present.shape[1]):
            absent = ~present[source, word]
            for bit in range(min(64, num_parts - 64 * word)):
                sent_after[owner, 64 * word + bit] += np.int64((absent >> np.uint64(bit)) & _ONE)
    touched[:] = owns
    touched[np.argmin(strains)] = True
    num_readers = 0
    for p in range(num_parts):
        num_readers += readers[node, p] > 0
        touched[p] |= readers[node, p] > 0
        if owns[p]:
            for q in range(num_parts):
                halo_after[q] += sent_after[p, q]
        else:
            sent_after[p, :] = 0
    touched[own] = False
    read_here = 1 if readers[node, own] > 0 else 0
    for p in range(num_parts):
        if not touched[p]:
            continue
        gain = 0.0
        read_there = 1 if readers[node, p] > 0 else 0
        for q in range(num_parts):
            sent = sent_after[q, p] - left_by[q]
            if q == own:
                sent -= num_readers - read_here
            elif q == p:
                sent += num_readers - read_there
            elif sent == 0:
                new_strains[q] = strains[q]
                continue
            for k in range(5):
                after[q, k] = sizes[q, k]
            after[q, SENT] += sent
            if q == own:
                after[q, INNER] -= 1.0
                after[q, EDGES] -= degrees[node]
                after[q, TRAIN] -= is_train[node]
                after[q, HALO] += read_here - left_halo
            elif q == p:
                after[q, INNER] += 1.0
                after[q, EDGES] += degrees[node]
                after[q, TRAIN] += is_train[node]
                after[q, HALO] += halo_after[p] - read_there
            new_strains[q] = _strain(
                after, q, per_size, constants, scale, power, bytes_per_size, byte_constants, limits, weight
            )
            gain += strains[q] - new_strains[q]
        if gain > best_gain:
            best, best_gain = p, gain
            best_strains[:] = new_strains
    if best_gain <= 1e-12 * strains.sum():
        best = -1
    return best, best_gain, left_halo


@jit(parallel=True)
def weigh_moves(bounds, nodes, graph, part, readers, present, sizes, costs, aim, gains):  # type: ignore[no-untyped-def]
    """``gains`` of each of ``nodes``, zero before: what its best move gains for the work that it moves, if any does.

    What is minimised is the sum over parts of ``(seconds * scale) ** power`` plus ``weight`` for memory that is
    lacking, relative to the limit: with a high power the slowest part decides. ``aim`` is these three numbers.

    ``graph`` lists the distinct sources of each node but itself (offsets, sources), counts in-edges, parallel ones and
    self-loops included, and says with 0 or 1 which nodes train. ``readers`` and ``present`` are those of
    :func:`count_readers`; ``sizes`` is ``(P, 5)`` float64. ``costs`` are seconds for one of each size ``(P, 5)`` and of
    a part without any ``(P,)``, the same of bytes, and limits in bytes ``(P,)``. ``bounds`` splits the nodes.
    """
    strains = _strains(sizes, costs, aim)
    for task in numba.prange(len(bounds) - 1):
        room = _room(len(strains))
        for place in range(bounds[task], bounds[task + 1]):
            node = nodes[place]
            best, gain, _ = _best_move(node, graph, part, readers, present, sizes, strains, costs, aim, room)
            if best >= 0:
                own = part[node]
                gains[place] = gain / (costs[0][own, INNER] + costs[0][own, EDGES] * graph[2][node] + 1e-300)


@jit()
def make_moves(nodes, graph, part, readers, present, sizes, costs, aim, for_memory):  # type: ignore[no-untyped-def]
    """Moves ``nodes``, in their order, each to the best part where that lowers the sum; returns how many were moved.

    With ``for_memory`` nodes only leave a part while that lacks memory.

    Arguments are those of :func:`weigh_moves`; ``part``, ``readers``, ``present`` and ``sizes`` follow the moves. Every
    move lowers the sum, so that moves come to an end.
    """
    indptr, sources, degrees, is_train = graph
    strains = _strains(sizes, costs, aim)
    room = _room(len(strains))
    sent_after, left_by, halo_after, best_strains = room[2], room[3], room[4], room[7]
    num_moved = 0
    for place in range(len(nodes)):
        node = nodes[place]
        own = part[node]
        if for_memory and _lacking(sizes, own, costs[2], costs[3], costs[4]) == 0.0:
            continue
        best, _, left_halo = _best_move(node, graph, part, readers, present, sizes, strains, costs, aim, room)
        if best < 0:
            continue
        num_readers = 0
        for p in range(len(strains)):
            num_readers += readers[node, p] > 0
        read_here = 1 if readers[node, own] > 0 else 0
        read_there = 1 if readers[node, best] > 0 else 0
        sizes[own, INNER] -= 1.0
        sizes[own, EDGES] -= degrees[node]
        sizes[own, TRAIN] -= is_train[node]
        sizes[own, HALO] += read_here - left_halo
        sizes[own, SENT] -= num_readers - read_here
        sizes[best, INNER] += 1.0
        sizes[best, EDGES] += degrees[node]
        sizes[best, TRAIN] += is_train[node]
        sizes[best, HALO] += halo_after[best] - read_there
        sizes[best, SENT] += num_readers - read_there
        for q in range(len(strains)):
            sizes[q, SENT] += sent_after[q, best] - left_by[q]
        here, there = _ONE << np.uint64(own & 63), _ONE << np.uint64(best & 63)
        part[node] = best
        present[node, best >> 6] |= there
        if not read_here:
            present[node, own >> 6] &= ~here
        for k in range(indptr[node], indptr[node + 1]):
            source = sources[k]
            readers[source, own] -= 1
            if readers[source, own] == 0 and part[source] != own:
                present[source, own >> 6] &= ~here
            readers[source, best] += 1
            present[source, best >> 6] |= there
        strains[:] = best_strains
        num_moved += 1
    return num_moved
