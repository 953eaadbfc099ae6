"""Laws of the fused attention kernels, run by `test_attention.py` in a process of its own: interpreted, or on a GPU.

Tiles, pieces and groups are small, so that tiny graphs meet every path.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from triton_laws import DEVICE, NUM_SHARES, is_rounded, run_laws

from nugnn.kernels import row_schedule as schedules
from nugnn.kernels.attention import AttentionDropout, _Attention, _dropout_arguments, gpu
from nugnn.kernels.attention.reference import gat_attention_reference, gatv2_attention_reference
from nugnn.kernels.dropout.reference import dropout_rows_reference
from nugnn.kernels.philox import RandomKey
from nugnn.kernels.row_schedule import make_row_schedule
from nugnn.kernels.rows import IdRuns
from nugnn.kernels.sddmm.reference import sddmm_reference
from nugnn.kernels.spmm.reference import spmm_reference
from nugnn.kernels.structure import Structure

INF, NAN = float("inf"), float("nan")
SLOPE = 0.2
KEY = RandomKey(2**63 + 5, 6, 7)


def a_structure(seed: int, num_dst: int = 6, max_degree: int = 4, index_dtype: torch.dtype = torch.int32) -> Structure:
    """Empty rows, one hub on each side, parallel edges, sources that nobody reads; heavy rows from 5 edges on."""
    generator = torch.Generator().manual_seed(seed)
    num_src = num_dst + 3
    degrees = torch.randint(0, max_degree + 1, (num_dst,), generator=generator)
    degrees[torch.rand(num_dst, generator=generator) < 0.3] = 0
    degrees[torch.randint(0, num_dst, (1,), generator=generator)] += 3 * max_degree
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(0, num_src - 2, (int(indptr[-1]),), generator=generator)
    indices[torch.rand(len(indices), generator=generator) < 0.4] = 1
    structure = Structure(num_src, indptr.to(DEVICE), indices.to(DEVICE, index_dtype))
    for offsets in (structure.indptr, structure.transposed.indptr):
        schedules._schedules[offsets] = make_row_schedule(offsets, piece_edges=4, group_cost=20)
    return structure


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def inputs(structure: Structure, kind: str, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    x = randn(structure.num_src, heads, dim, seed=seed, dtype=dtype)
    if kind == "gat":
        rest = [
            2 * randn(structure.num_src, heads, seed=seed + 1, dtype=dtype),
            2 * randn(structure.num_dst, heads, seed=seed + 2, dtype=dtype),
        ]
    else:
        rest = [
            randn(structure.num_dst, heads, dim, seed=seed + 1, dtype=dtype),
            randn(heads, dim, seed=seed + 2, dtype=dtype),
        ]
    return [y.requires_grad_() for y in (x, *rest)]


def fused(structure: Structure, kind: str, given: list[Tensor], dropout: AttentionDropout | None = None) -> Tensor:
    x, second, third = given
    operands = (x, second, third, None) if kind == "gat" else (x, None, second, third)
    result: Tensor = _Attention.apply(structure, *operands, SLOPE, dropout)
    return result


def exact(structure: Structure, kind: str, given: list[Tensor], dropout: AttentionDropout | None = None) -> Tensor:
    function = gat_attention_reference if kind == "gat" else gatv2_attention_reference
    options = () if dropout is None else (dropout.p, dropout.key, dropout.ids(structure))
    return function(structure, *given, SLOPE, *options)


def ids_of(structure: Structure, form: str) -> Tensor | IdRuns:
    """Ids past 2**32, by row or by edge."""
    runs = IdRuns(torch.arange(structure.num_dst, device=DEVICE) * 1000 + 2**33, structure.indptr)
    return runs if form == "runs" else runs.tensor().flip(0)


def forward_bound(structure: Structure, kind: str, given: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Bound on the error of the result, first order in the unit roundoff u, from float64 inputs.

    A score of GATv2 is a sum of D products of a rounded difference, slope and weight: ``(D + 4) u`` of its mass
    ``sum |a| |leaky(z)|``; GAT's is 4 roundings of its value. The exponent ``s - m`` is rounded, here and when a later
    maximum shrinks what was summed: together at most twice the row's spread, in powers of two. An exponential is good
    to 3 u and is met once for each of at most ``deg`` blocks. That is the relative error r of a weight before
    normalisation; numerator and sum have it both, and sum up to ``deg`` terms: ``2 r + (2 deg + 4) u``.
    """
    unit = torch.finfo(dtype).eps / 2
    x = given[0].detach()
    dst = structure.dst.long()
    if kind == "gat":
        scores = sddmm_reference(structure, "add", given[1].detach(), given[2].detach(), "u", "v")
        mass = sddmm_reference(structure, "add", given[1].detach().abs(), given[2].detach().abs(), "u", "v")
        score_error = 4 * unit * mass
    else:
        z = sddmm_reference(structure, "add", x, given[1].detach(), "u", "v")
        mass_z = sddmm_reference(structure, "add", x.abs(), given[1].detach().abs(), "u", "v")
        scores = (torch.nn.functional.leaky_relu(z, SLOPE) * given[2].detach()).sum(-1)
        score_error = (x.shape[2] + 4) * unit * (mass_z * given[2].detach().abs()).sum(-1)
    spread = scores.max() - scores.min()
    degrees = structure.in_degrees[dst][:, None]
    r_EH = score_error.amax() + unit * (2 * 1.45 * spread + 3 * (degrees + 1))
    relative_EH = 2 * r_EH + (2 * degrees + 4) * unit
    weights_EH = torch.exp(scores - scores.max())
    total = torch.zeros(structure.num_dst, x.shape[1], dtype=torch.float64, device=DEVICE)
    total = total.index_add(0, dst, weights_EH)
    return 1.01 * spmm_reference(structure, "mul", "sum", x.abs(), (relative_EH * weights_EH / total[dst])[..., None])


def check_forward_and_gradients(share: int) -> None:
    """float64 and float32 against the definition, over shapes, with and without dropout."""
    shapes = [(1, 1), (1, 5), (2, 3), (3, 8), (4, 2), (5, 7)]
    for number, ((heads, dim), kind) in list(enumerate(product(shapes, ("gat", "gatv2"))))[share::NUM_SHARES]:
        p = (0.0, 0.4, 0.4, 0.0)[number % 4]
        structure = a_structure(number, index_dtype=(torch.int32, torch.int64)[number % 2])
        dropout = AttentionDropout(p, KEY, ids_of(structure, ("runs", "tensor")[number % 2])) if p else None
        given = inputs(structure, kind, heads, dim, torch.float64, number)
        wanted = exact(structure, kind, given, dropout)
        out = fused(structure, kind, given, dropout)
        scale = 1 / (1 - p)
        bound = scale * forward_bound(structure, kind, given, torch.float64)
        assert ((out - wanted).abs() <= 2 * bound).all(), (heads, dim, kind, p)  # 2: the definition rounds as well
        grad = randn(*out.shape, seed=99)
        grads = torch.autograd.grad(out, given, grad)
        # values of some units, from below 1e4 roundings of 1e-16
        for mine, right in zip(grads, torch.autograd.grad(wanted, given, grad), strict=True):
            assert mine.shape == right.shape and ((mine - right).abs() <= 1e-11 * (1 + right.abs())).all(), (kind, p)
        if number < 4:
            again = fused(structure, kind, given, dropout)
            assert torch.equal(out, again)
            assert all(map(torch.equal, grads, torch.autograd.grad(again, given, grad)))
        narrow = [y.detach().float().requires_grad_() for y in given]
        wide = [y.detach().double().requires_grad_() for y in narrow]
        wanted, plain = exact(structure, kind, wide, dropout), exact(structure, kind, narrow, dropout)
        out = fused(structure, kind, narrow, dropout)
        assert out.dtype == torch.float32
        bound = scale * forward_bound(structure, kind, wide, torch.float32)
        assert ((out.double() - wanted).abs() <= bound).all(), (heads, dim, kind, p)
        wanted_grads = torch.autograd.grad(wanted, wide, grad)
        plain_grads = torch.autograd.grad(plain, narrow, grad.float())
        mine = torch.autograd.grad(out, narrow, grad.float())
        for own, right, theirs in zip(mine, wanted_grads, plain_grads, strict=True):
            # no worse than plain float32; slack: other orders of summation, 64 roundings of the largest value
            slack = 64 * torch.finfo(torch.float32).eps * (1 + right.abs().max())
            assert (own - right).abs().max() <= 4 * (theirs - right).abs().max() + slack, (heads, dim, kind, p)


def check_half_types_are_float32_rounded_once() -> None:
    for dtype, kind in product((torch.bfloat16, torch.float16), ("gat", "gatv2")):
        structure = a_structure(3)
        given = inputs(structure, kind, 2, 5, dtype)
        out = fused(structure, kind, given)
        grad = randn(*out.shape, seed=9, dtype=dtype)
        grads = torch.autograd.grad(out, given, grad)
        wide = [y.detach().float().requires_grad_() for y in given]
        wide_out = fused(structure, kind, wide)
        wide_grads = torch.autograd.grad(wide_out, wide, grad.float())
        for mine, right in zip((out, *grads), (wide_out, *wide_grads), strict=True):
            assert mine.dtype == dtype and is_rounded(mine, right)


def check_operands_of_two_types_meet_in_the_wider_one() -> None:
    """As autocast gives them: bfloat16 values, float32 scores; gradients in the types of their operands."""
    for kind in ("gat", "gatv2"):
        structure = a_structure(3)
        x, *rest = inputs(structure, kind, 2, 5, torch.float32)
        given = [x.detach().bfloat16().requires_grad_(), *rest]
        wide = [given[0].detach().float().requires_grad_(), *rest]
        out, wide_out = fused(structure, kind, given), fused(structure, kind, wide)
        assert out.dtype == torch.float32 and torch.equal(out, wide_out)
        grads, wide_grads = (torch.autograd.grad(y.sin().sum(), z) for y, z in ((out, given), (wide_out, wide)))
        assert is_rounded(grads[0], wide_grads[0]) and all(map(torch.equal, grads[1:], wide_grads[1:]))


def check_mask_equals_that_of_dropout_rows() -> None:
    """Equal scores and unit vectors as values: an entry of the result is positive iff its edge was kept."""
    num_edges = 13
    structure = Structure(num_edges, torch.tensor([0, num_edges]).to(DEVICE), torch.arange(num_edges, device=DEVICE))
    blocks = ((1, 1), (2, 2), (3, 4), (5, 8), (5, 2), (6, 1), (9, 4))
    for (heads, block_heads), form in zip(blocks, ("runs", "tensor") * 4, strict=False):
        x = torch.eye(num_edges, device=DEVICE)[:, None, :].expand(-1, heads, -1).contiguous()
        operands = gpu.Operands(x, x.new_zeros(num_edges, heads), x.new_zeros(1, heads), None, SLOPE)
        ids = ids_of(structure, form)
        dropout = AttentionDropout(0.3, KEY, ids)
        out, _ = gpu.attention_forward(
            structure, operands, _dropout_arguments(structure, x, dropout), gpu.Tile(4, block_heads, 16, 1)
        )
        kept = dropout_rows_reference(torch.ones(num_edges, heads, 1, device=DEVICE), 0.3, KEY, dropout.ids(structure))
        assert torch.equal(out[0].T > 0, kept[..., 0] > 0), (heads, block_heads)
        assert 0 < int((out > 0).sum()) < num_edges * heads


def check_masked_rows_and_values_that_are_not_finite() -> None:
    indptr, indices = torch.tensor([0, 2, 5, 5, 7], device=DEVICE), torch.tensor([0, 1, 0, 2, 3, 4, 2], device=DEVICE)
    structure = Structure(5, indptr, indices)
    x = randn(5, 1, 2, seed=1).requires_grad_()
    el = torch.tensor([-INF, -INF, 1.0, 1.0, NAN], dtype=torch.float64, device=DEVICE)[:, None].requires_grad_()
    er = torch.zeros(4, 1, dtype=torch.float64, device=DEVICE, requires_grad=True)
    out = fused(structure, "gat", [x, el, er])
    assert out[0].tolist() == [[0, 0]] and out[2].tolist() == [[0, 0]]  # all scores -inf; no edges
    assert torch.allclose(out[1], (x[2] + x[3]) / 2) and out[3].isnan().all()
    grads = torch.autograd.grad(out[:3].sum(), [x, er], retain_graph=True)
    assert grads[1][:3].isfinite().all() and grads[1][0] == 0
    overflow = fused(structure, "gat", [x, torch.full_like(el, INF), er])
    assert overflow[:2].isnan().all()
    large = fused(structure, "gat", [x, torch.full_like(el, 5e4), er])
    assert large[0].allclose((x[0] + x[1]) / 2)


def check_zero_sizes_views_and_certain_dropout() -> None:
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    normal = a_structure(1)
    cases = [
        (Structure(3, torch.zeros(3, dtype=torch.int64, device=DEVICE), none), 2, 3),
        (Structure(0, torch.zeros(1, dtype=torch.int64, device=DEVICE), none), 2, 3),
        (Structure(2, torch.zeros(1, dtype=torch.int64, device=DEVICE), none), 2, 3),
        (normal, 2, 0),
        (normal, 0, 3),
    ]
    for (structure, heads, dim), kind in product(cases, ("gat", "gatv2")):
        given = inputs(structure, kind, heads, dim, torch.float32)
        out = fused(structure, kind, given)
        grads = torch.autograd.grad(out.sum(), given)
        assert out.shape == (structure.num_dst, heads, dim) and (out == 0).all()
        assert all(g.shape == y.shape and (g == 0).all() for g, y in zip(grads, given, strict=True))
    for kind in ("gat", "gatv2"):
        given = inputs(normal, kind, 2, 3, torch.float64)
        strided = [torch.stack([y.detach(), y.detach()], -1)[..., 0] for y in given]
        assert torch.equal(fused(normal, kind, strided), fused(normal, kind, given))
        out = fused(normal, kind, given, AttentionDropout(1.0, KEY))
        assert (out == 0).all()
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), given))


def check_tiles_change_the_order_of_sums_only() -> None:
    """Edges at once, heads in one program, warps, and rows fetched ahead."""
    structure = a_structure(5)
    none = gpu.no_dropout(torch.empty(0, device=DEVICE))
    for kind in ("gat", "gatv2"):
        x, second, third = (y.detach() for y in inputs(structure, kind, 4, 8, torch.float64))
        operands = gpu.Operands(*((x, second, third, None) if kind == "gat" else (x, None, second, third)), SLOPE)
        out, stats = gpu.attention_forward(structure, operands, none)
        grads = gpu.attention_backward(structure, operands, none, stats, out)
        for tile in (gpu.Tile(1, 4, 8, 1), gpu.Tile(4, 2, 8, 1, 2), gpu.Tile(8, 4, 8, 2, 3)):
            other, stats = gpu.attention_forward(structure, operands, none, tile)
            other_grads = gpu.attention_backward(structure, operands, none, stats, out, tile, tile)
            for one, two in zip((out, *grads), (other, *other_grads), strict=True):
                assert (one is None) == (two is None)
                assert one is None or two is None or torch.allclose(one, two, rtol=1e-12, atol=1e-12)


def check_wide_heads_take_several_programs() -> None:
    """More values than a program holds: heads are shared out, and one wide head spreads over warps."""
    structure = a_structure(2, num_dst=3)
    for heads, dim in ((3, 300), (1, 1100)):
        given = inputs(structure, "gatv2", heads, dim, torch.float64)
        wanted = exact(structure, "gatv2", given)
        out = fused(structure, "gatv2", given)
        assert torch.allclose(out, wanted, rtol=1e-11, atol=1e-11)
        grad = randn(*out.shape, seed=4)
        for mine, right in zip(
            torch.autograd.grad(out, given, grad), torch.autograd.grad(wanted, given, grad), strict=True
        ):
            assert torch.allclose(mine, right, rtol=1e-10, atol=1e-10)


if __name__ == "__main__":
    run_laws(globals())
