"""Benchmark graphs at any scale: degree-corrected block models shaped like ogbn-products.

Everything is integer arithmetic on :mod:`nugnn.datasets.counter_hash`, features included, so a seed gives the same
graph on every machine and device; :mod:`nugnn.datasets.synthetic_device` is the twin of this module on torch tensors.
The recipe, for N nodes and M undirected edges:

1. Positions 0..N-1 lie in C equal communities: position p in ``p * C // N``. Weight of p: the largest k <= cap with
   ``bits("weight", p) >> 32 < T[k]``, ``T[k] = floor(2^32 * k^-0.9)`` exactly (density exponent 1.9).
   The table of stubs lists each position as often as its weight.
2. Draw i of stream s ("inside" or "across") picks ``u = stubs[below(bits(s + " u", i), len(stubs))]`` and ``v`` alike
   from ``bits(s + " v", i)``: inside from the stubs of u's community, across from all, refused in the same community.
   Self-loops are refused. The first ``round(inside_share * M)`` distinct pairs of "inside" and the first others of
   "across", in order of i, are the edges.
3. Node id of p: its rank by ``(bits("id", p), p)``. Arcs, both directions, are ordered by (src, dst).
4. Label of p in community c: class ``c % num_classes`` if ``bits("label", p) >> 32 < floor(0.7 * 2^32)``, else one of
   three classes ``below(bits("side class", 3c + j), num_classes)``, ``j = below(bits("side", p), 3)``.
5. Feature f of node id v with label y: ``(noise(bits("noise", v * F + f)) + noise(bits("mean", y * F + f)) * S // 256)
   / 2^15``, where ``noise`` is the sum of the four 16-bit fields minus 131070: bell-shaped, standard deviation 37837;
   ``//`` rounds down, S is 56 for products-like and 80 for mixed-like.
6. Split by rank of ``(bits("split", v), v)``: 8 % train, 2 % val, the rest test, as ogbn-products has it.

A node's own features and its neighbours' are each partial evidence of its label, so accuracy stays below 100 %, where
a loss of precision would be invisible.
"""

from __future__ import annotations

import numpy as np
import torch

from nugnn.datasets.counter_hash import below, counter_hash
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.synthetic_recipe import (
    FULL_ARCS,
    FULL_NODES,
    MAIN_CLASS_SHARE,
    MIXED,
    PRODUCTS,
    SIDE_CLASSES,
    Layout,
    Recipe,
)

__all__ = ["FULL_ARCS", "FULL_NODES", "mixed_like", "planted_communities", "products_like"]

_CHUNK = 1 << 18
"""Hashes at a time where there are many: fits the cache."""


def products_like(
    num_nodes: int,
    num_arcs: int | None = None,
    seed: int = 0,
    *,
    num_features: int = 100,
    num_classes: int = 47,
    device: torch.device | str = "cpu",
) -> GraphData:
    """A graph shaped like ogbn-products: heavy-tailed degrees, 80 % of the edges inside communities.

    Args:
        num_nodes: N, from 64; ogbn-products has 2,449,029.
        num_arcs: Directed edges, even; default in the proportion of ogbn-products, fewer where communities are small.
        seed: Any integer.
        num_features: F.
        num_classes: C.
        device: Where it is computed; the graph is the same and lies on the host.
            :func:`nugnn.datasets.synthetic_device.device_graph` leaves it on the device.

    Returns:
        Symmetric, no self-loops, no parallel edges, exactly ``num_arcs`` edges ordered by (src, dst), node ids
        shuffled; float32 features. The communities are not in it; see :func:`planted_communities`.

    Raises:
        ValueError: counts out of range, or more arcs than the communities can hold.
    """
    return _generate(Recipe(PRODUCTS, num_nodes, num_arcs, seed, num_features, num_classes), torch.device(device))


def mixed_like(
    num_nodes: int,
    num_arcs: int | None = None,
    seed: int = 0,
    *,
    num_features: int = 100,
    num_classes: int = 47,
    device: torch.device | str = "cpu",
) -> GraphData:
    """The less kind benchmark graph: as :func:`products_like`, but 30 % of the edges inside communities."""
    return _generate(Recipe(MIXED, num_nodes, num_arcs, seed, num_features, num_classes), torch.device(device))


def planted_communities(num_nodes: int, seed: int = 0) -> torch.Tensor:
    """Community of each node id of a graph made with these arguments, ``(N,)`` int64: for tests and reports only."""
    communities = np.empty(num_nodes, dtype=np.int64)
    communities[_node_ids(num_nodes, seed)] = _communities_of(Layout(num_nodes), np.arange(num_nodes))
    return torch.from_numpy(communities)


def _generate(recipe: Recipe, device: torch.device) -> GraphData:
    if device.type != "cpu":
        from nugnn.datasets.synthetic_device import generate_on_device

        return generate_on_device(recipe, device).to_host()
    num_nodes, seed = recipe.num_nodes, recipe.seed
    stubs = _Stubs(recipe)
    u, v = (
        np.concatenate(both)
        for both in zip(stubs.distinct_pairs("inside"), stubs.distinct_pairs("across"), strict=True)
    )
    ids = _node_ids(num_nodes, seed)
    src, dst = _both_directions(num_nodes, ids[u], ids[v])
    labels = np.empty(num_nodes, dtype=np.int64)
    labels[ids] = _labels(recipe)
    train, val, test = _split(recipe)
    return GraphData(
        name=recipe.family.name,
        num_nodes=num_nodes,
        src=torch.from_numpy(src),
        dst=torch.from_numpy(dst),
        features=torch.from_numpy(_features(recipe, labels)),
        labels=torch.from_numpy(labels),
        num_classes=recipe.num_classes,
        train_nodes=torch.from_numpy(train),
        val_nodes=torch.from_numpy(val),
        test_nodes=torch.from_numpy(test),
    )


def _communities_of(layout: Layout, positions: np.ndarray) -> np.ndarray:
    return positions * layout.num_communities // layout.num_nodes


class _Stubs:
    """Each position as often as its weight, in order of position, so a community's stubs are contiguous."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        layout = recipe.layout
        positions = np.arange(layout.num_nodes, dtype=np.int64)
        weights = _weights(counter_hash(recipe.seed, "weight", positions), layout.weight_thresholds)
        self._stubs = np.repeat(positions, weights)
        offsets = np.concatenate([[0], np.cumsum(weights)])[layout.starts]
        self._first, self._count = offsets[:-1], np.diff(offsets)

    def distinct_pairs(self, stream: str) -> tuple[np.ndarray, np.ndarray]:
        """The first distinct pairs ``u < v`` of a stream, as two arrays of positions in order of draw."""
        recipe, num_nodes = self._recipe, self._recipe.num_nodes
        wanted = recipe.wanted[stream]
        keys = np.empty(0, dtype=np.int64)
        drawn = 0
        while recipe.may_draw(stream, drawn):
            step = recipe.next_draws(stream, len(keys), drawn)
            keys = _first_occurrences(np.concatenate([keys, self._draw(stream, drawn, drawn + step)]))
            drawn += step
            if len(keys) >= wanted:
                return keys[:wanted] // num_nodes, keys[:wanted] % num_nodes
        raise recipe.cannot_hold(stream, len(keys), drawn)

    def _draw(self, stream: str, start: int, stop: int) -> np.ndarray:
        """Keys ``min * N + max`` of the draws ``[start, stop)`` that are allowed."""
        layout, seed = self._recipe.layout, self._recipe.seed
        parts = []
        for low in range(start, stop, _CHUNK):
            draws = np.arange(low, min(low + _CHUNK, stop))
            u = self._stubs[below(counter_hash(seed, f"{stream} u", draws), len(self._stubs))]
            other = counter_hash(seed, f"{stream} v", draws)
            community = _communities_of(layout, u)
            if stream == "inside":
                v = self._stubs[self._first[community] + below(other, self._count[community])]
                allowed = u != v
            else:
                v = self._stubs[below(other, len(self._stubs))]
                allowed = community != _communities_of(layout, v)
            parts.append((np.minimum(u, v) * layout.num_nodes + np.maximum(u, v))[allowed])
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _weights(bits: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Integer weights with ``P(weight >= k) = k^-0.9`` for k up to the largest."""
    uniform = (bits >> np.uint64(32)).astype(np.int64)
    return 1 + np.searchsorted(-thresholds, -uniform, side="left")


def _first_occurrences(keys: np.ndarray) -> np.ndarray:
    """The distinct keys in order of their first place."""
    place_bits = len(keys).bit_length()
    if not len(keys) or int(keys.max()).bit_length() + place_bits > 63:
        _, first = np.unique(keys, return_index=True)
        return keys[np.sort(first)]
    # key and place in one word: numpy sorts those ten times as fast as it finds a sorting order
    packed = (keys << place_bits) | np.arange(len(keys))
    packed.sort()
    is_first = np.ones(len(keys), dtype=bool)
    is_first[1:] = (packed[1:] >> place_bits) != (packed[:-1] >> place_bits)
    return keys[np.sort(packed[is_first] & ((1 << place_bits) - 1))]


def _node_ids(num_nodes: int, seed: int) -> np.ndarray:
    """Shuffled id of each position."""
    order = np.argsort(counter_hash(seed, "id", np.arange(num_nodes)), kind="stable")
    ids = np.empty(num_nodes, dtype=np.int64)
    ids[order] = np.arange(num_nodes)
    return ids


def _both_directions(num_nodes: int, u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    keys = np.concatenate([u * num_nodes + v, v * num_nodes + u])
    keys.sort()
    src = keys // num_nodes
    return src, keys - src * num_nodes


def _labels(recipe: Recipe) -> np.ndarray:
    """Label of each position."""
    seed, num_classes = recipe.seed, recipe.num_classes
    positions = np.arange(recipe.num_nodes)
    community = _communities_of(recipe.layout, positions)
    side = below(counter_hash(seed, "side", positions), SIDE_CLASSES)
    side_class = below(counter_hash(seed, "side class", community * SIDE_CLASSES + side), num_classes)
    is_main = (counter_hash(seed, "label", positions) >> np.uint64(32)) < np.uint64(int(MAIN_CLASS_SHARE * 2**32))
    return np.where(is_main, community % num_classes, side_class)


def _features(recipe: Recipe, labels: np.ndarray) -> np.ndarray:
    seed, num_features, num_classes = recipe.seed, recipe.num_features, recipe.num_classes
    means = _noise(counter_hash(seed, "mean", np.arange(num_classes * num_features))) * recipe.family.signal // 256
    means = means.reshape(num_classes, num_features)
    features = np.empty((len(labels), num_features), dtype=np.float32)
    rows = max(1, _CHUNK // num_features)
    for start in range(0, len(labels), rows):
        y = labels[start : start + rows]
        counters = np.arange(start * num_features, (start + len(y)) * num_features)
        noise = _noise(counter_hash(seed, "noise", counters)).reshape(len(y), num_features)
        # exact: integers below 2^24 times a power of two
        features[start : start + rows] = (noise + means[y]).astype(np.float32) * np.float32(2.0**-15)
    return features


def _noise(bits: np.ndarray) -> np.ndarray:
    """Sum of the four 16-bit fields, centred: mean 0, standard deviation 37837, in [-131070, 131070]."""
    field = np.uint64(0xFFFF)
    total = bits & field
    for shift in (16, 32, 48):
        total += (bits >> np.uint64(shift)) & field
    return total.astype(np.int64) - 2 * 0xFFFF


def _split(recipe: Recipe) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.argsort(counter_hash(recipe.seed, "split", np.arange(recipe.num_nodes)), kind="stable")
    num_train, num_val = recipe.split_sizes
    return order[:num_train], order[num_train : num_train + num_val], order[num_train + num_val :]
