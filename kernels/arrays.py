"""Tensors as NumPy arrays for the numba kernels, leaving the tensor's memory as it is."""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_FEWEST_ADVISED_BYTES = 8 << 20
_logger = logging.getLogger(__name__)


def as_array(x: Tensor) -> np.ndarray:
    """``x`` as an array over the same memory.

    Unlike ``x.numpy()`` this does not forbid resizing the tensor's storage for good: layers that free their input until
    backward (`dgl.nn.GroupRevRes`) could not follow a kernel otherwise.

    Args:
        x: On the CPU, of a type that NumPy has; its gradient is left out of account.
    """
    array: np.ndarray = np.from_dlpack(x.detach())  # type: ignore[arg-type]
    return array if array.flags.writeable else x.detach().numpy()  # read-only before NumPy 2.1


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``torch.empty`` on the CPU, on huge pages where the system grants them on request.

    A new result of some ten megabytes is memory that the system hands out page by page, each zeroed on first touch:
    with pages of 4 KiB that takes five times as long as writing the result.

    Args:
        shape: Of the tensor.
        dtype: Of its values.
    """
    out = torch.empty(shape, dtype=dtype)
    num_bytes = out.numel() * out.element_size()
    if num_bytes >= _FEWEST_ADVISED_BYTES and (advise := _madvise()) is not None:
        begin = -(-out.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        end = (out.data_ptr() + num_bytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)  # only advice: a refusal changes nothing
    return out


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError) as error:
        _logger.info("results are not asked for on huge pages: %s", error)
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function  # type: ignore[no-any-return]
