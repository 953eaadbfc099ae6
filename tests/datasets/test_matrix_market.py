"""Matrix Market files: the same matrix as SciPy reads, and every kind that is no graph refused."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets.matrix_market import read_matrix_market

DATA = Path(os.environ.get("NUGNN_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def as_matrix(data):
    values = data.edge_data["weight"].numpy() if data.edge_data else np.ones(data.num_edges)
    shape = (data.num_nodes, data.num_nodes)
    return scipy.sparse.coo_array((values, (data.src.numpy(), data.dst.numpy())), shape=shape).toarray()


@given(
    seed=st.integers(0, 99),
    size=st.integers(1, 6),
    field=st.sampled_from(["real", "integer", "pattern"]),
    symmetry=st.sampled_from(["general", "symmetric"]),
)
def test_equals_the_matrix_scipy_reads(tmp_path_factory, seed, size, field, symmetry):
    rng = np.random.default_rng(seed)
    dense = rng.integers(-3, 4, (size, size)) * (rng.random((size, size)) < 0.5)
    dense = (dense + dense.T if symmetry == "symmetric" else dense) / (2 if field == "real" else 1)
    path = tmp_path_factory.mktemp("mtx") / "a.mtx"
    matrix = scipy.sparse.coo_array(dense if field == "real" else dense.astype(np.int64))
    scipy.io.mmwrite(path, matrix, comment="a comment", field=field, symmetry=symmetry)
    data = read_matrix_market(path)
    assert np.array_equal(as_matrix(data), scipy.io.mmread(path).toarray())
    assert bool(data.edge_data) == (scipy.io.mminfo(path)[4] != "pattern"), "an empty pattern is written as real"


def test_sample_has_the_published_counts():
    path = DATA / "formats" / "bips98_606.mtx"
    if not path.is_file():
        pytest.skip(f"{path} is not there; name the folder of public graphs with NUGNN_DATA")
    data = read_matrix_market(path)
    assert (data.num_nodes, data.num_edges) == (7135, 34738)
    assert np.array_equal(as_matrix(data), scipy.io.mmread(path).toarray().astype(np.float32))


def test_gzip_order_and_mirrored_entries(tmp_path):
    text = "%%MatrixMarket matrix coordinate real symmetric\n%c\n\n3 3 3\n3  1 2.5\n2 2 -1\n\n% c\n 3 2\t4e0 \n"
    (tmp_path / "a.mtx.gz").write_bytes(gzip.compress(text.encode()))
    data = read_matrix_market(tmp_path / "a.mtx.gz")
    assert data.name == "a"
    assert data.src.tolist() == [2, 1, 2, 0, 1]
    assert data.dst.tolist() == [0, 1, 1, 2, 2]
    assert data.edge_data["weight"].tolist() == [2.5, -1, 4, 2.5, 4]


def test_whole_numbers_that_float32_cannot_hold_become_float64(tmp_path):
    path = tmp_path / "a.mtx"
    path.write_text("%%MatrixMarket matrix coordinate integer general\n1 1 1\n1 1 16777217\n")
    assert read_matrix_market(path).edge_data["weight"].dtype == torch.float64


GENERAL = "%%MatrixMarket matrix coordinate real general\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the first line is ''; a Matrix Market file begins with"),
        ("1 1 1\n", "the first line is '1 1 1'"),
        ("%%MatrixMarket matrix array real general\n2 2\n", "stored as 'array'"),
        ("%%MatrixMarket matrix coordinate complex general\n", "the entries are 'complex'"),
        ("%%MatrixMarket matrix coordinate real skew-symmetric\n", "is 'skew-symmetric'; write it as general"),
        ("%%MatrixMarket matrix coordinate real hermitian\n", "is 'hermitian'"),
        (GENERAL, "the line of sizes is ''"),
        (GENERAL + "2 2\n", "the line of sizes is '2 2'"),
        (GENERAL + "2 3 0\n", "is 2 x 3"),
        (GENERAL + "0 0 0\n", "the matrix is empty"),
        (GENERAL + "2 2 2\n1 1 1\n", "announces 2 entries, 1 follow"),
        (GENERAL + "2 2 1\n1 1 1\n2 2 2\n", "announces 1 entries, 2 follow"),
        (GENERAL + "2 2 2\n1 1 1\n3 1 1\n", "line 4 is '3 1 1'; rows and columns are 1 to 2"),
        (GENERAL + "2 2 1\n0 1 1\n", "line 3 is '0 1 1'"),
        (GENERAL + "2 2 1\n1 1\n", "line 3 is '1 1'; expected a row and a column, counted from 1, and a value"),
        (GENERAL + "2 2 1\n1 1 nan\n", "line 3 is '1 1 nan'; the value has to be finite"),
        (GENERAL + "2 2 1\n1 1 1e40\n", "line 3 is '1 1 1e40'; the value has to be finite"),
        (GENERAL + "2 2 1\n1 -1 1\n", "line 3 is '1 -1 1'"),
        (GENERAL + "2 2 1\n1 0x1 1\n", "line 3 is '1 0x1 1'"),
        (GENERAL + "999999999999 999999999999 1\n1 1 1\n", "announces 999999999999 nodes"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    (tmp_path / "a.mtx").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.mtx: .*{message}"):
        read_matrix_market(tmp_path / "a.mtx")
