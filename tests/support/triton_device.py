"""Where Triton kernels run in tests: the GPU, or Triton's interpreter where there is none.

Import this before any module with kernels: Triton looks at its setting when a kernel is defined.
"""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    import triton_interpreter  # noqa: F401
