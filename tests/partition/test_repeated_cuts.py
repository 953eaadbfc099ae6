"""Clusters are found once for targets after targets; parts meet each of them."""

from __future__ import annotations

import numpy as np
import pytest

from nugnn.datasets.synthetic import products_like
from nugnn.partition import coarse, repeated_cuts
from nugnn.partition.assign import split_graph
from nugnn.partition.balance import Balance, normalise_shares
from nugnn.partition.metis import SymmetricGraph, metis_parts, symmetric_graph
from nugnn.partition.repeated_cuts import RepeatedCuts

NODES = 6_000


@pytest.fixture(autouse=True)
def _small_graphs_are_coarsened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarse, "_FEWEST_CLUSTERS", 60)


@pytest.fixture(scope="module")
def graph() -> SymmetricGraph:
    made = products_like(NODES, num_features=1)
    return symmetric_graph(NODES, made.src.numpy(), made.dst.numpy(), None)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The smallest share of each time that clusters are found."""
    calls: list[float] = []

    def find(graph: SymmetricGraph, balance: Balance, seed: int) -> coarse.Hierarchy:
        calls.append(min(balance.shares))
        return coarse.find_clusters(graph, balance, seed)

    monkeypatch.setattr(repeated_cuts, "find_clusters", find)
    return calls


def balance(*shares: float, weights: np.ndarray | None = None) -> Balance:
    column = np.ones(NODES) if weights is None else weights
    return Balance(column[:, None], normalise_shares(shares), 0.02)


def cut(graph: SymmetricGraph, part: np.ndarray) -> float:
    ends = graph.adjacency.tocoo()
    return float((part[ends.coords[0]] != part[ends.coords[1]]).mean())


def test_the_first_cut_is_that_of_the_partitioner(graph: SymmetricGraph) -> None:
    once, _ = split_graph("clusters", graph, balance(5, 3, 1), 4, [])
    assert np.array_equal(RepeatedCuts(graph, 4).parts("clusters", balance(5, 3, 1), 4, []), once)


def test_clusters_serve_targets_of_other_sizes_and_weights(graph: SymmetricGraph, found: list[float]) -> None:
    cuts = RepeatedCuts(graph, 0)
    by_degree = 1.0 + np.diff(graph.adjacency.indptr)
    targets = [balance(5, 3, 1), balance(1, 1, 1), balance(1, 4, 4), balance(6, 3, 1, weights=by_degree)]
    for number, target in enumerate(targets):
        part = cuts.parts("clusters", target, number, [])
        assert not target.violations(part)
        once, _ = split_graph("clusters", graph, target, number, [])
        assert cut(graph, part) <= 1.15 * cut(graph, once)
    assert found == [pytest.approx(1 / 9)]


def test_smaller_targets_get_smaller_clusters(graph: SymmetricGraph, found: list[float]) -> None:
    cuts = RepeatedCuts(graph, 0)
    for shares in ((1, 1), (3, 1), (5, 1), (1, 1)):  # a quarter is served by clusters for a half, a sixth is not
        assert not balance(*shares).violations(cuts.parts("clusters", balance(*shares), 0, []))
    assert found == [0.5, pytest.approx(1 / 6)]


def test_targets_of_a_few_nodes_leave_clusters_as_large_as_they_are(
    graph: SymmetricGraph, found: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is to hold a node does not make each node a cluster, and METIS cut the whole graph."""
    cut_sizes: list[int] = []

    def parts(graph: SymmetricGraph, balance: Balance, seed: int, notes: list[str]) -> np.ndarray:
        cut_sizes.append(len(balance.node_weights))
        return metis_parts(graph, balance, seed, notes)

    monkeypatch.setattr(coarse, "metis_parts", parts)
    cuts = RepeatedCuts(graph, 0)
    for nodes in (1, 20):
        target = balance(NODES / 2, NODES / 2, nodes)
        part = cuts.parts("clusters", target, 0, [])
        assert not target.violations(part) and abs(int((part == 2).sum()) - nodes) <= 1
        without, _ = split_graph("clusters", graph, balance(1, 1), 0, [])
        assert cut(graph, part) <= 1.15 * cut(graph, without) + nodes / NODES
    assert max(cut_sizes) < NODES / 10 and len(found) == 1
    only_one = balance(NODES, 1, 1)
    assert np.bincount(cuts.parts("clusters", only_one, 0, [])).tolist() == [NODES - 2, 1, 1]


def test_equal_calls_give_equal_parts(graph: SymmetricGraph) -> None:
    one, two = (
        [cuts.parts("clusters", balance(*shares), seed, []) for seed, shares in enumerate(((2, 1), (3, 1), (9, 1)))]
        for cuts in (RepeatedCuts(graph, 3), RepeatedCuts(graph, 3))
    )
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("method", ["metis", "clusters"])
def test_no_edges_and_a_single_part(method: str, found: list[float]) -> None:
    none = np.zeros(0, np.int64)
    cuts = RepeatedCuts(symmetric_graph(NODES, none, none, None), 0)
    assert not balance(2, 1).violations(cuts.parts(method, balance(2, 1), 0, []))  # type: ignore[arg-type]
    assert not cuts.parts(method, balance(1), 0, []).any()  # type: ignore[arg-type]
    assert not found
