"""Handlers for torch functions whose exact meaning needs row identity or a sparse layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nugnn.kernels.dropout import dropout_csr_values, dropout_rows
from nugnn.kernels.epilogue import epilogue_rows
from nugnn.kernels.interceptor import Interceptor, current_interceptor
from nugnn.kernels.operator_call import OperatorCall
from nugnn.kernels.random_draws import calling_line, draws_now
from nugnn.kernels.row_follower import where_lost
from nugnn.kernels.rows import Rows, identity_of, tag
from nugnn.kernels.sparse_rows import csr_matmul, densify, with_values

Proceed = Callable[[OperatorCall], Any]
DRAW_BEFORE = "Use torch.nn.Dropout for random masks, or draw the numbers before training and keep them as node data."
_MARK = (
    "Mark the tensor where it is made, with nugnn.as_node_rows(x, graph), nugnn.as_edge_rows(x, graph), "
    "nugnn.as_rows_of(x, like) if its rows are those of like, or nugnn.as_replicated(x)."
)


class DropoutHandler:
    """Dropout by (seed, step, operator name, global row id, column), so that a mask does not depend on the parts.

    Args:
        is_split: Whether other ranks hold further rows; rows of unknown identity are then an error, and numbered from
            0 otherwise.
        instead: What to do about rows of unknown identity, for the error.
    """

    def __init__(self, *, is_split: bool, instead: str = _MARK) -> None:
        self._is_split, self._instead = is_split, instead
        # on one rank torch draws where there are no masks by row
        self.kinds = frozenset({"dropout", "structured_dropout", "recurrent"} if is_split else {"dropout"})

    def __call__(self, call: OperatorCall, proceed: Proceed, interceptor: Interceptor) -> Any:
        if call.kind == "recurrent":
            return self._recurrent(call, proceed)
        arguments = call.attrs
        if call.inputs:
            arguments = dict(zip(("input", "p", "training", "inplace"), call.inputs, strict=False)) | arguments
        p = float(arguments.get("p", 0.5))
        if p == 0 or not arguments.get("training", arguments.get("train", True)):
            return proceed(call)
        x: Tensor = arguments["input"] if "input" in arguments else arguments["x"]
        if call.kind == "structured_dropout":
            raise NotImplementedError(
                f"{call.name}: this kind of dropout would draw different masks for different numbers of parts"
                f"{calling_line()}. Use torch.nn.Dropout; for whole channels "
                "x * F.dropout(torch.ones_like(x[:, :, :1]), p, self.training), with :1 for each axis behind channels."
            )
        if not 0 <= p <= 1:
            raise ValueError(f"{call.name}: dropout probability has to be between 0 and 1, but got {p}")
        rows = identity_of(x)
        if rows is None and self._is_split:
            raise ValueError(
                f"{call.name}: dropout on rows whose identity is not known (shape {tuple(x.shape)}), so its mask would "
                f"depend on the split{calling_line()}.{where_lost(x)} {self._instead}"
            )
        key = interceptor.random_key(call.name, rows)
        ids = _row_ids(call.name, x, rows)
        if x.layout is torch.sparse_csr:
            crow, col = x.crow_indices(), x.col_indices()
            return tag(with_values(x, dropout_csr_values(x.values(), crow, col, p, key, ids)), rows)
        if (steps := arguments.get("epilogue")) is not None:
            return tag(epilogue_rows(x, **steps, p=p, key=key, row_ids=ids), rows)
        if rows is not None and rows.axis:
            out = dropout_rows(x.movedim(rows.axis, 0), p, key, ids).movedim(0, rows.axis)
        else:
            out = dropout_rows(x, p, key, ids) if x.dim() else dropout_rows(x[None], p, key, ids)[0]
        if arguments.get("inplace", False):
            return x.copy_(out)
        return tag(out, rows)

    def _recurrent(self, call: OperatorCall, proceed: Proceed) -> Any:
        """``torch.lstm`` and its kin draw masks between their layers, inside one call."""
        start = 5 if isinstance(call.inputs[3], (list, tuple)) else 4  # packed sequences come with their sizes
        num_layers, p, training = call.inputs[start : start + 3]
        if training and p > 0 and num_layers > 1:
            raise NotImplementedError(
                f"{call.name}: dropout between the layers of a recurrent network would draw different masks for "
                f"different numbers of parts{calling_line()}. Give it dropout=0, or stack one-layer networks with "
                "torch.nn.Dropout."
            )
        return proceed(call)


def epilogue(x: Tensor, *, p: float = 0.0, training: bool = True, **steps: Any) -> Tensor:
    """What follows a layer's product, ending in dropout, as one operator of the step that is open: one pass on a GPU.

    The operator is named and keyed as ``F.dropout`` in its place would be, so its mask is that of the separate steps.
    Outside of a step, and with a handler of dropout missing, torch's own dropout draws the mask.

    Args:
        x: ``(n, C)`` rows, whose identity the result has.
        p: Probability of dropping.
        training: Whether to drop; all other steps are taken in any case.
        **steps: ``row_scale``, ``bias``, ``layer_norm``, ``norm_weight``, ``norm_bias``, ``eps``, ``activation`` and
            ``alpha`` of :func:`nugnn.kernels.epilogue.epilogue_rows`.

    Raises:
        ValueError: As for `epilogue_rows`; rows of unknown identity on a split graph.
    """
    interceptor = current_interceptor()
    if interceptor is None:
        return _plain_epilogue(x, p, training, epilogue=steps)
    rows = identity_of(x)
    out: Tensor = interceptor.call("dropout", None, (x, p, training), {"epilogue": steps}, _plain_epilogue)
    return tag(out, rows)


def _plain_epilogue(x: Tensor, p: float, training: bool, *, epilogue: dict[str, Any]) -> Tensor:
    out = epilogue_rows(x, **epilogue)
    # below the function that the interceptor names: this operator has its name already
    return torch.native_dropout(out, p, train=True)[0] if training and p > 0 else out


class RandomDrawHandler:
    """Refuses draws by position where rows are split: they would depend on the parts.

    Args:
        is_split: Whether other ranks hold further rows; on one rank torch draws as ever.
        refuses_all: Refuse every draw, also one that has nothing to do with rows: ranks draw from generators of their
            own, whose states part as soon as one of them draws another number of values. Otherwise those alone that
            read or write rows known to be split.
        instead: What to do, for the error.
    """

    def __init__(self, *, is_split: bool, refuses_all: bool = False, instead: str = DRAW_BEFORE) -> None:
        self._refuses_all, self._instead = refuses_all, instead
        self.kinds = frozenset({"random"} if is_split else ())

    def __call__(self, call: OperatorCall, proceed: Proceed, interceptor: Interceptor) -> Any:
        if not draws_now(call.run, call.inputs, call.attrs):
            return proceed(call)
        tensors = [x for x in (*call.inputs, *call.attrs.values()) if isinstance(x, Tensor)]
        if not self._refuses_all and not any((rows := identity_of(x)) is not None and rows.split for x in tensors):
            return proceed(call)
        function = getattr(call.run, "__name__", "")
        raise NotImplementedError(
            f"{call.name}: {function} draws random numbers by position, so they would depend on the split"
            f"{calling_line()}. {self._instead}"
        )


def _row_ids(name: str, x: Tensor, rows: Rows | None) -> Tensor | range:
    num_rows = x.shape[0 if rows is None else rows.axis] if x.dim() else 1
    if rows is None or rows.source is None:
        return range(num_rows)
    if rows.num_rows != num_rows:
        raise ValueError(
            f"{name}: marked as {rows.num_rows} {rows.kind} rows but has {num_rows}. Mark the tensor where it is made, "
            "with nugnn.as_node_rows, nugnn.as_edge_rows or nugnn.as_rows_of."
        )
    return rows.to(x.device).row_ids(num_rows)


class SparseRowsHandler:
    """Keeps sparse input features sparse through the first product; anything else sees them dense."""

    kinds = frozenset({"linear", "matmul", "other", "bmm", "conv", "layer_norm", "batch_norm", "softmax", "loss"})

    def __call__(self, call: OperatorCall, proceed: Proceed, interceptor: Interceptor) -> Any:
        first = call.inputs[0] if call.inputs else None
        if not _is_csr(first):
            if getattr(call.run, "__name__", "") in ("to", "type_as") and _is_csr(call.inputs[1]):
                like = call.inputs[1]  # names a type and a place only: no values are read
                return proceed(call.with_inputs(first, torch.empty(0, dtype=like.dtype, device=like.device)))
            if call.kind == "other" or any(_is_csr(x) for x in call.inputs):
                return self._on_dense(call, proceed)
            return proceed(call)
        assert isinstance(first, Tensor)
        if call.kind == "linear":
            weight = call.inputs[1] if len(call.inputs) > 1 else call.attrs["weight"]
            bias = call.inputs[2] if len(call.inputs) > 2 else call.attrs.get("bias")
            out = csr_matmul(first, weight.t())
            return out if bias is None else out + bias
        function_name = getattr(call.run, "__name__", "")
        if call.kind == "matmul" and function_name in ("matmul", "mm", "__matmul__") and not call.attrs:
            other = call.inputs[1]
            if isinstance(other, Tensor) and other.dim() == 2 and other.layout is torch.strided:
                return csr_matmul(first, other)
        if call.kind == "other" and function_name in _KEEPS_SPARSE:
            return proceed(call)
        if function_name in _SCALINGS and len(call.inputs) == 2 and not call.attrs:
            scaled = _scaled_rows(first, call.inputs[1], call.run)
            if scaled is not None:
                return scaled
        return self._on_dense(call, proceed)

    @staticmethod
    def _on_dense(call: OperatorCall, proceed: Proceed) -> Any:
        def dense(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(dense(y) for y in x)
            return tag(densify(x), identity_of(x)) if _is_csr(x) else x

        # only plain functions of tensors; attribute access keeps the sparse tensor
        if getattr(call.run, "__name__", "") in ("__get__", *_KEEPS_SPARSE):
            return proceed(call)
        return proceed(call.with_inputs(*(dense(x) for x in call.inputs)))


_KEEPS_SPARSE = frozenset(
    """
    dim size shape numel is_floating_point is_complex requires_grad_ detach to type float double values crow_indices
    col_indices to_dense is_sparse layout dtype device __len__ __repr__ __hash__ element_size nelement ndimension
    storage is_contiguous clone _nnz get_device data_ptr type_as retain_grad __format__
    """.split()
)


_SCALINGS = frozenset(("mul", "multiply", "div", "divide", "true_divide", "__mul__", "__truediv__"))


def _scaled_rows(x_csr: Tensor, factor: Any, operation: Callable[[Tensor, Any], Tensor]) -> Tensor | None:
    """``x * factor`` or ``x / factor`` on the stored entries, for a number or ``(N, 1)``; None for other factors."""
    if isinstance(factor, (int, float)):
        return with_values(x_csr, operation(x_csr.values(), factor)) if math.isfinite(factor) and factor else None
    if not isinstance(factor, Tensor) or factor.shape != (x_csr.shape[0], 1) or factor.dtype != x_csr.dtype:
        return None
    lengths, num_entries = x_csr.crow_indices().diff(), len(x_csr.values())  # known, so that nobody waits for a GPU
    return with_values(
        x_csr, operation(x_csr.values(), torch.repeat_interleave(factor[:, 0], lengths, output_size=num_entries))
    )


def _is_csr(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.sparse_csr
