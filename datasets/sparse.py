"""Sparse feature matrices as torch CSR tensors, without torch's one-time beta warning."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from nugnn.datasets.mapped import gather_rows


def csr_matrix(
    indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, ...], *, is_checked: bool = True
) -> Tensor:
    """Make a ``torch.sparse_csr`` matrix.

    Args:
        indptr: ``(N + 1,)`` row pointers; converted to int64.
        indices: ``(nnz,)`` column of each stored entry; converted to int64.
        values: ``(nnz,)`` stored entries, any floating dtype.
        shape: ``(N, F)``.
        is_checked: Whether the arrays were checked already (``check_csr``).

    Raises:
        RuntimeError: They were not, and are not those of such a matrix.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(
            indptr.to(torch.int64), indices.to(torch.int64), values, size=shape, check_invariants=not is_checked
        )


def select_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """Rows ``ids`` of a dense or ``sparse_csr`` tensor, in the same layout and type."""
    if rows.layout != torch.sparse_csr:
        return gather_rows(rows, ids)
    crow, lengths = rows.crow_indices(), rows.crow_indices().diff()[ids]
    new_crow = torch.zeros(len(ids) + 1, dtype=crow.dtype)
    torch.cumsum(lengths, 0, out=new_crow[1:])
    shift = torch.repeat_interleave(crow[ids] - new_crow[:-1], lengths)
    entries = shift + torch.arange(len(shift))
    return csr_matrix(new_crow, rows.col_indices()[entries], rows.values()[entries], (len(ids), rows.shape[1]))


def stored_values(rows: Tensor | None) -> int | None:
    """Of a row of ``sparse_csr``, in the mean, rounded, at least 1 where there are any; None of dense rows."""
    if rows is None or rows.layout != torch.sparse_csr:
        return None
    stored = len(rows.values())
    return max(round(stored / max(len(rows), 1)), min(stored, 1))
