"""Triton's interpreter for kernels with loops over loaded bounds; import it before any kernel, in a process of its own.

The interpreter keeps a scalar as an array of one element and makes a loop bound of it by ``int``, which NumPy refuses
since 2.4 for anything but arrays without dimensions.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


interpreter._patch_lang_tensor = _patched
