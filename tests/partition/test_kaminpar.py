"""KaMinPar: what it is given, what it leaves undone, and what is said where it is not installed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import sparse

from nugnn.partition import assign, kaminpar
from nugnn.partition.assign import partition_nodes
from nugnn.partition.balance import Balance
from nugnn.partition.metis import SymmetricGraph


def cliques(sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Complete graphs of these sizes in a ring, each joined to the next by one edge."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    pairs = [(u, v) for low, high in itertools.pairwise(starts) for u in range(low, high) for v in range(u)
             if v >= low]  # fmt: skip
    pairs += [(int(low), int(starts[(number + 1) % len(sizes)])) for number, low in enumerate(starts[:-1])]
    src, dst = np.array(pairs).T
    return np.concatenate([src, dst]), np.concatenate([dst, src])


def test_without_it_the_user_is_told_before_any_work(monkeypatch):
    monkeypatch.setattr(kaminpar.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(assign, "_measure", None)
    with pytest.raises(ValueError, match="the KaMinPar partitioner is not installed; `pip install kaminpar` adds it"):
        partition_nodes(10, *cliques((5, 5)), [1, 1], method="kaminpar")


def test_unequal_cliques_are_kept_whole():
    pytest.importorskip("kaminpar")
    found = partition_nodes(200, *cliques((100, 60, 40)), [5, 3, 2], method="kaminpar")
    assert found.node_counts == (100, 60, 40)
    assert found.edge_cut == 6
    assert found.method == "kaminpar"


@pytest.mark.parametrize("weighted", [False, True], ids=["unit", "weighted"])
@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "temporary file"])
def test_the_graph_it_reads_is_the_graph_given(weighted, in_memory, monkeypatch):
    native = pytest.importorskip("kaminpar")
    if not in_memory:
        monkeypatch.delattr(kaminpar.os, "memfd_create")
    rng = np.random.default_rng(0)
    half = sparse.random(40, 40, density=0.2, random_state=0, dtype=np.float64)
    half.data = rng.integers(1, 2**33, half.nnz).astype(np.float64) if weighted else np.ones(half.nnz)
    adjacency = sparse.csr_array(sparse.triu(half, 1) + sparse.triu(half, 1).T).astype(np.int64)
    node_weights = rng.integers(1, 2**33, 40) if weighted else None
    seen = []

    class Recorder:
        def __init__(self, threads, context):
            pass

        def compute_partition(self, graph, most):
            nodes = range(graph.n())
            seen.append([dict(graph.neighbors(node)) for node in nodes])
            seen.append([graph.node_weight(node) for node in nodes])
            return [0] * graph.n()

    monkeypatch.setattr(native, "KaMinPar", Recorder)
    kaminpar.call_kaminpar(adjacency, node_weights, adjacency.data if weighted else None, [1, 1], seed=0)
    expected = [
        dict(zip(adjacency.indices[low:high].tolist(), adjacency.data[low:high].tolist(), strict=True))
        for low, high in itertools.pairwise(adjacency.indptr)
    ]
    assert seen[0] == expected
    assert seen[1] == ([1] * 40 if node_weights is None else node_weights.tolist())


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (np.zeros(30, np.int64), "Repaired by moving"),
        (np.zeros(7, np.int64), "KaMinPar returned 7 entries for 30 nodes; discarded"),
        (np.full(30, 5), "KaMinPar returned part 5 for node 0"),
    ],
)
def test_what_it_returns_is_checked_and_repaired(answer, sentence, monkeypatch):
    monkeypatch.setattr(kaminpar, "call_kaminpar", lambda *args, **options: answer)
    src, dst = cliques((10, 10, 10))
    adjacency = sparse.csr_array((np.ones(len(src), np.int64), (src, dst)), shape=(30, 30))
    balance = Balance(np.ones((30, 1)), (0.5, 0.3, 0.2), 0.02)
    notes: list[str] = []
    part = kaminpar.kaminpar_parts(SymmetricGraph(adjacency, 0), balance, 0, notes)
    assert balance.violations(part) == []
    assert any(sentence in note for note in notes)
