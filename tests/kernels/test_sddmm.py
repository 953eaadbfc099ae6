"""One value per edge: every op and pair of ends, broadcasting, gradients, dtypes, zero sizes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nugnn.kernels.sddmm import sddmm
from nugnn.kernels.sddmm.reference import sddmm_reference
from nugnn.kernels.structure import Structure

from .conftest import MakeStructure

OPS = ["add", "sub", "mul", "div", "dot", "copy_lhs", "copy_rhs"]
TARGETS = list(product("uve", "uve"))
FEATURES = [((), ()), ((4,), (4,)), ((4,), ()), ((3,), (2, 3)), ((2, 1), (3,)), ((2, 1, 3), (1, 5, 3))]


def rows(structure: Structure, target: str) -> int:
    return {"u": structure.num_src, "v": structure.num_dst, "e": structure.num_edges}[target]


def operands(structure: Structure, op: str, targets: tuple, shapes: tuple, seed: int, dtype: torch.dtype) -> list:
    generator = torch.Generator().manual_seed(seed)
    pair = [
        torch.randn(rows(structure, target), *shape, generator=generator, dtype=torch.float64)
        for target, shape in zip(targets, shapes, strict=True)
    ]
    if op == "div":
        pair[1] = pair[1].sign() * (pair[1].abs() + 0.5)
    pair = [x.to(dtype).requires_grad_() for x in pair]
    return [None if op == "copy_rhs" else pair[0], None if op == "copy_lhs" else pair[1]]


def skip(op: str, shapes: tuple) -> bool:
    return op == "dot" and shapes[0][-1:] != shapes[1][-1:]


def with_gradients(function, structure: Structure, op: str, pair: list, targets: tuple, grad: Tensor | None = None):
    leaves = [x for x in pair if x is not None]
    out = function(structure, op, *pair, *targets)
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return out, torch.autograd.grad(out, leaves, grad), grad


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), num_dst=st.integers(1, 8), targets=st.sampled_from(TARGETS))
@pytest.mark.parametrize("shapes", FEATURES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_float32_stays_within_the_rounding_bound(
    make_structure: MakeStructure, op: str, shapes: tuple, seed: int, num_dst: int, targets: tuple
) -> None:
    if skip(op, shapes):
        with pytest.raises(ValueError, match=r"dot needs equal last dimensions|do not broadcast"):
            sddmm(make_structure(1), op, *operands(make_structure(1), op, targets, shapes, 1, torch.float32), *targets)
        return
    structure = make_structure(seed, num_dst)
    pair = operands(structure, op, targets, shapes, seed, torch.float32)
    out, grads, grad = with_gradients(sddmm, structure, op, pair, targets)
    wide = [None if x is None else x.detach().double().requires_grad_() for x in pair]
    exact, exact_grads, _ = with_gradients(sddmm_reference, structure, op, wide, targets, grad.double())
    positive = [None if x is None else x.detach().double().abs().requires_grad_() for x in pair]
    mass, mass_grads, _ = with_gradients(
        sddmm_reference, structure, {"sub": "add"}.get(op, op), positive, targets, grad.double().abs()
    )
    assert out.shape == exact.shape and out.dtype == torch.float32
    unit = torch.finfo(torch.float32).eps / 2
    # A dot sums as many products as the last dimension has; other ops round at most 3 times (reciprocal, product).
    # Higham 2002, sec. 3.1, with the terms' absolute values as mass.
    width = shapes[0][-1] if op == "dot" and shapes[0] else 1
    assert ((out.double() - exact).abs() <= 1.01 * unit * (width + 3) * mass).all()
    # A gradient entry sums at most one term per edge and output column, each rounded up to 6 times.
    terms = structure.num_edges * max(1, width) * max(1, exact[0].numel() if len(exact) else 1) + 6
    for mine, right, weight in zip(grads, exact_grads, mass_grads, strict=True):
        assert mine.shape == right.shape
        assert ((mine.double() - right).abs() <= 1.01 * unit * terms * weight.abs()).all()  # d/dr of l / r is negative


@pytest.mark.parametrize("targets", TARGETS, ids="".join)
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(make_structure: MakeStructure, op: str, targets: tuple) -> None:
    structure = make_structure(12, num_dst=3, num_halo=2, max_degree=2)
    for shapes in (((), ()), ((2, 3), (3,))):
        if skip(op, shapes):
            continue
        pair = operands(structure, op, targets, shapes, 5, torch.float64)
        leaves = [x for x in pair if x is not None]

        def function(*given: Tensor, pair: list = pair) -> Tensor:
            left = list(given)
            return sddmm(structure, op, *(None if x is None else left.pop(0) for x in pair), *targets)

        assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("op", ["add", "dot", "copy_lhs"])
def test_equals_plain_dgl_on_an_ordinary_graph(make_structure: MakeStructure, op: str) -> None:
    import dgl

    structure = make_structure(31, num_dst=50, num_halo=0)
    graph = dgl.graph((structure.indices.long(), structure.dst.long()), num_nodes=50)
    for targets in (("u", "v"), ("v", "u"), ("u", "e")):
        lhs, rhs = operands(structure, op, targets, ((3, 4), (4,)), 3, torch.float64)
        theirs = dgl.ops.gsddmm(graph, op, lhs, rhs, *targets)
        mine = sddmm(structure, op, lhs, rhs, *targets)
        assert mine.shape == theirs.shape and torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64], ids=str)
def test_kernels_10_integers_and_bool_are_copied_unchanged(make_structure: MakeStructure, dtype: torch.dtype) -> None:
    structure = make_structure(3)
    values = torch.arange(structure.num_src * 2).view(-1, 2)
    x = (values % 3 == 0) if dtype == torch.bool else (values + (2**53 if dtype == torch.int64 else 0)).to(dtype)
    on_edges = sddmm(structure, "copy_lhs", x, None, "u", "v")
    assert on_edges.dtype == dtype and torch.equal(on_edges, x[structure.indices.long()])
    on_edges = sddmm(structure, "copy_rhs", None, x[: structure.num_dst], "u", "v")
    assert on_edges.dtype == dtype and torch.equal(on_edges, x[structure.dst.long()])
    assert torch.equal(sddmm(structure, "copy_lhs", on_edges, None, "e", "v"), on_edges)


def test_kernels_10_integer_arithmetic_keeps_the_type(make_structure: MakeStructure) -> None:
    structure = make_structure(3)
    for dtype in (torch.uint8, torch.int64):
        x = torch.arange(structure.num_src * 2).view(-1, 2).to(dtype)
        out = sddmm(structure, "dot", x, x[: structure.num_dst], "u", "v")
        assert out.dtype == dtype
        assert torch.equal(out, (x[structure.indices.long()] * x[structure.dst.long()]).sum(-1, True).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_computed_in_float32(make_structure: MakeStructure, dtype: torch.dtype) -> None:
    structure = make_structure(3)
    lhs, rhs = operands(structure, "dot", ("u", "v"), ((2, 30), (30,)), 1, dtype)
    out = sddmm(structure, "dot", lhs, rhs, "u", "v")
    assert torch.equal(out, sddmm(structure, "dot", lhs.float(), rhs.float(), "u", "v").to(dtype))


@pytest.mark.parametrize("targets", TARGETS, ids="".join)
@pytest.mark.parametrize("op", OPS)
def test_kernels_07_both_index_types_give_the_same(make_structure: MakeStructure, op: str, targets: tuple) -> None:
    results = []
    for dtype in (torch.int32, torch.int64):
        structure = make_structure(21, dtype=dtype)
        pair = operands(structure, op, targets, ((4,), (4,)), 2, torch.float32)
        results.append(with_gradients(sddmm, structure, op, pair, targets))
    (out, grads, _), (other, other_grads, _) = results
    assert torch.equal(out, other) and all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))


@pytest.mark.parametrize("targets", TARGETS, ids="".join)
@pytest.mark.parametrize("op", OPS)
def test_kernels_03_zero_sizes(make_structure: MakeStructure, op: str, targets: tuple) -> None:
    normal = make_structure(1)
    with_gradients(sddmm, normal, op, operands(normal, op, targets, ((3,), (3,)), 1, torch.float32), targets)
    none = torch.empty(0, dtype=torch.int32)
    cases = [
        (normal, (2, 0)),
        (Structure(4, torch.zeros(4, dtype=torch.int64), none), (3,)),
        (Structure(0, torch.zeros(1, dtype=torch.int64), none), (2, 3)),
    ]
    for structure, features in cases:
        for dtype in (torch.float32, torch.bfloat16):
            pair = operands(structure, op, targets, (features, features), 1, dtype)
            out, grads, _ = with_gradients(sddmm, structure, op, pair, targets)
            last = (1,) if op == "dot" else features[-1:]
            assert out.shape == (structure.num_edges, *features[:-1], *last) and out.dtype == dtype
            for grad, operand in zip(grads, [x for x in pair if x is not None], strict=True):
                assert grad.shape == operand.shape and grad.dtype == dtype and (grad == 0).all()


@pytest.mark.parametrize(
    ("op", "lhs", "rhs", "targets", "match"),
    [
        ("pow", torch.ones(3), torch.ones(1), "uv", "op is 'pow'"),
        ("add", torch.ones(3), torch.ones(1), "ux", "target is 'x'"),
        ("add", torch.ones(3), None, "uv", "needs operand rhs"),
        ("copy_rhs", torch.ones(3), None, "uv", "needs operand rhs"),
        ("add", torch.ones(2), torch.ones(1), "uv", "3 source rows"),
        ("add", torch.ones(3), torch.ones(2), "uv", "1 destination rows"),
        ("add", torch.ones(3), torch.ones(1).double(), "uv", "float32.*float64"),
        ("mul", torch.ones(3).bool(), torch.ones(1).bool(), "uv", "bool"),
        ("add", torch.ones(3, 2), torch.ones(1, 3), "uv", "do not broadcast"),
    ],
)
def test_wrong_arguments_are_refused(op: str, lhs: Tensor, rhs: Tensor, targets: str, match: str) -> None:
    structure = Structure(3, torch.tensor([0, 2]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=match):
        sddmm(structure, op, lhs, rhs, *targets)
