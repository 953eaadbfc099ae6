"""What is asked of compressed gradient sums, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nugnn.comm.compression.wire import BUCKET, WIRES, Wire

ADAPTIVE, POWERSGD = "adaptive", "powersgd"
LEAST_SIZE = 1024
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of parameters whose gradients may be compressed: no precision is lost before they are rounded."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How gradients travel.

    Args:
        wire: One of `nugnn.comm.compression.wire.WIRES`, or ``adaptive``: bits by tensor, chosen from time to time so
            that the squared error of all together is at most that of 4 bits for each; or ``powersgd``, see
            `nugnn.comm.compression.low_rank`.
        bucket: Values that share their ends, or a quarter as many where levels then pay for the ends, see
            `nugnn.comm.compression.arrangement`.
        rounding: ``nearest``, or ``stochastic``: the mean of many roundings is the value, and none is fed back.
        error_feedback: Whether what rounding left out is added in the next step; with levels that are rounded to
            nearest when None. It takes a copy of the gradients, and a second one: on a GPU within a step, on a CPU
            from step to step.
        seed: Of stochastic rounding, and of the first products of ``powersgd``.
        least_size: Tensors of fewer values, and those of fewer than two axes (biases, norms), travel as float32.

    Raises:
        ValueError: A value is not allowed, or has no effect.
    """

    wire: str = "4bit"
    bucket: int = BUCKET
    rounding: str = "nearest"
    error_feedback: bool | None = None
    seed: int = 0
    least_size: int = LEAST_SIZE

    def __post_init__(self) -> None:
        if self.wire not in (ADAPTIVE, POWERSGD):
            Wire(self.wire, self.bucket)
        elif self.bucket < 1:
            raise ValueError(f"bucket is {self.bucket}, must be 1 or more")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding {self.rounding!r} is not known; choose nearest or stochastic")
        if self.rounding == "stochastic" and not self.is_quantized:
            raise ValueError(f"rounding stochastic has no effect on {self.wire}, only on 8bit to 1bit and {ADAPTIVE}")
        if self.rounding == "stochastic" and self.error_feedback:
            raise ValueError("error_feedback would add what stochastic rounding evens out by itself; choose one")
        if self.bucket != BUCKET and not (self.is_quantized or self.wire == "fp16"):
            raise ValueError(f"bucket {self.bucket} has no effect on {self.wire}; leave it out")
        if self.seed and self.rounding != "stochastic" and self.wire != POWERSGD:
            raise ValueError(f"seed {self.seed} has no effect on rounding to nearest; leave it out")
        if self.error_feedback and self.wire == "fp32":
            raise ValueError("error_feedback has no effect on fp32, which leaves nothing out")
        if self.least_size < 0:
            raise ValueError(f"least_size is {self.least_size}, must be 0 or more")

    @property
    def is_quantized(self) -> bool:
        """Whether tensors travel as levels."""
        return self.wire not in ("fp32", "bf16", "fp16", POWERSGD)

    @property
    def feeds_back(self) -> bool:
        """Whether what rounding left out is added in the next step."""
        if self.error_feedback is not None:
            return self.error_feedback
        return self.wire == POWERSGD or (self.is_quantized and self.rounding == "nearest")

    @property
    def first_wire(self) -> Wire:
        """Of tensors that are compressed, before anything was measured; ``powersgd`` has a way of its own."""
        return Wire({ADAPTIVE: "4bit", POWERSGD: "fp32"}.get(self.wire, self.wire), self.bucket)

    def takes(self, parameter: Tensor) -> bool:
        """Whether the gradient of ``parameter`` is compressed, rather than sent as float32."""
        return self.wire != "fp32" and parameter.dim() > 1 and parameter.numel() >= max(self.least_size, 1)


def check_types(named: Mapping[str, Tensor]) -> None:
    """Refuse parameters of other types than `TYPES`.

    Raises:
        ValueError: One is neither float32 nor of 16 bits.
    """
    for name, parameter in named.items():
        if parameter.dtype not in TYPES:
            raise ValueError(
                f"{name} is {parameter.dtype}, and compressed gradients are summed in float32; leave compression out"
            )


def wire_names() -> tuple[str, ...]:
    """All that ``wire`` may be."""
    return (*WIRES, ADAPTIVE, POWERSGD)
