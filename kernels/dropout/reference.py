"""Dropout by row identity in plain PyTorch: what the fast kernels must equal bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from nugnn.kernels.philox import RandomKey, derived_key
from nugnn.kernels.philox.reference import block_words_reference, random_words_reference


def keep_threshold(p: float) -> int:
    """An entry is kept iff its word is at least this: ``round(p * 2**32)``, of 2**32 possible words."""
    return min(max(round(p * 2**32), 0), 2**32)


def keep_scale(p: float) -> float:
    """``1 / (1 - p)`` in float64; 0 for ``p = 1``, where nothing is kept."""
    return 0.0 if p >= 1 else 1.0 / (1.0 - p)


def dropout_rows_reference(x: Tensor, p: float, key: RandomKey, row_ids: Tensor) -> Tensor:
    """``x * keep_scale(p)`` where kept, else 0; differentiable in ``x``.

    The product is taken in the dtype of ``x``, in float32 for bfloat16 and float16 (rounded once, at the end).
    """
    if p == 0:
        return x.clone()
    num_columns = x[0].numel() if len(x) else 0
    words = random_words_reference(derived_key(key), row_ids, num_columns)
    kept = (words >= keep_threshold(p)).reshape(x.shape)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    scaled = wide * torch.tensor(keep_scale(p), dtype=wide.dtype)
    return torch.where(kept, scaled.to(x.dtype), torch.zeros((), dtype=x.dtype))


def dropout_csr_values_reference(
    values: Tensor, indptr: Tensor, indices: Tensor, p: float, key: RandomKey, row_ids: Tensor
) -> Tensor:
    """The entries that ``dropout_rows_reference`` would give at the stored positions of a sparse matrix."""
    if p == 0 or values.numel() == 0:
        return values.clone()
    entry_row_ids = torch.repeat_interleave(row_ids, indptr.diff().to(torch.int64))
    columns = indices.to(torch.int64)
    blocks = block_words_reference(derived_key(key), entry_row_ids, columns // 4)
    words = blocks.gather(-1, (columns % 4)[:, None])[:, 0]
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    scaled = wide * torch.tensor(keep_scale(p), dtype=wide.dtype)
    return torch.where(words >= keep_threshold(p), scaled.to(values.dtype), torch.zeros((), dtype=values.dtype))
