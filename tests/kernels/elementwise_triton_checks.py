"""Laws of the Triton dropout, epilogue and losses, run by `test_elementwise_triton.py` in a process of its own.

    python tests/kernels/elementwise_triton_checks.py cpu     # with TRITON_INTERPRET=1
    python tests/kernels/elementwise_triton_checks.py cuda    # all side by side; --skip :float64 for fewer
    python tests/kernels/elementwise_triton_checks.py cuda check_offsets_past_two_to_the_31

Expected values come from the plain PyTorch definitions on the CPU. Outputs start as NaN. Triton's interpreter cuts
float32 to bfloat16 where a GPU rounds, so there bits are compared on the GPU only.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton_laws import Copies, quicken_the_interpreter

from nugnn.kernels import add_rows as add
from nugnn.kernels import cross_entropy as losses
from nugnn.kernels import epilogue as epilogues
from nugnn.kernels import take_rows as take
from nugnn.kernels.add_rows import add_rows_
from nugnn.kernels.add_rows.gpu import add_rows_triton
from nugnn.kernels.cross_entropy import binary_cross_entropy_rows, cross_entropy_rows
from nugnn.kernels.cross_entropy.reference import binary_cross_entropy_rows_reference, cross_entropy_rows_reference
from nugnn.kernels.dropout import dropout_csr_values, dropout_rows, mask_arguments, relu_dropout_rows
from nugnn.kernels.dropout.reference import dropout_csr_values_reference, dropout_rows_reference
from nugnn.kernels.epilogue import epilogue_rows
from nugnn.kernels.epilogue.reference import before_dropout, epilogue_rows_reference
from nugnn.kernels.padded import carve, is_padded, padded_copy, padded_width, with_padding
from nugnn.kernels.philox import RandomKey, random_words
from nugnn.kernels.philox.key_table import KeyTable
from nugnn.kernels.take_rows import take_rows
from nugnn.kernels.take_rows.gpu import take_rows_triton

DEVICE = sys.argv[1]
ONES = 2**32 - 1
KEY = RandomKey(2**63 + 5, 3, ONES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(37, 100), (9, 256), (21, 3), (6, 4, 5), (3, 433), (50,), (1, 1), (130, 8)]


def unit(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to ``dtype``."""
    cuts = DEVICE == "cpu" and dtype == torch.bfloat16
    return torch.finfo(dtype).eps / (1 if cuts else 2)


def wide_unit(dtype: torch.dtype) -> float:
    """Of one rounding in the type that kernels calculate in."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids_of(num_rows: int) -> Tensor:
    return torch.randperm(10_000, generator=torch.Generator().manual_seed(7))[:num_rows] + 2**33


def same(label: str, mine: Tensor, right: Tensor) -> None:
    assert mine.dtype == right.dtype and mine.shape == right.shape, (label, mine.dtype, mine.shape)
    mine = mine.detach().cpu()
    if DEVICE == "cpu" and mine.dtype == torch.bfloat16:
        assert torch.equal(mine == 0, right == 0), label
        assert ((mine - right).double().abs() <= unit(mine.dtype) * right.double().abs()).all(), label
    else:
        assert torch.equal(mine, right), f"{label}: {int((mine != right).sum())} of {right.numel()} differ"


def within(label: str, mine: Tensor, right: Tensor, bound: Tensor | float) -> None:
    error = (mine.detach().cpu().double() - right.detach()).abs()
    assert (error <= bound).all(), (
        f"{label}: error up to {float(error.max()):.3g}, bound {float(torch.as_tensor(bound).max()):.3g}"
    )


def saved_bytes(run: Callable[[], Tensor], *known: Tensor) -> int:
    """Bytes that autograd keeps for a step, without those of tensors that exist anyway."""
    addresses = {t.untyped_storage().data_ptr() for t in known}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in addresses:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(kept.values())


# -- dropout -------------------------------------------------------------------------------------------------------


def check_dropout_has_the_bits_of_the_definition(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x, grad, ids = randn(*shape).to(dtype), randn(*shape, seed=1).to(dtype), ids_of(shape[0])
        leaf = x.to(DEVICE).requires_grad_()
        for p in (0.3, 0.999):
            y = dropout_rows(leaf, p, KEY, ids.to(DEVICE))
            same(f"dropout {dtype} {shape} {p}", y, dropout_rows_reference(x, p, KEY, ids))
            (g,) = torch.autograd.grad(y, leaf, grad.to(DEVICE))
            same(f"dropout gradient {dtype} {shape} {p}", g, dropout_rows_reference(grad, p, KEY, ids))
        y = relu_dropout_rows(leaf, 0.3, KEY, ids.to(DEVICE))
        same(f"relu dropout {dtype} {shape}", y, dropout_rows_reference(x.relu(), 0.3, KEY, ids))
        (g,) = torch.autograd.grad(y, leaf, grad.to(DEVICE))
        right = torch.where(x > 0, dropout_rows_reference(grad, 0.3, KEY, ids), 0)
        same(f"relu dropout gradient {dtype} {shape}", g, right)


def check_dropout_by_a_range_of_ids_extremes_and_strides() -> None:
    x = randn(12, 20)
    for start in (0, 5, 2**31 + 3, 2**40):
        by_range = dropout_rows(x.to(DEVICE), 0.5, KEY, range(start, start + 12))
        same("range", by_range, dropout_rows_reference(x, 0.5, KEY, torch.arange(start, start + 12)))
    for p in (1.0, 1 - 1e-12):
        leaf = torch.full((5, 3), torch.nan, device=DEVICE, requires_grad=True)
        for run in (dropout_rows, relu_dropout_rows):
            y = run(leaf, p, KEY, range(5))
            assert (y == 0).all() and (torch.autograd.grad(y.sum(), leaf)[0] == 0).all(), p
    for key in (RandomKey(0, 0, 0), RandomKey(1, 2, 3), KEY):
        y = dropout_rows(x.to(DEVICE), 1e-12, key, range(12))  # threshold 0: all kept
        same("all kept", y, dropout_rows_reference(x, 1e-12, key, torch.arange(12)))
    view = x.to(DEVICE)[:, ::2].t()
    same(
        "strides",
        dropout_rows(view, 0.5, KEY, range(10)),
        dropout_rows_reference(x[:, ::2].t(), 0.5, KEY, torch.arange(10)),
    )
    y = dropout_rows(torch.full((50, 8), torch.nan, device=DEVICE), 0.5, KEY, range(50)).cpu()
    kept = dropout_rows_reference(torch.ones(50, 8), 0.5, KEY, torch.arange(50)) != 0
    assert torch.equal(y.isnan(), kept) and (y[~kept] == 0).all()


def check_dropout_keeps_no_mask_and_relu_dropout_a_bit() -> None:
    x, ids = randn(64, 256).float().to(DEVICE).requires_grad_(), ids_of(64).to(DEVICE)
    assert saved_bytes(lambda: dropout_rows(x, 0.5, KEY, ids), ids) == 0
    assert saved_bytes(lambda: relu_dropout_rows(x, 0.5, KEY, ids), ids) == 64 * 256 // 8


def check_a_kept_mask_is_the_mask_made_again() -> None:
    from nugnn.kernels.epilogue import gpu

    x, grad = (randn(33, 100, seed=s).float().to(DEVICE) for s in (0, 1))
    mask = mask_arguments(0.4, KEY, range(33))
    results = []
    for remake in (False, True):
        out, kept = gpu.forward(x, None, None, None, "none", 1.0, mask, remake=remake)
        assert (kept.bits is None) == remake
        results.append((out, gpu.backward(grad, kept, None, None, None, None, "none", 1.0, mask, needs_sums=False)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def check_keys_in_memory_give_the_masks_of_keys_by_value() -> None:
    """Also the second time that a table is filled, and after the keys of another step."""
    table = KeyTable(torch.device(DEVICE))
    x, ids = randn(9, 100).float().to(DEVICE), ids_of(9).to(DEVICE)
    offsets, columns = torch.arange(0, 901, 100, device=DEVICE), torch.arange(100, device=DEVICE).repeat(9)

    def results(step: int) -> list[Tensor]:
        leaf, (a, b, c, d) = x.clone().requires_grad_(), (RandomKey(2**63 + 5, step, word) for word in (0, 7, ONES, 9))
        (dropout_rows(leaf, 0.5, a, ids) * 2).sum().backward()
        assert leaf.grad is not None
        sparse = dropout_csr_values(x.flatten(), offsets, columns, 0.5, c, ids)
        return [leaf.grad, epilogue_rows(x, activation="relu", p=0.3, key=b, row_ids=ids), sparse,
                random_words(d, ids, 9)]  # fmt: skip

    for step in (0, 1, 2**32 - 1, 1):
        by_value = results(step)
        with table.of_step(step, is_fixed=step == 2**32 - 1):
            for mine, other in zip(results(step), by_value, strict=True):
                assert torch.equal(mine, other)
    for key in (RandomKey(2**63 + 5, 4, 0), RandomKey(1, 3, 0), RandomKey(2**63 + 5, 3, 1)):
        with pytest.raises(RuntimeError), table.of_step(3, is_fixed=True):  # another step, seed, and a new key
            dropout_rows(x, 0.5, key, ids)


def check_sparse_dropout_has_the_bits_of_the_definition(dtype: torch.dtype) -> None:
    dense = torch.where(randn(400, 37, seed=3) > 1.2, randn(400, 37), 0)
    dense[5:200] = 0
    dense[-3:] = 0
    csr, ids = dense.to(dtype).to_sparse_csr(), torch.arange(400) * 3 + 2**33
    for index_dtype in (torch.int32, torch.int64):
        crow, col = csr.crow_indices().to(index_dtype), csr.col_indices().to(index_dtype)
        right = dropout_csr_values_reference(csr.values(), crow, col, 0.3, KEY, ids)
        values = csr.values().to(DEVICE).requires_grad_()
        out = dropout_csr_values(values, crow.to(DEVICE), col.to(DEVICE), 0.3, KEY, ids.to(DEVICE))
        same(f"sparse {dtype} {index_dtype}", out, right)
        (g,) = torch.autograd.grad(out.sum(), values)
        ones = torch.ones_like(csr.values())
        same("sparse gradient", g, dropout_csr_values_reference(ones, crow, col, 0.3, KEY, ids))
    one_row = dropout_csr_values(
        *(torch.tensor(t, device=DEVICE) for t in ([1.0, 2.0], [0, 2], [4, 9])), 0.5, KEY, range(8, 9)
    )
    right = dropout_csr_values_reference(
        *(torch.tensor(t) for t in ([1.0, 2.0], [0, 2], [4, 9])), 0.5, KEY, torch.tensor([8])
    )
    same("one row", one_row, right)


def check_offsets_past_two_to_the_31() -> None:
    if DEVICE == "cpu" or torch.cuda.mem_get_info()[0] < 24 * 2**30:
        return  # 4.5 GB each for input and output
    num_rows, width = 2_200_000, 1024
    x = torch.ones(num_rows, width, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    y = relu_dropout_rows(x, 0.5, KEY, range(num_rows))
    (g,) = torch.autograd.grad(y, x, x.detach())
    last = range(num_rows - 50, num_rows)
    right = dropout_rows_reference(
        torch.ones(50, width, dtype=torch.bfloat16), 0.5, KEY, torch.arange(last.start, last.stop)
    )
    same("far rows", y[-50:], right)
    same("far gradients", g[-50:], right)


# -- epilogue ------------------------------------------------------------------------------------------------------

STEPS = [
    {"bias": True},
    {"bias": True, "activation": "relu"},
    {"bias": True, "activation": "relu", "p": 0.3},
    {"row_scale": True, "bias": True, "activation": "leaky_relu", "alpha": 0.2},
    {"row_scale": True, "activation": "leaky_relu", "p": 0.3},
    {"bias": True, "activation": "elu", "alpha": 1.5, "p": 0.3},
    {"row_scale": True, "bias": True, "layer_norm": True, "affine": True, "activation": "relu", "p": 0.3},
    {"layer_norm": True, "activation": "elu"},
    {"layer_norm": True, "affine": True, "p": 0.3},
    {"layer_norm": True, "affine": True, "activation": "leaky_relu", "p": 0.3},
]


class Operands:
    """Operands of one chain, on the CPU; what runs on them, and with what gradients."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, steps: dict[str, Any], seed: int = 0) -> None:
        self.steps, self.dtype, self.ids = steps, dtype, ids_of(num_rows)
        self.x, self.grad = (randn(num_rows, width, seed=seed + s).to(dtype) for s in (0, 1))
        self.row_scale = randn(num_rows, seed=seed + 2).abs().to(torch.float32) if steps.get("row_scale") else None
        names = ["bias"] * bool(steps.get("bias")) + ["norm_weight", "norm_bias"] * bool(steps.get("affine"))
        self.parameters = {name: randn(width, seed=seed + 3 + i).to(dtype) for i, name in enumerate(names)}
        self.activation = steps.get("activation", "none")
        self.alpha = steps.get("alpha", 0.01 if self.activation == "leaky_relu" else 1.0)
        self.p = steps.get("p", 0.0)

    def ours(self) -> list[Tensor]:
        """Result, and gradients of x and parameters."""
        x = self.x.to(DEVICE).requires_grad_()
        parameters = {name: t.to(DEVICE).requires_grad_() for name, t in self.parameters.items()}
        y = epilogue_rows(
            x,
            row_scale=None if self.row_scale is None else self.row_scale.to(DEVICE),
            layer_norm=self.steps.get("layer_norm", False),
            activation=self.activation,
            alpha=self.alpha,
            p=self.p,
            key=KEY,
            row_ids=self.ids.to(DEVICE),
            **parameters,
        )
        return [y, *torch.autograd.grad(y, [x, *parameters.values()], self.grad.to(DEVICE))]

    def stepwise(self, dtype: torch.dtype) -> list[Tensor]:
        x = self.x.to(dtype).requires_grad_()
        parameters = {name: t.to(dtype).requires_grad_() for name, t in self.parameters.items()}
        y = epilogue_rows_reference(
            x, self.row_scale, parameters.get("bias"), self._norm(parameters), self.activation, self.alpha, self.p,
            KEY, self.ids,
        )  # fmt: skip
        return [y, *torch.autograd.grad(y, [x, *parameters.values()], self.grad.to(dtype))]

    def smallest_input_of_activation(self) -> float:
        wide = {name: t.double() for name, t in self.parameters.items()}
        z = before_dropout(self.x.double(), self.row_scale, wide.get("bias"), self._norm(wide), "none", 1.0)
        return float(z.abs().min())

    def _norm(self, parameters: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None, float] | None:
        if not self.steps.get("layer_norm"):
            return None
        return parameters.get("norm_weight"), parameters.get("norm_bias"), 1e-5


def check_wide_types_without_norm_and_elu_have_the_bits_of_the_steps(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        return  # a half type is rounded once here, after each of the steps there
    for steps in STEPS:
        if steps.get("layer_norm") or steps.get("activation") == "elu":
            continue
        for width in (100, 300):
            case = Operands(37, width, dtype, steps)
            mine, right = case.ours(), case.stepwise(dtype)
            same(f"{steps} {dtype} {width}", mine[0], right[0])
            same(f"{steps} {dtype} {width} gradient", mine[1], right[1])


def check_epilogue_errs_like_the_steps_in_float32(dtype: torch.dtype) -> None:
    """Against float64. A result in a half type may be off by its own last rounding besides."""
    for steps in STEPS:
        for num_rows, width in ((37, 100), (70, 5))[: 1 if DEVICE == "cuda" else 2]:  # a GPU compiles for each width
            # next to 0 float32 and float64 may see different signs, and so different gradients
            cases = (Operands(num_rows, width, dtype, steps, seed) for seed in itertools.count(11, 20))
            case = next(case for case in cases if case.smallest_input_of_activation() > 1e-6)
            mine, exact = case.ours(), case.stepwise(torch.float64)
            plain = case.stepwise(torch.float64 if dtype == torch.float64 else torch.float32)
            for i, (ours, right, steps_) in enumerate(zip(mine, exact, plain, strict=True)):
                assert ours.dtype == dtype
                # twice the steps' largest error, and a slack of 16 roundings of the largest value: the order of
                # sums over a row and over rows differs, and exp of a GPU is off by two units
                error = 2 * float((steps_.double() - right).abs().max())
                slack = 16 * wide_unit(dtype) * float(right.abs().max() + case.alpha)
                within(f"{steps} {dtype} {width} [{i}]", ours, right, error + slack + unit(dtype) * right.abs())


def check_column_sums_over_many_programs() -> None:
    """More row tiles than partial sums: every program walks several tiles, the last one fewer."""
    from nugnn.kernels.epilogue import gpu

    for rows_per_sum, num_rows in ((3, 5003), (1, 700)):
        x = torch.ones(num_rows, 9, device=DEVICE, requires_grad=True)
        bias = torch.zeros(9, device=DEVICE, requires_grad=True)
        original = gpu._MAX_PARTIAL_SUMS
        gpu._MAX_PARTIAL_SUMS = rows_per_sum
        y = epilogue_rows(x, bias=bias, activation="relu")
        g_x, g_bias = torch.autograd.grad(y, (x, bias), torch.ones_like(y))
        gpu._MAX_PARTIAL_SUMS = original
        assert torch.equal(g_bias.cpu(), torch.full((9,), float(num_rows))), g_bias  # integers: exact in any order
        assert torch.equal(g_x.cpu(), torch.ones(num_rows, 9))


def check_epilogue_keeps_bits_and_gives_no_gradient_that_is_not_asked_for() -> None:
    x = randn(64, 256).float().to(DEVICE).requires_grad_()
    bias, scale = torch.randn(256, device=DEVICE), torch.rand(64, device=DEVICE)
    known = (x, bias, scale)
    run = {"bias": bias, "row_scale": scale, "key": KEY, "row_ids": range(64)}
    assert saved_bytes(lambda: epilogue_rows(x, activation="relu", p=0.5, **run), *known) == 64 * 256 // 8
    assert saved_bytes(lambda: epilogue_rows(x, activation="leaky_relu", p=0.5, **run), *known) == 2 * 64 * 256 // 8
    assert saved_bytes(lambda: epilogue_rows(x, **run), *known) == 0
    norm_bytes = saved_bytes(lambda: epilogue_rows(x, layer_norm=True, activation="relu", p=0.5, **run), *known)
    assert norm_bytes == 64 * 256 // 8 + 64 * 2 * 4
    epilogue_rows(x, activation="relu", p=0.5, **run).sum().backward()
    assert x.grad is not None and bias.grad is None
    frozen, trained = torch.randn(4, 6, device=DEVICE), torch.zeros(6, device=DEVICE, requires_grad=True)
    epilogue_rows(frozen, bias=trained).sum().backward()
    assert torch.equal(trained.grad.cpu(), torch.full((6,), 4.0))


# -- padded rows ---------------------------------------------------------------------------------------------------


def check_padded_rows_give_the_same_bits_in_padded_rows(dtype: torch.dtype) -> None:
    num_rows, ids = 37, ids_of(37).to(DEVICE)
    labels = (ids % 3).long()
    for width in (3, 47, 100):
        parameters = [randn(width, seed=seed).to(DEVICE, dtype) for seed in (1, 2, 3)]
        bias, weight, shift = parameters
        random = {"p": 0.3, "key": KEY, "row_ids": ids}
        norm = {"layer_norm": True, "norm_weight": weight, "norm_bias": shift}
        targets, rows = (randn(num_rows, width, seed=5) > 0).to(DEVICE), torch.arange(0, num_rows, 2, device=DEVICE)
        steps: dict[str, Callable[[Tensor], Tensor]] = {
            "dropout": lambda x: dropout_rows(x, 0.3, KEY, ids),
            "relu dropout": lambda x: relu_dropout_rows(x, 0.3, KEY, ids),
            "bias elu": lambda x, bias=bias: epilogue_rows(x, bias=bias, activation="elu"),
            "norm": lambda x, norm=norm, random=random: epilogue_rows(x, activation="leaky_relu", **norm, **random),
            "cross-entropy": lambda x: cross_entropy_rows(x, labels),
            "of rows": lambda x, rows=rows: cross_entropy_rows(x, labels[rows], rows),
            "binary": lambda x, rows=rows, y=targets: binary_cross_entropy_rows(x, y[rows], rows),
        }
        for name, step in steps.items():
            x, grad = randn(num_rows, width).to(DEVICE, dtype), randn(num_rows, width, seed=4).to(DEVICE, dtype)
            results = []
            for lay_out in (Tensor.clone, padded_copy, beside_another):
                leaf = lay_out(x).requires_grad_()
                with Copies() as copies:
                    y = step(leaf)
                given = lay_out(grad) if y.dim() == 2 else grad[: len(y), 0].to(y.dtype)
                with Copies() as more_copies:
                    (g,) = torch.autograd.grad(y, leaf, given)
                assert copies.count == more_copies.count == 0, (name, dtype, width)
                results.append((y.detach(), g))
            for padded in results[1:]:
                for mine, plain in zip(padded, results[0], strict=True):
                    assert same_but_for_the_order_of_sums(mine, plain, name, width), (name, dtype, width)
                    assert mine.dim() == 1 or (with_padding(mine)[:, width:] == 0).all()
                if padded_width(width, dtype.itemsize) > width:
                    assert is_padded(padded[1]) and (padded[0].dim() == 1 or is_padded(padded[0])), name


def check_rows_are_added_with_the_bits_of_index_add(dtype: torch.dtype) -> None:
    if DEVICE == "cpu" and dtype.itemsize == 2:
        return  # the interpreter cuts where a GPU rounds
    for width in (1, 47, 256, 300):
        x, values = randn(100, width).to(DEVICE, dtype), randn(37, width, seed=1).to(DEVICE, dtype)
        rows = torch.randperm(100, generator=torch.Generator().manual_seed(2))[:37].to(DEVICE)
        expected = x.clone().index_add_(0, rows, values)
        for lay_out in (Tensor.clone, padded_copy):
            given = lay_out(x)
            assert add_rows_triton(given, rows, lay_out(values)) is given and torch.equal(given, expected), width


def check_rows_are_taken_as_they_are(dtype: torch.dtype) -> None:
    rows = torch.randint(0, 100, (150,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for width in (1, 47, 256, 300):
        x = randn(100, width).to(DEVICE, dtype)
        for lay_out in (Tensor.clone, padded_copy, beside_another):
            taken = take_rows_triton(lay_out(x), rows)
            assert taken.is_contiguous() and torch.equal(taken, x[rows]), width


def check_rows_of_several_axes_take_the_same_kernels(dtype: torch.dtype) -> None:
    """As attention's are, of heads and features; what lies otherwise is taken and added all the same."""
    rows = torch.randperm(100, generator=torch.Generator().manual_seed(2))[:37].to(DEVICE)
    for heads, dim in ((4, 16), (3, 1), (2, 0)):
        x, values = randn(100, heads, dim).to(DEVICE, dtype), randn(37, heads, dim, seed=1).to(DEVICE, dtype)
        with noted(take, "take_rows_triton") as taken, noted(add, "add_rows_triton") as added:
            assert torch.equal(take_rows(x, rows), x[rows])
            turned = x.transpose(0, 1).contiguous().transpose(0, 1)
            assert torch.equal(take_rows(turned, rows), x[rows])
            if not (DEVICE == "cpu" and dtype.itemsize == 2):
                expected = x.clone().index_add_(0, rows, values)
                given = x.clone()
                assert add_rows_(given, rows, values) is given and torch.equal(given, expected)
                assert torch.equal(add_rows_(turned.clone(), rows, values), expected)
            else:
                add_rows_(x.clone(), rows, values)
        assert (len(taken), len(added)) == ((2, 1) if dim else (0, 0)), (heads, dim)


@contextlib.contextmanager
def noted(module: Any, name: str) -> Iterator[list[str]]:
    """Calls of a function of ``module.gpu``, which serves the CPU as well."""
    calls: list[str] = []
    plain = getattr(module.gpu, name)

    def counted(*args: Any) -> Tensor:
        calls.append(name)
        return plain(*args)

    with mock.patch.object(module.gpu, name, counted), mock.patch.object(module, "runs_in_triton", lambda _: True):
        yield calls


def same_but_for_the_order_of_sums(mine: Tensor, plain: Tensor, name: str, width: int) -> bool:
    """Equal bits, but on a GPU where a row is summed: how it is loaded decides which threads add which columns.

    A sum of ``width`` terms is off by that many roundings of the accumulator; the variance of three columns may be
    some 50 times smaller than their squares, which its inverse carries into the result. Then one rounding to the dtype.
    """
    if DEVICE == "cpu" or name in ("dropout", "relu dropout", "bias elu"):
        return torch.equal(mine, plain)
    wide = torch.promote_types(plain.dtype, torch.float32)
    of_sums = 64 * width * torch.finfo(wide).eps * plain.double().abs().max()
    of_rounding = 2 * torch.finfo(plain.dtype).eps * plain.double().abs()
    return bool(((mine.double() - plain.double()).abs() <= of_sums + of_rounding).all())


def beside_another(x: Tensor) -> Tensor:
    """In a buffer whose rows hold something else, too."""
    padded = with_padding(padded_copy(x))
    buffer = torch.cat([padded, torch.full_like(padded, 7.0)], 1)
    return carve(buffer, [x.shape[1], padded.shape[1]], [padded.shape[1]] * 2)[0]


# -- losses --------------------------------------------------------------------------------------------------------


def check_cross_entropy_within_its_bound(dtype: torch.dtype) -> None:
    for num_classes in (1, 2, 47, 3000):
        for with_rows, weighted in ((False, False), (True, True)):
            cross_entropy_case(dtype, num_classes, with_rows, weighted)


def cross_entropy_case(dtype: torch.dtype, num_classes: int, with_rows: bool, weighted: bool) -> None:
    """The bound in roundings ``u`` of the kernel's own type.

    ``log sum exp`` errs by the sum (a tree over a block of 2,048, blocks in turn), by the fast exp and log (2**-22 at
    the most, 8 u together with their arguments), and by the roundings of its result and of the difference.
    """
    generator = torch.Generator().manual_seed(num_classes)
    num_rows, u = 40, wide_unit(dtype)
    logits = (4 * randn(num_rows, num_classes)).to(dtype)
    rows = torch.randperm(num_rows, generator=generator)[:17] if with_rows else None
    count = num_rows if rows is None else len(rows)
    labels = torch.randint(num_classes, (count,), generator=generator)
    weights = torch.rand(num_classes, generator=generator) if weighted else None
    grad = torch.rand(count, generator=generator)
    leaf = logits.to(DEVICE).requires_grad_()
    on_device = [None if t is None else t.to(DEVICE) for t in (rows, weights)]
    loss = cross_entropy_rows(leaf, labels.to(DEVICE), *on_device)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (g,) = torch.autograd.grad(loss, leaf, grad.to(DEVICE, loss.dtype))

    exact = logits.double().requires_grad_()
    right = cross_entropy_rows_reference(exact, labels, rows, weights)
    (right_g,) = torch.autograd.grad(right, exact, grad.double())
    picked = logits.double() if rows is None else logits.double()[rows]
    log_sum, own = picked.logsumexp(1), picked.gather(1, labels[:, None])[:, 0]
    weight = torch.ones(count, dtype=torch.float64) if weights is None else weights.double()[labels]
    sum_error = u * (24 + num_classes / 2048) + 2 * u * log_sum.abs()
    bound = weight * (sum_error + 2 * u * (own.abs() + (log_sum - own).abs()))
    label = f"cross-entropy {dtype} {num_classes} {with_rows}"
    within(label, loss, right, bound)
    # the probability errs by exp of a difference of two numbers that are off by `sum_error` and one rounding
    bound_g = (grad.double() * weight * (2 * sum_error + 8 * u + 2 * u * picked.abs().amax(1)))[:, None].expand_as(
        picked
    )
    full = torch.zeros(num_rows, num_classes, dtype=torch.float64)
    full[torch.arange(num_rows) if rows is None else rows] = bound_g
    within(f"{label} gradient", g, right_g, full + (unit(dtype) + 4 * u) * right_g.abs() + tiny(dtype))
    others = torch.ones(num_rows, dtype=torch.bool)
    others[torch.arange(num_rows) if rows is None else rows] = False
    assert (g.cpu()[others] == 0).all()
    assert g.dtype == dtype


def tiny(dtype: torch.dtype) -> float:
    """Spacing of the smallest values of ``dtype``: what a result below its normal range is off by."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def check_extreme_logits_and_labels_that_are_no_class() -> None:
    logits = torch.tensor(
        [[1e4, 0.0, -1e4], [-torch.inf, 0.0, 0.0], [0.0, torch.nan, 0.0], [1.0, 2.0, 3.0]], device=DEVICE
    )
    labels = torch.tensor([0, 1, 0, 1], device=DEVICE)
    loss = cross_entropy_rows(logits, labels).cpu()
    assert loss[0] == 0 and abs(float(loss[1]) - 0.6931472) < 1e-6 and loss[2].isnan() and loss[3].isfinite()
    for label in (-1, 3, 2**40):
        outside = cross_entropy_rows(logits, torch.tensor([0, 1, 0, label], device=DEVICE)).cpu()
        assert outside[3].isnan() and torch.equal(outside[:2], loss[:2])
    none = logits[:0].requires_grad_()
    assert cross_entropy_rows(none, labels[:0]).shape == (0,)
    no_rows = torch.ones(4, 3, device=DEVICE, requires_grad=True)
    cross_entropy_rows(no_rows, labels[:0], torch.empty(0, dtype=torch.int64, device=DEVICE)).sum().backward()
    assert (no_rows.grad == 0).all()


def check_binary_cross_entropy_within_its_bound(dtype: torch.dtype) -> None:
    for num_classes in (1, 39, 2500):
        for targets_dtype in (torch.bool, torch.float32, torch.int64):
            generator = torch.Generator().manual_seed(num_classes)
            logits, u = (5 * randn(30, num_classes)).to(dtype), wide_unit(dtype)
            rows = torch.randperm(30, generator=generator)[:11]
            targets = (torch.rand(11, num_classes, generator=generator) < 0.3).to(targets_dtype)
            grad = torch.rand(11, generator=generator)
            leaf = logits.to(DEVICE).requires_grad_()
            loss = binary_cross_entropy_rows(leaf, targets.to(DEVICE), rows.to(DEVICE))
            (g,) = torch.autograd.grad(loss, leaf, grad.to(DEVICE, loss.dtype))
            exact = logits.double().requires_grad_()
            right = binary_cross_entropy_rows_reference(exact, targets, rows)
            (right_g,) = torch.autograd.grad(right, exact, grad.double())
            # values and products up to |z|, then exp and log of a GPU, then a sum of blocks
            mean = logits.double()[rows].abs().mean(1)
            label = f"binary {dtype} {num_classes} {targets_dtype}"
            within(label, loss, right, u * (24 + num_classes / 2048) * (mean + 1))
            largest = float(logits.double().abs().max())
            scale = torch.zeros(30, 1, dtype=torch.float64)
            scale[rows] = grad.double()[:, None] / num_classes
            bound = scale * u * (16 + largest) + unit(dtype) * right_g.abs() + tiny(dtype)
            within(f"{label} gradient", g, right_g, bound)
            others = torch.ones(30, dtype=torch.bool)
            others[rows] = False
            assert (g.cpu()[others] == 0).all()


def tasks() -> dict[str, Callable[[], None]]:
    """What there is to run by name; a check with a dtype is one task for each."""
    found: dict[str, Callable[[], None]] = {}
    for name, check in globals().items():
        if name.startswith("check_") and "dtype" in check.__annotations__:
            found |= {f"{name}:{str(dtype)[6:]}": functools.partial(check, dtype) for dtype in DTYPES}
        elif name.startswith("check_"):
            found[name] = check
    return found


def run_task(name: str) -> tuple[str, bool]:
    """The output of a task in a process of its own, and whether it held."""
    result = subprocess.run(
        [sys.executable, __file__, DEVICE, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return result.stdout.removesuffix("all hold\n"), result.returncode == 0


def main() -> None:
    names = [name for name in tasks() if not sys.argv[2:] or name in sys.argv[2:]]
    if sys.argv[2:3] == ["--skip"]:
        names = [name for name in tasks() if not any(word in name for word in sys.argv[3:])]
    assert names, sys.argv
    if DEVICE == "cuda" and len(names) > 1:  # compiling takes most of the time, and one core
        with concurrent.futures.ThreadPoolExecutor(min(14, os.cpu_count() or 1)) as pool:
            results = list(pool.map(run_task, names))
        print("".join(output for output, _ in results), end="")
        print("all hold" if all(holds for _, holds in results) else "some fail")
        return
    if DEVICE == "cpu":
        quicken_the_interpreter()
        epilogues.runs_in_triton = losses.runs_in_triton = lambda x: True
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name in names:
        start = time.perf_counter()
        tasks()[name]()
        print(f"{name} {time.perf_counter() - start:.1f} s", flush=True)
    print("all hold")


if __name__ == "__main__":
    main()
