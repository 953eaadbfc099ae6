"""Synthetic benchmark graphs: bit-equal to the recipe in the module's docstring, and hard enough to train on."""

import nugnn  # noqa: F401  # lets dgl import under this torch

# isort: split
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.datasets import mixed_like, planted_communities, products_like
from nugnn.datasets.counter_hash import counter_hash
from nugnn.datasets.synthetic import _first_occurrences
from nugnn.datasets.synthetic_recipe import weight_threshold

FAMILIES = {"products-like": (products_like, 0.8, 56), "mixed-like": (mixed_like, 0.3, 80)}


def recipe(family, num_nodes, num_arcs, seed, num_features, num_classes):
    """The docstring's six steps, one number at a time, for graphs of 16 communities."""
    _, inside_share, signal = FAMILIES[family]

    def bits(stream, counter):
        return int(counter_hash(seed, stream, np.array([counter]))[0])

    def below(word, limit):
        return ((word >> 32) * limit) >> 32

    def noise(word):
        return sum((word >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 131070

    cap = min(3000, max(2, 3000 * num_nodes * 1880 // (2449029 * 16)))
    community = [p * 16 // num_nodes for p in range(num_nodes)]
    tail = [bits("weight", p) >> 32 for p in range(num_nodes)]
    weights = [max(k for k in range(1, cap + 1) if t < 2**32 * k**-0.9) for t in tail]
    stubs = [p for p in range(num_nodes) for _ in range(weights[p])]
    pairs = []
    num_inside = round(inside_share * (num_arcs // 2))
    for stream, wanted in (("inside", num_inside), ("across", num_arcs // 2 - num_inside)):
        found, i = [], 0
        while len(found) < wanted:
            u = stubs[below(bits(f"{stream} u", i), len(stubs))]
            pool = [p for p in stubs if community[p] == community[u]] if stream == "inside" else stubs
            v = pool[below(bits(f"{stream} v", i), len(pool))]
            i += 1
            allowed = u != v and (stream == "inside" or community[u] != community[v])
            if allowed and {u, v} not in found:
                found.append({u, v})
        pairs += found
    by_rank = sorted(range(num_nodes), key=lambda p: (bits("id", p), p))
    ids = {p: rank for rank, p in enumerate(by_rank)}
    arcs = sorted((ids[a], ids[b]) for u, v in map(tuple, pairs) for a, b in ((u, v), (v, u)))
    labels = [0] * num_nodes
    for p in range(num_nodes):
        c = community[p]
        if bits("label", p) >> 32 < int(0.7 * 2**32):
            labels[ids[p]] = c % num_classes
        else:
            labels[ids[p]] = below(bits("side class", 3 * c + below(bits("side", p), 3)), num_classes)
    features = [
        [
            (
                noise(bits("noise", v * num_features + f))
                + noise(bits("mean", labels[v] * num_features + f)) * signal // 256
            )
            / 2**15
            for f in range(num_features)
        ]
        for v in range(num_nodes)
    ]
    split = sorted(range(num_nodes), key=lambda v: (bits("split", v), v))
    num_train, num_val = num_nodes * 8 // 100, num_nodes * 2 // 100
    parts = split[:num_train], split[num_train : num_train + num_val], split[num_train + num_val :]
    return arcs, labels, features, [sorted(part) for part in parts], {ids[p]: community[p] for p in ids}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 7])
def test_graph_is_bit_equal_to_the_documented_recipe(family, seed):
    make = FAMILIES[family][0]
    data = make(150, 260, seed, num_features=5, num_classes=6)
    arcs, labels, features, parts, communities = recipe(family, 150, 260, seed, 5, 6)
    assert list(zip(data.src.tolist(), data.dst.tolist(), strict=True)) == arcs
    assert data.labels.tolist() == labels
    assert data.features.tolist() == features
    assert [nodes.tolist() for nodes in data.split] == parts
    assert planted_communities(150, seed).tolist() == [communities[v] for v in range(150)]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(num_nodes=st.integers(64, 3000), seed=st.integers(-5, 2**65), arcs_per_node=st.integers(1, 8))
def test_graph_is_simple_symmetric_ordered_and_has_what_was_asked_for(family, num_nodes, seed, arcs_per_node):
    make, inside_share, _ = FAMILIES[family]
    num_arcs = num_nodes * arcs_per_node // 8 * 2
    data = make(num_nodes, num_arcs, seed, num_features=3, num_classes=5)
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_classes) == (num_nodes, num_arcs, 3, 5)
    assert (data.src != data.dst).all()
    keys = data.src * num_nodes + data.dst
    assert (keys.diff() > 0).all()
    assert torch.equal((data.dst * num_nodes + data.src).sort().values, keys)
    communities = planted_communities(num_nodes, seed)
    num_inside = int((communities[data.src] == communities[data.dst]).sum())
    assert num_inside == 2 * round(inside_share * (num_arcs // 2))
    assert sum(len(nodes) for nodes in data.split) == num_nodes


def test_same_seed_same_graph_other_seed_another():
    one = products_like(500)
    assert products_like(500).content_hash() == one.content_hash()
    assert products_like(500, seed=1).content_hash() != one.content_hash()


@pytest.mark.parametrize("num_nodes", [64, 100, 333, 1000, 4000, 12_000, 20_830])
@pytest.mark.parametrize("family", FAMILIES)
def test_default_number_of_arcs_fits_the_communities(family, num_nodes):
    for seed in range(3):
        FAMILIES[family][0](num_nodes, seed=seed, num_features=1)


def test_ids_are_shuffled_and_communities_are_nowhere_in_the_graph():
    data = products_like(4000)
    communities = planted_communities(4000)
    assert torch.bincount(communities).tolist() == [250] * 16
    assert not data.node_data
    assert not data.edge_data
    neighbours_together = float((communities[1:] == communities[:-1]).float().mean())
    assert abs(neighbours_together - 1 / 16) <= 5 * (1 / 16 / 4000) ** 0.5  # binomial, 5 standard deviations


@given(st.integers(2, 3000))
def test_weight_thresholds_are_exact(k):
    t = weight_threshold(k)
    assert t**10 * k**9 <= 2**320 < (t + 1) ** 10 * k**9


@given(st.lists(st.integers(0, 5)), st.sampled_from([1, 2**50, 2**62 // 5]))
def test_first_occurrences_are_those_of_a_dictionary_for_small_and_large_keys(keys, factor):
    keys = [key * factor for key in keys]
    assert _first_occurrences(np.array(keys, dtype=np.int64)).tolist() == list(dict.fromkeys(keys))


def test_degrees_are_heavy_tailed():
    data = products_like(20_000, 200_000, num_features=1)
    degrees = torch.bincount(data.src, minlength=20_000).double()
    assert degrees.max() >= 50 * degrees.mean()
    assert degrees.median() <= degrees.mean() / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": 63}, "63 nodes; it takes 64 to"),
        ({"num_nodes": 2**28 + 1}, "nodes; it takes 64 to"),
        ({"num_nodes": 100, "num_arcs": 7}, "even and positive"),
        ({"num_nodes": 100, "num_arcs": 0}, "even and positive"),
        ({"num_nodes": 100, "num_arcs": 9000}, "100 nodes in 16 communities cannot hold 3600 edges inside"),
        ({"num_nodes": 100, "num_classes": 0}, "at least 1"),
        ({"num_nodes": 100, "num_features": 0}, "at least 1"),
    ],
)
def test_impossible_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"products-like: .*{message}"):
        products_like(**arguments)


def _accuracy(data, layers, call, epochs=60):
    """Best-validation test accuracy of a two-layer model."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=0.01, weight_decay=5e-4)
    best_val, best_test = 0.0, 0.0
    for epoch in range(epochs):
        hidden = torch.dropout(call(layers[0], data.features).relu(), 0.4, True)
        logits = call(layers[1], hidden)
        loss = torch.nn.functional.cross_entropy(logits[data.train_nodes], data.labels[data.train_nodes])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 5 == 4:
            with torch.no_grad():
                correct = call(layers[1], call(layers[0], data.features).relu()).argmax(dim=1) == data.labels
            val, test = (float(correct[nodes].float().mean()) for nodes in (data.val_nodes, data.test_nodes))
            if val > best_val:
                best_val, best_test = val, test
    return best_test


@pytest.mark.slow
@pytest.mark.parametrize(("family", "margin"), [("products-like", 0.2), ("mixed-like", 0.04)])
def test_graphsage_gets_70_to_85_percent_and_a_model_without_edges_clearly_less(family, margin):
    from dgl.nn import SAGEConv

    data = FAMILIES[family][0](20_000)
    graph = data.to_dgl()
    torch.manual_seed(0)
    sage = [SAGEConv(100, 64, "mean"), SAGEConv(64, 47, "mean")]
    with_edges = _accuracy(data, sage, lambda layer, x: layer(graph, x))
    without = _accuracy(data, [torch.nn.Linear(100, 64), torch.nn.Linear(64, 47)], lambda layer, x: layer(x))
    assert 0.70 <= with_edges <= 0.85
    assert without <= with_edges - margin
