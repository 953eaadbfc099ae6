"""Benchmark graphs at any scale: degree-corrected block models shaped like ogbn-products.

Everything is integer arithmetic on :mod:`nugnn.datasets.counter_hash`, features included, so a seed gives the same
graph on every machine, and a GPU twin can reproduce it bit for bit. The recipe, for N nodes and M undirected edges:

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

import math
from dataclasses import dataclass

import numpy as np
import torch

from nugnn.datasets.counter_hash import below, counter_hash
from nugnn.datasets.graph_data import GraphData

FULL_NODES = 2_449_029
FULL_ARCS = 123_718_280
_FULL_COMMUNITIES = 1_880
_FEWEST_COMMUNITIES = 16
_FEWEST_NODES = 4 * _FEWEST_COMMUNITIES
_MOST_NODES = 2**28
"""The stubs, about 13 for each node, are picked with 32 bits."""
_LARGEST_WEIGHT = 3_000
_MAIN_CLASS_SHARE = 0.7
_SIDE_CLASSES = 3
_MOST_DRAWS_PER_EDGE = 16
"""More than a graph that its communities can well hold needs, about 1.5."""
_CHUNK = 1 << 18
"""Hashes at a time where there are many: fits the cache."""


@dataclass(frozen=True)
class _Family:
    name: str
    inside_share: float
    """Of the edges, how many join nodes of one community."""
    signal: int
    """Spread of the class means in 256ths of the noise's."""


_PRODUCTS = _Family("products-like", inside_share=0.8, signal=56)
_MIXED = _Family("mixed-like", inside_share=0.3, signal=80)


def products_like(
    num_nodes: int, num_arcs: int | None = None, seed: int = 0, *, num_features: int = 100, num_classes: int = 47
) -> GraphData:
    """A graph shaped like ogbn-products: heavy-tailed degrees, 80 % of the edges inside communities.

    Args:
        num_nodes: N, from 64; ogbn-products has 2,449,029.
        num_arcs: Directed edges, even; default in the proportion of ogbn-products, fewer where communities are small.
        seed: Any integer.
        num_features: F.
        num_classes: C.

    Returns:
        Symmetric, no self-loops, no parallel edges, exactly ``num_arcs`` edges ordered by (src, dst), node ids
        shuffled; float32 features. The communities are not in it; see :func:`planted_communities`.

    Raises:
        ValueError: counts out of range, or more arcs than the communities can hold.
    """
    return _generate(_PRODUCTS, num_nodes, num_arcs, seed, num_features, num_classes)


def mixed_like(
    num_nodes: int, num_arcs: int | None = None, seed: int = 0, *, num_features: int = 100, num_classes: int = 47
) -> GraphData:
    """The less kind benchmark graph: as :func:`products_like`, but 30 % of the edges inside communities."""
    return _generate(_MIXED, num_nodes, num_arcs, seed, num_features, num_classes)


def planted_communities(num_nodes: int, seed: int = 0) -> torch.Tensor:
    """Community of each node id of a graph made with these arguments, ``(N,)`` int64: for tests and reports only."""
    layout = _Layout(num_nodes)
    communities = np.empty(num_nodes, dtype=np.int64)
    communities[_node_ids(num_nodes, seed)] = layout.community_of(np.arange(num_nodes))
    return torch.from_numpy(communities)


@dataclass(frozen=True)
class _Layout:
    """Positions in communities, a pure function of the number of nodes."""

    num_nodes: int

    @property
    def num_communities(self) -> int:
        return max(_FEWEST_COMMUNITIES, round(_FULL_COMMUNITIES * self.num_nodes / FULL_NODES))

    @property
    def largest_weight(self) -> int:
        """3,000 at full size; for smaller communities the same multiple of their size."""
        scaled = _LARGEST_WEIGHT * self.num_nodes * _FULL_COMMUNITIES // (FULL_NODES * self.num_communities)
        return min(_LARGEST_WEIGHT, max(2, scaled))

    @property
    def starts(self) -> np.ndarray:
        """First position of each community, and N at the end."""
        communities = np.arange(self.num_communities + 1)
        return -(-communities * self.num_nodes // self.num_communities)

    def community_of(self, positions: np.ndarray) -> np.ndarray:
        return positions * self.num_communities // self.num_nodes


def _generate(
    family: _Family,
    num_nodes: int,
    num_arcs: int | None,
    seed: int,
    num_features: int,
    num_classes: int,
) -> GraphData:
    name, layout = family.name, _Layout(num_nodes)
    if not _FEWEST_NODES <= num_nodes <= _MOST_NODES:
        raise ValueError(f"{name}: {num_nodes} nodes; it takes {_FEWEST_NODES} to {_MOST_NODES}")
    if num_features < 1 or num_classes < 1:
        raise ValueError(f"{name}: {num_features} features and {num_classes} classes; both have to be at least 1")
    num_pairs = _default_pairs(layout) if num_arcs is None else num_arcs // 2
    if num_arcs is not None and (num_arcs < 2 or num_arcs % 2):
        raise ValueError(f"{name}: {num_arcs} arcs; each edge is two arcs, so the number has to be even and positive")
    num_inside = round(family.inside_share * num_pairs)
    stubs = _Stubs(name, layout, seed)
    u, v = (
        np.concatenate(both)
        for both in zip(
            stubs.distinct_pairs("inside", num_inside),
            stubs.distinct_pairs("across", num_pairs - num_inside),
            strict=True,
        )
    )
    ids = _node_ids(num_nodes, seed)
    src, dst = _both_directions(num_nodes, ids[u], ids[v])
    labels = np.empty(num_nodes, dtype=np.int64)
    labels[ids] = _labels(layout, seed, num_classes)
    train, val, test = _split(num_nodes, seed)
    return GraphData(
        name=name,
        num_nodes=num_nodes,
        src=torch.from_numpy(src),
        dst=torch.from_numpy(dst),
        features=torch.from_numpy(_features(seed, labels, num_features, num_classes, family.signal)),
        labels=torch.from_numpy(labels),
        num_classes=num_classes,
        train_nodes=torch.from_numpy(train),
        val_nodes=torch.from_numpy(val),
        test_nodes=torch.from_numpy(test),
    )


def _default_pairs(layout: _Layout) -> int:
    """Edges in the proportion of ogbn-products; at most as many as a sixteenth of the pairs inside communities."""
    size = layout.num_nodes // layout.num_communities
    most = layout.num_communities * size * (size - 1) // 2 // 16
    return int(min(FULL_ARCS / 2 / FULL_NODES * layout.num_nodes, most))


class _Stubs:
    """Each position as often as its weight, in order of position, so a community's stubs are contiguous."""

    def __init__(self, name: str, layout: _Layout, seed: int) -> None:
        self._name = name
        self._layout = layout
        self._seed = seed
        positions = np.arange(layout.num_nodes, dtype=np.int64)
        weights = _weights(counter_hash(seed, "weight", positions), layout.largest_weight)
        self._stubs = np.repeat(positions, weights)
        offsets = np.concatenate([[0], np.cumsum(weights)])[layout.starts]
        self._first, self._count = offsets[:-1], np.diff(offsets)

    def distinct_pairs(self, stream: str, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        """The first ``wanted`` distinct pairs ``u < v`` of a stream, as two arrays of positions in order of draw."""
        num_nodes = self._layout.num_nodes
        keys = np.empty(0, dtype=np.int64)
        drawn = 0
        while drawn < _MOST_DRAWS_PER_EDGE * wanted + 64 and wanted <= self._num_possible(stream):
            # as many as are missing and some to spare, more where many repeat: the result does not depend on it
            step = max(wanted - len(keys) + wanted // 8 + 64, drawn // 2)
            keys = _first_occurrences(np.concatenate([keys, self._draw(stream, drawn, drawn + step)]))
            drawn += step
            if len(keys) >= wanted:
                return keys[:wanted] // num_nodes, keys[:wanted] % num_nodes
        raise ValueError(
            f"{self._name}: {num_nodes} nodes in {self._layout.num_communities} communities cannot hold {wanted} edges "
            f"{stream} communities: {drawn} draws gave {len(keys)} different ones; ask for fewer arcs or more nodes"
        )

    def _num_possible(self, stream: str) -> int:
        num_nodes = self._layout.num_nodes
        inside = int(sum(size * (size - 1) // 2 for size in np.diff(self._layout.starts).tolist()))
        return inside if stream == "inside" else num_nodes * (num_nodes - 1) // 2 - inside

    def _draw(self, stream: str, start: int, stop: int) -> np.ndarray:
        """Keys ``min * N + max`` of the draws ``[start, stop)`` that are allowed."""
        parts = []
        for low in range(start, stop, _CHUNK):
            draws = np.arange(low, min(low + _CHUNK, stop))
            u = self._stubs[below(counter_hash(self._seed, f"{stream} u", draws), len(self._stubs))]
            other = counter_hash(self._seed, f"{stream} v", draws)
            community = self._layout.community_of(u)
            if stream == "inside":
                v = self._stubs[self._first[community] + below(other, self._count[community])]
                allowed = u != v
            else:
                v = self._stubs[below(other, len(self._stubs))]
                allowed = community != self._layout.community_of(v)
            parts.append((np.minimum(u, v) * self._layout.num_nodes + np.maximum(u, v))[allowed])
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _weights(bits: np.ndarray, largest: int) -> np.ndarray:
    """Integer weights with ``P(weight >= k) = k^-0.9`` for k up to ``largest``."""
    thresholds = np.array([_threshold(k) for k in range(2, largest + 1)], dtype=np.int64)
    uniform = (bits >> np.uint64(32)).astype(np.int64)
    return 1 + np.searchsorted(-thresholds, -uniform, side="left")


def _threshold(k: int) -> int:
    """``floor(2^32 * k^-0.9)`` exactly, whatever the machine's ``pow``: the largest t with ``t^10 * k^9 <= 2^320``."""
    t = math.floor(2**32 * k**-0.9)
    while (t + 1) ** 10 * k**9 <= 2**320:
        t += 1
    while t**10 * k**9 > 2**320:
        t -= 1
    return t


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


def _labels(layout: _Layout, seed: int, num_classes: int) -> np.ndarray:
    """Label of each position."""
    positions = np.arange(layout.num_nodes)
    community = layout.community_of(positions)
    side = below(counter_hash(seed, "side", positions), _SIDE_CLASSES)
    side_class = below(counter_hash(seed, "side class", community * _SIDE_CLASSES + side), num_classes)
    is_main = (counter_hash(seed, "label", positions) >> np.uint64(32)) < np.uint64(int(_MAIN_CLASS_SHARE * 2**32))
    return np.where(is_main, community % num_classes, side_class)


def _features(seed: int, labels: np.ndarray, num_features: int, num_classes: int, signal: int) -> np.ndarray:
    means = _noise(counter_hash(seed, "mean", np.arange(num_classes * num_features))) * signal // 256
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


def _split(num_nodes: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.argsort(counter_hash(seed, "split", np.arange(num_nodes)), kind="stable")
    num_train, num_val = num_nodes * 8 // 100, num_nodes * 2 // 100
    return order[:num_train], order[num_train : num_train + num_val], order[num_train + num_val :]
