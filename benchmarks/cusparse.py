"""cuSPARSE's SpMM with the algorithm and the preprocessing of one's choice, through the library that torch has loaded.

``torch.sparse`` chooses the algorithm itself and prepares each call anew. Here descriptors, workspace and analysis are
made once and kept, as cuSPARSE's manual advises for repeated products with one matrix: a fairer opponent.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch
from torch import Tensor

ALGORITHMS = {"default": 0, "alg1": 4, "alg2": 6, "alg3": 12}
"""``cusparseSpMMAlg_t`` of CSR matrices."""
_INDEX_32 = 2
_ROW_MAJOR = 2
_AS_IT_IS = 0
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""``cudaDataType_t``."""


class CuSparseError(RuntimeError):
    """cuSPARSE has refused a call."""


@functools.cache
def library() -> ctypes.CDLL:
    """The libcusparse of this process, which torch's CUDA build loads.

    Raises:
        CuSparseError: There is none.
    """
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcusparse.so" in line}
    if not mapped:
        raise CuSparseError("libcusparse is not loaded: this torch has no CUDA")
    return ctypes.CDLL(sorted(mapped)[0])


class CuSparseProduct:
    """``y = A @ x`` for one CSR matrix and one shape and type of ``x``, everything but the product done beforehand.

    Args:
        indptr: ``(N + 1,)`` int32.
        indices: ``(E,)`` int32.
        values: ``(E,)`` of the dtype of ``x``.
        x: ``(L, F)`` float32, float16 or bfloat16, contiguous. Accumulation is float32. Not kept.
        algorithm: One of `ALGORITHMS`.
        preprocess: Call ``cusparseSpMM_preprocess`` once.

    Raises:
        CuSparseError: The library refuses the combination.
    """

    def __init__(
        self, indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, algorithm: str, preprocess: bool
    ) -> None:
        self._library = library()
        self._num_rows = num_rows = len(indptr) - 1
        y = torch.empty(num_rows, x.shape[1], dtype=x.dtype, device=x.device)
        self._kept = (indptr, indices)  # the descriptor holds their addresses
        self._values: Tensor | None = values
        kind = _TYPES[x.dtype]
        self._handle, self._matrix, self._x, self._y = (c_void_p() for _ in range(4))
        self._call("cusparseCreate", byref(self._handle))
        self._call("cusparseSetStream", self._handle, c_void_p(torch.cuda.current_stream(x.device).cuda_stream))
        self._call(
            "cusparseCreateCsr", byref(self._matrix), c_int64(num_rows), c_int64(len(x)), c_int64(len(indices)),
            c_void_p(indptr.data_ptr()), c_void_p(indices.data_ptr()), c_void_p(values.data_ptr()),
            c_int(_INDEX_32), c_int(_INDEX_32), c_int(0), c_int(kind),
        )  # fmt: skip
        for descriptor, dense in ((self._x, x), (self._y, y)):
            self._call(
                "cusparseCreateDnMat", byref(descriptor), c_int64(len(dense)), c_int64(dense.shape[1]),
                c_int64(dense.shape[1]), c_void_p(dense.data_ptr()), c_int(kind), c_int(_ROW_MAJOR),
            )  # fmt: skip
        one, zero = c_float(1.0), c_float(0.0)
        self._arguments = (
            self._handle, c_int(_AS_IT_IS), c_int(_AS_IT_IS), byref(one), self._matrix, self._x, byref(zero), self._y,
            c_int(_TYPES[torch.float32]), c_int(ALGORITHMS[algorithm]),
        )  # fmt: skip
        size = c_size_t()
        self._call("cusparseSpMM_bufferSize", *self._arguments, byref(size))
        self._workspace = torch.empty(max(size.value, 16), dtype=torch.uint8, device=x.device)
        self._arguments = (*self._arguments, c_void_p(self._workspace.data_ptr()))
        if preprocess:
            self._call("cusparseSpMM_preprocess", *self._arguments)

    def __call__(self, x: Tensor, y: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        """The product, in ``y`` or in new memory; both contiguous.

        Args:
            x: As the one that it was made for.
            y: ``(N, F)`` to fill.
            values: ``(E,)`` contiguous, instead of those that were given first, which are let go: the analysis is one
                of the pattern. Whoever has given some gives some in each call.
        """
        if y is None:
            y = torch.empty(self._num_rows, x.shape[1], dtype=x.dtype, device=x.device)
        for descriptor, dense in ((self._x, x), (self._y, y)):
            self._call("cusparseDnMatSetValues", descriptor, c_void_p(dense.data_ptr()))
        if values is not None:
            self._call("cusparseSpMatSetValues", self._matrix, c_void_p(values.data_ptr()))
            self._values = None  # whoever frees these does so on the same stream, after the product
        elif self._values is None:
            raise ValueError("the first values are gone: give some")
        self._call("cusparseSpMM", *self._arguments)
        return y

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            for destroy, descriptor in (
                ("cusparseDestroySpMat", self._matrix),
                ("cusparseDestroyDnMat", self._x),
                ("cusparseDestroyDnMat", self._y),
                ("cusparseDestroy", self._handle),
            ):
                if descriptor:
                    getattr(self._library, destroy)(descriptor)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CuSparseError(f"{name} gave status {status}")
