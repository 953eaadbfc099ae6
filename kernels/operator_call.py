"""One call of an operator, the kinds of operators that there are, and what a chain that calls pass is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.structure import Structure

if TYPE_CHECKING:
    from nugnn.kernels.interceptor import Interceptor


@dataclass(eq=False, slots=True)
class OperatorCall:
    """One operator about to run; not modified once it is made (a frozen dataclass takes five times as long to make).

    Args:
        name: Module path, kind and count within the step: ``layers.0/spmm``, ``head/linear#1``.
        kind: ``spmm``, ``sddmm``, ``edge_softmax``, ``linear``, ``matmul``, ``dropout``, ``batch_norm``, ...
        structure: Sparse structure the operator runs on; None for torch functions.
        inputs: Positional operands. Graph operators: ``(u, e)`` for spmm, ``(lhs, rhs)`` for sddmm, ``(scores,)``.
        attrs: Everything else (``op``, ``reduce``, targets, keyword arguments of the torch function).
        run: Computes the result from ``(structure, *inputs, **attrs)``; torch functions ignore ``structure``.
    """

    name: str
    kind: str
    structure: Structure | None
    inputs: tuple[Any, ...]
    attrs: dict[str, Any]
    run: Callable[..., Any]

    def with_inputs(self, *inputs: Any) -> OperatorCall:
        return replace(self, inputs=inputs)

    def compute(self) -> Any:
        if self.structure is None:
            return self.run(*self.inputs, **self.attrs)
        return self.run(self.structure, *self.inputs, **self.attrs)


class Handler(Protocol):
    """A link of the chain: may change the call, answer it, or look at it; ``proceed`` runs the rest.

    A call costs Python time in each operator of a model, so a handler asks for no kind that it only passes on.
    """

    @property
    def kinds(self) -> frozenset[str] | None:
        """Kinds of operator this handler wants to see; None for all."""

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any: ...


class Observer(Protocol):
    """Stands among the handlers, and is told only that an operator has run: nothing has to be named for it."""

    @property
    def observed(self) -> frozenset[str]:
        """Kinds of operator it is told about."""

    def finished(self) -> None: ...


def _kinds() -> dict[Any, str]:
    table: dict[str, tuple[Any, ...]] = {
        "linear": (F.linear,),
        "matmul": (torch.matmul, torch.mm, torch.addmm, Tensor.matmul, Tensor.mm, Tensor.__matmul__, Tensor.addmm),
        "bmm": (torch.bmm, torch.baddbmm, Tensor.bmm),
        "conv": (F.conv1d, F.conv2d, F.conv3d),
        "layer_norm": (F.layer_norm, torch.layer_norm),
        "batch_norm": (F.batch_norm, torch.batch_norm),
        "instance_norm": (F.instance_norm, torch.instance_norm),
        "softmax": (F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax),
        "dropout": (F.dropout, torch.dropout, torch.dropout_),
        "structured_dropout": (
            *(F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
            *(torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
            *(torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_),
        ),
        "recurrent": (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
        "attention": (F.scaled_dot_product_attention, F.multi_head_attention_forward),
        "loss": (F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.mse_loss),
    }
    return {function: kind for kind, functions in table.items() for function in functions}


KIND_OF = _kinds()
"""Of the torch functions that are operators."""
KINDS = frozenset((*KIND_OF.values(), "spmm", "sddmm", "edge_softmax"))
"""Of operators that get a name when a handler asks for them."""
