"""Dropout by row identity: mask bits, scale, gradients, independence of the split, dtypes, shapes, sparse rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nugnn.kernels.dropout import dropout_csr_values, dropout_rows
from nugnn.kernels.dropout.reference import dropout_csr_values_reference, dropout_rows_reference, keep_threshold
from nugnn.kernels.philox import RandomKey, random_words

KEY = RandomKey(seed=2**40 + 3, step=5, stream=77)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(num_rows=st.integers(0, 40), trailing=st.lists(st.integers(0, 9), max_size=2), p=st.floats(0, 1))
def test_equals_the_reference_bit_for_bit(dtype: torch.dtype, num_rows: int, trailing: list[int], p: float) -> None:
    x = randn(num_rows, *trailing).to(dtype).requires_grad_()
    ids = torch.arange(num_rows) * 2**31 + 5
    grad = randn(num_rows, *trailing, seed=1).to(dtype)
    mine, reference = dropout_rows(x, p, KEY, ids), dropout_rows_reference(x, p, KEY, ids)
    assert mine.dtype == dtype and mine.shape == x.shape
    assert torch.equal(mine, reference)
    (mine_grad,) = torch.autograd.grad(mine, x, grad)
    assert torch.equal(mine_grad, dropout_rows_reference(grad, p, KEY, ids))


def test_an_entry_is_kept_iff_its_word_reaches_the_threshold() -> None:
    ids, p = torch.tensor([9, 2, 9]), 0.3
    x = torch.ones(3, 2, 5, dtype=torch.float64)
    kept = random_words(KEY, ids, 10).view(3, 2, 5) >= round(p * 2**32)
    assert torch.equal(dropout_rows(x, p, KEY, ids), kept.double() / (1 - p))
    assert [keep_threshold(p) for p in (0.0, 0.5, 1.0, 1e-12, 1 - 1e-12)] == [0, 2**31, 2**32, 0, 2**32]


def test_parts_of_a_graph_drop_what_the_whole_drops() -> None:
    x, ids = randn(1000, 8, 3).float(), torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    whole = dropout_rows(x, 0.6, KEY, ids)
    for part in torch.tensor_split(torch.randperm(1000, generator=torch.Generator().manual_seed(2)), [100, 101, 640]):
        assert torch.equal(dropout_rows(x[part], 0.6, KEY, ids[part]), whole[part])


@pytest.mark.parametrize(
    "key", [RandomKey(0, 0, 0), RandomKey(2**64 - 1, 2**32 - 1, 2**32 - 1), RandomKey(2**63, 1, 2**31)], ids=str
)
def test_keys_at_the_ends_of_their_ranges(key: RandomKey) -> None:
    x, ids = randn(5, 9).float(), torch.arange(5)
    assert torch.equal(dropout_rows(x, 0.5, key, ids), dropout_rows_reference(x, 0.5, key, ids))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_the_mask(dtype: torch.dtype) -> None:
    x, ids, before = randn(3000, 7).to(dtype), torch.arange(3000), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(dropout_rows(x, 0.5, KEY, ids))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_drop_rate_and_mean_are_right(p: float) -> None:
    out = dropout_rows(torch.ones(5000, 40), p, KEY, torch.arange(5000))
    count = out.numel()
    sigma = (p * (1 - p) / count) ** 0.5  # of the observed rate; 5 sigma fails once in 2 million keys
    assert abs(float((out == 0).double().mean()) - p) < 5 * sigma


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [1 - 1e-12, 1 - 2**-32, 1e-12])
def test_p_so_near_an_end_that_hardly_a_word_decides(dtype: torch.dtype, p: float) -> None:
    x, ids = randn(7, 11).to(dtype), torch.arange(7)
    assert torch.equal(dropout_rows(x, p, KEY, ids), dropout_rows_reference(x, p, KEY, ids))


def test_extremes_of_p() -> None:
    x, ids = randn(4, 3), torch.arange(4)
    assert torch.equal(dropout_rows(x, 0.0, KEY, ids), x)
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    x.requires_grad_()
    out = dropout_rows(x, 1.0, KEY, ids)
    assert torch.equal(out, torch.zeros(4, 3, dtype=x.dtype))
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.zeros_like(x))


def test_dropped_entries_are_zero_even_where_not_finite() -> None:
    for dtype in DTYPES:
        x = torch.full((50, 8), torch.nan, dtype=dtype)
        out = dropout_rows(x, 0.5, KEY, torch.arange(50))
        dropped = random_words(KEY, torch.arange(50), 8) < 2**31
        assert (out[dropped] == 0).all() and out[~dropped].isnan().all()


def test_gradcheck_and_use_in_two_places() -> None:
    x, ids = randn(5, 3).requires_grad_(), torch.arange(5)
    assert torch.autograd.gradcheck(lambda x: dropout_rows(x, 0.4, KEY, ids), x)
    out = dropout_rows(x, 0.4, KEY, ids)
    (grad,) = torch.autograd.grad((out * 2 + out).sum(), x)
    assert torch.equal(grad, dropout_rows_reference(torch.full_like(x, 3.0), 0.4, KEY, ids).detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_and_expanded_gradients(dtype: torch.dtype) -> None:
    base, ids = randn(6, 20).to(dtype), torch.arange(12)[::2]
    for view in (base[:, ::2], base.split(7, dim=1)[1], base.t()[:6].t(), base[:, :1].expand(6, 4)):
        leaf = view.detach().requires_grad_()
        out = dropout_rows(leaf, 0.5, KEY, ids)
        assert torch.equal(out, dropout_rows_reference(view.contiguous(), 0.5, KEY, ids.contiguous()))
        (grad,) = torch.autograd.grad(out.sum(), leaf)
        assert torch.equal(grad, dropout_rows_reference(torch.ones_like(leaf), 0.5, KEY, ids.contiguous()))


def test_nothing_of_the_size_of_x_is_saved() -> None:
    saved: list[Tensor] = []
    x, ids = randn(100, 50).requires_grad_(), torch.arange(100)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout_rows(x, 0.5, KEY, ids)
    assert [t.numel() for t in saved] == [100]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (0, 0, 3)])
def test_kernels_03_zero_sizes(shape: tuple[int, ...]) -> None:
    dropout_rows(torch.ones(3, 2), 0.5, KEY, torch.arange(3))
    for dtype in DTYPES:
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        out = dropout_rows(x, 0.5, KEY, torch.arange(shape[0]))
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert out.shape == grad.shape == x.shape and out.dtype == grad.dtype == dtype
    empty = torch.empty(0, requires_grad=True)
    indptr = torch.zeros(4, dtype=torch.int64)
    out = dropout_csr_values(empty, indptr, torch.empty(0, dtype=torch.int64), 0.5, KEY, torch.arange(3))
    assert out.shape == (0,) and torch.autograd.grad(out.sum(), empty)[0].shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("p", [0.25, 0.5, 1.0])
def test_sparse_rows_drop_what_dense_rows_drop(dtype: torch.dtype, index_dtype: torch.dtype, p: float) -> None:
    dense = torch.where(randn(900, 37, seed=3) > 1.5, randn(900, 37), 0).to(dtype)
    dense[5:300] = 0  # a run of empty rows across task bounds
    csr, ids = dense.to_sparse_csr(), torch.arange(900) * 3 + 2**33
    indptr, indices = csr.crow_indices().to(index_dtype), csr.col_indices().to(index_dtype)
    values = csr.values().clone().requires_grad_()
    out = dropout_csr_values(values, indptr, indices, p, KEY, ids)
    row = torch.repeat_interleave(csr.crow_indices().diff())
    assert out.dtype == dtype
    assert torch.equal(out, dropout_rows(dense, p, KEY, ids)[row, csr.col_indices()])
    assert torch.equal(out, dropout_csr_values_reference(values, indptr, indices, p, KEY, ids))
    (grad,) = torch.autograd.grad(out.sum(), values)
    assert torch.equal(grad, dropout_rows(torch.ones_like(dense), p, KEY, ids)[row, csr.col_indices()])


@pytest.mark.parametrize(
    ("x", "p", "ids", "match"),
    [
        (torch.ones(3, 2), 1.5, torch.arange(3), "p is 1.5"),
        (torch.ones(3, 2), float("nan"), torch.arange(3), "p is nan"),
        (torch.ones(3, 2, dtype=torch.int64), 0.5, torch.arange(3), "int64"),
        (torch.ones(3, 2), 0.5, torch.arange(4), "one id per row"),
        (torch.ones(3, 2), 0.5, torch.arange(3).int(), "int64"),
    ],
)
def test_wrong_arguments_are_refused(x: Tensor, p: float, ids: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dropout_rows(x, p, KEY, ids)


def test_wrong_sparse_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="indptr of 3 entries"):
        dropout_csr_values(torch.ones(1), torch.tensor([0, 1]), torch.zeros(1).long(), 0.5, KEY, torch.arange(2))
