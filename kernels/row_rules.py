"""How row identity follows a tensor: which argument a torch function's result inherits it from, function by function.

A rule is about what the function does to axis 0; it looks at dimensions and indices given as arguments, and never
concludes from equal sizes that two tensors are about the same nodes. Untagged operands (constants, or results whose
identity was lost) count as values that belong to the rows they meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nugnn.kernels.rows import ATTRIBUTE, REPLICATED, Rows, rows_of, tag, tag_turned, turned_rows_of, untag

Args = Sequence[Any]
Kwargs = dict[str, Any]
Rule = Callable[[Args, Kwargs, Tensor], "Rows | None"]
Follow = Callable[[Args, Kwargs, Any], None]


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among ``values`` and inside their lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)


def propagate(func: Callable[..., Any], args: Args, kwargs: Kwargs, out: Any) -> None:
    """Tag the result(s) of ``func(*args, **kwargs)`` with the identity their rows inherit."""
    follower(func)(args, kwargs, out)


def follower(func: Callable[..., Any]) -> Follow:
    """What tags the results of ``func``, given arguments and results, as `propagate` does.

    A model calls the same few functions again and again: what depends on the function alone is found out here, once.
    """
    full_name = getattr(func, "__name__", "")
    is_in_place = not full_name.startswith("__") and full_name.endswith("_")
    name = full_name.rstrip("_") if is_in_place else full_name
    is_swap = full_name in _SWAPS
    unshapes, keeps_given = is_in_place and name in _RESHAPED_IN_PLACE, name != "set"
    rule, has_many = _RULES.get(name), name in _SPLIT or name in _RECURRENT
    has_quick = rule is not None and not has_many and not unshapes
    is_elementwise = rule is _elementwise

    def follow(args: Args, kwargs: Kwargs, out: Any) -> None:
        if is_swap:
            _turn(args, kwargs, out)
        if has_quick and args and type(out) is Tensor and type(args[0]) is Tensor:
            # nearly all calls: a tensor whose own tag decides, or nothing that could have one
            own: Rows | None = getattr(args[0], ATTRIBUTE, None)
            if own is None:
                if len(args) == 1 and not kwargs:
                    return
            elif own.kind != "replicated":
                if not is_elementwise:
                    rows = rule(args, kwargs, out)  # type: ignore[misc]
                elif args[0].dim() == out.dim() and _quickly_agree(own, args, kwargs):
                    rows = own
                else:
                    rows = _elementwise(args, kwargs, out)
                if rows is None or not out.dim() or rows.num_rows != out.shape[0]:
                    return
                known = getattr(out, ATTRIBUTE, None)
                if known is None:
                    setattr(out, ATTRIBUTE, rows)
                elif known is not rows:
                    _inherit(out, rows, _tensors_of(args, kwargs), keeps_given)
                return
        follow_any(args, kwargs, out)

    def follow_any(args: Args, kwargs: Kwargs, out: Any) -> None:
        inputs = _tensors_of(args, kwargs)
        has_tag = has_own = False
        num_replicated = 0
        for x in inputs:
            if (rows := rows_of(x)) is not None:
                has_tag = True
                if rows.kind == "replicated":
                    num_replicated += 1
                else:
                    has_own = True
        if not has_tag:
            return
        if not has_own and num_replicated == len(inputs):
            for x in tensors((out,)):
                if not isinstance(x, Parameter):
                    tag(x, REPLICATED)
            return
        if isinstance(out, Tensor) and not has_many:
            if unshapes and any(out is given for given in inputs):
                untag(out)
            elif rule is not None and has_own:
                _inherit(out, rule(args, kwargs, out), inputs, keeps_given)
            return
        outputs = list(tensors((out,)))
        if unshapes and outputs and any(outputs[0] is given for given in inputs):
            untag(outputs[0])
        elif outputs and has_own:
            for x, rows in zip(outputs, result_rows(name, args, kwargs, outputs), strict=True):
                _inherit(x, rows, inputs, keeps_given)

    return follow


def _quickly_agree(own: Rows, args: Args, kwargs: Kwargs) -> bool:
    """Whether no argument says anything else than ``own``, the first one's tag, as far as is seen at a glance."""
    for x in args:
        if type(x) is Tensor:
            rows = getattr(x, ATTRIBUTE, None)
            if rows is not own and rows is not None and rows.kind != "replicated":
                return False
        elif type(x) not in _NO_TENSORS:
            return False
    return not kwargs or all([type(x) in _NO_TENSORS for x in kwargs.values()])


_NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format})


def _inherit(x: Tensor, rows: Rows | None, inputs: Sequence[Tensor], keeps_given: bool) -> None:
    if rows is None or not x.dim() or rows.num_rows != x.shape[0]:
        return
    # in place, or nothing to do (x.to(its own dtype)): the function returned its argument
    if keeps_given and any(x is given for given in inputs) and rows_of(x) is not None:
        return
    tag(x, rows)


def _tensors_of(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Tensors among the arguments of a call and inside their lists and tuples."""
    found: list[Tensor] = []
    for values in (args, kwargs.values()) if kwargs else (args,):
        for x in values:
            if isinstance(x, Tensor):
                found.append(x)
            elif isinstance(x, (tuple, list)):
                found += tensors(x)
    return found


def result_rows(name: str, args: Args, kwargs: Kwargs, outputs: Sequence[Tensor]) -> list[Rows | None]:
    """Identity of each output of the torch function ``name`` (without the underscore of an in-place form).

    Args:
        name: As torch gives it to ``__torch_function__``.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        outputs: Tensors it returned.
    """
    if name in _SPLIT:
        return _split(name, args, kwargs, outputs)
    if name in _RECURRENT:
        return [_recurrent(args, kwargs), *[None] * (len(outputs) - 1)]
    rule = _RULES.get(name)
    return [None if rule is None else rule(args, kwargs, x) for x in outputs]


# -- reading arguments ---------------------------------------------------------------------------------------------


def _first(args: Args, kwargs: Kwargs) -> Any:
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def _own(x: Any) -> Rows | None:
    """The tag of ``x`` when it stands for nodes or edges."""
    rows = rows_of(x)
    return None if rows is None or rows.kind == "replicated" else rows


def _get(args: Args, kwargs: Kwargs, position: int, *names: str, default: Any = None) -> Any:
    for name in names:
        if name in kwargs:
            return kwargs[name]
    return args[position] if len(args) > position else default


def _sizes(args: Args, kwargs: Kwargs, name: str) -> tuple[Any, ...]:
    """Numbers given one by one, as one sequence, or by keyword."""
    given = kwargs.get(name, args[1:])
    if isinstance(given, (tuple, list)) and len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = given[0]
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _is_rows(dim: Any, num_dims: int) -> bool:
    """Whether ``dim`` (int, tuple, or None for all) includes axis 0."""
    if type(dim) is int:
        return dim % max(num_dims, 1) == 0
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return len(dims) == 0 or any(not isinstance(d, int) or d % max(num_dims, 1) == 0 for d in dims)


def _agreed(operands: Iterable[Any]) -> Rows | None:
    """The one identity of all node or edge operands; None when they differ or none has one."""
    found: Rows | None = None
    for x in operands:
        rows = _own(x)
        if rows is None:
            continue
        if found is not None and not found.same_as(rows):
            return None
        found = rows
    return found


# -- rules ---------------------------------------------------------------------------------------------------------


def _elementwise(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    tagged = [x for x in _tensors_of(args, kwargs) if _own(x) is not None]
    # broadcasting aligns last axes: rows stay rows where a tagged operand has as many axes as the result
    return _agreed(tagged) if any(x.dim() == out.dim() for x in tagged) else None


def _rowwise(min_dims: int) -> Rule:
    """Row i of the result depends on row i of the first argument, which has at least ``min_dims`` axes."""

    def rule(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
        x = _first(args, kwargs)
        return _own(x) if isinstance(x, Tensor) and x.dim() >= min_dims and out.dim() else None

    return rule


def _along(position: int, default: Any) -> Rule:
    """Works along a dimension, at ``position`` among the arguments; keeps rows unless that is axis 0."""

    def rule(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
        x = _first(args, kwargs)
        dim = _get(args, kwargs, position, "dim", "axis", default=default)
        if isinstance(dim, Tensor):  # torch.max(x, y)
            return _elementwise(args, kwargs, out)
        return None if not isinstance(x, Tensor) or _is_rows(dim, x.dim()) else _own(x)

    return rule


def _flip(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    return None if _is_rows(_sizes(args, kwargs, "dims"), out.dim()) else _own(_first(args, kwargs))


def _set(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """``x.set_(y)`` makes ``x`` another name of ``y``."""
    return _own(_get(args, kwargs, 1, "source"))


def _pairwise(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """Compares row i with row i over an axis that is not rows."""
    if _is_rows(_get(args, kwargs, 2, "dim", default=1), 2):
        return None
    pair = [_first(args, kwargs), _get(args, kwargs, 1, "x2")]
    return _agreed(pair) if all(isinstance(x, Tensor) and x.dim() >= 2 for x in pair) else None


def _layer_norm(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    shape = _get(args, kwargs, 1, "normalized_shape", default=())
    return _own(_first(args, kwargs)) if len(shape) < out.dim() else None


def _pad(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    return _own(_first(args, kwargs)) if len(_get(args, kwargs, 1, "pad")) // 2 < out.dim() else None


def _product(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """Matrix product: rows of a left matrix, or the leading batch axis of either side."""
    x, y = _first(args, kwargs), _get(args, kwargs, 1, "other", "mat2", "vec")
    if x.dim() == y.dim() > 2:
        return _agreed((x, y))
    if x.dim() == 1 or (y.dim() <= 2 and x.dim() <= 2):  # what is left of x's last axis and y's last but one is summed
        return _own(x) if x.dim() == 2 and _own(y) is None else _own(y) if y.dim() > 2 and _own(x) is None else None
    if y.dim() == 1:
        return _own(x) if _own(y) is None else None
    shallow = [z for z in (x, y) if z.dim() < out.dim()]  # broadcast: every row meets all of it
    return _agreed((x, y)) if all(_own(z) is None for z in shallow) else None


def _add_product(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    return _product((_get(args, kwargs, 1, "mat1", "batch1", "mat"), _get(args, kwargs, 2, "mat2", "batch2")), {}, out)


def _einsum(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """Rows where the result's first letter is the first letter, and only that, of each operand it occurs in."""
    if not isinstance(args[0], str):
        return None
    operands = list(tensors(args[1:]))
    inputs, arrow, result = args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or not result or "." in inputs or len(terms) != len(operands):
        return None
    letter = result[0]
    if any(letter in term[1:] for term in terms):
        return None
    if any(not term.startswith(letter) and _own(x) is not None for term, x in zip(terms, operands, strict=True)):
        return None
    return _agreed(operands)


def _reshape(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """Row-major order stays: rows are kept, split into equal pieces (a fold), or joined again."""
    x = _first(args, kwargs)
    rows = _own(x)
    if rows is None or not x.dim() or not out.dim():
        return None
    old, new = x.shape[0], out.shape[0]
    if old == new:
        return rows
    if old and new % old == 0:
        return rows.folded(rows.fold * (new // old))
    if new and old % new == 0 and rows.fold % (old // new) == 0:
        return rows.folded(rows.fold // (old // new))
    return None


def _unsqueeze(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    return None if _get(args, kwargs, 1, "dim") % out.dim() == 0 else _own(_first(args, kwargs))


def _squeeze(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x = _first(args, kwargs)
    dim = _get(args, kwargs, 1, "dim")
    goes = x.shape[:1] == (1,) if dim is None else _is_rows(dim, x.dim())
    return None if goes else _own(x)


def _expand(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x = _first(args, kwargs)
    return _own(x) if x.dim() == out.dim() else None


def _repeat(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x = _first(args, kwargs)
    times = _sizes(args, kwargs, "repeats" if "repeats" in kwargs else "dims")
    return _own(x) if len(times) < x.dim() or (len(times) == x.dim() and times[0] == 1) else None


def _repeat_interleave(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x, times = _first(args, kwargs), _get(args, kwargs, 1, "repeats")
    dim = _get(args, kwargs, 2, "dim", default=0 if x.dim() == 1 else None)
    rows = _own(x)
    if rows is None or dim is None or not isinstance(times, int):
        return None
    return rows.folded(rows.fold * times) if dim % x.dim() == 0 else rows


def _move_axes(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """``transpose``, ``swapaxes``, ``movedim``: keeps rows when axis 0 is neither source nor target."""
    num_dims = out.dim()
    for d in args[1:]:
        if _is_rows(d, num_dims):
            return None
    for key, d in kwargs.items():
        if key not in ("input", "self") and _is_rows(d, num_dims):
            return None
    return _own(_first(args, kwargs))


def _turn(args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Rows that go to axis 1 when axes 0 and 1 change places, and come back when they do so again."""
    x, num_dims = _first(args, kwargs), max(out.dim(), 1)
    a, b = _get(args, kwargs, 1, "dim0", "axis0") % num_dims, _get(args, kwargs, 2, "dim1", "axis1") % num_dims
    if a + b == 1:  # axes 0 and 1, in either order
        tag_turned(out, _own(x))
        tag(out, turned_rows_of(x))


def _permute(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    order = _sizes(args, kwargs, "dims")
    return _own(_first(args, kwargs)) if order and order[0] % len(order) == 0 else None


def _narrow(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x = _first(args, kwargs)
    rows = _own(x)
    if rows is None or not _is_rows(_get(args, kwargs, 1, "dim"), x.dim()):
        return rows
    start = int(_get(args, kwargs, 2, "start"))
    return rows.picked(slice(start, start + int(_get(args, kwargs, 3, "length"))))


def _index_select(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x, dim, index = (_get(args, kwargs, i, name) for i, name in enumerate(("input", "dim", "index")))
    if not _is_rows(dim, x.dim()):
        return _own(x)
    return _lookup(x, index)


def _lookup(x: Tensor, index: Tensor) -> Rows | None:
    """Rows of ``x`` picked by ids; from a table without rows of its own, row i belongs to ``index[i]``."""
    rows = _own(x)
    return _own(index) if rows is None else rows.picked(index)


def _embedding(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """``F.embedding(ids, table)`` and ``torch.embedding(table, ids)``."""
    first, second = _first(args, kwargs), _get(args, kwargs, 1, "weight", "indices")
    return _own(second if first.is_floating_point() else first)


def _getitem(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x, index = args
    if type(index) is tuple and index and _is_all(index[0]) and all([type(part) in _BASIC for part in index]):
        return _own(x)
    parts = list(index) if isinstance(index, tuple) else [index]
    advanced = [i for i, part in enumerate(parts) if isinstance(part, (Tensor, list))]
    if advanced and advanced != list(range(advanced[0], advanced[-1] + 1)):
        return None  # index tensors apart from each other move their axis to the front
    if not parts:
        return _own(x)
    head = parts[0]
    if head is Ellipsis:
        used = sum(_axes_used(part) for part in parts[1:])
        return _own(x) if used < x.dim() else None
    rows = _own(x)
    if isinstance(head, slice):
        if rows is None or head.indices(x.shape[0]) == (0, x.shape[0], 1):
            return rows
        return rows.picked(head)
    if len(advanced) == 1 and isinstance(head, list):
        return None if rows is None else rows.picked(head)
    if len(advanced) == 1 and isinstance(head, Tensor) and head.dim() == 1:
        return _lookup(x, head) if head.dtype.itemsize > 1 else None if rows is None else rows.picked(head)
    return None


_BASIC = frozenset({slice, int, type(None)})


def _is_all(part: Any) -> bool:
    return type(part) is slice and part.start is None and part.stop is None and part.step is None


def _axes_used(part: Any) -> int:
    if part is None:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype.itemsize == 1 else 1


def _join(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    parts = list(tensors([_get(args, kwargs, 0, "tensors")]))
    dim = _get(args, kwargs, 1, "dim", "axis", default=0)
    return None if _is_rows(dim, out.dim()) else _agreed(parts)


def _join_columns(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    return _agreed(tensors([_get(args, kwargs, 0, "tensors")])) if out.dim() > 1 else None


def _split(name: str, args: Args, kwargs: Kwargs, outputs: Sequence[Tensor]) -> list[Rows | None]:
    x = _first(args, kwargs)
    dim = _get(args, kwargs, 1 if name == "unbind" else 2, "dim", "axis", default=0)
    rows = _own(x)
    if rows is None or not _is_rows(dim, x.dim()):
        return [rows] * len(outputs)
    if name == "unbind":
        return [None] * len(outputs)
    starts = [0]
    for piece in outputs:
        starts.append(starts[-1] + len(piece))
    return [rows.picked(slice(a, b)) for a, b in itertools.pairwise(starts)]


def _recurrent(args: Args, kwargs: Kwargs) -> Rows | None:
    """``torch.lstm`` and its kin, as `torch.nn` calls them: every row is a sequence of its own if batch_first."""
    is_packed = len(args) != 9 or isinstance(args[3], (list, tuple))  # a packed call has one argument more in front
    return _own(args[0]) if not is_packed and args[8] and args[0].dim() == 3 else None


# -- which function follows which rule -----------------------------------------------------------------------------


def _names(*groups: str) -> list[str]:
    return [name for group in groups for name in group.split()]


_SPLIT = frozenset(_names("chunk split tensor_split unbind split_with_sizes"))
_SWAPS = frozenset(_names("transpose swapaxes swapdims"))
_RECURRENT = frozenset(_names("lstm gru rnn_tanh rnn_relu"))
_RESHAPED_IN_PLACE = frozenset(_names("t squeeze unsqueeze transpose swapaxes swapdims resize resize_as as_strided"))
# the in-place forms of these give a tensor another shape: its identity ends

_ELEMENTWISE = _names(
    "add sub rsub mul div true_divide floor_divide remainder fmod pow float_power square sqrt rsqrt exp exp2 expm1 log",
    "log2 log10 log1p abs absolute neg negative positive reciprocal sign sgn sin cos tan asin acos atan atan2 sinh",
    "cosh tanh asinh acosh atanh erf erfc erfinv sigmoid logit relu relu6 leaky_relu elu selu celu gelu silu mish",
    "hardtanh hardswish hardsigmoid softplus softsign tanhshrink hardshrink softshrink logsigmoid threshold rrelu",
    "prelu clamp clip clamp_min clamp_max maximum minimum fmax fmin where masked_fill lerp addcmul addcdiv nan_to_num",
    "round floor ceil trunc frac eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor",
    "bitwise_and bitwise_or bitwise_not bitwise_xor subtract multiply divide sinc digamma lgamma polygamma xlogy",
    "heaviside hypot logaddexp logaddexp2 copysign isclose deg2rad rad2deg arctan2 copy",
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits",
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__",
    "__neg__ __and__ __or__ __xor__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __mod__ __floordiv__",
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __rfloordiv__ __abs__ __pos__ __rand__ __ror__ __rxor__",
    # the same values in another type, place or memory order
    "to type type_as float double half bfloat16 int long short bool byte clone contiguous detach requires_grad",
    "zeros_like ones_like full_like empty_like dropout alpha_dropout feature_alpha_dropout cpu cuda",
)
_REDUCE = _names(
    "sum mean max min amax amin prod std var any all argmax argmin logsumexp cumsum cumprod softmax log_softmax",
    "softmin median nanmedian nansum nanmean count_nonzero std_mean var_mean logcumsumexp cummax cummin select",
)
_WRITTEN = _names("index_copy index_add index_fill index_put masked_scatter scatter scatter_add scatter_reduce")

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(
        _names("linear bilinear batch_norm rms_norm gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell"), _rowwise(2)
    ),
    **dict.fromkeys(_names("cross_entropy nll_loss one_hot"), _rowwise(1)),
    **dict.fromkeys(_names("group_norm instance_norm conv1d max_pool1d avg_pool1d local_response_norm"), _rowwise(3)),
    **dict.fromkeys(_names("conv2d max_pool2d avg_pool2d pixel_shuffle pixel_unshuffle"), _rowwise(4)),
    **dict.fromkeys(_names("conv3d max_pool3d avg_pool3d"), _rowwise(5)),
    **dict.fromkeys(_names("adaptive_avg_pool1d adaptive_max_pool1d interpolate upsample"), _rowwise(3)),
    **dict.fromkeys(_names("conv_transpose1d scaled_dot_product_attention"), _rowwise(3)),
    **dict.fromkeys(_names("conv_transpose2d adaptive_avg_pool2d adaptive_max_pool2d"), _rowwise(4)),
    **dict.fromkeys(_WRITTEN, _rowwise(1)),  # what is written has other rows, the place it goes to stays
    **{"flip": _flip, "set": _set, "layer_norm": _layer_norm},
    "embedding": _embedding,
    "pad": _pad,
    **dict.fromkeys(_REDUCE, _along(1, None)),
    **dict.fromkeys(_names("sort argsort glu"), _along(1, -1)),
    **dict.fromkeys(_names("norm linalg_norm linalg_vector_norm take_along_dim"), _along(2, None)),
    **dict.fromkeys(_names("topk kthvalue diff"), _along(2, -1)),
    "gather": _along(1, None),
    "normalize": _along(2, 1),
    "cosine_similarity": _pairwise,
    "pairwise_distance": _rowwise(2),
    **dict.fromkeys(_names("matmul mm mv bmm __matmul__"), _product),
    **dict.fromkeys(_names("addmm addmv baddbmm"), _add_product),
    "einsum": _einsum,
    **dict.fromkeys(_names("view reshape flatten unflatten view_as reshape_as ravel"), _reshape),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    **dict.fromkeys(_names("expand expand_as broadcast_to"), _expand),
    **dict.fromkeys(_names("repeat tile"), _repeat),
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(_names("transpose swapaxes swapdims movedim moveaxis"), _move_axes),
    "permute": _permute,
    "narrow": _narrow,
    "index_select": _index_select,
    "__getitem__": _getitem,
    **dict.fromkeys(_names("cat concat concatenate stack"), _join),
    **dict.fromkeys(_names("hstack column_stack"), _join_columns),
}
