"""Row identity: which node or edge each row of a tensor stands for, carried along by provenance.

A tag is attached where identity is known (graph frames, message-passing results, UDF batches) and follows the
tensor through the functions listed here, each of which keeps rows apart and in order. A function that is not listed
drops the tag; nothing is inferred from a shape alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

_ATTRIBUTE = "_nugnn_rows"


@dataclass(frozen=True, eq=False)
class Rows:
    """Identity of the rows of a tensor.

    Args:
        kind: ``node`` or ``edge`` rows of a (possibly split) graph; ``replicated``: same values on every rank.
        ids: ``(n,)`` int64 global ids; None for ``replicated``.
        fold: Consecutive rows per id, for example heads after ``(N, heads, D) -> (N * heads, D)``.
        split: Whether other ranks hold further rows of the same kind.
    """

    kind: Literal["node", "edge", "replicated"]
    ids: Tensor | None = None
    fold: int = 1
    split: bool = False

    def row_ids(self, num_rows: int) -> Tensor:
        """``(num_rows,)`` int64, one id per row, unique within the kind and equal for any number of parts."""
        if self.ids is None:
            return torch.arange(num_rows)
        if self.fold == 1:
            return self.ids
        return (self.ids[:, None] * self.fold + torch.arange(self.fold)).reshape(-1)

    @property
    def num_rows(self) -> int | None:
        return None if self.ids is None else len(self.ids) * self.fold

    def same_as(self, other: Rows) -> bool:
        return self is other or (self.kind == other.kind and self.ids is other.ids and self.fold == other.fold)


REPLICATED = Rows("replicated")


def tag(x: Tensor, rows: Rows | None) -> Tensor:
    """Attach ``rows`` to ``x`` (in place, returns ``x``)."""
    if rows is not None:
        setattr(x, _ATTRIBUTE, rows)
    return x


def rows_of(x: Any) -> Rows | None:
    """The tag of ``x``; parameters are replicated unless tagged otherwise."""
    rows = getattr(x, _ATTRIBUTE, None)
    if rows is None and isinstance(x, torch.nn.Parameter):
        return REPLICATED
    return rows


def _names(*groups: str) -> frozenset[str]:
    return frozenset(name for group in groups for name in group.split())


# Names as torch gives them to __torch_function__ (func.__name__); trailing underscore (in place) is stripped first.
_ELEMENTWISE = _names(
    "add sub rsub mul div true_divide floor_divide remainder fmod pow float_power square sqrt rsqrt exp exp2 expm1 log",
    "log2 log10 log1p abs absolute neg negative positive reciprocal sign sgn sin cos tan asin acos atan atan2 sinh",
    "cosh tanh asinh acosh atanh erf erfc erfinv sigmoid logit relu relu6 leaky_relu elu selu celu gelu silu mish",
    "hardtanh hardswish hardsigmoid softplus softsign tanhshrink hardshrink softshrink logsigmoid threshold rrelu",
    "prelu clamp clip clamp_min clamp_max maximum minimum fmax fmin where masked_fill lerp addcmul addcdiv nan_to_num",
    "round floor ceil trunc frac eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor",
    "bitwise_and bitwise_or bitwise_not bitwise_xor sub subtract multiply divide sinc digamma lgamma polygamma xlogy",
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__",
    "__neg__ __and__ __or__ __xor__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __mod__ __floordiv__",
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __rfloordiv__ __abs__",
    # the same values in another type, place or memory order
    "to type type_as float double half bfloat16 int long short bool byte clone contiguous detach requires_grad",
    "zeros_like ones_like full_like empty_like dropout alpha_dropout feature_alpha_dropout cpu",
)
# Row i of the result depends on row i of the first tensor argument (and on replicated tensors) only.
_ROWWISE_FIRST = _names(
    "linear layer_norm rms_norm group_norm instance_norm batch_norm embedding bilinear normalize conv1d conv2d conv3d",
    "gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell glu one_hot max_pool1d avg_pool1d local_response_norm",
    "cross_entropy nll_loss",
)
_MATMUL = _names("matmul mm __matmul__ bmm")
_REDUCTION = _names(
    "sum mean max min amax amin prod std var norm vector_norm any all argmax argmin logsumexp cumsum cumprod softmax",
    "log_softmax softmin sort argsort topk median nansum nanmean count_nonzero std_mean var_mean cosine_similarity",
)
_RESHAPE = _names("view reshape flatten unflatten view_as reshape_as")
_AXIS = _names("unsqueeze squeeze expand expand_as transpose swapaxes permute movedim narrow repeat broadcast_to")
_SPLIT = _names("chunk split tensor_split unbind split_with_sizes")
_JOIN = _names("cat concat concatenate stack hstack")


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (tuple, list)):
            yield from _tensors(arg)


def _agreed(tensors: Iterable[Tensor]) -> Rows | None:
    """The one tag that stands for all node or edge operands; None when they differ or none has one."""
    found: Rows | None = None
    for x in tensors:
        rows = rows_of(x)
        if rows is None or rows.kind == "replicated":
            continue
        if found is not None and not found.same_as(rows):
            return None
        found = rows
    return found


def _dim_argument(args: Sequence[Any], kwargs: dict[str, Any], position: int) -> Any:
    if "dim" in kwargs:
        return kwargs["dim"]
    if "axis" in kwargs:
        return kwargs["axis"]
    return args[position] if len(args) > position else None


def _touches_rows(dim: Any, num_dims: int) -> bool:
    """Whether a reduction over ``dim`` (int, tuple or None for all) runs over rows."""
    if dim is None:
        return True
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    if any(not isinstance(d, int) for d in dims):
        return True
    return any(d % max(num_dims, 1) == 0 for d in dims) or len(dims) == 0


def _indexed(rows: Rows, index: Any) -> Rows | None:
    """Identity after ``x[index]``: rows kept by a full slice, picked by a slice, mask or id tensor on dim 0."""
    first = index[0] if isinstance(index, tuple) and index else index
    if first is Ellipsis:
        return rows
    if isinstance(first, slice) and first == slice(None):
        return rows
    if rows.fold != 1 or rows.ids is None:
        return None
    if isinstance(first, slice):
        return Rows(rows.kind, rows.ids[first], 1, rows.split)
    if isinstance(first, Tensor) and first.dim() == 1 and not first.is_floating_point():
        if isinstance(index, tuple) and sum(isinstance(i, Tensor) for i in index) > 1:
            return None
        return Rows(rows.kind, rows.ids[first], 1, rows.split)
    return None


def _refold(rows: Rows, old_rows: int, new_rows: int) -> Rows | None:
    if old_rows == new_rows:
        return rows
    if old_rows and new_rows % old_rows == 0:
        return Rows(rows.kind, rows.ids, rows.fold * (new_rows // old_rows), rows.split)
    if new_rows and old_rows % new_rows == 0 and rows.fold % (old_rows // new_rows) == 0:
        return Rows(rows.kind, rows.ids, rows.fold // (old_rows // new_rows), rows.split)
    return None


def _result_rows(name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Rows | None:
    first = args[0] if args else next(iter(kwargs.values()), None)
    if name in _ELEMENTWISE:
        operands = list(_tensors(args)) + list(_tensors(kwargs.values()))
        rows = _agreed(operands)
        if rows is None:
            return None
        aligned = any(
            x.dim() == out.dim() and x.shape[:1] == out.shape[:1]
            for x in operands
            if (r := rows_of(x)) is not None and r.kind != "replicated"
        )
        return rows if aligned else None
    if name in _JOIN:
        dim = _dim_argument(args, kwargs, 1)
        dim = 0 if dim is None and name != "hstack" else 1 if dim is None else dim
        parts = list(_tensors([first]))
        if dim % max(out.dim(), 1) == 0 or any(rows_of(x) is None for x in parts):
            return None
        return _agreed(parts)
    if not isinstance(first, Tensor):
        return None
    rows = rows_of(first)
    if rows is None or rows.kind == "replicated":
        if name in ("addmm", "embedding") and len(args) > 1 and isinstance(args[1], Tensor):
            rows = rows_of(args[1]) if name == "addmm" else rows
        if name == "embedding":  # functional form is embedding(ids, weight): first holds the ids
            return None
        if name != "addmm" or rows is None or rows.kind == "replicated":
            return None
        return rows
    if name in _ROWWISE_FIRST:
        return rows
    if name in _MATMUL:
        other = rows_of(args[1]) if len(args) > 1 else None
        mixes = name != "bmm" and first.dim() > 2 and isinstance(args[1], Tensor) and args[1].dim() > 2
        same = other is None or other.kind == "replicated" or (other.same_as(rows) and (name == "bmm" or mixes))
        return rows if first.dim() >= 2 and same else None
    if name in _REDUCTION:
        default = 1 if name == "cosine_similarity" else None
        position = 2 if name in ("norm", "topk", "cosine_similarity") else 1
        dim = _dim_argument(args, kwargs, position)
        if dim is None:
            dim = -1 if name in ("sort", "argsort", "topk") else default
        return None if _touches_rows(dim, first.dim()) else rows
    if name in _RESHAPE:
        return _refold(rows, first.shape[0], out.shape[0]) if out.dim() else None
    if name in _AXIS:
        keeps = (
            out.dim() > 0
            and out.shape[0] == first.shape[0]
            and (out.numel() == 0 or out.stride(0) == first.stride(0) or name == "repeat")
        )
        moved = name in ("transpose", "swapaxes", "permute", "movedim") and 0 in _moved_dims(name, args, first.dim())
        return rows if keeps and not moved else None
    if name == "__getitem__":
        return _indexed(rows, args[1])
    if name == "index_select" and _dim_argument(args, kwargs, 1) == 0:
        index = kwargs.get("index", args[2] if len(args) > 2 else None)
        return _indexed(rows, index)
    return None


def _moved_dims(name: str, args: Sequence[Any], num_dims: int) -> set[int]:
    """Axes that ``transpose``-like functions move."""
    if name == "permute":
        order = args[1] if len(args) > 1 and isinstance(args[1], (tuple, list)) else args[1:]
        return {i for i, d in enumerate(order) if d % num_dims != i}
    moved: set[int] = set()
    for arg in args[1:]:
        moved.update(d % num_dims for d in (arg if isinstance(arg, (tuple, list)) else (arg,)))
    return moved


def propagate(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Tag the result(s) of ``func(*args, **kwargs)`` with the identity their rows inherit."""
    outputs = (
        [out]
        if isinstance(out, Tensor)
        else [x for x in out if isinstance(x, Tensor)]
        if isinstance(out, (tuple, list))
        else []
    )
    if not outputs:
        return
    inputs = list(_tensors(args)) + list(_tensors(kwargs.values()))
    tags = [rows_of(x) for x in inputs]
    if not any(rows is not None for rows in tags):
        return
    if all(rows is not None and rows.kind == "replicated" for rows in tags):
        for x in outputs:
            if not isinstance(x, torch.nn.Parameter):
                tag(x, REPLICATED)
        return
    name = getattr(func, "__name__", "")
    if not name.startswith("__"):
        name = name.rstrip("_")
    if name in _SPLIT:
        dim = _dim_argument(args, kwargs, 1 if name == "unbind" else 2)
        first = args[0]
        if isinstance(first, Tensor) and not _touches_rows(0 if dim is None else dim, first.dim()):
            for x in outputs:
                tag(x, rows_of(first))
        return
    for x in outputs:
        if any(x is given for given in inputs) and rows_of(x) is not None:
            continue  # in place: the tensor keeps its identity
        tag(x, _result_rows(name, args, kwargs, x))
