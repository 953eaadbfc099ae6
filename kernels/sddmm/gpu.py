"""SDDMM in Triton, and its gradients as sums over the edges of a row: no atomics, equal bits from run to run.

The forward kernels are flat over edges and features, balanced whatever the degrees. A gradient to source or destination
rows walks the edges of each row by the schedule, over out-edges for sources. Import this module only where Triton is
installed.

Shape suffixes: E edges, F features of the broadcast result, own operand's rows first in gradients.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nugnn.kernels.operator import Operator
from nugnn.kernels.row_programs import edges_of_row, num_units, rows_of_unit, schedule_arguments, sum_pieces
from nugnn.kernels.row_schedule import row_schedule
from nugnn.kernels.structure import Structure

_TARGETS = {"u": 0, "v": 1, "e": 2}
_OPS = {"add": 0, "sub": 1, "mul": 2, "div": 3, "copy_lhs": 4, "copy_rhs": 5}
_SAME, _REPEAT, _TABLE = 0, 1, 2
_TILE = 1024


@dataclass(frozen=True, eq=False, slots=True)
class Columns:
    """Which column of an operand each column of the broadcast result reads.

    Args:
        mode: The same column; ``column // repeat``; or as the table says.
        repeat: Result columns for each operand column.
        table: ``(F,)`` int32, read in the last mode only.
    """

    mode: int
    repeat: int
    table: Tensor


@functools.lru_cache(maxsize=256)
def columns_of(own: tuple[int, ...], features: tuple[int, ...], device: torch.device) -> Columns:
    """Columns of an operand of feature shape ``own`` in a result of feature shape ``features``."""
    numbers = torch.arange(math.prod(own), dtype=torch.int32).reshape(own).expand(features).flatten()
    plain = torch.arange(len(numbers), dtype=torch.int32)
    repeat = len(numbers) // max(1, math.prod(own))
    if torch.equal(numbers, plain):
        return Columns(_SAME, 1, torch.empty(0, dtype=torch.int32, device=device))
    if repeat and torch.equal(numbers, plain // repeat):
        return Columns(_REPEAT, repeat, torch.empty(0, dtype=torch.int32, device=device))
    return Columns(_TABLE, 1, numbers.to(device))


@triton.jit
def _rows_of(edges, live, indices, dst, target: tl.constexpr):  # type: ignore[no-untyped-def]
    """The operand's row for each edge."""
    if target == 0:
        return tl.load(indices + edges, mask=live, other=0).to(tl.int64)
    if target == 1:
        return tl.load(dst + edges, mask=live, other=0).to(tl.int64)
    return edges


@triton.jit
def _columns_of(columns, width, table, mode: tl.constexpr, repeat: tl.constexpr):  # type: ignore[no-untyped-def]
    if mode == 0:
        return columns
    if mode == 1:
        return columns // repeat
    return tl.load(table + columns, mask=columns < width, other=0)


@triton.jit
def _divide(a, b, acc: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest quotient; Triton's ``/`` of float32 is not."""
    if acc == tl.float32:
        return tl.div_rn(a, b)
    return a / b


@triton.jit
def _map_kernel(  # type: ignore[no-untyped-def]
    out, lhs, rhs, indices, dst, lhs_table, rhs_table, num_edges,
    op: tl.constexpr, width: tl.constexpr,
    lhs_target: tl.constexpr, lhs_width: tl.constexpr, lhs_mode: tl.constexpr, lhs_repeat: tl.constexpr,
    rhs_target: tl.constexpr, rhs_width: tl.constexpr, rhs_mode: tl.constexpr, rhs_repeat: tl.constexpr,
    block_edges: tl.constexpr, block_columns: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """``out[e, f] = op(lhs, rhs)`` for a tile of edges and features."""
    edges = tl.program_id(0).to(tl.int64) * block_edges + tl.arange(0, block_edges)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    live = edges < num_edges
    mask = live[:, None] & (columns < width)[None, :]
    if op != 5:
        rows = _rows_of(edges, live, indices, dst, lhs_target)
        own = _columns_of(columns, width, lhs_table, lhs_mode, lhs_repeat)
        a = tl.load(lhs + (rows * lhs_width)[:, None] + own[None, :], mask=mask, other=0.0).to(acc)
        result = a
    if op != 4:
        rows = _rows_of(edges, live, indices, dst, rhs_target)
        own = _columns_of(columns, width, rhs_table, rhs_mode, rhs_repeat)
        b = tl.load(rhs + (rows * rhs_width)[:, None] + own[None, :], mask=mask, other=1.0).to(acc)
        result = b
    if op == 0:
        result = a + b
    elif op == 1:
        result = a - b
    elif op == 2:
        result = a * b
    elif op == 3:
        result = _divide(a, b, acc)
    tl.store(out + (edges * width)[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dot_kernel(  # type: ignore[no-untyped-def]
    out, lhs, rhs, indices, dst, lhs_table, rhs_table, num_edges,
    width: tl.constexpr, dim: tl.constexpr,
    lhs_target: tl.constexpr, lhs_width: tl.constexpr, lhs_mode: tl.constexpr, lhs_repeat: tl.constexpr,
    rhs_target: tl.constexpr, rhs_width: tl.constexpr, rhs_mode: tl.constexpr, rhs_repeat: tl.constexpr,
    block_edges: tl.constexpr, block_columns: tl.constexpr, block_dim: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """``out[e, g] = sum over d of lhs[.., g, d] rhs[.., g, d]`` for a tile of edges and leading positions."""
    edges = tl.program_id(0).to(tl.int64) * block_edges + tl.arange(0, block_edges)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    live = edges < num_edges
    mask = live[:, None] & (columns < width)[None, :]
    lhs_rows = _rows_of(edges, live, indices, dst, lhs_target) * (lhs_width * dim)
    rhs_rows = _rows_of(edges, live, indices, dst, rhs_target) * (rhs_width * dim)
    lhs_columns = _columns_of(columns, width, lhs_table, lhs_mode, lhs_repeat) * dim
    rhs_columns = _columns_of(columns, width, rhs_table, rhs_mode, rhs_repeat) * dim
    total = tl.zeros((block_edges, block_columns), acc)
    for start in tl.static_range(0, dim, block_dim):
        dims = start + tl.arange(0, block_dim)
        mask_3d = mask[:, :, None] & (dims < dim)[None, None, :]
        at_lhs = lhs_rows[:, None, None] + lhs_columns[None, :, None] + dims[None, None, :]
        at_rhs = rhs_rows[:, None, None] + rhs_columns[None, :, None] + dims[None, None, :]
        a = tl.load(lhs + at_lhs, mask=mask_3d, other=0.0).to(acc)
        b = tl.load(rhs + at_rhs, mask=mask_3d, other=0.0).to(acc)
        total += tl.sum(a * b, axis=2)
    tl.store(out + (edges * width)[:, None] + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_pieces"])
def _row_sum_kernel(  # type: ignore[no-untyped-def]
    out, part, grad, other, indptr, ends, edge_rows, grad_table, other_table,
    num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end,
    permuted: tl.constexpr, factor: tl.constexpr, other_is_edge: tl.constexpr, width: tl.constexpr,
    grad_width: tl.constexpr, grad_mode: tl.constexpr, grad_repeat: tl.constexpr,
    other_width: tl.constexpr, other_mode: tl.constexpr, other_repeat: tl.constexpr,
    block_edges: tl.constexpr, block_columns: tl.constexpr, acc: tl.constexpr,
):  # fmt: skip
    """``sum over the edges of a row of grad[e]``, each times (factor 2) or over (3) the other operand's value."""
    unit = tl.program_id(0)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    in_columns = columns < width
    grad_columns = _columns_of(columns, width, grad_table, grad_mode, grad_repeat)
    other_columns = _columns_of(columns, width, other_table, other_mode, other_repeat)
    is_piece, first, last, begin_of_piece, end_of_piece = rows_of_unit(
        unit, num_pieces, piece_row, piece_begin, piece_end, group_begin, group_end
    )
    for row in range(first, last):
        begin, end = edges_of_row(indptr, row, is_piece, begin_of_piece, end_of_piece)
        total = tl.zeros((block_columns,), acc)
        for start in range(begin, end, block_edges):
            positions = (start + tl.arange(0, block_edges)).to(tl.int64)
            live = positions < end
            mask = live[:, None] & in_columns[None, :]
            edges = positions
            if permuted:
                edges = tl.load(edge_rows + positions, mask=live, other=0).to(tl.int64)
            value = tl.load(grad + (edges * grad_width)[:, None] + grad_columns[None, :], mask=mask, other=0.0).to(acc)
            if factor != 0:
                if other_is_edge:
                    rows = edges
                else:
                    rows = tl.load(ends + positions, mask=live, other=0).to(tl.int64)
                at = other + (rows * other_width)[:, None] + other_columns[None, :]
                met = tl.load(at, mask=mask, other=1.0).to(acc)
                if factor == 2:
                    value = value * met
                else:
                    value = _divide(value, met, acc)
            total += tl.sum(value, axis=0)
        if is_piece:
            tl.store(part + unit.to(tl.int64) * width + columns, total, mask=in_columns)
        else:
            tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=in_columns)


def sddmm_triton(
    structure: Structure, op: str, lhs: Tensor | None, rhs: Tensor | None, lhs_target: str, rhs_target: str
) -> Tensor:
    """As :func:`nugnn.kernels.sddmm.sddmm`, for checked, aligned and contiguous operands of different targets."""
    result: Tensor = _Sddmm.apply(structure, op, lhs, rhs, lhs_target, rhs_target)
    return result


class _Sddmm(Operator):
    @staticmethod
    def forward(
        ctx: Any,
        structure: Structure,
        op: str,
        lhs: Tensor | None,
        rhs: Tensor | None,
        lhs_target: str,
        rhs_target: str,
    ) -> Tensor:
        ctx.structure, ctx.op, ctx.targets = structure, op, (lhs_target, rhs_target)
        ctx.shapes = tuple(None if x is None else x.shape for x in (lhs, rhs))
        # a gradient of mul, div or dot needs the other operand, and that of a divisor its own values too
        needs_lhs, needs_rhs = ctx.needs_input_grad[2:4]
        multiplies = op in ("mul", "div", "dot")
        ctx.save_for_backward(
            lhs if multiplies and needs_rhs else None,
            rhs if multiplies and (needs_lhs or (op == "div" and needs_rhs)) else None,
        )
        return evaluate(structure, op, lhs, rhs, lhs_target, rhs_target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None, Tensor | None, None, None]:
        lhs, rhs = ctx.saved_tensors
        grad = grad.contiguous()
        grads = tuple(
            operand_grad(ctx.structure, ctx.op, side, grad, lhs, rhs, ctx.shapes, ctx.targets)
            if ctx.needs_input_grad[2 + side]
            else None
            for side in (0, 1)
        )
        return None, None, grads[0], grads[1], None, None


def evaluate(
    structure: Structure, op: str, lhs: Tensor | None, rhs: Tensor | None, lhs_target: str, rhs_target: str
) -> Tensor:
    """``(E, ...)``, without autograd."""
    given = [x for x in (lhs, rhs) if x is not None]
    like, num_edges = given[0], structure.num_edges
    features = torch.broadcast_shapes(*(x.shape[1:] for x in given))
    is_dot = op == "dot" and like.dim() > 1
    out = like.new_empty(num_edges, *((*features[:-1], 1) if is_dot else features))
    if out.numel() == 0:
        return out
    dim = features[-1] if is_dot else 1
    if dim == 0:
        return out.zero_()
    leading = tuple(features[:-1] if is_dot else features)
    width = math.prod(leading)
    sides: dict[str, Any] = {}
    tables = []
    for name, x, target in (("lhs", lhs, lhs_target), ("rhs", rhs, rhs_target)):
        own = () if x is None else tuple(x.shape[1:-1] if is_dot else x.shape[1:])
        columns = columns_of(own, leading, like.device)
        tables.append(columns.table)
        sides |= {
            f"{name}_target": _TARGETS[target], f"{name}_width": math.prod(own), f"{name}_mode": columns.mode,
            f"{name}_repeat": columns.repeat,
        }  # fmt: skip
    # only the "v" operand reads the destination of each edge, which is made on first use
    dst = (
        structure.dst if "v" in (lhs_target if lhs is not None else "", rhs_target if rhs is not None else "") else like
    )
    pointers = (
        out,
        given[0] if lhs is None else lhs,
        given[-1] if rhs is None else rhs,
        structure.indices,
        dst,
        *tables,
    )
    acc = tl.float64 if like.dtype == torch.float64 else tl.float32
    if is_dot:
        block_dim = min(128, triton.next_power_of_2(dim))
        block_columns = min(triton.next_power_of_2(width), max(1, 128 // block_dim))
        block_edges = max(1, 2 * _TILE // (block_dim * block_columns))
        _dot_kernel[(triton.cdiv(num_edges, block_edges), triton.cdiv(width, block_columns))](
            *pointers, num_edges, width, dim, **sides,
            block_edges=block_edges, block_columns=block_columns, block_dim=block_dim, acc=acc, num_warps=4,
        )  # fmt: skip
        return out
    block_columns = min(128, triton.next_power_of_2(width))
    block_edges = 2 * _TILE // block_columns
    _map_kernel[(triton.cdiv(num_edges, block_edges), triton.cdiv(width, block_columns))](
        *pointers, num_edges, _OPS["mul" if op == "dot" else op], width, **sides,
        block_edges=block_edges, block_columns=block_columns, acc=acc, num_warps=4,
    )  # fmt: skip
    return out


def operand_grad(
    structure: Structure,
    op: str,
    side: int,
    grad_E: Tensor,
    lhs: Tensor | None,
    rhs: Tensor | None,
    shapes: tuple[torch.Size, torch.Size],
    targets: tuple[str, str],
) -> Tensor:
    """Gradient of operand ``side`` (0: lhs, 1: rhs), in the shape and dtype of the operand."""
    own_shape, target, other_target = shapes[side], targets[side], targets[1 - side]
    other = (rhs, lhs)[side]
    factor = {"mul": "mul", "dot": "mul", "div": "div" if side == 0 else "mul"}.get(op)
    wide = torch.float64 if grad_E.dtype == torch.float64 else torch.float32
    if factor is None:
        other = None
    if target == "e":
        total = grad_E if other is None else evaluate(structure, factor or "", grad_E, other, "e", other_target)
        total = total.to(wide)
    else:
        total = _row_sums(structure, target, factor, grad_E, other, other_target, op == "dot")
    if op == "sub" and side == 1:
        total = -total
    if op == "div" and side == 1:
        assert rhs is not None
        divisor = rhs.to(wide)
        total = -total / (divisor * divisor)
    return total.sum_to_size(own_shape).to(grad_E.dtype)


def _row_sums(
    structure: Structure, target: str, factor: str | None, grad_E: Tensor, other: Tensor | None, other_target: str,
    is_dot: bool,
) -> Tensor:  # fmt: skip
    """``(rows of target, *features)`` sums over each row's edges of the gradient, times or over the other operand."""
    features = tuple(grad_E.shape[1:])
    if other is not None:
        # for a dot the gradient has one column for each leading position, and broadcasts along the last dimension
        features = tuple(torch.broadcast_shapes(features, other.shape[1:]))
    num_rows = structure.num_src if target == "u" else structure.num_dst
    wide = torch.float64 if grad_E.dtype == torch.float64 else torch.float32
    out = torch.empty(num_rows, *features, dtype=wide, device=grad_E.device)
    if out.numel() == 0:
        return out
    width = math.prod(features)
    if target == "u":
        indptr, ends, edge_rows = (structure.transposed.indptr, structure.transposed.dst, structure.transposed.edges)
    else:
        indptr, ends, edge_rows = structure.indptr, structure.indices, structure.indices
    schedule = row_schedule(indptr)
    part = out.new_empty(schedule.num_pieces, width)
    grad_columns = columns_of(tuple(grad_E.shape[1:]), features, grad_E.device)
    other_columns = columns_of(() if other is None else tuple(other.shape[1:]), features, grad_E.device)
    block_columns = min(128, triton.next_power_of_2(width))
    _row_sum_kernel[(num_units(schedule), triton.cdiv(width, block_columns))](
        out, part, grad_E, grad_E if other is None else other, indptr, ends, edge_rows,
        grad_columns.table, other_columns.table, schedule.num_pieces, *schedule_arguments(schedule),
        permuted=target == "u", factor=0 if factor is None else _OPS[factor], other_is_edge=other_target == "e",
        width=width, grad_width=math.prod(grad_E.shape[1:]), grad_mode=grad_columns.mode,
        grad_repeat=grad_columns.repeat, other_width=1 if other is None else math.prod(other.shape[1:]),
        other_mode=other_columns.mode, other_repeat=other_columns.repeat,
        block_edges=max(4, min(64, _TILE // block_columns)), block_columns=block_columns,
        acc=tl.float64 if wide == torch.float64 else tl.float32, num_warps=1,
    )  # fmt: skip
    if schedule.num_split:
        sums = sum_pieces(part, schedule)
        out.view(num_rows, width).index_copy_(0, schedule.split_rows.long(), sums)
    return out
