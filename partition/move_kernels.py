"""What the parts of an assignment hold, counted in one pass over the edges; moves of single nodes, weighed exactly.

A node that is read by another part is sent to that part once, however many edges ask for it. So all counts follow from
``readers[u, p]``: how many distinct nodes of part p other than u have an in-edge from u.
"""

from __future__ import annotations

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
def count_readers(indptr, sources, part, readers):  # type: ignore[no-untyped-def]
    """Fills ``readers``, ``(N, P)`` zeros, from the distinct sources of each node, itself left out."""
    for node in range(len(part)):
        own = part[node]
        for k in range(indptr[node], indptr[node + 1]):
            readers[sources[k], own] += 1


@jit(inline=True)
def _strain(table, column, per_size, constants, scale, power, bytes_per_size, byte_constants, limits, weight):  # type: ignore[no-untyped-def]
    """What a part of these sizes adds to the sum that is minimised: seconds to a high power, and bytes that lack."""
    seconds = constants[column]
    held = byte_constants[column]
    for k in range(5):
        seconds += per_size[column, k] * table[column, k]
        held += bytes_per_size[column, k] * table[column, k]
    lacking = max(held - limits[column], 0.0) / max(limits[column], 1.0)
    return (max(seconds, 0.0) * scale) ** power + weight * lacking


@jit()
def try_moves(  # type: ignore[no-untyped-def]
    nodes, apply, indptr, sources, degrees, is_train, part, readers, sizes, costs, scale, power, weight, gains
):
    """Weighs moves of ``nodes``, each from its part to the best of those it touches; returns how many were made.

    What is minimised is the sum over parts of ``(seconds * scale) ** power`` plus ``weight`` for memory that is
    lacking, relative to the limit: with a high power the slowest part decides, and every move that is made lowers the
    sum, so that moves come to an end.

    ``nodes`` are looked at in their order. With ``apply`` each move that lowers the sum is made; otherwise ``gains`` of
    each node is what its best move gains for the work that it moves, 0 where none does. ``indptr`` and ``sources`` list
    the distinct sources of each node but itself, ``degrees`` counts in-edges, parallel ones and self-loops included,
    ``is_train`` is 0 or 1. ``part``, ``readers`` (see the module) and ``sizes``, ``(P, 5)`` float64, follow the moves.
    ``costs`` are seconds for one of each size ``(P, 5)`` and of a part without any ``(P,)``, the same of bytes, and
    limits in bytes ``(P,)``.
    """
    per_size, constants, bytes_per_size, byte_constants, limits = costs
    num_parts = len(constants)
    strains = np.empty(num_parts)
    for p in range(num_parts):
        strains[p] = _strain(
            sizes, p, per_size, constants, scale, power, bytes_per_size, byte_constants, limits, weight
        )
    touched = np.zeros(num_parts, np.bool_)
    choices = np.zeros(num_parts, np.int64)
    sent_after = np.zeros((num_parts, num_parts))
    halo_after = np.zeros(num_parts)
    left_by = np.zeros(num_parts)
    after = np.empty((num_parts, 5))
    new_strains = np.empty(num_parts)
    best_strains = np.empty(num_parts)
    num_moved = 0
    for place in range(len(nodes)):
        node = nodes[place]
        own = part[node]
        gains[place] = 0.0
        if sizes[own, INNER] < 2:
            continue
        touched[:] = False
        touched[np.argmin(strains)] = True
        for p in range(num_parts):
            touched[p] |= readers[node, p] > 0
        for k in range(indptr[node], indptr[node + 1]):
            touched[part[sources[k]]] = True
        touched[own] = False
        left_by[:] = 0.0
        left_halo = 0.0
        num_choices = 0
        for p in range(num_parts):
            if touched[p]:
                choices[num_choices] = p
                num_choices += 1
                halo_after[p] = 0.0
                sent_after[p, :] = 0.0
        for k in range(indptr[node], indptr[node + 1]):
            source = sources[k]
            owner = part[source]
            if owner != own and readers[source, own] == 1:  # nobody else of this part reads it
                left_halo += 1.0
                left_by[owner] += 1.0
            for choice in range(num_choices):
                p = choices[choice]
                if owner != p and readers[source, p] == 0:
                    halo_after[p] += 1.0
                    sent_after[p, owner] += 1.0
        num_readers = 0
        for p in range(num_parts):
            num_readers += readers[node, p] > 0
        read_here = 1 if readers[node, own] > 0 else 0
        best, best_gain = -1, 0.0
        for choice in range(num_choices):
            p = choices[choice]
            gain = 0.0
            read_there = 1 if readers[node, p] > 0 else 0
            for q in range(num_parts):
                sent = sent_after[p, q] - left_by[q]
                if q == own:
                    sent -= num_readers - read_here
                elif q == p:
                    sent += num_readers - read_there
                elif sent == 0.0:
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
        if best < 0 or best_gain <= 1e-12 * strains.sum():
            continue
        gains[place] = best_gain / (per_size[own, INNER] + per_size[own, EDGES] * degrees[node] + 1e-300)
        if not apply:
            continue
        sizes[own, INNER] -= 1.0
        sizes[own, EDGES] -= degrees[node]
        sizes[own, TRAIN] -= is_train[node]
        sizes[own, HALO] += read_here - left_halo
        sizes[own, SENT] -= num_readers - read_here
        sizes[best, INNER] += 1.0
        sizes[best, EDGES] += degrees[node]
        sizes[best, TRAIN] += is_train[node]
        sizes[best, HALO] += halo_after[best] - (1 if readers[node, best] > 0 else 0)
        sizes[best, SENT] += num_readers - (1 if readers[node, best] > 0 else 0)
        for q in range(num_parts):
            sizes[q, SENT] += sent_after[best, q] - left_by[q]
        for k in range(indptr[node], indptr[node + 1]):
            readers[sources[k], own] -= 1
            readers[sources[k], best] += 1
        part[node] = best
        strains[:] = best_strains
        num_moved += 1
    return num_moved
