"""How a model's numbers are stored and multiplied: five fixed choices, float32 master weights under all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nugnn.kernels.rows import rows_of, tag

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "amp")
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def model_dtype(model: nn.Module) -> torch.dtype:
    """Type of the first floating parameter; float32 when there is none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def at_least_float32(x: Tensor) -> Tensor:
    """``x``, in float32 where it is stored in 16 bits: for exponentials and long sums."""
    return x.float() if x.dtype in _HALF.values() else x


class Storage:
    """Types of features, activations and products of a model.

    Args:
        precision: ``fp32``: as the model is, neither products nor convolutions rounded to TF32. ``tf32``: both in TF32
            where they are float32 and the device has it. ``bf16``, ``fp16``: features, activations and the copies of
            the weights that a step works on are stored in that type; reductions inside operators, batch norm's weights
            and statistics and the loss are float32, and the optimizer updates float32 masters. ``amp``: torch's
            autocast to bfloat16.

    Raises:
        ValueError: There is no such choice.
    """

    def __init__(self, precision: str = "fp32") -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r} is not known; choose one of {', '.join(PRECISIONS)}")
        self.precision = precision

    @property
    def is_half(self) -> bool:
        """Whether activations are kept in a 16-bit type throughout."""
        return self.precision in _HALF

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients would underflow without a factor on the loss."""
        return self.precision == "fp16"

    def dtype_of(self, model_dtype: torch.dtype) -> torch.dtype:
        """The type of input features of a model whose parameters are ``model_dtype``.

        Raises:
            ValueError: A 16-bit type was asked for and the model is not float32.
        """
        if not self.is_half:
            return model_dtype
        if model_dtype is not torch.float32:
            raise ValueError(f"precision {self.precision} needs a float32 model, this one is {model_dtype}")
        return _HALF[self.precision]

    def pads(self, dtype: torch.dtype) -> bool:
        """Whether products of input features of ``dtype`` run where the alignment of rows decides about their speed."""
        return dtype.is_floating_point and (self.is_half or (self.precision == "tf32" and dtype is torch.float32))

    def casts(self, model: nn.Module, device: torch.device) -> AbstractContextManager[None]:
        """While open, ``model`` works in this precision; open it around forward and backward together.

        Gradients arrive at the float32 masters.
        """
        is_tf32 = self.precision == "tf32"
        if self.is_half or self.precision == "amp" or _rounding_now() != _rounding_for(is_tf32):
            return self._casts(model, device)
        return nullcontext()  # nothing to change: a small step notices each generator

    @contextmanager
    def _casts(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        with _rounding(self.precision == "tf32"):
            if self.precision == "amp":
                with torch.autocast(device.type, torch.bfloat16):
                    yield
            elif self.is_half:
                with _parameters_as(model, _HALF[self.precision]):
                    yield
            else:
                yield


@contextmanager
def _rounding(is_tf32: bool) -> Iterator[None]:
    """Products and convolutions in TF32, or neither; torch's default rounds convolutions alone."""
    before, wanted = _rounding_now(), _rounding_for(is_tf32)
    if before == wanted:
        yield
        return
    _set_rounding(wanted)
    try:
        yield
    finally:
        _set_rounding(before)


def _rounding_now() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def _rounding_for(is_tf32: bool) -> tuple[str, bool]:
    return "high" if is_tf32 else "highest", is_tf32


def _set_rounding(rounding: tuple[str, bool]) -> None:
    torch.set_float32_matmul_precision(rounding[0])
    torch.backends.cudnn.allow_tf32 = rounding[1]


@contextmanager
def _parameters_as(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Put a differentiable copy in ``dtype`` in the place of every float32 parameter but batch norm's."""
    copies: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    recurrent: list[tuple[nn.RNNBase, list[Tensor | None]]] = []

    def copy_of(p: Tensor) -> Tensor:
        if p.dtype is not torch.float32:
            return p
        if id(p) not in copies:
            copies[id(p)] = tag(p.to(dtype), rows_of(p))
        return copies[id(p)]

    for module in model.modules():
        if isinstance(module, _BatchNorm):
            continue
        own: dict[str, Tensor | None] = module._parameters  # type: ignore[assignment]
        for name, parameter in own.items():
            if parameter is not None and parameter.dtype is torch.float32:
                replaced.append((own, name, parameter))
        if isinstance(module, nn.RNNBase):  # keeps a list of its own
            recurrent.append((module, module._flat_weights))
    for own, name, parameter in replaced:
        own[name] = copy_of(parameter)
    for layer, weights in recurrent:
        layer._flat_weights = [None if w is None else copy_of(w) for w in weights]
    try:
        yield
    finally:
        for own, name, parameter in replaced:
            own[name] = parameter
        for layer, weights in recurrent:
            layer._flat_weights = weights
