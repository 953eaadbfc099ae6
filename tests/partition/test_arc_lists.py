"""Neighbour lists are those of SciPy's sparse matrices, whatever the arcs and the number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from nugnn.datasets.synthetic import products_like
from nugnn.partition import metis
from nugnn.partition.arc_lists import distinct_sources, neighbours_both_ways


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def arcs(num_nodes: int, num_arcs: int, seed: int, kind: type) -> tuple[np.ndarray, np.ndarray]:
    """With loops, parallel arcs, both ways of pairs, hubs, and nodes without any."""
    rng = np.random.default_rng(seed)
    src = (rng.random(num_arcs) ** 2 * num_nodes).astype(kind)
    dst = rng.integers(0, num_nodes, num_arcs).astype(kind)
    return np.concatenate([src, dst[::3]]), np.concatenate([dst, src[::3]])


def check_both_ways(num_nodes: int, src: np.ndarray, dst: np.ndarray) -> None:
    """Against the definition: the sum of the matrix of arcs and its transpose, without the diagonal."""
    found = neighbours_both_ways(num_nodes, src, dst)
    off = src != dst
    ones = np.ones(int(off.sum()), np.int64)
    one_way = sparse.csr_array((ones, (src[off], dst[off])), shape=(num_nodes, num_nodes))
    both = sparse.csr_array(one_way + one_way.T)
    both.sort_indices()
    for name, expected in (("indptr", both.indptr), ("indices", both.indices), ("weights", both.data)):
        assert np.array_equal(getattr(found, name), expected), name
    assert found.indptr.dtype == found.indices.dtype == found.weights.dtype == np.int32
    assert found.num_merged == len(ones) - one_way.nnz


def check_sources(num_nodes: int, src: np.ndarray, dst: np.ndarray) -> None:
    found = distinct_sources(num_nodes, src, dst)
    off = src != dst
    ones = np.ones(int(off.sum()), np.int64)
    expected = sparse.csr_array((ones, (dst[off], src[off])), shape=(num_nodes, num_nodes))
    assert np.array_equal(found.indptr, expected.indptr) and np.array_equal(found.indices, expected.indices)
    assert found.num_merged == len(ones) - expected.nnz and not len(found.weights)


@settings(max_examples=60)
@given(
    num_nodes=st.integers(1, 60),
    num_arcs=st.integers(0, 400),
    seed=st.integers(0, 99),
    order=st.sampled_from(["any", "src", "dst"]),
)
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_both_ways_are_the_sum_of_the_matrix_and_its_transpose(
    kind: type, num_nodes: int, num_arcs: int, seed: int, order: str
) -> None:
    src, dst = arcs(num_nodes, num_arcs, seed, kind)
    if order != "any":
        places = np.argsort(src if order == "src" else dst, kind="stable")
        src, dst = src[places], dst[places]
    check_both_ways(num_nodes, src, dst)
    check_sources(num_nodes, src, dst)


def test_it_is_so_on_any_number_of_threads(threads: int) -> None:
    check_both_ways(500, *arcs(500, 40_000, 0, np.int64))  # so many arcs for a node that there is a run for each thread
    graph = products_like(3_000, num_features=1)
    check_both_ways(3_000, graph.src.numpy(), graph.dst.numpy())


def test_distinct_sources_are_the_rows_of_the_transpose(threads: int) -> None:
    check_sources(300, *arcs(300, 9_000, 1, np.int32))


def test_the_partitioners_graph_is_the_same_however_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = arcs(400, 6_000, 2, np.int64)
    by_scipy = metis.symmetric_graph(400, src, dst, None)
    monkeypatch.setattr(metis, "_MANY_ARCS", 0)
    monkeypatch.setattr(metis.sparse.csr_array, "__add__", None)  # SciPy's way would fail
    by_lists = metis.symmetric_graph(400, src, dst, None)
    assert by_lists.num_merged == by_scipy.num_merged > 0
    for name in ("indptr", "indices", "data"):
        assert np.array_equal(getattr(by_lists.adjacency, name), getattr(by_scipy.adjacency, name)), name
