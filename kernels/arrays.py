"""Tensors as NumPy arrays for the numba kernels, leaving the tensor's memory as it is."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def as_array(x: Tensor) -> np.ndarray:
    """``x`` as an array over the same memory.

    Unlike ``x.numpy()`` this does not forbid resizing the tensor's storage for good: layers that free their input until
    backward (`dgl.nn.GroupRevRes`) could not follow a kernel otherwise.

    Args:
        x: On the CPU, of a type that NumPy has; its gradient is left out of account.
    """
    array: np.ndarray = np.from_dlpack(x.detach())  # type: ignore[arg-type]
    return array if array.flags.writeable else x.detach().numpy()  # read-only before NumPy 2.1
