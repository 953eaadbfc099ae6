"""Distinct rows read, added to and written, in Triton. Import this module only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.operator import unseen

_TILE_VALUES = 2048


@triton.jit(do_not_specialize=["num_rows"])
def _add_rows_kernel(  # type: ignore[no-untyped-def]
    x, rows, values, num_rows,
    num_columns: tl.constexpr, x_stride: tl.constexpr, value_stride: tl.constexpr, acc: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    slots = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    in_rows = slots < num_rows
    row = tl.load(rows + slots, mask=in_rows, other=0)
    inside = in_rows[:, None] & (columns < num_columns)[None, :]
    at = x + row[:, None] * x_stride + columns[None, :]
    more = tl.load(values + slots[:, None] * value_stride + columns[None, :], mask=inside, other=0.0).to(acc)
    total = tl.load(at, mask=inside, other=0.0).to(acc) + more
    tl.store(at, total.to(x.dtype.element_ty), mask=inside)


@unseen
def add_rows_triton(x_N: Tensor, rows_S: Tensor, values_S: Tensor) -> Tensor:
    """See :func:`nugnn.kernels.add_rows.add_rows_`; both matrices with contiguous rows, ``S`` at least 1."""
    num_columns = x_N.shape[1]
    block_columns = min(256, triton.next_power_of_2(num_columns))
    block_rows = _TILE_VALUES // block_columns
    grid = (triton.cdiv(len(rows_S), block_rows), triton.cdiv(num_columns, block_columns))
    with torch.cuda.device_of(x_N):
        _add_rows_kernel[grid](
            x_N, rows_S, values_S, len(rows_S), num_columns, x_N.stride(0), values_S.stride(0),
            tl.float64 if x_N.dtype == torch.float64 else tl.float32, block_rows, block_columns,
        )  # fmt: skip
    return x_N
