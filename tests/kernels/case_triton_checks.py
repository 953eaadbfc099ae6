"""The acceptance cases of kernels as laws of every Triton kernel, run by `test_triton_cases.py` in the interpreter.

Offsets past 31 bits are met by the last programs of a launch over matrices of 2**31 elements and more: memory that
nobody touches is never taken from the system, and the other programs are left out. A wrapped offset lies outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter
from triton_laws import run_laws

from nugnn.kernels import row_schedule as schedules
from nugnn.kernels import spmm as spmm_module
from nugnn.kernels.attention import gpu as attention
from nugnn.kernels.attention.reference import gat_attention_reference
from nugnn.kernels.cross_entropy import gpu as losses
from nugnn.kernels.dropout.gpu import drop_csr_values
from nugnn.kernels.edge_softmax import gpu as softmax
from nugnn.kernels.edge_softmax.reference import edge_softmax_reference
from nugnn.kernels.epilogue import gpu as epilogue
from nugnn.kernels.philox.gpu import probe_offset, random_words_triton
from nugnn.kernels.row_schedule import make_row_schedule
from nugnn.kernels.sddmm import gpu as sddmm
from nugnn.kernels.sddmm.reference import sddmm_reference
from nugnn.kernels.spmm import gpu as spmm
from nugnn.kernels.spmm.gpu_aggregate import aggregate_rows, in_edges
from nugnn.kernels.spmm.gpu_gradients import edge_gradient
from nugnn.kernels.spmm.reference import spmm_reference
from nugnn.kernels.spmm.tiles import Tile
from nugnn.kernels.structure import Structure

INF, NAN = float("inf"), float("nan")
WIDTH = 1 << 19
"""Columns of a far matrix."""
ROWS = 4200
"""Rows of it: its last hundred lie past 2**31 elements."""
BLOCK = 16
"""Its last columns, which every kernel here has in its last block."""
HALF = torch.float16


# -- launches ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def launches(first: int | None = None) -> Iterator[list[tuple[int, ...]]]:
    """Notes the grid of each launch. Of each axis the last program runs alone; ``first`` of the first axis too.

    Without ``first`` all run.
    """
    run, set_dim, set_idx = (
        interpreter.InterpretedFunction.run,
        interpreter.interpreter_builder.set_grid_dim,
        interpreter.interpreter_builder.set_grid_idx,
    )
    restore = interpreter.GridExecutor._restore_args_dev
    grids: list[tuple[int, ...]] = []
    chosen: list[list[int]] = []

    def run_some(self: Any, *args: Any, grid: Any, **options: Any) -> Any:
        grids.append(tuple(grid))
        chosen[:] = [list(range(size)) for size in grid]
        if first is not None:
            chosen[0] = sorted({*range(min(first, grid[0])), grid[0] - 1})
            chosen[1:] = [[size - 1] for size in grid[1:]]
        return run(self, *args, grid=tuple(map(len, chosen)), **options)

    def real_dim(*_: int) -> None:
        set_dim(*grids[-1], *[1] * (3 - len(grids[-1])))

    def real_idx(*place: int) -> None:
        set_idx(*(axis[at] for axis, at in zip([*chosen, [0], [0]], place, strict=False)))

    interpreter.InterpretedFunction.run = run_some
    interpreter.interpreter_builder.set_grid_dim = real_dim
    interpreter.interpreter_builder.set_grid_idx = real_idx
    interpreter.GridExecutor._restore_args_dev = lambda *_: None  # the tensors are on the host already
    try:
        yield grids
    finally:
        interpreter.InterpretedFunction.run = run
        interpreter.interpreter_builder.set_grid_dim = set_dim
        interpreter.interpreter_builder.set_grid_idx = set_idx
        interpreter.GridExecutor._restore_args_dev = restore


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    """What is allocated is not filled with NaN, which would take the memory."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled


@contextlib.contextmanager
def far(first: int = 0) -> Iterator[None]:
    """Only the last programs run, and nothing fills what is allocated."""
    with unfilled(), launches(first):
        yield


def far_matrix(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> Tensor:
    """Zeros that take no memory, with small whole numbers in the last columns of the last rows."""
    with unfilled():
        x = torch.empty(shape or (ROWS, WIDTH), dtype=dtype)
    flat = x.view(shape[0] if shape else ROWS, -1)
    assert flat.numel() > 2**31
    block = torch.randint(1, 9, (4, BLOCK), generator=torch.Generator().manual_seed(seed))
    flat[-4:, -BLOCK:] = block.to(dtype)
    return x


def corner(x: Tensor, rows: int) -> Tensor:
    """The last columns of the last rows, float64."""
    return x.reshape(len(x), -1)[-rows:, -BLOCK:].double()


def to_the_last_row(num_edges: int = 2, num_src: int = ROWS, piece_edges: int = 512) -> Structure:
    """All edges go from the last rows, in turn, into the last of `ROWS` rows."""
    indptr = torch.zeros(ROWS + 1, dtype=torch.int64)
    indptr[-1] = num_edges
    structure = Structure(num_src, indptr, (num_src - 1 - torch.arange(num_edges) % 2).to(torch.int32))
    for offsets in (structure.indptr, structure.transposed.indptr):
        schedules._schedules[offsets] = make_row_schedule(offsets, piece_edges=piece_edges, group_cost=32)
    return structure


def many_edges() -> Structure:
    """`ROWS` edges into two rows; all but 4 into the first, which is in two pieces."""
    indptr = torch.tensor([0, ROWS - 4, ROWS])
    structure = Structure(2, indptr, (torch.arange(ROWS) % 2).to(torch.int32))
    schedules._schedules[indptr] = make_row_schedule(indptr, piece_edges=ROWS // 2, group_cost=32)
    return structure


# -- kernels-01, kernels-02 -------------------------------------------------------------------------------------------


def check_kernels_01_the_launch_of_the_far_programs_is_the_real_one() -> None:
    """The checks below see the programs that run for real: a small launch, whole and by its last program."""
    x = torch.arange(64.0).view(32, 2)
    with launches() as grids:
        whole = epilogue.forward(x, None, None, None, "relu", 0.0, None, remake=False)[0]
    assert torch.equal(whole, x) and len(grids) == 1
    words = random_words_triton((1, 2), torch.arange(40), 8)
    with launches(0) as grids:
        last = random_words_triton((1, 2), torch.arange(40), 8)
    assert grids == [(2, 1)] and torch.equal(last[32:], words[32:]) and not torch.equal(last[:32], words[:32])


def check_kernels_01_counts_past_31_bits() -> None:
    """Offsets of edges come as 64 bits from end to end: pieces and groups of rows that end at 2**31 + 5."""
    for last_row in (5, 5000):
        indptr = torch.tensor([0, 2**31 - last_row, 2**31, 2**31 + 5])
        schedule = make_row_schedule(indptr, piece_edges=2**20)
        assert schedule.piece_begin.dtype == schedule.piece_end.dtype == torch.int64
        assert schedule.piece_end[-1] == 2**31 - last_row and (schedule.piece_end - schedule.piece_begin).min() > 0
        assert int((schedule.piece_end - schedule.piece_begin).sum()) == 2**31 - last_row
    from nugnn.kernels.spmm.gpu_aggregate import needs_wide_edges

    assert needs_wide_edges(2**31) and needs_wide_edges(2**31 + 5) and not needs_wide_edges(2**30)


def check_kernels_02_offsets_of_the_random_words() -> None:
    for row, width in ((524_288, 4096), (600_000, 4096), (2**31 + 5, 7)):
        assert probe_offset(row, width - 1, width, "cpu") == row * width + width - 1


def check_kernels_02_aggregation_of_far_rows() -> None:
    x = far_matrix()
    expected = corner(x, 2).sum(0)
    for structure, tile, first in (
        (to_the_last_row(), Tile(1, 2, 1, 1, 64), 0),
        (to_the_last_row(), Tile(4, 1, 2, 1, 64, row_sets=32), 0),  # the last program has the last window of rows
        (to_the_last_row(piece_edges=1), Tile(1, 1, 1, 1, 64), 2),
    ):
        with far(first):
            out, _ = aggregate_rows(in_edges(structure), x, 1, tile=tile)
            assert torch.equal(corner(out, 1)[0], expected), tile
            largest, winner = aggregate_rows(in_edges(structure), x, 1, tile=tile, sign=1)
            assert torch.equal(corner(largest, 1)[0], corner(x, 2).amax(0)), tile
            assert torch.equal(corner(winner, 1)[0], (corner(x, 2)[0] > corner(x, 2)[1]).double()), tile
            del out, largest, winner


def check_kernels_02_aggregation_of_far_edge_rows() -> None:
    structure, w, x = many_edges(), far_matrix(), torch.ones(2, WIDTH, dtype=HALF)
    tile = Tile(1, 2, 1, 1, 64)
    with far():
        for op, operands in (("copy_rhs", {"by_edge": True}), ("mul", {"w": w})):
            out, _ = aggregate_rows(in_edges(structure), w if op == "copy_rhs" else x, 1, op=op, tile=tile, **operands)
            assert torch.equal(corner(out, 1)[0], corner(w, 4).sum(0)), op
        grad = torch.full((2, WIDTH), 3.0, dtype=HALF)
        out = edge_gradient(structure, grad, x * 2, 1 << 17, True, HALF)
        assert (corner(out, 4) == 6).all()


def check_kernels_02_sddmm_of_far_rows_and_edges() -> None:
    far_rows, few = to_the_last_row(), torch.full((2, WIDTH), 2.0, dtype=HALF)
    u, v = far_matrix(seed=1), far_matrix(seed=2)
    with far():
        out = sddmm.evaluate(far_rows, "mul", u, v, "u", "v")
        assert torch.equal(corner(out, 2), corner(u, 2).flip(0) * corner(v, 1))
        heads = (ROWS, WIDTH // 4, 4)
        out = sddmm.evaluate(far_rows, "dot", u.view(heads), v.view(heads), "u", "v")
        exact = (corner(u, 2).flip(0) * corner(v, 1)).view(2, -1, 4).sum(-1)
        assert torch.equal(out.reshape(2, -1)[:, -BLOCK // 4 :].double(), exact)
        structure = many_edges()
        out = sddmm.evaluate(structure, "add", few, few, "u", "v")
        assert (corner(out, 4) == 4).all()
        for target in ("u", "v"):
            sums = sddmm._row_sums(far_rows, target, None, few, None, "e", False)
            assert (corner(sums, 1) == (2 if target == "u" else 4)).all()
        sums = sddmm._row_sums(structure, "v", "mul", u, v, "e", False)
        assert torch.equal(corner(sums, 1)[0], (corner(u, 4) * corner(v, 4)).sum(0))


def check_kernels_02_edge_softmax_of_far_edges() -> None:
    structure, scores = many_edges(), far_matrix()
    four = torch.softmax(corner(scores, 4), 0)
    tolerance = 4 * torch.finfo(HALF).eps  # one rounding to float16, of weights computed in float32
    with far(first=2):
        weights = softmax.softmax(structure.indptr, scores)
        assert ((corner(weights, 4) - four).abs() <= tolerance * four).all()
        before = weights[-5, -BLOCK:].double()  # the last edge of the row in pieces, whose scores are all equal
        assert ((before - 1 / (ROWS - 4)).abs() <= tolerance / (ROWS - 4)).all(), before
    with far():
        grad = far_matrix(seed=3)
        mine = softmax.softmax_backward(structure.indptr, weights, grad)
        w, g = corner(weights, 4), corner(grad, 4)
        bound = 8 * torch.finfo(HALF).eps * w * (g.abs() + (w * g).sum(0))
        assert ((corner(mine, 4) - w * (g - (w * g).sum(0))).abs() <= bound).all()


def check_kernels_02_elementwise_kernels_at_far_rows() -> None:
    x = far_matrix()
    with far():
        out, kept = epilogue.forward(x, None, None, None, "relu", 0.0, None, remake=False)
        assert torch.equal(corner(out, 4), corner(x, 4))
        grad, _ = epilogue.backward(x, kept, None, None, None, None, "relu", 0.0, None, needs_sums=False)
        assert torch.equal(corner(grad, 4), corner(x, 4))


def check_kernels_02_losses_of_far_rows() -> None:
    logits = far_matrix()
    labels, rows = torch.tensor([WIDTH - 2]), torch.tensor([ROWS - 1])
    with far():
        loss, log_sum = losses.cross_entropy(logits, labels, rows, None)
        wide = corner(logits, 1)
        exact = torch.log(wide.exp().sum(1) + (WIDTH - BLOCK))
        tolerance = 1e-4  # float32: a relative error of 2**-24 for each of 2**19 terms at most, far less in blocks
        assert ((log_sum.double() - exact).abs() <= tolerance * exact).all()
        assert ((loss.double() - (exact - wide[:, -2])).abs() <= 2 * tolerance * exact).all()
        grad = losses.cross_entropy_backward(torch.ones(1), log_sum, logits, labels, rows, None)
        share = (wide - log_sum.double()[:, None]).exp()
        share[:, -2] -= 1
        assert ((corner(grad, 1) - share).abs() <= 2 * torch.finfo(HALF).eps * (share.abs() + 1e-3)).all()


def check_kernels_02_attention_of_far_rows() -> None:
    structure = to_the_last_row()
    shape = (ROWS, WIDTH // 4, 4)
    x = far_matrix(*shape)
    with unfilled():
        scores = torch.empty(ROWS, WIDTH // 4, dtype=HALF)
    scores[-2:, -BLOCK // 4 :] = 0
    with far():
        operands = attention.Operands(x, scores, scores, None, 0.2)
        out, _ = attention.attention_forward(structure, operands, attention.no_dropout(x))
        assert torch.equal(corner(out, 1)[0], corner(x, 2).mean(0))
        del out
        attn = torch.zeros(shape[1:], dtype=HALF)
        operands = attention.Operands(x, None, x, attn, 0.2)
        out, _ = attention.attention_forward(structure, operands, attention.no_dropout(x))
        assert torch.equal(corner(out, 1)[0], corner(x, 2).mean(0))


# -- kernels-03, kernels-04, kernels-06, kernels-07 --------------------------------------------------------------------


def small_structure(dtype: torch.dtype = torch.int32) -> Structure:
    """Four rows, the second without edges, the last with four; parallel edges."""
    return Structure(5, torch.tensor([0, 3, 3, 5, 9]), torch.tensor([4, 3, 2, 0, 1, 2, 2, 4, 0], dtype=dtype))


def whole_numbers(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """From -3 to 3, of which sums and products of a few are exact in bfloat16; a view made by ``split``."""
    wide = torch.randint(-3, 4, (*shape[:-1], 2 * shape[-1]), generator=torch.Generator().manual_seed(seed))
    return wide.to(dtype).split(shape[-1], -1)[1]


def same(mine: Tensor, right: Tensor) -> bool:
    return mine.shape == right.shape and torch.equal(mine.double().nan_to_num(77), right.double().nan_to_num(77))


def near(mine: Tensor, right: Tensor, num_units: float) -> bool:
    """Within so many units of ``mine``'s type of the right value, NaN where it is."""
    unit = torch.finfo(mine.dtype).eps
    right = right.double()
    close = (mine.double() - right).abs() <= num_units * unit * right.abs()
    return mine.shape == right.shape and bool((close | (mine.isnan() & right.isnan())).all())


def check_kernels_03_zero_sizes_have_their_shapes_and_no_launch() -> None:
    none = torch.empty(0, dtype=torch.int32)
    no_rows, no_edges = Structure(0, torch.zeros(1, dtype=torch.int64), none), Structure(4, torch.zeros(4).long(), none)
    full = small_structure()
    before = spmm.aggregate(full, "copy_lhs", "sum", torch.ones(5, 3), None)  # after a normal call
    with launches() as grids:
        for structure, features in ((no_rows, (3,)), (no_edges, (3,)), (full, (0,)), (no_edges, (0,)), (full, (2, 0))):
            x = torch.ones(structure.num_src, *features, requires_grad=True)
            w = torch.ones(structure.num_edges, *features, requires_grad=True)
            assert spmm_module._plain(structure, [x, w])  # so that the plain definition runs, on a GPU too
            v = torch.ones(structure.num_dst, *features, requires_grad=True)
            out = sddmm.sddmm_triton(structure, "mul", x, v, "u", "v")
            assert out.shape == w.shape
            assert [grad.shape for grad in torch.autograd.grad(out.sum(), (x, v))] == [x.shape, v.shape]
            scores = torch.ones(structure.num_edges, features[-1])
            for out in (
                softmax.softmax(structure.indptr, scores),
                softmax.softmax_backward(structure.indptr, scores, scores),
            ):
                assert out.shape == scores.shape
        for structure, heads, dim in ((no_rows, 2, 3), (full, 0, 3), (full, 2, 0)):
            x, s, d = (torch.ones(n, heads, dim) for n in (structure.num_src, structure.num_src, structure.num_dst))
            operands = attention.Operands(x, s.new_ones(s.shape[:2]), d.new_ones(d.shape[:2]), None, 0.2)
            out, _ = attention.attention_forward(structure, operands, attention.no_dropout(x))
            assert out.shape == (structure.num_dst, heads, dim)
        nothing, labels = torch.ones(0, 4), torch.empty(0, dtype=torch.int64)
        loss, log_sum = losses.cross_entropy(nothing, labels, None, None)
        assert loss.shape == log_sum.shape == (0,)
        assert losses.cross_entropy_backward(loss, log_sum, nothing, labels, None, None).shape == (0, 4)
        assert losses.binary_cross_entropy(nothing, nothing, None).shape == (0,)
        assert random_words_triton((1, 2), labels, 3).shape == (0, 3)
        assert random_words_triton((1, 2), torch.arange(3), 0).shape == (3, 0)
        assert all(0 not in grid for grid in grids), grids
    assert torch.equal(before, spmm.aggregate(full, "copy_lhs", "sum", torch.ones(5, 3), None))


def check_kernels_04_bfloat16_of_whole_numbers_is_exact() -> None:
    """Sums and products of small whole numbers are the reference's, with a NaN among them, from a view."""
    structure = small_structure()
    x, w, v = whole_numbers(5, 2, 6, seed=1), whole_numbers(9, 2, 6, seed=2), whole_numbers(4, 2, 6, seed=3)
    x[2, 1, 3] = NAN
    for op in ("copy_lhs", "add", "mul"):
        for reduce in ("sum", "max", "min"):
            right = None if op == "copy_lhs" else w
            wide = None if right is None else right.double()
            out = spmm.aggregate(structure, op, reduce, x, right)
            assert out.dtype == torch.bfloat16 and same(out, spmm_reference(structure, op, reduce, x.double(), wide))
    for op in ("add", "sub", "mul", "dot"):
        out = sddmm.sddmm_triton(structure, op, x.contiguous(), v.contiguous(), "u", "v")
        assert out.dtype == torch.bfloat16 and same(
            out, sddmm_reference(structure, op, x.double(), v.double(), "u", "v")
        )
    flat = x.reshape(5, 12)
    out, _ = epilogue.forward(flat, None, None, None, "relu", 0.0, None, remake=False)
    assert out.dtype == torch.bfloat16 and same(out, torch.relu(flat.double()))


def check_kernels_04_bfloat16_results_that_are_rounded() -> None:
    structure = small_structure()
    scores = whole_numbers(9, 3, seed=4).contiguous()
    scores[7, 1] = NAN
    weights = softmax.softmax(structure.indptr, scores)
    exact = edge_softmax_reference(structure, scores.double())
    assert weights.dtype == torch.bfloat16 and near(weights, exact, 1.01)  # one unit: it is cut off, or rounded
    logits, labels = whole_numbers(4, 5, seed=5).contiguous(), torch.tensor([0, 4, 2, 2])
    logits[2, 2] = NAN
    loss, _ = losses.cross_entropy(logits, labels, None, None)
    wanted = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    bound = 16 * torch.finfo(torch.float32).eps * (1 + wanted.abs() + logits.double().nan_to_num().abs().amax(1))
    assert loss.dtype == torch.float32 and same(loss.isnan(), wanted.isnan())
    assert ((loss - wanted).abs() <= bound)[~wanted.isnan()].all()
    x = whole_numbers(5, 2, 4, seed=6).contiguous()
    x[1, 0, 2] = NAN
    sides = (torch.zeros(5, 2, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.bfloat16))
    operands = attention.Operands(x, *sides, None, 0.2)
    out, _ = attention.attention_forward(structure, operands, attention.no_dropout(x))
    wanted = gat_attention_reference(structure, x.double(), *(side.double() for side in sides), 0.2)
    # a mean of up to 4 whole numbers: its float32 weights are 1/2, 1/3 and 1/4, and its last rounding is bfloat16's
    slack = 16 * torch.finfo(torch.float32).eps * 4
    close = (out.double() - wanted).abs() <= torch.finfo(torch.bfloat16).eps * wanted.abs() + slack
    assert out.dtype == torch.bfloat16 and (close | (out.isnan() & wanted.isnan())).all()
    assert out.isnan().any() and not out.isnan().all()


def check_kernels_06_edge_softmax_does_not_overflow_and_masks() -> None:
    indptr = torch.tensor([0, 3, 3, 5, 8])
    for dtype, scores in (
        (torch.float32, [1000.0, 999, -1000]),
        (HALF, [60.0, 59, -60]),
        (torch.bfloat16, [60, 59, -60]),
    ):
        column = torch.tensor([*scores, -INF, -INF, 0.0, -INF, -INF], dtype=dtype)[:, None]
        for piece_edges in (8, 2):  # whole rows, and rows in pieces
            schedules._schedules[indptr] = make_row_schedule(indptr, piece_edges, 32)
            weights = softmax.softmax(indptr, column)
            exact = torch.tensor([0.7310585786, 0.2689414214, 0, 0, 0, 1, 0, 0])
            unit = torch.finfo(dtype).eps
            assert weights.dtype == dtype and ((weights.flatten() - exact).abs() <= 2 * unit * exact).all(), weights
            grad = softmax.softmax_backward(indptr, weights, torch.arange(8.0, dtype=dtype)[:, None])
            assert grad.isfinite().all() and grad[[3, 4, 6, 7]].eq(0).all()


def check_kernels_06_attention_does_not_overflow() -> None:
    structure = Structure(3, torch.tensor([0, 3, 3]), torch.tensor([0, 1, 2]))
    x = torch.tensor([[[1.0]], [[2.0]], [[4.0]]])
    for dtype, scores in ((torch.float32, [1000.0, 999, -5000]), (HALF, [60.0, 59, -600])):
        given = (x.to(dtype), torch.tensor(scores, dtype=dtype)[:, None], torch.zeros(2, 1, dtype=dtype))
        operands = attention.Operands(*given, None, 0.2)
        out, stats = attention.attention_forward(structure, operands, attention.no_dropout(given[0]))
        wanted = 0.7310585786 + 2 * 0.2689414214
        # a score is rounded in powers of two: an exponential is as exact as 1.45 times the score is in float32
        relative = 2 * torch.finfo(dtype).eps + 2 * 1.45 * scores[0] * torch.finfo(torch.float32).eps
        assert abs(float(out[0]) - wanted) <= relative * wanted and float(out[1]) == 0
        grads = attention.attention_backward(
            structure, operands, attention.no_dropout(given[0]), stats, torch.ones_like(out)
        )
        assert all(grad.isfinite().all() for grad in grads if grad is not None)


def check_kernels_07_both_id_types_give_the_same_bits() -> None:
    found: dict[torch.dtype, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(1)
    x, w, v = (torch.randn(rows, 2, 3, generator=generator) for rows in (5, 9, 4))
    for dtype in (torch.int32, torch.int64):
        structure = small_structure(dtype)
        results = found[dtype] = []
        u, e, d = leaves = [y.clone().requires_grad_() for y in (x, w, v)]
        outputs = [
            *(spmm.aggregate(structure, op, reduce, u, e) for op in ("mul", "add") for reduce in ("sum", "max", "min")),
            sddmm.sddmm_triton(structure, "dot", u, d, "u", "v"),
            sddmm.sddmm_triton(structure, "sub", e, u, "e", "u"),
        ]
        for out in outputs:
            masked = out.masked_fill(out.isinf(), 0)  # maxima of nothing
            grads = torch.autograd.grad(masked.square().sum(), leaves, allow_unused=True)
            results += [out.detach(), *(grad for grad in grads if grad is not None)]
        operands = attention.Operands(x, x[..., 0].contiguous(), v[..., 0].contiguous(), None, 0.2)
        out, stats = attention.attention_forward(structure, operands, attention.no_dropout(x))
        back = attention.attention_backward(structure, operands, attention.no_dropout(x), stats, out.clone())
        results += [out, *(grad for grad in back if grad is not None)]
        mask = epilogue.Mask(2**31, 2.0, (5, 6), torch.arange(4))
        for offsets in (structure.indptr, structure.indptr.to(dtype)):
            results.append(drop_csr_values(w[:, 0, 0].contiguous(), offsets, structure.indices, mask))
        logits, labels = v.reshape(4, 6), torch.tensor([0, 5, 3, 1], dtype=dtype)
        results.append(losses.cross_entropy(logits, labels, None, None)[0])
    assert all(map(torch.equal, found[torch.int32], found[torch.int64]))
    assert len(found[torch.int32]) == len(found[torch.int64]) > 25


if __name__ == "__main__":
    run_laws(globals())
