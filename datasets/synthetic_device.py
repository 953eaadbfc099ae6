"""The generator of :mod:`nugnn.datasets.synthetic` on torch tensors: the same graph, made where it is used.

Runs on any device of torch, the CPU included, which is how its tests compare it with the numpy path bit for bit. At
full size on a GPU it keeps edges as int32, hashes in chunks and sorts the arcs range by range, so that generating
takes a few times the memory of the graph's own edges and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nugnn.datasets.counter_hash import below_tensor, counter_hash_tensor, high_word, unsigned_order
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.synthetic_recipe import MAIN_CLASS_SHARE, MIXED, PRODUCTS, SIDE_CLASSES, Layout, Recipe

FAMILIES = {family.name: family for family in (PRODUCTS, MIXED)}
_CHUNK = {"cpu": 1 << 18}
_CHUNK_ELSEWHERE = 1 << 24
"""Hashes at a time: 128 MiB for each of a few temporaries, enough to fill a GPU."""
_SORTED_AT_A_TIME = 1 << 25


@dataclass(frozen=True, eq=False)
class DeviceGraph:
    """A synthetic graph on its device: what benchmarks need, without the host's checks and copies.

    The graph is symmetric, so in- and out-edges of a node are the same lists and one CSR is its own transpose up to
    the numbering of edges.

    Args:
        name: Its family.
        num_nodes: N.
        indptr: ``(N + 1,)`` int64.
        indices: ``(E,)`` int32, the neighbours of each node, ascending.
        features: ``(N, F)`` float32.
        labels: ``(N,)`` int64.
        num_classes: C.
        train_nodes: Ids, ascending, as the next two.
        val_nodes: Ids.
        test_nodes: Ids.
    """

    name: str
    num_nodes: int
    indptr: Tensor
    indices: Tensor
    features: Tensor
    labels: Tensor
    num_classes: int
    train_nodes: Tensor
    val_nodes: Tensor
    test_nodes: Tensor

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @property
    def degrees(self) -> Tensor:
        """``(N,)`` int64."""
        return self.indptr.diff()

    def renumbered(self, new_ids: Tensor) -> DeviceGraph:
        """The same graph with node ``v`` called ``new_ids[v]``, a permutation ``(N,)`` int64."""
        old_ids = torch.empty_like(new_ids)
        old_ids[new_ids] = torch.arange(self.num_nodes, device=new_ids.device)
        nodes = torch.arange(self.num_nodes, device=new_ids.device, dtype=torch.int32)
        src = new_ids.int()[torch.repeat_interleave(nodes, self.degrees)]
        indptr, indices = _grouped_by_source(self.num_nodes, src, new_ids.int()[self.indices])
        nodes_of = {name: new_ids[getattr(self, name)].sort().values for name in _SETS}
        return DeviceGraph(
            self.name, self.num_nodes, indptr, indices, self.features[old_ids], self.labels[old_ids],
            self.num_classes, **nodes_of,
        )  # fmt: skip

    def to_host(self) -> GraphData:
        """As :class:`GraphData`, edges ordered by (src, dst) in int64."""
        indptr, indices = self.indptr.cpu(), self.indices.cpu()
        return GraphData(
            name=self.name,
            num_nodes=self.num_nodes,
            src=torch.repeat_interleave(torch.arange(self.num_nodes), indptr.diff()),
            dst=indices.long(),
            features=self.features.cpu(),
            labels=self.labels.cpu(),
            num_classes=self.num_classes,
            **{name: getattr(self, name).cpu() for name in _SETS},
        )


_SETS = ("train_nodes", "val_nodes", "test_nodes")


def device_graph(
    family: Literal["products-like", "mixed-like"],
    num_nodes: int,
    num_arcs: int | None = None,
    seed: int = 0,
    *,
    num_features: int = 100,
    num_classes: int = 47,
    device: torch.device | str = "cuda",
) -> DeviceGraph:
    """The graph of :func:`nugnn.datasets.products_like` or ``mixed_like``, bit for bit, made on ``device``.

    Raises:
        ValueError: Counts out of range, or more arcs than the communities can hold.
    """
    recipe = Recipe(FAMILIES[family], num_nodes, num_arcs, seed, num_features, num_classes)
    return generate_on_device(recipe, torch.device(device))


def generate_on_device(recipe: Recipe, device: torch.device) -> DeviceGraph:
    """The graph of a recipe, on ``device``."""
    num_nodes = recipe.num_nodes
    ids = _node_ids(recipe, device)
    stubs = _Stubs(recipe, device)
    inside, across = (stubs.distinct_pairs(stream) for stream in ("inside", "across"))
    del stubs
    keys = torch.cat([inside, across])
    del inside, across
    # positions to ids chunk by chunk, and both ends as int32: at full size the pairs would take 1 GB otherwise
    u, v = (torch.empty(len(keys), dtype=torch.int32, device=device) for _ in range(2))
    for low in range(0, len(keys), _chunk_of(device)):
        some = keys[low : low + _chunk_of(device)]
        first = some // num_nodes
        u[low : low + len(some)] = ids[first]
        v[low : low + len(some)] = ids[some - first * num_nodes]
    del keys
    indptr, indices = _grouped_by_source(num_nodes, torch.cat([u, v]), torch.cat([v, u]))
    del u, v
    labels = torch.empty(num_nodes, dtype=torch.int64, device=device)
    labels[ids.long()] = _labels(recipe, device)
    train, val, test = _split(recipe, device)
    return DeviceGraph(
        recipe.family.name, num_nodes, indptr, indices, _features(recipe, labels), labels, recipe.num_classes,
        train.sort().values, val.sort().values, test.sort().values,
    )  # fmt: skip


def _chunk_of(device: torch.device) -> int:
    return _CHUNK.get(device.type, _CHUNK_ELSEWHERE)


def _communities_of(layout: Layout, positions: Tensor) -> Tensor:
    return positions * layout.num_communities // layout.num_nodes


def _hashed(recipe: Recipe, stream: str, device: torch.device) -> Tensor:
    """Bits of each position or node."""
    return counter_hash_tensor(recipe.seed, stream, torch.arange(recipe.num_nodes, device=device))


def _node_ids(recipe: Recipe, device: torch.device) -> Tensor:
    """Shuffled id of each position, int32."""
    order = torch.argsort(unsigned_order(_hashed(recipe, "id", device)), stable=True)
    ids = torch.empty(recipe.num_nodes, dtype=torch.int32, device=device)
    ids[order] = torch.arange(recipe.num_nodes, dtype=torch.int32, device=device)
    return ids


class _Stubs:
    """Each position as often as its weight, in order of position, so a community's stubs are contiguous."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        layout = recipe.layout
        positions = torch.arange(layout.num_nodes, dtype=torch.int32, device=device)
        thresholds = torch.from_numpy(layout.weight_thresholds).to(device)
        uniform = high_word(_hashed(recipe, "weight", device))
        # the thresholds descend, and searchsorted wants them ascending
        weights = 1 + torch.searchsorted(-thresholds, -uniform, right=False)
        self._stubs = torch.repeat_interleave(positions, weights)
        ends = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
        offsets = ends[torch.from_numpy(layout.starts).to(device)]
        self._first, self._count = offsets[:-1], offsets.diff()

    def distinct_pairs(self, stream: str) -> Tensor:
        """Keys ``u * N + v`` of the first distinct pairs ``u < v`` of a stream, in order of draw; int64."""
        recipe = self._recipe
        wanted = recipe.wanted[stream]
        keys = torch.empty(0, dtype=torch.int64, device=self._device)
        drawn = 0
        while recipe.may_draw(stream, drawn):
            step = recipe.next_draws(stream, len(keys), drawn)
            keys = _first_occurrences(torch.cat([keys, self._draw(stream, drawn, drawn + step)]))
            drawn += step
            if len(keys) >= wanted:
                return keys[:wanted].clone()
        raise recipe.cannot_hold(stream, len(keys), drawn)

    def _draw(self, stream: str, start: int, stop: int) -> Tensor:
        """Keys of the draws ``[start, stop)`` that are allowed."""
        layout, seed = self._recipe.layout, self._recipe.seed
        parts = []
        for low in range(start, stop, _chunk_of(self._device)):
            draws = torch.arange(low, min(low + _chunk_of(self._device), stop), device=self._device)
            u = self._stubs[below_tensor(counter_hash_tensor(seed, f"{stream} u", draws), len(self._stubs))].long()
            other = counter_hash_tensor(seed, f"{stream} v", draws)
            community = _communities_of(layout, u)
            if stream == "inside":
                v = self._stubs[self._first[community] + below_tensor(other, self._count[community])].long()
                allowed = u != v
            else:
                v = self._stubs[below_tensor(other, len(self._stubs))].long()
                allowed = community != _communities_of(layout, v)
            parts.append((torch.minimum(u, v) * layout.num_nodes + torch.maximum(u, v))[allowed])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=self._device)


def _first_occurrences(keys: Tensor) -> Tensor:
    """The distinct keys in order of their first place."""
    in_order, places = keys.sort(stable=True)
    is_first = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
    torch.ne(in_order[1:], in_order[:-1], out=is_first[1:])
    del in_order
    # a mask over places instead of a second sort
    kept = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
    kept[places[is_first]] = True
    return keys[kept]


def _grouped_by_source(num_nodes: int, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    """CSR of arcs in int32, neighbours ascending: ``indptr`` int64 and ``indices`` int32.

    Sources are taken range by range, so the 64-bit sort keys exist for a part of the arcs at a time.
    """
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64, device=src.device)
    torch.cumsum(torch.bincount(src, minlength=num_nodes), 0, out=indptr[1:])
    indices = torch.empty(len(src), dtype=torch.int32, device=src.device)
    num_ranges = -(-len(src) // _SORTED_AT_A_TIME)
    bounds = [num_nodes * number // num_ranges for number in range(num_ranges + 1)]
    for low, high, begin, end in zip(
        bounds[:-1], bounds[1:], indptr[bounds[:-1]].tolist(), indptr[bounds[1:]].tolist(), strict=True
    ):
        mine = (src >= low) & (src < high)
        keys = src[mine].long() * num_nodes + dst[mine]
        indices[begin:end] = keys.sort().values % num_nodes
    return indptr, indices


def _labels(recipe: Recipe, device: torch.device) -> Tensor:
    """Label of each position."""
    community = _communities_of(recipe.layout, torch.arange(recipe.num_nodes, device=device))
    side = below_tensor(_hashed(recipe, "side", device), SIDE_CLASSES)
    side_bits = counter_hash_tensor(recipe.seed, "side class", community * SIDE_CLASSES + side)
    is_main = high_word(_hashed(recipe, "label", device)) < int(MAIN_CLASS_SHARE * 2**32)
    return torch.where(is_main, community % recipe.num_classes, below_tensor(side_bits, recipe.num_classes))


def _features(recipe: Recipe, labels: Tensor) -> Tensor:
    num_features, num_classes, device = recipe.num_features, recipe.num_classes, labels.device
    counters = torch.arange(num_classes * num_features, device=device)
    # an arithmetic shift rounds down, as // does
    means = (_noise(counter_hash_tensor(recipe.seed, "mean", counters)) * recipe.family.signal) >> 8
    means = means.reshape(num_classes, num_features)
    features = torch.empty(len(labels), num_features, dtype=torch.float32, device=device)
    rows = max(1, _chunk_of(device) // num_features)
    for start in range(0, len(labels), rows):
        y = labels[start : start + rows]
        counters = torch.arange(start * num_features, (start + len(y)) * num_features, device=device)
        noise = _noise(counter_hash_tensor(recipe.seed, "noise", counters)).reshape(len(y), num_features)
        # exact: integers below 2^24 times a power of two
        features[start : start + rows] = (noise + means[y]).float() * 2.0**-15
    return features


def _noise(bits: Tensor) -> Tensor:
    """Sum of the four 16-bit fields, centred."""
    total = bits & 0xFFFF
    for shift in (16, 32, 48):
        total += (bits >> shift) & 0xFFFF
    return total - 2 * 0xFFFF


def _split(recipe: Recipe, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    order = torch.argsort(unsigned_order(_hashed(recipe, "split", device)), stable=True)
    num_train, num_val = recipe.split_sizes
    return order[:num_train], order[num_train : num_train + num_val], order[num_train + num_val :]
