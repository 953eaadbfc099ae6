"""Transforms, each against the plain sentence that defines it."""

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets import GraphData, make_undirected, normalize_features, self_loops
from nugnn.datasets.sparse import csr_matrix


def graph_of(num_nodes, edges, dtype=torch.int64, **fields):
    """Edge ``e`` carries ``weight`` e + 2 and ``kind`` [e, -e], so that data can be traced to its edge."""
    src, dst = (torch.tensor([edge[end] for edge in edges], dtype=dtype) for end in (0, 1))
    number = torch.arange(len(edges))
    edge_data = {"weight": number + 2.0, "kind": torch.stack([number, -number], dim=1)}
    return GraphData(name="g", num_nodes=num_nodes, src=src, dst=dst, edge_data=edge_data, **fields)


@st.composite
def graphs(draw):
    num_nodes = draw(st.integers(1, 6))
    ends = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(ends, ends), max_size=14))
    return graph_of(num_nodes, edges, draw(st.sampled_from([torch.int32, torch.int64])))


def edges_of(data):
    return list(zip(data.src.tolist(), data.dst.tolist(), strict=True))


def rows_of(data):
    """(src, dst, weight, kind) of each edge, in order."""
    weights, kinds = data.edge_data["weight"].tolist(), data.edge_data["kind"].tolist()
    return [(*edge, weight, kind) for edge, weight, kind in zip(edges_of(data), weights, kinds, strict=True)]


@given(graphs())
def test_undirected_is_first_occurrences_then_missing_reverses_with_copied_data(data):
    kept = {}
    for u, v, *rest in rows_of(data):
        kept.setdefault((u, v), rest)
    missing = {(v, u): rest for (u, v), rest in kept.items() if (v, u) not in kept}
    expected = [(*edge, *rest) for edge, rest in [*kept.items(), *missing.items()]]
    result = make_undirected(data)
    assert rows_of(result) == expected
    assert result.src.dtype == data.src.dtype
    assert make_undirected(result) is result


def test_datasets_03_self_edge_is_there_once():
    result = make_undirected(graph_of(3, [(0, 1), (1, 2), (2, 2)]))
    assert sorted(edges_of(result)) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 2)]
    assert result.num_edges == 5
    assert torch.bincount(result.dst).tolist() == [1, 2, 2]


@given(graphs())
def test_added_self_loops_are_exactly_one_per_node_and_keep_existing_data(data):
    result = self_loops(data, "add")
    others = [row for row in rows_of(data) if row[0] != row[1]]
    first = {}
    for row in rows_of(data):
        if row[0] == row[1]:
            first.setdefault(row[0], row)
    fresh = [(v, v, 1.0, [0, 0]) for v in range(data.num_nodes) if v not in first]
    kept = [row for row in rows_of(data) if row in others or row is first.get(row[0]) or row == first.get(row[0])]
    assert rows_of(result) == kept + fresh
    assert result.src.dtype == data.src.dtype
    assert self_loops(result, "add") is result


@given(graphs())
def test_removed_self_loops_leave_the_other_edges_in_order(data):
    expected = [row for row in rows_of(data) if row[0] != row[1]]
    assert rows_of(self_loops(data, "remove")) == expected
    assert rows_of(self_loops(self_loops(data, "add"), "remove")) == expected
    assert self_loops(data, "keep") is data


def test_api_01_loops_added_by_user_and_by_option_are_there_once():
    data = graph_of(3, [(0, 1), (1, 1), (2, 0)])
    by_user = self_loops(data, "add")
    by_option = self_loops(by_user, "add")
    assert sorted(edges_of(by_option)) == [(0, 0), (0, 1), (1, 1), (2, 0), (2, 2)]
    assert rows_of(by_option)[1] == (1, 1, 3.0, [1, -1]), "data of the existing loop"
    assert rows_of(self_loops(data, "keep")) == rows_of(data)


FLOATS = st.floats(-(2**60), 2**60, width=32, allow_subnormal=False)


@st.composite
def feature_matrices(draw):
    num_rows, num_columns = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    entries = st.one_of(st.just(0.0), FLOATS)
    row = st.lists(entries, min_size=num_columns, max_size=num_columns)
    return torch.tensor(draw(st.lists(row, min_size=num_rows, max_size=num_rows)))


def with_features(x, train=0):
    labels = torch.zeros(len(x), dtype=torch.int64)
    return graph_of(len(x), [], features=x, labels=labels, train_nodes=torch.arange(train))


def sparse(x, stored_zeros=False):
    mask = torch.ones_like(x, dtype=torch.bool) if stored_zeros else x != 0
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(dim=1).cumsum(0)])
    return csr_matrix(indptr, mask.nonzero()[:, 1], x[mask], tuple(x.shape))


@given(feature_matrices(), st.booleans())
def test_row_norm_makes_absolute_sums_one_and_keeps_zero_rows_and_sparsity(x, stored_zeros):
    result = normalize_features(with_features(x), "row").features
    sums = result.double().abs().sum(dim=1)
    is_zero = (x == 0).all(dim=1)
    assert (result[is_zero] == 0).all()
    # one rounding to float32 per entry, relative 2^-24, or below the normal numbers absolute 2^-150
    assert ((sums[~is_zero] - 1).abs() <= 2**-24 + 7 * 2**-50).all()
    assert (result * x.sign() >= 0).all()
    of_sparse = normalize_features(with_features(sparse(x, stored_zeros)), "row").features
    assert of_sparse.layout == torch.sparse_csr
    assert of_sparse.dtype == torch.float32
    # the float64 sums may differ in their last bits (order of addition), so the quotients by one float32 rounding
    assert torch.allclose(of_sparse.to_dense(), result, rtol=2**-23, atol=2**-149)


GRID = st.integers(-256, 256).map(lambda k: k / 16)


@given(st.lists(st.lists(GRID, min_size=3, max_size=3), min_size=2, max_size=8), st.data())
def test_standard_norm_centres_and_scales_by_train_rows_alone(rows, data):
    x = torch.tensor(rows)
    num_train = data.draw(st.integers(1, len(rows)))
    result = normalize_features(with_features(x, num_train), "standard").features
    assert result.dtype == x.dtype
    assert result.isfinite().all()
    train = result[:num_train].double()
    constant = (x[:num_train] == x[0]).all(dim=0)
    # |z| <= sqrt(T) and each is rounded once to float32; the float64 steps before it add less than 1e-12
    slack = 2**-24 * math.sqrt(num_train) + 1e-12
    assert (train.mean(dim=0).abs() <= slack).all()
    assert (train[:, constant] == 0).all()
    variance = train.square().mean(dim=0)[~constant]
    assert ((variance - 1).abs() <= 2 * 2**-24 + 2**-40).all()
    changed = x.clone()
    changed[num_train:] += 7
    again = normalize_features(with_features(changed, num_train), "standard").features
    assert torch.equal(again[:num_train], result[:num_train]), "val and test rows must not leak into the scale"


def test_standard_norm_of_a_constant_column_that_no_float_sum_hits_exactly():
    x = torch.full((7, 1), 0.1)
    x[6] = 5.0
    result = normalize_features(with_features(x, 6), "standard").features
    assert result[:6].tolist() == [[0.0]] * 6
    assert result[6].item() == pytest.approx(4.9, rel=2**-23)


def test_standard_norm_makes_sparse_dense_and_says_why(caplog):
    x = torch.tensor([[0.0, 2.0], [4.0, 0.0], [0.0, 0.0]])
    with caplog.at_level(logging.WARNING, logger="nugnn.datasets"):
        result = normalize_features(with_features(sparse(x), 2), "standard").features
    assert "24 bytes" in caplog.text
    assert torch.equal(result, normalize_features(with_features(x, 2), "standard").features)


def test_standard_norm_without_train_nodes_is_refused():
    with pytest.raises(ValueError, match="no train nodes"):
        normalize_features(with_features(torch.zeros(2, 2)), "standard")


def test_no_norm_and_no_features_change_nothing():
    data = with_features(torch.ones(2, 2))
    assert normalize_features(data, "none") is data
    bare = graph_of(2, [(0, 1)])
    assert normalize_features(bare, "row") is bare
    assert normalize_features(bare, "standard") is bare


def test_unknown_choices_are_refused_with_the_allowed_ones():
    data = graph_of(1, [])
    with pytest.raises(ValueError, match="self-loops is 'yes'; allowed are keep, add, remove"):
        self_loops(data, "yes")
    with pytest.raises(ValueError, match="feature norm is 'l2'; allowed are none, row, standard"):
        normalize_features(data, "l2")
