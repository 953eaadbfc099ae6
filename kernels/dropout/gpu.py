"""Dropout of the stored entries of a sparse matrix in Triton: an entry finds its row by bisection of the offsets.

Entries of a row lie side by side, so the lanes of a warp read the same few offsets; nothing of the size of the matrix
is made besides the result. Import this module only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nugnn.kernels.epilogue.gpu import Mask, scale_bits, signed
from nugnn.kernels.philox.gpu import key_word, philox_tile
from nugnn.kernels.philox.reference import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1

_M0, _M1 = tl.constexpr(MULTIPLIER_0), tl.constexpr(MULTIPLIER_1)
_W0, _W1 = tl.constexpr(WEYL_0), tl.constexpr(WEYL_1)
_ROUNDS = tl.constexpr(ROUNDS)
_BLOCK = 512


@triton.jit(
    do_not_specialize=[
        *("first_id", "num_rows", "num_entries", "threshold", "scale_bits", "k0", "k1", "num_halvings"),
    ]
)
def _csr_kernel(  # type: ignore[no-untyped-def]
    out, values, indptr, indices, row_ids, first_id, num_rows, num_entries, threshold, scale_bits, k0, k1,
    num_halvings, has_ids: tl.constexpr, acc: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    entries = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = entries < num_entries
    # the last row that begins at or before the entry: empty rows before it end where they begin
    low = tl.zeros_like(entries)
    high = tl.zeros_like(entries) + num_rows
    for _ in range(num_halvings):
        middle = (low + high) // 2
        begins = tl.load(indptr + middle, mask=inside, other=0).to(tl.int64) <= entries
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    if has_ids:
        ids = tl.load(row_ids + low, mask=inside, other=0)
    else:
        ids = low + first_id
    columns = tl.load(indices + entries, mask=inside, other=0).to(tl.int64)
    c0, c1, c2, c3 = philox_tile(ids, columns // 4, key_word(k0), key_word(k1), _M0, _M1, _W0, _W1, _ROUNDS)
    lane = columns % 4
    words = tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))
    value = tl.load(values + entries, mask=inside, other=0.0).to(acc) * scale_bits.to(acc, bitcast=True)
    value = tl.where(words >= threshold.to(tl.uint32), value, 0.0)
    tl.store(out + entries, value.to(out.dtype.element_ty), mask=inside)


def drop_csr_values(values: Tensor, indptr: Tensor, indices: Tensor, mask: Mask) -> Tensor:
    """As :func:`nugnn.kernels.dropout.dropout_csr_values`, at least one entry.

    Args:
        values: ``(nnz,)`` float32, float64, bfloat16 or float16.
        indptr: ``(n + 1,)`` int32 or int64.
        indices: ``(nnz,)`` int32 or int64.
        mask: Dropout, with one row id per row of the matrix.
    """
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    acc, dtype = (tl.float64, torch.float64) if values.dtype == torch.float64 else (tl.float32, torch.float32)
    num_rows = len(indptr) - 1
    ids, first_id = (indptr, mask.row_ids.start) if isinstance(mask.row_ids, range) else (mask.row_ids, 0)
    _csr_kernel[(triton.cdiv(len(values), _BLOCK),)](
        out, values.contiguous(), indptr.contiguous(), indices.contiguous(), ids, first_id, num_rows, len(values),
        signed(mask.threshold), scale_bits(mask.scale, dtype), signed(mask.key[0]), signed(mask.key[1]),
        num_rows.bit_length(), isinstance(mask.row_ids, Tensor), acc, _BLOCK,
    )  # fmt: skip
    return out
