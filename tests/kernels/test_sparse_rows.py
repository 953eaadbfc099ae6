"""Sparse features times a weight: values and gradients within summation bounds, cached transpose, zero sizes."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nugnn.kernels import sparse_rows
from nugnn.kernels.sparse_rows import csr_matmul, densify, with_values

pytestmark = pytest.mark.filterwarnings("ignore:.*Sparse CSR tensor support is in beta:UserWarning")


def sparse(num_rows: int, num_columns: int, seed: int, density: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
    kept = torch.rand(num_rows, num_columns, generator=generator) < density
    kept[: num_rows // 3] &= torch.rand(num_rows // 3, 1, generator=generator) < 0.5  # empty rows
    return torch.where(kept, values, 0)


def summation_bound(terms: int, mass: Tensor, dtype: torch.dtype) -> Tensor:
    """Higham 2002, sec. 3.1 and 4.2: ``gamma_n * sum of |terms|`` with one rounding per product and per addition."""
    unit = torch.finfo(dtype).eps / 2
    return (terms + 1) * unit / (1 - (terms + 1) * unit) * mass


@settings(max_examples=30, deadline=None)
@given(
    num_rows=st.integers(0, 30), num_columns=st.integers(1, 30), width=st.integers(1, 19), seed=st.integers(0, 2**31)
)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_float32_stays_within_the_summation_bound(
    index_dtype: torch.dtype, num_rows: int, num_columns: int, width: int, seed: int
) -> None:
    dense = sparse(num_rows, num_columns, seed).float()
    template = dense.to_sparse_csr()
    values = template.values().clone().requires_grad_()
    crow, col = template.crow_indices().to(index_dtype), template.col_indices().to(index_dtype)
    x = torch.sparse_csr_tensor(crow, col, values, dense.shape)
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(num_columns, width, generator=generator, requires_grad=True)
    grad = torch.randn(num_rows, width, generator=generator)
    out = csr_matmul(x, weight)
    grad_values, grad_weight = torch.autograd.grad(out, (values, weight), grad)

    exact, absolute = dense.double(), dense.double().abs()
    w, g = weight.detach().double(), grad.double()
    assert ((out.double() - exact @ w).abs() <= summation_bound(num_columns, absolute @ w.abs(), torch.float32)).all()
    error = (grad_weight.double() - exact.T @ g).abs()
    assert (error <= summation_bound(num_rows, absolute.T @ g.abs(), torch.float32)).all()
    row = torch.repeat_interleave(template.crow_indices().diff())
    error = (grad_values.double() - (g @ w.T)[row, template.col_indices()]).abs()
    mass = (g.abs() @ w.abs().T)[row, template.col_indices()]
    assert (error <= summation_bound(width, mass, torch.float32)).all()


def test_gradcheck() -> None:
    template = sparse(6, 5, 1, density=0.5).to_sparse_csr()
    values = template.values().clone().requires_grad_()
    weight = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda v, w: csr_matmul(with_values(template, v), w), (values, weight))
    assert torch.autograd.gradcheck(lambda v: densify(with_values(template, v)), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    x = sparse(20, 30, 2).to(dtype).to_sparse_csr()
    weight = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), x.values().float(), x.shape)
    assert torch.equal(csr_matmul(x, weight), csr_matmul(wide, weight.float()).to(dtype))


def test_values_get_no_gradient_unless_required() -> None:
    x = sparse(6, 5, 1).to_sparse_csr()
    weight = torch.ones(5, 3, dtype=torch.float64, requires_grad=True)
    csr_matmul(x, weight).sum().backward()
    assert x.grad is None and weight.grad is not None


def test_threads_do_not_change_a_bit() -> None:
    x, before = sparse(300, 200, 4).float().to_sparse_csr(), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            weight = torch.randn(200, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
            out = csr_matmul(x, weight)
            results.append((out, *torch.autograd.grad(out.square().sum(), weight)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_transpose_is_made_once_per_structure_and_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = sparse_rows._transpose
    monkeypatch.setattr(sparse_rows, "_transpose", lambda *a: made.append(1) or original(*a))
    cache = sparse_rows._IndexCache(sparse_rows._transpose)
    monkeypatch.setattr(sparse_rows, "_transposes", cache)

    def step(x: Tensor) -> None:
        csr_matmul(x, torch.ones(x.shape[1], 2, dtype=x.dtype, requires_grad=True)).sum().backward()

    x = sparse(9, 8, 1).to_sparse_csr()
    for factor in (1, 2, 3):  # what dropout does: other values, the same positions
        step(with_values(x, x.values() * factor))
    assert len(made) == 1
    other = sparse(9, 8, 2).to_sparse_csr()
    step(other)
    assert len(made) == 2
    other.col_indices().flip(0)  # reading changes nothing
    other.crow_indices().add_(0)  # writing might
    step(other)
    assert len(made) == 3
    del x, other
    gc.collect()
    step(sparse(9, 8, 3).to_sparse_csr())
    assert len(cache) == 1, "entries of freed matrices are dropped"


@pytest.mark.parametrize(("num_rows", "num_columns", "width"), [(0, 4, 3), (5, 0, 3), (5, 4, 0), (0, 0, 0)])
def test_kernels_03_zero_sizes(num_rows: int, num_columns: int, width: int) -> None:
    x = torch.ones(num_rows, num_columns).to_sparse_csr()
    weight = torch.ones(num_columns, width, requires_grad=True)
    out = csr_matmul(x, weight)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert out.shape == (num_rows, width) and grad.shape == weight.shape and (out == 0).all()


def test_nothing_stored_gives_zeros_and_zero_gradients() -> None:
    x, weight = torch.zeros(5, 4).to_sparse_csr(), torch.ones(4, 3, requires_grad=True)
    out = csr_matmul(x, weight)
    assert torch.equal(out, torch.zeros(5, 3))
    assert torch.equal(torch.autograd.grad(out.sum(), weight)[0], torch.zeros(4, 3))


def test_densify_gives_the_dense_matrix() -> None:
    dense = sparse(7, 9, 5)
    assert torch.equal(densify(dense.to_sparse_csr()), dense)


def test_new_values_raise_no_warning_of_torch() -> None:
    x = sparse(7, 9, 5).to_sparse_csr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_values(x, x.values() * 2)


@pytest.mark.parametrize(
    ("x", "weight", "match"),
    [
        (torch.ones(2, 3), torch.ones(3, 1), "layout"),
        (torch.ones(2, 3).to_sparse_csr(), torch.ones(3, 1).double(), "dtype"),
        (torch.ones(2, 3).to_sparse_csr(), torch.ones(2, 1), "do not multiply"),
    ],
)
def test_wrong_arguments_are_refused(x: Tensor, weight: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        csr_matmul(x, weight)
    if x.layout != torch.sparse_csr:
        with pytest.raises(ValueError, match="layout"):
            densify(x)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_aggregation_of_weight_rows_is_the_same_product(index_dtype: torch.dtype) -> None:
    """The way of a GPU, run here: values and both gradients equal those of the row kernel up to rounding."""
    template = sparse(40, 23, 6).to_sparse_csr()
    crow, col = template.crow_indices().to(index_dtype), template.col_indices().to(index_dtype)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(23, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(40, 7, generator=generator, dtype=torch.float64)
    values = template.values().clone().requires_grad_()
    x = torch.sparse_csr_tensor(crow, col, values, template.shape)
    aggregated = sparse_rows._aggregated(crow, col, values, weight)
    direct = csr_matmul(x, weight)
    assert torch.allclose(aggregated, direct, rtol=0, atol=1e-13)  # 40 terms of size 10 at most, 1e-16 each
    for mine, right in zip(
        *(torch.autograd.grad(out, (values, weight), grad) for out in (aggregated, direct)), strict=True
    ):
        assert torch.allclose(mine, right, rtol=0, atol=1e-13)


def test_structures_of_freed_matrices_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = sparse_rows._IndexCache(sparse_rows._structure)
    monkeypatch.setattr(sparse_rows, "_structures", cache)
    for seed in (1, 2, 3):
        x = sparse(9, 8, seed).to_sparse_csr()
        for _ in range(2):
            sparse_rows._aggregated(x.crow_indices(), x.col_indices(), x.values(), torch.ones(8, 2, dtype=x.dtype))
        assert len(cache) == 1
        del x
        gc.collect()
