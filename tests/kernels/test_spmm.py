"""Aggregation: sums within a summation bound, exact extremes, gradients, ties, integers, zero sizes, plain DGL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nugnn.kernels import spmm as spmm_module
from nugnn.kernels.spmm import spmm, sums
from nugnn.kernels.spmm.reference import spmm_reference
from nugnn.kernels.structure import Structure

from .conftest import MakeStructure

INF = float("inf")


@pytest.fixture(params=["small", "large"], scope="module")
def sum_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """For laws of sums: with the kernel that small ones get and with the one that large ones get."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "large":
            patch.setattr(sums, "FEWEST_BYTES", 0)
        yield request.param


of_sums = pytest.mark.usefixtures("sum_kernel")


def of_each_reduction(law: Callable[..., None]) -> Callable[..., None]:
    """Of sums with either kernel, of extremes with the one that there is."""
    cases = [("small", "sum"), ("large", "sum"), ("small", "max"), ("small", "min")]
    return of_sums(pytest.mark.parametrize(("sum_kernel", "reduce"), cases, indirect=["sum_kernel"])(law))


OPS = ["add", "sub", "mul", "div", "copy_lhs", "copy_rhs"]
FEATURES = [
    ((), ()),
    ((5,), (5,)),
    ((5,), ()),
    ((2, 3), (2, 1)),
    ((3,), (2, 1)),
    ((2, 1), (4,)),
    ((1,), (33,)),
    ((70,), (1,)),
]


def operands(structure: Structure, op: str, shapes: tuple, seed: int, dtype: torch.dtype) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(structure.num_src, *shapes[0], generator=generator, dtype=torch.float64)
    e = torch.randn(structure.num_edges, *shapes[1], generator=generator, dtype=torch.float64)
    if op == "div":
        e = e.sign() * (e.abs() + 0.5)
    pair = [x.to(dtype).requires_grad_() for x in (u, e)]
    return [None if op == "copy_rhs" else pair[0], None if op == "copy_lhs" else pair[1]]


def with_gradients(function, structure: Structure, op: str, reduce: str, pair: list, grad: Tensor | None = None):
    """Output and the gradients of the operands that ``op`` uses."""
    leaves = [x for x in pair if x is not None]
    out = function(structure, op, reduce, *pair)
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return out, torch.autograd.grad(out, leaves, grad), grad


def absolute(pair: list) -> list:
    return [None if x is None else x.detach().double().abs().requires_grad_() for x in pair]


def gamma(roundings: Tensor | int, dtype: torch.dtype) -> Tensor:
    """Higham 2002, sec. 3.1: relative error of a product of ``roundings`` factors ``1 + delta``."""
    total = torch.as_tensor(roundings, dtype=torch.float64) * torch.finfo(dtype).eps / 2
    return total / (1 - total)


@of_sums
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31), num_dst=st.integers(1, 9), num_halo=st.integers(0, 4), shapes=st.sampled_from(FEATURES)
)
@pytest.mark.parametrize("op", OPS)
def test_float32_sums_stay_within_the_summation_bound(
    make_structure: MakeStructure, op: str, seed: int, num_dst: int, num_halo: int, shapes: tuple
) -> None:
    structure = make_structure(seed, num_dst, num_halo)
    pair = operands(structure, op, shapes, seed, torch.float32)
    out, grads, grad = with_gradients(spmm, structure, op, "sum", pair)
    wide = [None if x is None else x.detach().double().requires_grad_() for x in pair]
    exact, exact_grads, _ = with_gradients(spmm_reference, structure, op, "sum", wide, grad.double())
    mass_op = {"sub": "add"}.get(op, op)
    mass, mass_grads, _ = with_gradients(spmm_reference, structure, mass_op, "sum", absolute(pair), grad.double().abs())
    # Higham 2002, sec. 4.2: an in-degree of additions, and up to 3 roundings in a message (reciprocal, product, cast).
    # The mass of a sum of u + e uses |u| + |e|, which bounds |u + e|.
    degree = structure.in_degrees.view(-1, *[1] * (out.dim() - 1))
    assert out.shape == exact.shape
    assert ((out.double() - exact).abs() <= gamma(degree + 3, torch.float32) * mass).all()
    # A gradient entry sums at most one term per edge and output column; 1/e and its square add up to 5 roundings.
    terms = structure.num_edges * max(1, exact[0].numel()) + 6
    for mine, right, weight in zip(grads, exact_grads, mass_grads, strict=True):
        assert mine.shape == right.shape
        assert (
            (mine.double() - right).abs() <= gamma(terms, torch.float32) * weight.abs()
        ).all()  # d/de of u / e is negative


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), num_dst=st.integers(1, 9), shapes=st.sampled_from(FEATURES))
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extremes_are_exact_and_so_is_the_edge_that_won(
    make_structure: MakeStructure, dtype: torch.dtype, op: str, reduce: str, seed: int, num_dst: int, shapes: tuple
) -> None:
    structure = make_structure(seed, num_dst)
    pair = operands(structure, op, shapes, seed, dtype)
    # few distinct values, so that ties abound, all exact in float32, as are their sums and products
    pair = [None if x is None else (x.detach() * 2).round().div(2).requires_grad_() for x in pair]
    if op == "div":
        pair[1] = torch.exp2(pair[1].detach().abs().clamp(max=2).round()).requires_grad_()  # reciprocals are exact
    out, grads, grad = with_gradients(spmm, structure, op, reduce, pair)
    exact, exact_grads, _ = with_gradients(spmm_reference, structure, op, reduce, pair, grad)
    assert torch.equal(out, exact)
    # One term per destination and column, summed in another order; d/de of u / e rounds up to 6 times. The mass takes
    # every |factor| of a term at its largest.
    terms = structure.num_dst * max(1, exact[0].numel())
    factor = max([1.0, *(float(x.detach().abs().max()) for x in pair if x is not None and x.numel())]) ** 2
    mass = terms * factor * float(grad.abs().max())
    for mine, right in zip(grads, exact_grads, strict=True):
        assert ((mine - right).abs() <= 2 * gamma(terms + 6, dtype) * mass).all()


@of_each_reduction
@pytest.mark.parametrize("shapes", FEATURES[:6], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(make_structure: MakeStructure, op: str, reduce: str, shapes: tuple) -> None:
    structure = make_structure(12, num_dst=4, num_halo=2, max_degree=3)
    pair = operands(structure, op, shapes, 5, torch.float64)
    leaves = [x for x in pair if x is not None]
    empty = (structure.in_degrees == 0).view(-1, *[1] * (spmm(structure, op, reduce, *pair).dim() - 1))

    def function(*given: Tensor) -> Tensor:
        left = list(given)
        u, e = (None if x is None else left.pop(0) for x in pair)
        return spmm(structure, op, reduce, u, e).masked_fill(empty, 0)  # differences of infinities are NaN

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_the_first_of_equal_messages_wins_and_no_gradient_leaves_an_empty_destination(reduce: str) -> None:
    structure = Structure(5, torch.tensor([0, 3, 3, 5]), torch.tensor([4, 3, 2, 0, 1], dtype=torch.int32))
    for dtype in (torch.float32, torch.float64):
        for width in (1, 16, 64):  # DGL's blocked kernels begin at some width
            x = torch.ones(5, width, dtype=dtype, requires_grad=True)
            out = spmm(structure, "copy_lhs", reduce, x, None)
            assert out[[0, 2]].eq(1).all() and out[1].eq(-INF if reduce == "max" else INF).all()
            (grad,) = torch.autograd.grad(out, x, torch.tensor([[1.0], [10], [100]], dtype=dtype).expand(3, width))
            assert grad[:, 0].tolist() == [100, 0, 0, 0, 1] and (grad == grad[:, :1]).all()


@of_sums
def test_infinite_messages_have_a_winner_and_nan_is_not_hidden() -> None:
    structure = Structure(3, torch.tensor([0, 3]), torch.tensor([2, 0, 1]))
    x = torch.tensor([-INF, -INF, -INF], requires_grad=True)
    (grad,) = torch.autograd.grad(spmm(structure, "copy_lhs", "max", x, None).sum(), x)
    assert grad.tolist() == [0, 0, 1]
    for values in ([1.0, float("nan"), 2.0], [float("nan"), 1.0, 2.0], [1.0, 2.0, float("nan")]):
        for reduce in ("max", "min", "sum"):
            assert spmm(structure, "copy_lhs", reduce, torch.tensor(values), None).isnan().all()


@of_sums
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["copy_lhs", "mul"])
def test_half_types_are_summed_in_float32_and_rounded_once(
    make_structure: MakeStructure, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, op: str
) -> None:
    structure = make_structure(3)
    u, e = operands(structure, op, ((8,), (8,)), 1, dtype)
    spmm_module._log_half_once.cache_clear()
    with caplog.at_level(logging.INFO):
        out = spmm(structure, op, "sum", u, e)
        spmm(structure, op, "sum", u, e)
    assert len(caplog.records) == 1 and "float32" in caplog.records[0].message
    wide = spmm(structure, op, "sum", u.float(), None if e is None else e.float())
    assert out.dtype == dtype and torch.equal(out, wide.to(dtype))
    (grad,) = torch.autograd.grad(out.float().sum(), u)
    assert grad.dtype == dtype
    hub = Structure(1, torch.tensor([0, 40_000]), torch.zeros(40_000, dtype=torch.int32))
    assert spmm(hub, "copy_lhs", "sum", torch.full((1, 1), 1.5, dtype=dtype), None).float().item() == (
        torch.tensor(60_000.0).to(dtype).float().item()
    )


@of_sums
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_kernels_10_integers_and_bool_pass_unchanged(dtype: torch.dtype) -> None:
    structure = Structure(3, torch.tensor([0, 3, 3, 4]), torch.tensor([2, 0, 1, 0], dtype=torch.int32))
    big = {torch.int64: 2**53 + 1, torch.bool: 1}.get(dtype, torch.iinfo(dtype).max if dtype != torch.bool else 1)
    x = torch.tensor([0, big, big - (dtype != torch.bool)], dtype=dtype)
    largest, smallest = (spmm(structure, "copy_lhs", reduce, x, None) for reduce in ("max", "min"))
    assert largest.dtype == smallest.dtype == dtype
    assert largest.tolist() == [big, 0, 0] and smallest.tolist() == [0, 0, 0]
    edge = torch.tensor([big, 0, 0, big], dtype=dtype)
    assert spmm(structure, "copy_rhs", "max", None, edge).tolist() == [big, 0, big]
    if dtype == torch.bool:
        with pytest.raises(ValueError, match="int64 to count"):
            spmm(structure, "copy_lhs", "sum", x, None)
    else:
        small = torch.tensor([1, 2, 3], dtype=dtype)
        total = spmm(structure, "copy_lhs", "sum", small, None)
        assert total.dtype == dtype and total.tolist() == [6, 0, 1]


@of_sums
def test_kernels_10_int64_sums_above_53_bits_are_exact() -> None:
    structure = Structure(2, torch.tensor([0, 2]), torch.tensor([0, 1]))
    assert spmm(structure, "copy_lhs", "sum", torch.tensor([2**53, 1]), None).item() == 2**53 + 1


@of_each_reduction
@pytest.mark.parametrize("op", OPS)
def test_kernels_07_both_index_types_give_the_same(make_structure: MakeStructure, op: str, reduce: str) -> None:
    results = []
    for dtype in (torch.int32, torch.int64):
        structure = make_structure(21, num_dst=30, dtype=dtype)
        pair = operands(structure, op, ((4,), (4,)), 2, torch.float32)
        results.append(with_gradients(spmm, structure, op, reduce, pair))
    (out, grads, _), (other, other_grads, _) = results
    assert torch.equal(out, other) and all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))


@of_each_reduction
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_kernels_03_zero_sizes(make_structure: MakeStructure, op: str, reduce: str, dtype: torch.dtype) -> None:
    normal = make_structure(1)
    with_gradients(spmm, normal, op, reduce, operands(normal, op, ((3,), (3,)), 1, dtype))
    none = torch.empty(0, dtype=torch.int32)
    cases = [
        (normal, (0,)),
        (Structure(4, torch.zeros(4, dtype=torch.int64), none), (3,)),
        (Structure(4, torch.zeros(1, dtype=torch.int64), none), (3,)),
        (Structure(0, torch.zeros(4, dtype=torch.int64), none), (2, 3)),
        (Structure(0, torch.zeros(1, dtype=torch.int64), none), ()),
    ]
    for structure, features in cases:
        pair = operands(structure, op, (features, features), 1, dtype)
        out, grads, _ = with_gradients(spmm, structure, op, reduce, pair)
        assert out.shape == (structure.num_dst, *features) and out.dtype == dtype
        assert (out == {"sum": 0, "max": -INF, "min": INF}[reduce]).all()
        for grad, operand in zip(grads, [x for x in pair if x is not None], strict=True):
            assert grad.shape == operand.shape and grad.dtype == dtype and (grad == 0).all()


@of_sums
def test_views_and_expanded_gradients(make_structure: MakeStructure) -> None:
    structure = make_structure(4)
    base = torch.randn(structure.num_src, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for view in (base[:, ::3], base.split(5, dim=1)[1], base[:, :1].expand(-1, 6)):
        for reduce in ("sum", "max"):
            leaf = view.detach().requires_grad_()
            out = spmm(structure, "copy_lhs", reduce, leaf, None)
            assert torch.equal(out, spmm(structure, "copy_lhs", reduce, view.contiguous(), None))
            (grad,) = torch.autograd.grad(out.sum(), leaf)
            if reduce == "max":  # one winner per destination and column
                assert grad.sum() == (structure.in_degrees > 0).sum() * view.shape[1]
            if reduce == "sum":
                counts = torch.bincount(structure.indices, minlength=structure.num_src)
                assert torch.equal(grad, counts[:, None].double().expand(view.shape))


@of_sums
@pytest.mark.parametrize("reduce", ["sum", "max", "min", "mean"])
def test_equals_plain_dgl_on_an_ordinary_graph(make_structure: MakeStructure, reduce: str) -> None:
    import dgl

    structure = make_structure(31, num_dst=50, num_halo=0)
    graph = dgl.graph((structure.indices.long(), structure.dst.long()), num_nodes=50)
    for op, shapes in (("copy_lhs", ((6,), ())), ("mul", ((3, 4), (3, 1))), ("copy_rhs", ((), (5,)))):
        u, e = operands(structure, op, shapes, 3, torch.float64)
        theirs = dgl.ops.gspmm(graph, op, reduce, u, e)
        mine = spmm(structure, op, "sum" if reduce == "mean" else reduce, u, e)
        if reduce == "mean":
            mine = mine / structure.in_degrees.clamp(min=1).view(-1, *[1] * (mine.dim() - 1))
        mass = spmm_reference(structure, op, "sum", *absolute([u, e]))
        finite = torch.isfinite(theirs)
        assert torch.equal(finite, torch.isfinite(mine)) and torch.equal(mine[~finite], theirs[~finite])
        degree = int(structure.in_degrees.max())
        bound = 2 * gamma(degree + 3, torch.float64) * mass
        assert ((mine - theirs)[finite].abs() <= bound[finite]).all()


def test_the_graph_index_is_made_once_and_numbers_edges_by_position(make_structure: MakeStructure) -> None:
    from nugnn.kernels.spmm import dgl_index

    structure = make_structure(2)
    index = dgl_index.graph_index(structure)
    assert dgl_index.graph_index(structure) is index and index.dtype == "int32"
    src, dst, edge_ids = index.edges(0, "eid")
    assert torch.equal(src, structure.indices) and torch.equal(dst, structure.dst)
    assert torch.equal(edge_ids, torch.arange(structure.num_edges, dtype=torch.int32))
    count = len(dgl_index._indices)
    del structure
    assert len(dgl_index._indices) == count - 1


@pytest.mark.parametrize(
    ("op", "reduce", "u", "e", "match"),
    [
        ("pow", "sum", torch.ones(3), None, "op is 'pow'"),
        ("copy_lhs", "mean", torch.ones(3), None, "reduce is 'mean'"),
        ("copy_lhs", "sum", None, None, "needs operand u"),
        ("mul", "sum", torch.ones(3), None, "needs operand e"),
        ("copy_lhs", "sum", torch.ones(4), None, "3 source rows"),
        ("copy_rhs", "sum", None, torch.ones(3), "2 edge rows"),
        ("mul", "sum", torch.ones(3), torch.ones(2).double(), "float32.*float64"),
        ("mul", "sum", torch.ones(3, 2), torch.ones(2, 3), "do not broadcast"),
        ("add", "max", torch.ones(3).bool(), torch.ones(2).bool(), "bool"),
        ("div", "sum", torch.ones(3).long(), torch.ones(2).long(), "int64"),
    ],
)
def test_wrong_arguments_are_refused(op: str, reduce: str, u: Tensor | None, e: Tensor | None, match: str) -> None:
    structure = Structure(3, torch.tensor([0, 2]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=match):
        spmm(structure, op, reduce, u, e)
