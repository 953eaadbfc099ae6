"""Laws of SDDMM and edge softmax in Triton, run by `test_edge_triton.py` in a process of its own.

Pieces and groups are small, so that tiny graphs meet every path.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton_laws import DEVICE, NUM_SHARES, is_rounded, run_laws

from nugnn.kernels import row_schedule as schedules
from nugnn.kernels.broadcast import align
from nugnn.kernels.edge_softmax import gpu as edge_softmax_gpu
from nugnn.kernels.edge_softmax.reference import edge_softmax_reference
from nugnn.kernels.row_schedule import make_row_schedule
from nugnn.kernels.sddmm.gpu import sddmm_triton
from nugnn.kernels.sddmm.reference import sddmm_reference
from nugnn.kernels.structure import Structure

INF, NAN = float("inf"), float("nan")
OPS = ["add", "sub", "mul", "div", "dot", "copy_lhs", "copy_rhs"]
TARGETS = [("u", "v"), ("v", "u"), ("u", "e"), ("e", "u"), ("v", "e"), ("e", "v")]
FEATURES = [
    ((), ()),
    ((5,), (5,)),
    ((4,), ()),
    ((3,), (2, 3)),
    ((2, 3), (2, 1)),
    ((2, 1, 3), (1, 5, 3)),
    ((130,), (1,)),
]


def a_structure(seed: int, num_dst: int = 5, index_dtype: torch.dtype = torch.int32) -> Structure:
    """Empty rows, one hub on each side, parallel edges, sources that nobody reads; heavy rows from 5 edges on."""
    generator = torch.Generator().manual_seed(seed)
    degrees = torch.randint(0, 4, (num_dst,), generator=generator)
    degrees[torch.randint(0, num_dst, (1,), generator=generator)] = 0
    degrees[torch.randint(0, num_dst, (1,), generator=generator)] += 10
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(0, num_dst + 1, (int(indptr[-1]),), generator=generator)
    indices[torch.rand(len(indices), generator=generator) < 0.4] = 1
    structure = Structure(num_dst + 2, indptr.to(DEVICE), indices.to(DEVICE, index_dtype))
    for offsets in (structure.indptr, structure.transposed.indptr):
        schedules._schedules[offsets] = make_row_schedule(offsets, piece_edges=4, group_cost=20)
    return structure


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def operands(structure: Structure, op: str, targets: tuple, shapes: tuple, dtype: torch.dtype, seed: int = 0) -> list:
    rows = {"u": structure.num_src, "v": structure.num_dst, "e": structure.num_edges}
    lhs, rhs = (randn(rows[t], *s, seed=seed + i) for i, (t, s) in enumerate(zip(targets, shapes, strict=True)))
    if op == "div":
        rhs = torch.where(rhs < 0, rhs - 0.5, rhs + 0.5)
    if op not in ("copy_lhs", "copy_rhs"):
        lhs, rhs = align(lhs, rhs)
    pair = [lhs.to(dtype).contiguous().requires_grad_(), rhs.to(dtype).contiguous().requires_grad_()]
    return [None if op == "copy_rhs" else pair[0], None if op == "copy_lhs" else pair[1]]


def cases() -> list[tuple]:
    """Every operator between every pair of ends, with feature shapes in turn; a copy of edge rows is no operator."""
    found = []
    for number, (op, targets) in enumerate(product(OPS, TARGETS)):
        if (op, targets[0]) == ("copy_lhs", "e") or (op, targets[1]) == ("copy_rhs", "e"):
            continue
        for shapes in (FEATURES[number % len(FEATURES)], FEATURES[(number + 3) % len(FEATURES)]):
            if op != "dot" or shapes[0][-1:] == shapes[1][-1:]:
                found.append((op, targets, shapes))
    return found


def with_gradients(
    function: Any, structure: Structure, op: str, pair: list, targets: tuple, grad: Tensor | None = None
):
    out = function(structure, op, *pair, *targets)
    grad = randn(*out.shape, seed=9, dtype=out.dtype) if grad is None else grad
    return out, torch.autograd.grad(out, [x for x in pair if x is not None], grad), grad


def check_sddmm_stays_within_the_rounding_bound(share: int) -> None:
    """float64 and float32; the bounds are those of `test_sddmm.py`, which derives them."""
    for number, (op, targets, shapes) in list(enumerate(cases()))[share::NUM_SHARES]:
        dtype = (torch.float32, torch.float64)[number % 2]
        structure = a_structure(number % 5, index_dtype=(torch.int32, torch.int64)[number % 3 == 0])
        pair = operands(structure, op, targets, shapes, dtype, number)
        out, grads, grad = with_gradients(sddmm_triton, structure, op, pair, targets)
        wide = [None if x is None else x.detach().double().requires_grad_() for x in pair]
        exact, exact_grads, _ = with_gradients(sddmm_reference, structure, op, wide, targets, grad.double())
        positive = [None if x is None else x.detach().double().abs().requires_grad_() for x in pair]
        positive_op = {"sub": "add"}.get(op, op)
        mass, mass_grads, _ = with_gradients(
            sddmm_reference, structure, positive_op, positive, targets, grad.double().abs()
        )
        unit = torch.finfo(dtype).eps / 2 * (1 + (dtype == torch.float64))  # the exact side rounds as well
        width = shapes[0][-1] if op == "dot" and shapes[0] else 1
        assert out.shape == exact.shape and out.dtype == dtype
        assert ((out.double() - exact).abs() <= 1.01 * unit * (width + 3) * mass).all(), (op, targets, shapes)
        terms = structure.num_edges * max(1, width) * max(1, exact[0].numel()) + 6
        for mine, right, weight in zip(grads, exact_grads, mass_grads, strict=True):
            assert mine.shape == right.shape and mine.dtype == dtype
            assert ((mine.double() - right).abs() <= 1.01 * unit * terms * weight.abs()).all(), (op, targets, shapes)


def check_sddmm_repeats_bit_for_bit_and_divides_as_the_cpu_does() -> None:
    structure = a_structure(2)
    pair = operands(structure, "div", ("u", "v"), ((3,), (3,)), torch.float32)
    first, again = (with_gradients(sddmm_triton, structure, "div", pair, ("u", "v")) for _ in range(2))
    assert torch.equal(first[0], again[0]) and all(map(torch.equal, first[1], again[1]))
    assert torch.equal(first[0], sddmm_reference(structure, "div", *pair, "u", "v"))


def check_half_types_are_float32_rounded_once() -> None:
    structure = a_structure(3)
    for dtype, (op, shapes) in product(
        (torch.bfloat16, torch.float16), (("dot", ((2, 9), (2, 9))), ("add", ((4,), (4,))), ("mul", ((2, 3), (2, 1))))
    ):
        pair = operands(structure, op, ("u", "v"), shapes, dtype)
        out, grads, grad = with_gradients(sddmm_triton, structure, op, pair, ("u", "v"))
        wide = [x.detach().float().requires_grad_() for x in pair]
        wide_out, wide_grads, _ = with_gradients(sddmm_triton, structure, op, wide, ("u", "v"), grad.float())
        assert out.dtype == dtype and is_rounded(out, wide_out)
        assert all(map(is_rounded, grads, wide_grads))


def check_zero_sizes() -> None:
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    for structure, shape in (
        (a_structure(1), (2, 0)),
        (Structure(4, torch.zeros(4, dtype=torch.int64, device=DEVICE), none), (3,)),
        (Structure(0, torch.zeros(1, dtype=torch.int64, device=DEVICE), none), (2, 3)),
    ):
        for op, targets in product(("add", "div", "dot"), (("u", "v"), ("v", "e"))):
            pair = operands(structure, op, targets, (shape, shape), torch.float32)
            out, grads, _ = with_gradients(sddmm_triton, structure, op, pair, targets)
            exact, exact_grads, _ = with_gradients(sddmm_reference, structure, op, pair, targets)
            assert torch.equal(out, exact) and all(map(torch.equal, grads, exact_grads))
        scores = torch.empty(structure.num_edges, 0, device=DEVICE)
        assert edge_softmax_gpu.softmax(structure.indptr, scores).shape == scores.shape


def check_edge_softmax_stays_within_the_rounding_bound() -> None:
    """Forward and backward; the bounds are those of `test_edge_softmax.py`, with one exponential more per block met."""
    for number, (columns, dtype) in enumerate(product((1, 3, 4, 70), (torch.float64, torch.float32))):
        structure = a_structure(number, num_dst=7)
        dst, indptr = structure.dst.long(), structure.indptr
        scores = 4 * randn(structure.num_edges, columns, seed=number, dtype=dtype)
        grad = randn(structure.num_edges, columns, seed=number + 50, dtype=dtype)
        weights = edge_softmax_gpu.softmax(indptr, scores)
        wide = scores.double().requires_grad_()
        exact = edge_softmax_reference(structure, wide)
        unit = torch.finfo(dtype).eps / 2 * (1 + (dtype == torch.float64))
        degrees = structure.in_degrees[dst][:, None]
        spread = float((scores.max() - scores.min()).detach())
        # shifts are rounded and multiplied by log2(e); a sum shrinks once for every block and piece
        relative = 1.01 * unit * (2 * 3 * spread + 2 * 3 + 5 * degrees)
        assert weights.dtype == dtype and ((weights - exact).abs() <= relative * exact).all()
        mine = edge_softmax_gpu.softmax_backward(indptr, weights, grad)
        (right,) = torch.autograd.grad(exact, wide, grad.double())
        total = torch.zeros(7, columns, dtype=torch.float64, device=DEVICE)
        total = total.index_add(0, dst, exact.detach() * grad.double().abs())
        mass = exact.detach() * (grad.double().abs() + total[dst])
        assert ((mine - right).abs() <= (2 * relative + 1.01 * unit * (degrees + 3)) * mass).all()
        assert torch.equal(weights, edge_softmax_gpu.softmax(indptr, scores))


def check_edge_softmax_masks_and_does_not_overflow() -> None:
    indptr = torch.tensor([0, 2, 5, 5, 7, 9, 20], device=DEVICE)
    schedules._schedules[indptr] = make_row_schedule(indptr, piece_edges=4, group_cost=20)
    values = [-INF, -INF, 1.0, -INF, 1.0, NAN, 2.0, 1.0, INF] + [-INF] * 5 + [3e4] * 2 + [-INF] * 4
    scores = torch.tensor(values, device=DEVICE)[:, None]
    out = edge_softmax_gpu.softmax(indptr, scores).flatten()
    assert out[:5].tolist() == [0, 0, 0.5, 0, 0.5] and out[5:7].isnan().all() and out[7:9].isnan().any()
    assert out[9:].tolist() == [0.0] * 5 + [0.5] * 2 + [0.0] * 4  # a split row, with pieces that are all masked
    grad = edge_softmax_gpu.softmax_backward(indptr, out[:, None].nan_to_num(), torch.ones_like(scores))
    assert grad[:2].flatten().tolist() == [0, 0] and grad.isfinite().all()


def check_half_softmax_is_float32_rounded_once() -> None:
    structure = a_structure(4)
    for dtype in (torch.bfloat16, torch.float16):
        scores = randn(structure.num_edges, 3, seed=1, dtype=dtype)
        weights = edge_softmax_gpu.softmax(structure.indptr, scores)
        assert weights.dtype == dtype and is_rounded(
            weights, edge_softmax_gpu.softmax(structure.indptr, scores.float())
        )
        grad = randn(structure.num_edges, 3, seed=2, dtype=dtype)
        mine = edge_softmax_gpu.softmax_backward(structure.indptr, weights, grad)
        assert is_rounded(mine, edge_softmax_gpu.softmax_backward(structure.indptr, weights.float(), grad.float()))


if __name__ == "__main__":
    run_laws(globals())
