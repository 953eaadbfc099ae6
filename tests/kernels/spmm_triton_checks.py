"""Laws of the Triton aggregation, run by `test_spmm_triton.py` in a process of its own: interpreted, or on a GPU.

Tiles, pieces and groups are drawn small, so that tiny graphs meet every path; outputs start as NaN.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_laws import Copies, quicken_the_interpreter

from nugnn.kernels import row_schedule as schedules
from nugnn.kernels import structure as structures
from nugnn.kernels.broadcast import align
from nugnn.kernels.padded import carve, is_padded, padded_copy, padded_width, with_padding
from nugnn.kernels.row_schedule import make_row_schedule
from nugnn.kernels.spmm import gpu_aggregate, gpu_extreme, gpu_gradients, staged
from nugnn.kernels.spmm.gpu import aggregate
from nugnn.kernels.spmm.gpu_aggregate import in_edges
from nugnn.kernels.spmm.reference import spmm_reference
from nugnn.kernels.spmm.tiles import Tile, choose_tile, wide_tile
from nugnn.kernels.structure import Structure

DEVICE = sys.argv[1]
OPS = ["copy_lhs", "copy_rhs", "add", "sub", "mul", "div"]
FEATURES = [
    ((), ()),
    ((5,), (5,)),
    ((7,), ()),
    ((16,), (1,)),
    ((2, 3), (2, 1)),
    ((3, 4), (3, 1)),
    ((2, 8), (2, 8)),
    ((3,), (2, 1)),
    ((2, 1), (4,)),
    ((1,), (9,)),
]
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF, NAN = float("inf"), float("nan")


def a_structure(seed: int, num_dst: int, index_dtype: torch.dtype = torch.int32, max_degree: int = 5) -> Structure:
    """Empty rows, one hub, parallel edges, sources that nobody reads; heavy rows from 5 edges on."""
    generator = torch.Generator().manual_seed(seed)
    num_src = num_dst + 3
    degrees = torch.randint(0, max_degree + 1, (num_dst,), generator=generator)
    degrees[torch.rand(num_dst, generator=generator) < 0.3] = 0
    degrees[torch.randint(0, num_dst, (1,), generator=generator)] += 3 * max_degree
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    torch.cumsum(degrees, 0, out=indptr[1:])
    indices = torch.randint(0, max(1, num_src - 2), (int(indptr[-1]),), generator=generator).to(index_dtype)
    structure = Structure(num_src, indptr.to(DEVICE), indices.to(DEVICE))
    for offsets in (structure.indptr, structure.transposed.indptr):
        schedules._schedules[offsets] = make_row_schedule(offsets, piece_edges=4, group_cost=20)
    return structure


def operands(structure: Structure, op: str, shapes: tuple, seed: int, dtype: torch.dtype, ties: bool = False) -> list:
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(structure.num_src, *shapes[0], generator=generator, dtype=torch.float64)
    e = torch.randn(structure.num_edges, *shapes[1], generator=generator, dtype=torch.float64)
    if ties:  # few distinct values, exact in every type, as are their sums, products and reciprocals
        u, e = (u * 2).round() / 2, (e * 2).round() / 2
    if op == "div":
        e = torch.exp2(e.abs().clamp(max=2).round()) if ties else e.sign() * (e.abs() + 0.5)
    pair = [x.to(DEVICE, dtype).requires_grad_() for x in (u, e)]
    return [None if op == "copy_rhs" else pair[0], None if op == "copy_lhs" else pair[1]]


def ours(structure: Structure, op: str, reduce: str, u: Any, e: Any) -> Tensor:
    if u is not None and e is not None:
        u, e = align(u, e)
    return aggregate(structure, op, reduce, u, e)


def with_gradients(function, structure: Structure, op: str, reduce: str, pair: list, grad: Tensor | None = None):
    leaves = [x for x in pair if x is not None]
    out = function(structure, op, reduce, *pair)
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        grad = grad.to(DEVICE, out.dtype)
    return out, torch.autograd.grad(out, leaves, grad), grad


def absolute(pair: list) -> list:
    return [None if x is None else x.detach().double().abs().requires_grad_() for x in pair]


def gamma(roundings: Tensor | int, dtype: torch.dtype) -> Tensor:
    """Higham 2002, sec. 3.1: relative error of a product of ``roundings`` factors ``1 + delta``."""
    total = torch.as_tensor(roundings, dtype=torch.float64, device=DEVICE) * torch.finfo(dtype).eps / 2
    return total / (1 - total)


def allowed(terms: Tensor | int, dtype: torch.dtype, mass: Tensor, exact: Tensor) -> Tensor:
    """A sum of ``terms`` in the accumulator, then one rounding to ``dtype`` (half a unit, or of the subnormals)."""
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    error = gamma(terms, accumulator) * mass.abs()
    if dtype == accumulator:
        return error
    info = torch.finfo(dtype)
    # the interpreter cuts bfloat16 off where a GPU rounds to nearest
    unit = info.eps if DEVICE == "cpu" and dtype == torch.bfloat16 else info.eps / 2
    return error + (exact.abs() + error) * unit + info.smallest_normal * unit


class SmallTiles:
    """Draws a tile in place of the one that suits the hardware."""

    def __init__(self, rows: int, edges: int, unroll: int, heads: int, columns: int, row_sets: int = 1) -> None:
        self.tile = Tile(rows, edges, unroll, heads, columns, row_sets if rows > 1 else 1)

    def __enter__(self) -> None:
        gpu_aggregate.choose_tile = self._choose
        gpu_extreme.wide_tile = lambda *_: replace(self.tile, rows=1, row_sets=1, heads=1)

    def __exit__(self, *_: object) -> None:
        gpu_aggregate.choose_tile = choose_tile
        gpu_extreme.wide_tile = wide_tile

    def _choose(self, num_heads: int, *_: Any) -> Tile:
        return replace(self.tile, heads=self.tile.heads if num_heads > 1 else 1)


TILES = st.builds(
    SmallTiles,
    rows=st.sampled_from([1, 2, 4]),
    edges=st.sampled_from([1, 2]),
    unroll=st.sampled_from([1, 2]),
    heads=st.sampled_from([1, 2]),
    columns=st.sampled_from([4, 8]),
    row_sets=st.sampled_from([1, 2]),
)


def few(count: int):
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=quiet,
        phases=[Phase.generate],  # shrinking a failure takes minutes in the interpreter
    )  # fmt: skip


@few(20)
@given(
    seed=st.integers(0, 2**31),
    num_dst=st.integers(1, 5),
    shapes=st.sampled_from(FEATURES),
    op=st.sampled_from(OPS),
    dtype=st.sampled_from(DTYPES),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    tiles=TILES,
)
def check_sums_stay_within_the_summation_bound(seed, num_dst, shapes, op, dtype, index_dtype, tiles) -> None:
    structure = a_structure(seed, num_dst, index_dtype)
    pair = operands(structure, op, shapes, seed, dtype)
    with tiles:
        out, grads, grad = with_gradients(ours, structure, op, "sum", pair)
    wide = [None if x is None else x.detach().double().requires_grad_() for x in pair]
    exact, exact_grads, _ = with_gradients(spmm_reference, structure, op, "sum", wide, grad.double())
    mass_op = {"sub": "add"}.get(op, op)
    mass, mass_grads, _ = with_gradients(spmm_reference, structure, mass_op, "sum", absolute(pair), grad.double().abs())
    # Higham 2002, sec. 4.2: an in-degree of additions, and up to 3 roundings in a message.
    degree = structure.in_degrees.view(-1, *[1] * (out.dim() - 1))
    assert out.shape == exact.shape and out.dtype == dtype
    assert ((out.double() - exact).abs() <= allowed(degree + 3, dtype, mass, exact)).all()
    # A gradient sums at most one term per edge and output column. Where an operand is broadcast, PyTorch sums the
    # expanded gradient in the operand's own type: a rounding of each addend and of each partial sum at most.
    columns = max(1, exact[0].numel())
    terms = structure.num_edges * columns + 6
    for mine, right, weight, leaf in zip(
        grads, exact_grads, mass_grads, [x for x in pair if x is not None], strict=True
    ):
        assert mine.shape == right.shape and mine.dtype == leaf.dtype
        bound = allowed(terms, dtype, weight, right)
        if leaf.shape[1:] != exact.shape[1:]:
            bound = bound + gamma(columns + 2, dtype) * weight.abs()
        assert ((mine.double() - right).abs() <= bound).all(), (op, shapes)


@few(14)
@given(
    seed=st.integers(0, 2**31),
    num_dst=st.integers(1, 5),
    shapes=st.sampled_from(FEATURES),
    op=st.sampled_from(OPS),
    reduce=st.sampled_from(["max", "min"]),
    dtype=st.sampled_from(DTYPES),
    tiles=TILES,
    is_wide=st.booleans(),
    wide_places=st.booleans(),
)
def check_extremes_are_exact_and_so_is_the_edge_that_won(
    seed, num_dst, shapes, op, reduce, dtype, tiles, is_wide, wide_places
) -> None:
    gpu_extreme.LEAST_BYTES = 1 if is_wide else 1 << 20
    gpu_extreme.MOST_SHORT_PLACES = structures.MOST_SHORT_PLACES = 4 if wide_places else 1 << 15
    structure = a_structure(seed, num_dst)
    pair = operands(structure, op, shapes, seed, dtype, ties=True)
    with tiles:
        out, grads, grad = with_gradients(ours, structure, op, reduce, pair)
    wide = [None if x is None else x.detach().double().requires_grad_() for x in pair]
    exact, exact_grads, _ = with_gradients(spmm_reference, structure, op, reduce, wide, grad.double())
    assert out.dtype == dtype and torch.equal(out.double(), exact)
    # One term per destination and column; the mass takes every |factor| of a term at its largest.
    columns = max(1, exact[0].numel())
    factor = max([1.0, *(float(x.detach().abs().max()) for x in pair if x is not None and x.numel())]) ** 2
    mass = torch.tensor(structure.num_dst * columns * factor * float(grad.abs().max()), device=DEVICE)
    for mine, right, leaf in zip(grads, exact_grads, [x for x in pair if x is not None], strict=True):
        bound = allowed(structure.num_dst * columns + 6, dtype, mass, right)
        if leaf.shape[1:] != exact.shape[1:] or op in ("sub", "div"):
            bound = bound + gamma(columns + 6, dtype) * mass
        assert ((mine.double() - right).abs() <= bound).all(), (op, shapes)


def check_ties_infinities_and_nan() -> None:
    indptr = torch.tensor([0, 3, 3, 5], device=DEVICE)
    structure = Structure(5, indptr, torch.tensor([4, 3, 2, 0, 1], dtype=torch.int32, device=DEVICE))
    upstream = torch.tensor([[1.0], [10], [100]], device=DEVICE)
    for rows, edges, unroll in ((1, 1, 2), (2, 2, 2)):
        with SmallTiles(rows, edges, unroll, 1, 4, 2):
            for piece_edges in (2, 8):
                schedules._schedules[indptr] = make_row_schedule(indptr, piece_edges, 8)
                for reduce in ("max", "min"):
                    x = torch.ones(5, 3, device=DEVICE, requires_grad=True)
                    out = aggregate(structure, "copy_lhs", reduce, x, None)
                    assert out[[0, 2]].eq(1).all() and out[1].eq(-INF if reduce == "max" else INF).all()
                    (grad,) = torch.autograd.grad(out, x, upstream.expand(3, 3))
                    assert grad[:, 0].tolist() == [100, 0, 0, 0, 1] and (grad == grad[:, :1]).all()
                    low = torch.full((5, 3), -INF if reduce == "max" else INF, device=DEVICE, requires_grad=True)
                    (grad,) = torch.autograd.grad(aggregate(structure, "copy_lhs", reduce, low, None).sum(), low)
                    assert grad[:, 1].tolist() == [1, 0, 0, 0, 1]  # the first edge, though nothing is above -inf
                for values in ([0.0, 0, 1, NAN, 2], [0.0, 0, NAN, 1, 2], [0.0, 0, 1, 2, NAN], [0.0, 0, NAN, NAN, INF]):
                    for reduce in ("max", "min", "sum"):
                        x = torch.tensor(values, device=DEVICE)[:, None].requires_grad_()
                        out = aggregate(structure, "copy_lhs", reduce, x, None)
                        assert out[0].isnan().all() and out[2].eq(0).all()
                        if reduce != "sum":  # the first NaN in edge order: edges come from 4, 3, 2
                            (grad,) = torch.autograd.grad(out[0].sum(), x)
                            first = next(row for row in (4, 3, 2) if values[row] != values[row])
                            assert grad.flatten().tolist() == [float(row == first) for row in range(5)]


def check_wide_extremes_of_every_triple_of_special_values() -> None:
    gpu_extreme.LEAST_BYTES, gpu_extreme.MOST_SHORT_PLACES = 1, 1 << 15  # other laws leave them as their last case had
    structures.MOST_SHORT_PLACES = 1 << 15
    values = torch.tensor([-INF, -0.0, 0.0, INF, NAN], dtype=torch.float64)
    triples = torch.cartesian_prod(values, values, values).T
    indptr = torch.tensor([0, 3, 3, 5, 10], device=DEVICE)
    indices = torch.tensor([2, 1, 0, 0, 2, 1, 1, 2, 2, 0], dtype=torch.int32, device=DEVICE)
    structure = Structure(4, indptr, indices)
    upstream = torch.tensor([[1.0], [2], [4], [8]], dtype=torch.float64, device=DEVICE).expand(4, triples.shape[1])
    for dtype, reduce, piece_edges in product([torch.float32, *HALVES], ["max", "min"], [3, 512]):
        schedules._schedules[indptr] = make_row_schedule(indptr, piece_edges, 20)
        x = torch.cat([triples, torch.zeros_like(triples[:1])]).to(DEVICE, dtype).requires_grad_()
        wide = x.detach().double().requires_grad_()
        exact = spmm_reference(structure, "copy_lhs", reduce, wide, None)
        with SmallTiles(1, 2, 2, 1, 128):
            out = aggregate(structure, "copy_lhs", reduce, x, None)
        assert gpu_extreme.takes(x) and out.dtype == dtype
        assert torch.equal(out.double().nan_to_num(7, posinf=8, neginf=9), exact.nan_to_num(7, posinf=8, neginf=9))
        (right,) = torch.autograd.grad(exact, wide, upstream)
        assert torch.equal(torch.autograd.grad(out, x, upstream.to(dtype))[0].double(), right.to(dtype).double())


@few(8)
@given(
    seed=st.integers(0, 2**31),
    num_dst=st.integers(1, 5),
    heads=st.sampled_from([1, 3]),
    weighted=st.booleans(),
    scaled=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    tiles=TILES,
)
def check_scales_are_part_of_the_sum(seed, num_dst, heads, weighted, scaled, dtype, tiles) -> None:
    structure = a_structure(seed, num_dst)
    shapes = ((heads, 5), (heads, 1))
    x, w = operands(structure, "mul", shapes, seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    rows = (structure.num_src, structure.num_dst)
    src, dst = (
        torch.rand(count, generator=generator).to(DEVICE) if used else None
        for count, used in zip(rows, scaled, strict=True)
    )

    def direct(structure: Structure, op: str, _: str, x: Any, w: Any) -> Tensor:
        return aggregate(structure, op, "sum", x, w, src, dst)

    def composed(structure: Structure, op: str, _: str, x: Any, w: Any) -> Tensor:
        x = x if src is None else x * src.double().view(-1, 1, 1)
        out = spmm_reference(structure, op, "sum", x, w)
        return out if dst is None else out * dst.double().view(-1, 1, 1)

    op = "mul" if weighted else "copy_lhs"
    pair = [x, w if weighted else None]
    with tiles:
        out, grads, grad = with_gradients(direct, structure, op, "sum", pair)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in pair]
    exact, exact_grads, _ = with_gradients(composed, structure, op, "sum", wide, grad.double())
    mass, mass_grads, _ = with_gradients(composed, structure, op, "sum", absolute(pair), grad.double().abs())
    degree = structure.in_degrees.view(-1, 1, 1)
    assert ((out.double() - exact).abs() <= allowed(degree + 4, dtype, mass, exact)).all()
    for mine, right, weight in zip(grads, exact_grads, mass_grads, strict=True):
        assert ((mine.double() - right).abs() <= allowed(structure.num_edges * 5 + 6, dtype, weight, right)).all()


def check_gradcheck() -> None:
    structure = a_structure(12, 2, max_degree=2)
    empty = structure.in_degrees == 0
    cases = (("mul", "sum", ((2, 2), (2, 1))), ("div", "sum", ((3,), (3,))), ("copy_rhs", "sum", ((), (2,))))
    cases += (("mul", "max", ((2,), ())), ("add", "min", ((2,), (2,))), ("copy_lhs", "max", ((3,), ())))
    for op, reduce, shapes in cases:
        pair = operands(structure, op, shapes, 5, torch.float64)
        leaves = [x for x in pair if x is not None]

        def function(*given: Tensor, op: str = op, reduce: str = reduce, pair: list = pair) -> Tensor:
            left = list(given)
            u, e = (None if x is None else left.pop(0) for x in pair)
            out = ours(structure, op, reduce, u, e)
            return out.masked_fill(empty.view(-1, *[1] * (out.dim() - 1)), 0)  # differences of infinities are NaN

        with SmallTiles(1, 2, 2, 2, 4):
            assert torch.autograd.gradcheck(function, leaves, fast_mode=DEVICE == "cpu")


def check_views_padding_and_repetition() -> None:
    structure = a_structure(21, 5)
    for dtype, width in ((torch.float32, 3), (torch.bfloat16, 47), (torch.float32, 100), (torch.bfloat16, 1)):
        base = torch.randn(structure.num_src, 2 * width + 1, generator=torch.Generator().manual_seed(0))
        view = base.to(DEVICE, dtype)[:, 1 : 2 * width + 1 : 2]
        out = aggregate(structure, "copy_lhs", "sum", view, None)
        exact = spmm_reference(structure, "copy_lhs", "sum", view.double(), None)
        mass = spmm_reference(structure, "copy_lhs", "sum", view.double().abs(), None)
        assert ((out.double() - exact).abs() <= allowed(structure.in_degrees[:, None], dtype, mass, exact)).all()
        assert torch.equal(out, aggregate(structure, "copy_lhs", "sum", view, None))
    many = Structure(3, structure.indptr, structure.indices % 3)  # each source is read often: rows are padded
    assert gpu_aggregate.aligned_rows(torch.ones(3, 5), many.num_edges).shape == (3, 8)
    x = torch.arange(15.0, device=DEVICE).view(3, 5)
    assert torch.equal(aggregate(many, "copy_lhs", "sum", x, None), spmm_reference(many, "copy_lhs", "sum", x, None))


def check_sums_of_rows_with_many_edges() -> None:
    """The tiles searched for a mean degree of 32 and more, a masked and a whole row of each."""
    indptr = torch.tensor([0, 3, 3, 48, 130, 330], device=DEVICE)
    indices = torch.randint(0, 7, (330,), generator=torch.Generator().manual_seed(27))
    structure = Structure(7, indptr, indices.to(DEVICE))
    assert in_edges(structure).mean_degree >= 32
    for dtype, widths in ((torch.float32, (8, 5, 16, 12, 32, 72)), (torch.bfloat16, (16, 12, 32, 24, 48, 160))):
        for width in widths:
            x = torch.randn(structure.num_src, width, generator=torch.Generator().manual_seed(width)).to(DEVICE, dtype)
            out = aggregate(structure, "copy_lhs", "sum", x, None)
            exact = spmm_reference(structure, "copy_lhs", "sum", x.double(), None)
            mass = spmm_reference(structure, "copy_lhs", "sum", x.double().abs(), None)
            assert ((out.double() - exact).abs() <= allowed(structure.in_degrees[:, None], dtype, mass, exact)).all()


def check_how_rows_lie_changes_no_bit() -> None:
    structure = a_structure(23, 6)
    generator = torch.Generator().manual_seed(23)
    types = ((torch.float64, 6), (torch.bfloat16, 47))
    for (op, reduce), (dtype, width) in product(
        (("copy_lhs", "max"), ("mul", "sum"), ("mul", "max"), ("add", "min")), types
    ):
        x = torch.randn(structure.num_src, width, generator=generator).to(DEVICE, dtype)
        w = torch.randn(structure.num_edges, 1, generator=generator).to(DEVICE, dtype)
        grad = torch.randn(structure.num_dst, width, generator=generator).to(DEVICE, dtype)
        spread = torch.full((structure.num_src, 2 * width), NAN, dtype=dtype, device=DEVICE)
        spread[:, ::2] = x
        results = []
        for u, g in ((x, grad), (padded_copy(x), padded_copy(grad)), (spread[:, ::2], grad)):
            u, e = u.detach().requires_grad_(), None if op == "copy_lhs" else w.clone().requires_grad_()
            out = aggregate(structure, op, reduce, u, e)
            results.append([out, *torch.autograd.grad(out, [t for t in (u, e) if t is not None], g)])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), (op, reduce, dtype)


def check_stages_are_one_sum_rounded_once() -> None:
    for seed, dtype, width in ((31, torch.float32, 5), (32, torch.bfloat16, 24), (33, torch.float64, 3)):
        structure = a_structure(seed, 6)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(structure.num_src, width, generator=generator).to(DEVICE, dtype)
        src, dst = (torch.rand(n, generator=generator).to(DEVICE) for n in (structure.num_src, structure.num_dst))
        wide = torch.promote_types(dtype, torch.float32)
        for first in (0, 3, structure.num_src):
            parts = structure.split(first)
            for part in (parts.first, parts.rest):
                schedules._schedules[part.indptr] = make_row_schedule(part.indptr, piece_edges=3, group_cost=20)
            with SmallTiles(2, 2, 2, 1, 8):
                begun, _ = gpu_aggregate.aggregate_rows(
                    gpu_aggregate.in_edges(parts.first), x[:first].contiguous(), 1, out_dtype=wide,
                    src_scale=src[:first].contiguous(), dst_scale=dst,
                )  # fmt: skip
                place = begun if dtype == wide else None
                out, _ = gpu_aggregate.aggregate_rows(
                    gpu_aggregate.in_edges(parts.rest), x[first:].contiguous(), 1,
                    src_scale=src[first:].contiguous(), dst_scale=dst, add_to=begun, out=place,
                )  # fmt: skip
            assert out.dtype == dtype and (out.data_ptr() == begun.data_ptr()) == (dtype == wide)
            scaled = x.double() * src.double()[:, None]
            exact = spmm_reference(structure, "copy_lhs", "sum", scaled, None) * dst.double()[:, None]
            mass = spmm_reference(structure, "copy_lhs", "sum", scaled.abs(), None) * dst.double()[:, None]
            assert (
                (out.double() - exact).abs() <= allowed(structure.in_degrees[:, None] + 5, dtype, mass, exact)
            ).all()


def check_some_rows_begin_and_all_are_one_sum_rounded_once() -> None:
    """A stage for some rows, the others in one pass; padded rows end in zeros, also where one row alone is left."""
    for seed, dtype, width in ((34, torch.float32, 5), (35, torch.bfloat16, 24), (36, torch.bfloat16, 47)):
        structure, num_first = a_structure(seed, 6), 4
        generator = torch.Generator().manual_seed(seed)
        num_src, num_dst = structure.num_src, structure.num_dst
        x, base = (torch.randn(n, width, generator=generator).to(DEVICE, dtype) for n in (num_src, num_dst))
        src, dst = (torch.rand(n, generator=generator).to(DEVICE) for n in (num_src, num_dst))
        halves, scales = (x[:num_first], x[num_first:]), {"src_scale": src, "dst_scale": dst}
        scaled = x.double() * src.double()[:, None]
        sums, masses = (
            spmm_reference(structure, "copy_lhs", "sum", y, None) * dst.double()[:, None]
            for y in (scaled, scaled.abs())
        )
        for num_rows in (1, num_dst // 2, num_dst - 1, num_dst):
            for to in (None, base, padded_copy(base)):
                to = None if to is None else to.clone() if to is base else to
                before = torch.zeros_like(base) if to is None else base
                with mock.patch.object(staged, "runs_triton", return_value=True):
                    begun = staged.begin_sum(structure, halves[0], num_rows, add_to=to, **scales)
                    assert begun.shape == (num_rows, width)
                    out = staged.finish_sum(structure, begun, *halves, add_to=to, **scales)
                assert (out is to) == (to is not None and num_rows < num_dst)
                exact, mass = sums + before.double(), masses + before.double().abs()
                error = (out.double() - exact).abs()
                assert (error <= allowed(structure.in_degrees[:, None] + 6, dtype, mass, exact)).all()
                assert (with_padding(out)[:, width:] == 0).all()


def check_rows_with_heads_begin_where_no_others_come() -> None:
    structure = a_structure(37, 6)
    x, none = torch.randn(structure.num_src, 2, 3, device=DEVICE), torch.empty(0, 2, 3, device=DEVICE)
    exact, mass = (spmm_reference(structure, "copy_lhs", "sum", y, None) for y in (x.double(), x.double().abs()))
    bound = allowed(structure.in_degrees[:, None, None] + 2, x.dtype, mass, exact)
    with mock.patch.object(staged, "runs_triton", return_value=True):
        for num_rows in (structure.num_dst // 2, structure.num_dst):
            out = staged.finish_sum(structure, staged.begin_sum(structure, x, num_rows), x, none)
            assert ((out.double() - exact).abs() <= bound).all()


def check_padded_rows_give_the_same_bits_in_padded_rows_without_a_copy() -> None:
    structure = a_structure(23, 9, max_degree=9)
    scale = torch.rand(structure.num_dst, device=DEVICE)
    for dtype, width in ((torch.bfloat16, 47), (torch.bfloat16, 100), (torch.float32, 5), (torch.float64, 3)):
        x = torch.randn(structure.num_src, width, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
        grad = torch.randn(structure.num_dst, width, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        results = []
        for lay_out in (Tensor.clone, padded_copy):
            leaf, given = lay_out(x).requires_grad_(), lay_out(grad)
            with Copies() as copies:
                out = aggregate(structure, "copy_lhs", "sum", leaf, None, None, scale)
                (own,) = torch.autograd.grad(out, leaf, given)
            results.append((out, own))
        assert copies.count == 0
        for plain, padded in zip(*results, strict=True):
            assert torch.equal(plain, padded) and not is_padded(plain)
            behind = with_padding(padded.detach())[:, width:]
            assert behind.shape[1] > 0 and (behind == 0).all()


def check_sums_are_added_in_place_and_rounded_once() -> None:
    structure = a_structure(24, 9, max_degree=9)
    scale = torch.rand(structure.num_dst, device=DEVICE)
    for dtype, width in ((torch.bfloat16, 47), (torch.float32, 16), (torch.float64, 5)):
        generator, padded = torch.Generator().manual_seed(0), padded_width(width, dtype.itemsize)
        buffer = torch.randn(structure.num_src, 2 * padded, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        buffer[:, width:padded] = buffer[:, padded + width :] = 0
        to, x = carve(buffer, [width, width], [padded, padded])  # side by side, as two products of one input
        to, before, others = to[: structure.num_dst], to[: structure.num_dst].double().clone(), x.clone()
        out = aggregate(structure, "copy_lhs", "sum", x, None, None, scale, to)
        assert out.data_ptr() == to.data_ptr() and torch.equal(x, others)
        assert (with_padding(to)[:, width:] == 0).all()
        sums, mass = (spmm_reference(structure, "copy_lhs", "sum", y, None) for y in (x.double(), x.double().abs()))
        exact, mass = (s * scale.double()[:, None] + b for s, b in ((sums, before), (mass, before.abs())))
        error = (out.double() - exact).abs()
        assert (error <= allowed(structure.in_degrees[:, None] + 2, dtype, mass, exact)).all()

        wide = before.to(torch.float64 if dtype == torch.float64 else torch.float32)  # another type and other strides
        new, _ = gpu_aggregate.aggregate_rows(in_edges(structure), x, 1, dst_scale=scale, add_to=wide)
        assert new.dtype == dtype and new.data_ptr() != wide.data_ptr()
        assert torch.equal(new, out) and (with_padding(new)[:, width:] == 0).all()

        start = before.to(dtype).requires_grad_()
        x = x.clone().requires_grad_()
        grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        added = aggregate(structure, "copy_lhs", "sum", x, None, None, scale, start * 1)
        to_start, to_x = torch.autograd.grad(added, (start, x), grad)
        alone = aggregate(structure, "copy_lhs", "sum", x, None, None, scale)
        assert torch.equal(to_start, grad)
        assert torch.equal(to_x, torch.autograd.grad(alone, x, grad)[0])


@few(4)
@given(
    seed=st.integers(0, 2**31),
    num_dst=st.integers(1, 5),
    width=st.sampled_from([1, 5, 8, 19]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["plain", "padded", "beside others"]),
    adds=st.booleans(),
    tiles=TILES,
)
def check_sums_of_two_tensors_and_of_some_rows_have_the_bits_of_one_sum(
    seed, num_dst, width, dtype, layout, adds, tiles
) -> None:
    structure = a_structure(seed, num_dst)
    x, y, base = (
        torch.randn(rows, width, generator=torch.Generator().manual_seed(seed + rows)).to(DEVICE, dtype)
        for rows in (structure.num_src, num_dst, num_dst)
    )
    src, dst = (1 + torch.rand(rows, device=DEVICE) for rows in (structure.num_src, num_dst))
    first = 1 + seed % (structure.num_src - 1)
    halves = [x[:first].clone(), x[first:].clone()]
    if layout != "plain":
        halves = [padded_copy(half) for half in halves]
        x, y, base = (padded_copy(z) for z in (x, y, base))
    if layout == "beside others":  # rows of one product among several, at another distance than received ones
        padded = padded_width(width, dtype.itemsize)
        buffer = torch.zeros(first, 2 * padded, dtype=dtype, device=DEVICE)
        halves[0] = carve(buffer, [width, width], [padded, padded])[1].copy_(halves[0])
    scales = {"src_scale": src, "dst_scale": dst, "add_to": base if adds else None}
    with tiles:
        one, _ = gpu_aggregate.aggregate_rows(in_edges(structure), x, 1, **scales)
        two, _ = gpu_aggregate.aggregate_rows(in_edges(structure), halves[0], 1, rest=halves[1], **scales)
        assert torch.equal(one, two) and is_padded(two) == is_padded(one)
        usual = schedules._sizes
        schedules._sizes = lambda indptr: (4, 20)  # as `a_structure` cuts all rows
        scale, to_all = src, None
        for rows in (None, (0, first), (first, structure.num_src)):
            edges = gpu_aggregate.out_edges(structure, has_edge_rows=False, rows=rows)
            begin, end = rows or (0, structure.num_src)
            sums, _ = gpu_aggregate.aggregate_rows(edges, y, 1, src_scale=dst, dst_scale=scale[begin:end])
            to_all = sums if to_all is None else to_all
            assert torch.equal(sums, to_all[begin:end])
        schedules._sizes = usual


def check_64_bit_edges_give_the_same() -> None:
    structure = a_structure(22, 3)
    results = []
    usual = gpu_aggregate.needs_wide_edges
    for wide in (False, True):
        for module in (gpu_aggregate, gpu_extreme, gpu_gradients):
            module.needs_wide_edges = lambda num_edges, wide=wide: wide
        for op, reduce in (("copy_lhs", "sum"), ("mul", "max")):
            pair = operands(structure, op, ((2, 2), (2, 1)), 3, torch.float32)
            out, grads, _ = with_gradients(ours, structure, op, reduce, pair)
            results.append([out, *grads])
    gpu_aggregate.needs_wide_edges = gpu_extreme.needs_wide_edges = gpu_gradients.needs_wide_edges = usual
    for narrow, wide in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


def check_no_edges() -> None:
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    structure = Structure(3, torch.zeros(3, dtype=torch.int64, device=DEVICE), none)
    for width in (1, 16):
        for reduce, empty in (("sum", 0.0), ("max", -INF), ("min", INF)):
            x = torch.ones(3, width, device=DEVICE, requires_grad=True)
            out = aggregate(structure, "copy_lhs", reduce, x, None)
            assert out.shape == (2, width) and (out == empty).all()
            (grad,) = torch.autograd.grad(out.sum(), x)
            assert (grad == 0).all()


def main() -> None:
    if DEVICE == "cpu":
        quicken_the_interpreter()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            start = time.perf_counter()
            check()
            print(f"{name} {time.perf_counter() - start:.1f} s", flush=True)
    print("all hold")


if __name__ == "__main__":
    main()
