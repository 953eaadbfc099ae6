"""Rows read and written 16 bytes a thread, in Triton. Import this module only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.operator import unseen

_TILE_VALUES = 2048


@triton.jit(do_not_specialize=["num_rows"])
def _take_rows_kernel(  # type: ignore[no-untyped-def]
    out, x, rows, num_rows,
    num_columns: tl.constexpr, x_stride: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    slots = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    in_rows = slots < num_rows
    row = tl.load(rows + slots, mask=in_rows, other=0)
    inside = in_rows[:, None] & (columns < num_columns)[None, :]
    values = tl.load(x + row[:, None] * x_stride + columns[None, :], mask=inside, other=0.0)
    tl.store(out + slots[:, None] * num_columns + columns[None, :], values, mask=inside)


@unseen
def take_rows_triton(x_N: Tensor, rows_S: Tensor) -> Tensor:
    """See :func:`nugnn.kernels.take_rows.take_rows`; ``x`` a matrix with contiguous rows, ``S`` at least 1."""
    num_columns = x_N.shape[1]
    out = torch.empty(len(rows_S), num_columns, dtype=x_N.dtype, device=x_N.device)
    block_columns = min(256, triton.next_power_of_2(num_columns))
    block_rows = _TILE_VALUES // block_columns
    grid = (triton.cdiv(len(rows_S), block_rows), triton.cdiv(num_columns, block_columns))
    with torch.cuda.device_of(x_N):
        _take_rows_kernel[grid](out, x_N, rows_S, len(rows_S), num_columns, x_N.stride(0), block_rows, block_columns)
    return out
