"""Node features that are mostly zero, kept as CSR rows: ``x @ weight`` reads and differentiates stored entries only."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from nugnn.kernels._jit import row_tasks
from nugnn.kernels.operator import Operator
from nugnn.kernels.sparse_rows.reference import csr_matmul_reference
from nugnn.kernels.structure import Structure

__all__ = ["csr_matmul", "densify", "with_values"]

_WIDE = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)


def csr_matmul(x_csr: Tensor, weight: Tensor) -> Tensor:
    """Sparse feature rows times a dense weight.

    Every output row, and in the backward pass every row of the weight's gradient, is summed in an order that does not
    depend on the number of threads. The transposed structure that the weight's gradient needs is made once per pair of
    index tensors and kept as long as they live, so matrices that share them and differ in values (dropout) share it
    too. On a GPU the rows of the weight are aggregated as source rows with a weight per edge are.

    Args:
        x_csr: ``(N, F)`` ``torch.sparse_csr``, float32, float64, bfloat16 or float16 (the half types are summed in
            float32 and rounded once), int32 or int64 indices, no column twice in a row.
        weight: ``(F, C)`` dense, same dtype.

    Returns:
        ``(N, C)`` in the same dtype; differentiable in ``weight`` and, where required, in the values of ``x_csr``.

    Raises:
        ValueError: Layout, dtypes or shapes do not fit.
    """
    if x_csr.layout != torch.sparse_csr:
        raise ValueError(f"csr_matmul: x_csr has layout {x_csr.layout}; convert it with x.to_sparse_csr()")
    if x_csr.dtype != weight.dtype or weight.dtype not in _WIDE + _HALF:
        raise ValueError(f"csr_matmul: dtypes {x_csr.dtype} and {weight.dtype} must be one and the same floating dtype")
    if x_csr.dim() != 2 or weight.dim() != 2 or x_csr.shape[1] != weight.shape[0]:
        raise ValueError(f"csr_matmul: shapes {tuple(x_csr.shape)} and {tuple(weight.shape)} do not multiply")
    crow, col, values = x_csr.crow_indices(), x_csr.col_indices(), x_csr.values()
    if len(values) == 0 or weight.numel() == 0:
        return csr_matmul_reference(crow, col, values, weight)
    if weight.device.type != "cpu":
        return _aggregated(crow, col, values, weight)
    if weight.dtype in _HALF:
        wide: Tensor = _CsrMatmul.apply(crow, col, values.float(), weight.float())
        return wide.to(weight.dtype)
    result: Tensor = _CsrMatmul.apply(crow, col, values, weight)
    return result


def densify(x_csr: Tensor) -> Tensor:
    """``(N, F)`` dense copy of a ``torch.sparse_csr`` matrix; differentiable in its values.

    Raises:
        ValueError: ``x_csr`` is not in the sparse CSR layout.
    """
    if x_csr.layout != torch.sparse_csr:
        raise ValueError(f"densify: x_csr has layout {x_csr.layout}, expected torch.sparse_csr")
    num_rows, num_columns = x_csr.shape
    lengths = x_csr.crow_indices().diff().to(torch.int64)
    row = torch.repeat_interleave(lengths, output_size=len(x_csr.values()))  # known, so that nobody waits for a GPU
    positions = row * num_columns + x_csr.col_indices().to(torch.int64)
    values = x_csr.values()
    return values.new_zeros(num_rows * num_columns).index_add(0, positions, values).view(num_rows, num_columns)


def with_values(x_csr: Tensor, values: Tensor) -> Tensor:
    """The matrix with the same stored positions, sharing index tensors, and other values.

    Args:
        x_csr: ``torch.sparse_csr`` matrix.
        values: ``(nnz,)``; the result is differentiable in them.
    """
    with warnings.catch_warnings():
        # torch says once per process that this layout is young and that it skips checks unless told to.
        warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta", category=UserWarning)
        return torch.sparse_csr_tensor(
            x_csr.crow_indices(), x_csr.col_indices(), values, tuple(x_csr.shape), check_invariants=False
        )


def _aggregated(crow: Tensor, col: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """The product as an aggregation: column ``c`` is a source node with the row ``weight[c]``."""
    from nugnn.kernels.spmm import spmm

    structure = _structures.get(crow, col, len(weight))
    return spmm(structure, "mul", "sum", weight, values[:, None])


class _CsrMatmul(Operator):
    @staticmethod
    def forward(ctx: Any, crow: Tensor, col: Tensor, values: Tensor, weight: Tensor) -> Tensor:
        from nugnn.kernels.sparse_rows import cpu

        ctx.save_for_backward(crow, col, values, weight)
        indptr = _array(crow)
        out = torch.empty(len(crow) - 1, weight.shape[1], dtype=weight.dtype)
        no_entries = np.empty(0, np.int32)
        cpu.weighted_row_sums(
            row_tasks(indptr, torch.get_num_threads()),
            indptr,
            _array(col),
            no_entries,
            _array(values),
            _array(weight),
            out.numpy(),
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None, Tensor | None]:
        from nugnn.kernels.sparse_rows import cpu

        crow, col, values, weight = ctx.saved_tensors
        grad_values = grad_weight = None
        if ctx.needs_input_grad[2]:
            indptr = _array(crow)
            grad_values = torch.empty_like(values, memory_format=torch.contiguous_format)
            cpu.value_gradients(
                row_tasks(indptr, torch.get_num_threads()),
                indptr,
                _array(col),
                _array(grad),
                _array(weight),
                grad_values.numpy(),
            )
        if ctx.needs_input_grad[3]:
            columns = _transposes.get(crow, col, len(weight))
            grad_weight = torch.empty(weight.shape, dtype=weight.dtype)
            cpu.weighted_row_sums(
                row_tasks(columns.indptr, torch.get_num_threads()),
                columns.indptr,
                columns.rows,
                columns.entries,
                _array(values),
                _array(grad),
                grad_weight.numpy(),
            )
        return None, None, grad_values, grad_weight


@dataclass(frozen=True, eq=False, slots=True)
class _Transpose:
    """Entries grouped by column: ``indptr (F + 1,)``, ``rows (nnz,)``, ``entries (nnz,)``, the slot of each entry."""

    indptr: np.ndarray
    rows: np.ndarray
    entries: np.ndarray


T = TypeVar("T")


class _IndexCache(Generic[T]):
    """What is made of a pair of index tensors, by their memory; dropped once that memory is freed.

    A sparse tensor makes a new Python object each time its indices are asked for, so identity is that of the storage. A
    weak reference keeps a storage's address from being used again, and the version counter notices in-place changes.

    Args:
        make: Called with the two index tensors and the number of columns; the result must not hold their storages.
    """

    def __init__(self, make: Callable[[Tensor, Tensor, int], T]) -> None:
        self._make = make
        self._items: dict[tuple[Any, ...], tuple[StorageWeakRef, StorageWeakRef, T]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, crow: Tensor, col: Tensor, num_columns: int) -> T:
        crow_storage, col_storage = StorageWeakRef(crow.untyped_storage()), StorageWeakRef(col.untyped_storage())
        parts = tuple(
            (storage.cdata, t.dtype, t.storage_offset(), t.stride(), len(t), t._version)
            for storage, t in ((crow_storage, crow), (col_storage, col))
        )
        key = (*parts, num_columns)
        with self._lock:
            for stale in [k for k, (a, b, _) in self._items.items() if a.expired() or b.expired()]:
                del self._items[stale]
            if key not in self._items:
                self._items[key] = (crow_storage, col_storage, self._make(crow, col, num_columns))
            return self._items[key][2]


def _transpose(crow: Tensor, col: Tensor, num_columns: int) -> _Transpose:
    from nugnn.kernels.sparse_rows import cpu

    indptr, indices = _array(crow), _array(col)
    offsets = np.zeros(num_columns + 1, np.int64)
    np.cumsum(np.bincount(indices, minlength=num_columns), out=offsets[1:])
    rows = np.empty(len(indices), np.int32 if len(indptr) <= 2**31 else np.int64)
    entries = np.empty(len(indices), np.int32 if len(indices) < 2**31 else np.int64)
    cpu.transpose(indptr, indices, offsets[:-1].copy(), rows, entries)
    return _Transpose(offsets, rows, entries)


def _structure(crow: Tensor, col: Tensor, num_columns: int) -> Structure:
    # copies: what the cache holds must not keep the storages alive by which it knows that the matrix is gone
    return Structure(num_columns, crow.to(torch.int64, copy=True), col.to(torch.int32, copy=True))


_transposes = _IndexCache(_transpose)
_structures = _IndexCache(_structure)


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().contiguous().numpy()
    return array
