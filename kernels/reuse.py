"""The aggregation of constant input features is computed once: the same operands give the same bits in every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.operator_call import OperatorCall


class ReuseHandler:
    """Answers an SpMM over a given tensor alone with its earlier result, halo exchange included.

    Nothing is approximate: without weights, dropout or gradient the operator depends on that tensor and the structure
    only. Results are kept per structure, reduction and factors; one that was changed in place is computed again.

    Args:
        constant: ``(N, D)`` rows that do not change while this handler lives, without gradient.

    Raises:
        ValueError: ``constant`` requires a gradient.
    """

    kinds = frozenset({"spmm"})

    def __init__(self, constant: Tensor) -> None:
        if constant.requires_grad:
            raise ValueError("ReuseHandler: the constant operand requires a gradient")
        self._constant, self._version = constant, constant._version
        self._known: dict[tuple[Any, ...], tuple[Any, Tensor, int]] = {}
        self.num_reused = 0
        """Calls answered from memory, for tests and reports."""

    def kept(self) -> Iterator[Tensor]:
        """The constant's aggregates so far."""
        yield from (result for _, result, _ in self._known.values())

    def is_constant(self, x: Tensor) -> bool:
        """Whether ``x`` is the operand whose aggregates are kept."""
        return x is self._constant

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        if call.inputs[0] is not self._constant or call.inputs[1] is not None or call.attrs.get("add_to") is not None:
            return proceed(call)
        if self._constant._version != self._version:
            self._known.clear()
            self._version = self._constant._version
        constants = (call.structure, call.attrs.get("src_scale"), call.attrs.get("dst_scale"))
        key = (call.attrs["op"], call.attrs["reduce"], *map(id, constants))
        known = self._known.get(key)
        if known is not None and known[1]._version == known[2]:
            self.num_reused += 1
            return known[1]
        result = proceed(replace(call, attrs=call.attrs | {"is_kept": True}))
        self._known[key] = (constants, result, result._version)  # holding them keeps their ids theirs
        return result
