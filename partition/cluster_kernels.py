"""Label propagation, contraction and row gathering in numba: each result is the same on any number of threads.

A pass of label propagation visits the nodes in a few interleaved subsets. Within a subset every node chooses from the
labels as they were when the subset began, in parallel; the moves are then made one after another, so that which of two
nodes gets the last place in a full cluster is decided by their ids and not by the threads.
"""

from __future__ import annotations

import numba
import numpy as np

from nugnn.kernels._jit import jit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@jit(inline=True)
def _mixed(x):  # type: ignore[no-untyped-def]
    """The finaliser of splitmix64: every bit of the result depends on every bit of ``x``."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit(parallel=True)
def choose_labels(  # type: ignore[no-untyped-def]
    bounds, subset, num_subsets, indptr, indices, weights, parts, node_weights, labels, loads, capacities, seed,
    most_neighbours, keys, sums, used, chosen,
):  # fmt: skip
    """``chosen[v]``: for the nodes ``v = subset (mod num_subsets)`` the label that most of their arcs' weight bears.

    A label whose cluster has no room for the node is passed over. Of equal ones the node's own wins, else the one with
    the largest hash. A node looks at ``most_neighbours`` at most, evenly spaced: a vote of many is as good as one of
    all. With ``parts`` it looks only at those of its own part. An empty ``weights`` means 1 for each arc;
    ``capacities`` holds one number for all labels, or one for each. ``bounds`` splits the nodes into tasks; ``keys``
    (-1) and ``sums`` (0) hold a hash table for each and are left as they came, ``used`` the places of its labels.
    """
    weighted, divided, own_capacity = len(weights) > 0, len(parts) > 0, len(capacities) > 1
    for task in numba.prange(len(bounds) - 1):
        key, total, filled = keys[task], sums[task], used[task]
        first = bounds[task] + (subset - bounds[task]) % num_subsets
        for node in range(first, bounds[task + 1], num_subsets):
            begin, end = indptr[node], indptr[node + 1]
            own = labels[node]
            chosen[node] = own
            if begin == end:
                continue
            step = 1 + (end - begin - 1) // most_neighbours
            bits = 2
            while (1 << bits) < 2 * ((end - begin) // step + 1):
                bits += 1
            mask, shift = (1 << bits) - 1, np.uint64(64 - bits)
            num_labels = 0
            for k in range(begin, end, step):
                neighbour = indices[k]
                if neighbour == node or (divided and parts[neighbour] != parts[node]):
                    continue
                label = labels[neighbour]
                slot = np.int64((np.uint64(label) * _GOLDEN) >> shift)
                while key[slot] != label and key[slot] != -1:
                    slot = (slot + 1) & mask
                if key[slot] == -1:
                    key[slot] = label
                    filled[num_labels] = slot
                    num_labels += 1
                total[slot] += weights[k] if weighted else 1
            best, best_sum, best_hash = own, 0, np.uint64(0)
            weight = node_weights[node]
            for number in range(num_labels):
                place = filled[number]
                label = key[place]
                label_sum = total[place]
                key[place] = -1
                total[place] = 0
                if label == own:
                    label_hash = np.uint64(0xFFFFFFFFFFFFFFFF)
                elif label_sum < best_sum or loads[label] + weight > capacities[label if own_capacity else 0]:
                    continue
                else:
                    label_hash = _mixed(np.uint64(label) * _GOLDEN + np.uint64(node) + seed) >> np.uint64(1)
                if label_sum > best_sum or (label_sum == best_sum and label_hash > best_hash):
                    best, best_sum, best_hash = label, label_sum, label_hash
            chosen[node] = best


@jit()
def move_nodes(subset, num_subsets, chosen, node_weights, capacities, labels, loads):  # type: ignore[no-untyped-def]
    """Give the nodes of a subset their chosen labels while there is room; returns how many moved."""
    num_moved = 0
    own_capacity = len(capacities) > 1
    for node in range(subset, len(labels), num_subsets):
        label, before = chosen[node], labels[node]
        if label != before:
            weight = node_weights[node]
            if loads[label] + weight <= capacities[label if own_capacity else 0]:
                loads[label] += weight
                loads[before] -= weight
                labels[node] = label
                num_moved += 1
    return num_moved


@jit(parallel=True)
def merge_arcs(  # type: ignore[no-untyped-def]
    bounds, members, offsets, indptr, indices, weights, parts, labels, starts, places, out_indices, out_weights, counts
):
    """The arcs between clusters, those between the same two added up: row ``c`` from ``starts[c]``, ``counts[c]`` long.

    ``places`` holds a row of -1 for each task, as long as there are clusters.
    """
    weighted, divided = len(weights) > 0, len(parts) > 0
    for task in numba.prange(len(bounds) - 1):
        place_of = places[task]
        for cluster in range(bounds[task], bounds[task + 1]):
            start = starts[cluster]
            end = start
            for place in range(offsets[cluster], offsets[cluster + 1]):
                node = members[place]
                for k in range(indptr[node], indptr[node + 1]):
                    neighbour = indices[k]
                    other = labels[neighbour]
                    if other == cluster or (divided and parts[neighbour] != parts[node]):
                        continue
                    slot = place_of[other]
                    if slot < start:  # left there by an earlier cluster, whose rows lie before this one's
                        slot = end
                        place_of[other] = slot
                        out_indices[slot] = other
                        out_weights[slot] = 0
                        end += 1
                    out_weights[slot] += weights[k] if weighted else 1
            counts[cluster] = end - start


@jit()
def count_keys(keys, counts):  # type: ignore[no-untyped-def]
    """Adds to ``counts[k]`` how often ``k`` occurs; ``np.bincount`` would first copy 32-bit keys to 64 bits."""
    for place in range(len(keys)):
        counts[keys[place]] += 1


@jit()
def counting_sort(keys, next_slot, out):  # type: ignore[no-untyped-def]
    """Places of the keys grouped by key, earliest first; ``next_slot`` starts as where each group begins."""
    for place in range(len(keys)):
        slot = next_slot[keys[place]]
        out[slot] = place
        next_slot[keys[place]] = slot + 1


@jit(parallel=True)
def gather_rows(bounds, order, indptr, starts, entries, out):  # type: ignore[no-untyped-def]
    """Row ``i`` of ``out``, from ``starts[i]``, is row ``order[i]`` of ``entries``; ``bounds`` splits the rows."""
    for task in numba.prange(len(bounds) - 1):
        for row in range(bounds[task], bounds[task + 1]):
            source, target = indptr[order[row]], starts[row]
            for k in range(starts[row + 1] - target):
                out[target + k] = entries[source + k]


@jit(parallel=True)
def near_arcs(bounds, indptr, indices, parts, position, window, counts):  # type: ignore[no-untyped-def]
    """Per task, arcs inside a part, and those of them whose ends lie less than ``window`` positions apart."""
    divided = len(parts) > 0
    for task in numba.prange(len(bounds) - 1):
        inside = near = 0
        for node in range(bounds[task], bounds[task + 1]):
            here = position[node]
            for k in range(indptr[node], indptr[node + 1]):
                neighbour = indices[k]
                if divided and parts[neighbour] != parts[node]:
                    continue
                inside += 1
                if abs(position[neighbour] - here) < window:
                    near += 1
        counts[task, 0] = inside
        counts[task, 1] = near


@jit(parallel=True)
def fingerprints(bounds, src, dst, sums):  # type: ignore[no-untyped-def]
    """Per task, the sums of a 64-bit hash over the arcs and over the arcs turned round, modulo ``2^64``."""
    for task in numba.prange(len(bounds) - 1):
        forth = back = np.uint64(0)
        for k in range(bounds[task], bounds[task + 1]):
            u, v = _mixed(np.uint64(src[k]) + _GOLDEN), _mixed(np.uint64(dst[k]) + _GOLDEN)
            forth += _mixed(u * np.uint64(3) + v)
            back += _mixed(v * np.uint64(3) + u)
        sums[task, 0] = forth
        sums[task, 1] = back


@jit()
def join_lists(indptr, indices, src, dst, starts, next_slot, out):  # type: ignore[no-untyped-def]
    """Rows of ``indices`` followed by the targets of each node's out-arcs; ``next_slot`` starts after the former."""
    for node in range(len(indptr) - 1):
        for k in range(indptr[node + 1] - indptr[node]):
            out[starts[node] + k] = indices[indptr[node] + k]
    for edge in range(len(src)):
        slot = next_slot[src[edge]]
        out[slot] = dst[edge]
        next_slot[src[edge]] = slot + 1
