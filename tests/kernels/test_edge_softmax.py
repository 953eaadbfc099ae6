"""Edge softmax: sums to one, equals the definition, overflow, masking, gradients, zero sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nugnn.kernels.edge_softmax import edge_softmax
from nugnn.kernels.edge_softmax.reference import edge_softmax_reference
from nugnn.kernels.structure import Structure

from .conftest import MakeStructure

INF = float("inf")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_node(num_edges: int) -> Structure:
    return Structure(1, torch.tensor([0, num_edges]), torch.zeros(num_edges, dtype=torch.int32))


def relative_bound(structure: Structure, scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound on the relative error of a weight, first order in the unit roundoff u.

    The shift s - m is rounded once: absolute error u |s - m|, which exp turns into a relative one; exp itself is within
    2 u (1 ulp); a sum of n positive terms adds (n - 1) u and averages the relative errors of its terms; the division
    adds u. Shifts and exp count twice (numerator and denominator).
    """
    unit = torch.finfo(dtype).eps / 2
    dst = structure.dst.long()
    spread = scores.max() - scores.min() if scores.numel() else torch.tensor(0.0)
    return (unit * (2 * spread + 2 * 2 + structure.in_degrees[dst] + 1)).view(-1, *[1] * (scores.dim() - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), num_dst=st.integers(0, 9), trailing=st.lists(st.integers(1, 5), max_size=2))
def test_equals_the_definition_and_sums_to_one(
    make_structure: MakeStructure, dtype: torch.dtype, seed: int, num_dst: int, trailing: list[int]
) -> None:
    structure = make_structure(seed, num_dst)
    scores = (5 * randn(structure.num_edges, *trailing, seed=seed)).to(dtype)
    out = edge_softmax(structure, scores)
    exact = edge_softmax_reference(structure, scores.double())
    bound = relative_bound(structure, scores.double(), dtype)
    # 1.01: second-order terms. The exact side is float64 itself, hence twice the bound for float64.
    factor = 1.01 * (1 + (dtype == torch.float64))
    assert out.dtype == dtype and out.shape == scores.shape
    assert ((out.double() - exact).abs() <= factor * bound * exact).all()
    total = torch.zeros(num_dst, *trailing, dtype=torch.float64).index_add(0, structure.dst.long(), out.double())
    slack = float((factor * bound).max()) if bound.numel() else 0.0
    assert ((total[structure.in_degrees > 0] - 1).abs() <= slack).all()


@pytest.mark.parametrize(
    ("dtype", "scores"),
    [
        (torch.float32, [1000.0, 999.0, -1000.0]),
        (torch.float64, [1000.0, 999.0, -1000.0]),
        (torch.float16, [60.0, 59.0, -60.0]),
        (torch.bfloat16, [60.0, 59.0, -60.0]),
    ],
    ids=str,
)
def test_kernels_06_large_scores_do_not_overflow(dtype: torch.dtype, scores: list[float]) -> None:
    out = edge_softmax(one_node(3), torch.tensor(scores, dtype=dtype))
    expected = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
    assert expected.tolist() == pytest.approx([0.7311, 0.2689, 0], abs=5e-5)
    # One rounding to the type, and 8 units of float32 (or float64) for the computation; see relative_bound.
    unit = torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert ((out.double() - expected).abs() <= unit * expected + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_kernels_06_a_fully_masked_node_gives_zeros_and_finite_gradients(dtype: torch.dtype) -> None:
    structure = Structure(2, torch.tensor([0, 2, 5, 5]), torch.zeros(5, dtype=torch.int32))
    scores = torch.tensor([-INF, -INF, 1.0, -INF, 1.0], dtype=dtype, requires_grad=True)
    out = edge_softmax(structure, scores)
    assert out.tolist() == [0, 0, 0.5, 0, 0.5]
    (grad,) = torch.autograd.grad(out, scores, torch.tensor([3.0, 4, 1, 2, 5], dtype=dtype))
    # d/ds_i = w_i (g_i - sum w g) with sum w g = 3
    assert grad.tolist() == [0, 0, -1.0, 0, 1.0]


def test_nan_is_not_hidden() -> None:
    out = edge_softmax(one_node(3), torch.tensor([1.0, float("nan"), 2.0]))
    assert out.isnan().all()
    assert edge_softmax(one_node(2), torch.tensor([1.0, INF])).isnan().any()


def test_gradients(make_structure: MakeStructure) -> None:
    structure = make_structure(3)
    scores = randn(structure.num_edges, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: edge_softmax(structure, s), scores)


def test_float32_gradient_is_within_its_bound(make_structure: MakeStructure) -> None:
    structure = make_structure(5, num_dst=20)
    scores = randn(structure.num_edges, 3).float().requires_grad_()
    grad = randn(structure.num_edges, 3, seed=1).float()
    (mine,) = torch.autograd.grad(edge_softmax(structure, scores), scores, grad)
    wide = scores.detach().double().requires_grad_()
    weights = edge_softmax_reference(structure, wide)
    (exact,) = torch.autograd.grad(weights, wide, grad.double())
    # w (g - sum w g): relative error r of every w (forward bound), a sum of n products (n + 1 roundings), a difference
    # and a product; the mass is w (|g| + sum w |g|), and w counts twice.
    dst = structure.dst.long()
    total = torch.zeros(20, 3, dtype=torch.float64).index_add(0, dst, weights.detach() * grad.double().abs())
    mass = weights.detach() * (grad.double().abs() + total[dst])
    unit = torch.finfo(torch.float32).eps / 2
    rounding = unit * (structure.in_degrees[dst] + 3)[:, None]
    bound = 1.01 * (2 * relative_bound(structure, wide.detach(), torch.float32) + rounding) * mass
    assert ((mine.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_computed_in_float32(make_structure: MakeStructure, dtype: torch.dtype) -> None:
    structure = make_structure(4)
    scores = randn(structure.num_edges, 2).to(dtype)
    assert torch.equal(edge_softmax(structure, scores), edge_softmax(structure, scores.float()).to(dtype))


def test_views_and_expanded_gradients(make_structure: MakeStructure) -> None:
    structure = make_structure(4)
    scores = randn(structure.num_edges, 6)[:, ::2].requires_grad_()
    out = edge_softmax(structure, scores)
    assert torch.equal(out, edge_softmax(structure, scores.contiguous()))
    # the weights of a node sum to one, so a constant gradient gives zero up to one rounding per term
    (grad,) = torch.autograd.grad(out.sum(), scores)
    assert (grad.abs() <= (structure.in_degrees.max() + 3) * torch.finfo(torch.float64).eps).all()


def test_kernels_07_both_index_types(make_structure: MakeStructure) -> None:
    scores = randn(make_structure(6).num_edges, 2)
    results = [edge_softmax(make_structure(6, dtype=dtype), scores) for dtype in (torch.int32, torch.int64)]
    assert torch.equal(*results)


def test_threads_do_not_change_a_bit(make_structure: MakeStructure) -> None:
    structure, before = make_structure(8, num_dst=200), torch.get_num_threads()
    scores, results = randn(structure.num_edges, 3).float(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(edge_softmax(structure, scores))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize(("num_dst", "num_edges", "trailing"), [(0, 0, (2,)), (3, 0, (2,)), (3, 4, (0,)), (3, 0, ())])
def test_kernels_03_zero_sizes(num_dst: int, num_edges: int, trailing: tuple[int, ...]) -> None:
    indptr = torch.full((num_dst + 1,), num_edges)
    indptr[0] = 0
    structure = Structure(2, indptr, torch.zeros(num_edges, dtype=torch.int32))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        scores = torch.empty(num_edges, *trailing, dtype=dtype, requires_grad=True)
        out = edge_softmax(structure, scores)
        (grad,) = torch.autograd.grad(out.sum(), scores)
        assert out.shape == grad.shape == scores.shape and out.dtype == grad.dtype == dtype


def test_wrong_arguments_are_refused(make_structure: MakeStructure) -> None:
    structure = make_structure(1)
    with pytest.raises(ValueError, match="one row for each"):
        edge_softmax(structure, torch.ones(structure.num_edges + 1, 2))
    with pytest.raises(ValueError, match="int64"):
        edge_softmax(structure, torch.ones(structure.num_edges, dtype=torch.int64))
