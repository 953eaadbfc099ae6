"""How row identity follows a tensor: which argument a torch function's result inherits it from, rule by rule.

A rule is about what the function does to the axis that rows lie along; it looks at dimensions and indices given as
arguments, and never concludes from equal sizes that two tensors are about the same nodes. Untagged operands
(constants, or results whose identity was lost) count as values that belong to the rows they meet.

A rule gets a call's arguments and its result, and gives the rows of the result; None where it has none of its own or it
is not known whose they are. Which function follows which rule is said by `nugnn.kernels.row_rule_table`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from nugnn.kernels.rows import ATTRIBUTE, Rows

Args = Sequence[Any]
Kwargs = dict[str, Any]
Rule = Callable[[Args, Kwargs, Tensor], "Rows | None"]
RuleOfMany = Callable[[str, Args, Kwargs, Sequence[Tensor]], "list[Rows | None]"]


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among ``values`` and inside their lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)


def tensors_of(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Tensors among the arguments of a call and inside their lists and tuples."""
    found: list[Tensor] = []
    for values in (args, kwargs.values()) if kwargs else (args,):
        for x in values:
            if isinstance(x, Tensor):
                found.append(x)
            elif isinstance(x, (tuple, list)):
                found += tensors(x)
    return found


# -- reading arguments ---------------------------------------------------------------------------------------------


def _first(args: Args, kwargs: Kwargs) -> Any:
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def _own(x: Any) -> Rows | None:
    """The tag of ``x`` when it stands for nodes, edges or samples."""
    rows: Rows | None = getattr(x, ATTRIBUTE, None)
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


def _axes(dims: Any, num_dims: int) -> list[int] | None:
    """Axes that an argument names: one, a sequence of them, or, as None, where it names none or all of them."""
    if type(dims) is int:
        return [dims % max(num_dims, 1)]
    if not isinstance(dims, (tuple, list)) or not dims or any(not isinstance(dim, int) for dim in dims):
        return None
    return [dim % max(num_dims, 1) for dim in dims]


def _one_of(found: Iterable[Rows]) -> Rows | None:
    """The one identity among those that were found; None when they differ or there is none."""
    first: Rows | None = None
    for rows in found:
        if first is None:
            first = rows
        elif not first.same_as(rows):
            return None
    return first


def _agreed(operands: Iterable[Any]) -> Rows | None:
    """The one identity of all operands that have one."""
    return _one_of(rows for x in operands if (rows := _own(x)) is not None)


def _on_last_axes(operands: Iterable[Any], num_dims: int) -> list[Rows]:
    """Identities of operands that are broadcast to ``num_dims`` axes: their last ones stand above each other."""
    return [rows.at(rows.axis + num_dims - x.dim()) for x in operands if (rows := _own(x)) is not None]


def _aligned(operands: Iterable[Any], num_dims: int) -> Rows | None:
    """`_agreed`, of operands that are broadcast to ``num_dims`` axes."""
    return _one_of(_on_last_axes(operands, num_dims))


def _kept(rows: Rows | None, dims: list[int] | None, *, goes: bool) -> Rows | None:
    """Where rows lie after something was done along the axes ``dims``, which are gone then or not; None among them."""
    if rows is None or dims is None or rows.axis in dims:
        return None
    return rows.at(rows.axis - sum(dim < rows.axis for dim in dims)) if goes else rows


# -- rules ---------------------------------------------------------------------------------------------------------


def elementwise(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """Entries meet those in the same place, broadcasting considered."""
    return _aligned(tensors_of(args, kwargs), out.dim())


def same(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """The first argument in another type or place; what is named beside it is only read for that."""
    return _own(_first(args, kwargs))


def _has_another(args: Args, kwargs: Kwargs) -> bool:
    """Whether an operand behind the first has rows: all of its rows would meet each of the first one's."""
    for x in args[1:]:
        if type(x) is Tensor and _own(x) is not None:
            return True
    return bool(kwargs) and any(name != "input" and _own(x) is not None for name, x in kwargs.items())


def leading(sample_axes: int) -> Rule:
    """Each index of the axes in front of the last ``sample_axes`` of the first argument by itself."""

    def rule(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
        x = args[0] if args else _first(args, kwargs)
        rows = _own(x)
        if rows is None or rows.axis >= x.dim() - sample_axes or _has_another(args, kwargs):
            return None
        return rows

    return rule


def leading_of_all(sample_axes: int) -> Rule:
    """`leading`, with samples in any of the operands."""

    def rule(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
        operands = [x for x in tensors_of(args, kwargs) if _own(x) is not None]
        if any(_own(x).axis >= x.dim() - sample_axes for x in operands):  # type: ignore[union-attr]
            return None
        return _aligned(operands, max((x.dim() for x in operands), default=0))

    return rule


def batch(min_dims: int, axis: int = 0) -> Rule:
    """Samples stand on one axis, of arguments that have ``min_dims`` at least."""

    def rule(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
        x = _first(args, kwargs)
        rows = _agreed(tensors_of(args, kwargs)) if _has_another(args, kwargs) else _own(x)
        return rows if rows is not None and rows.axis == axis and x.dim() >= min_dims else None

    return rule


def written(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """What is written has other rows, the place it goes to stays."""
    return _own(_first(args, kwargs))


def along(position: int, default: Any) -> Rule:
    """Works along dimensions, at ``position`` among the arguments, and keeps rows that lie along none of them."""

    def rule(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
        x = _first(args, kwargs)
        dim = _get(args, kwargs, position, "dim", "axis", "dims", default=default)
        if isinstance(dim, Tensor):  # torch.max(x, y)
            return elementwise(args, kwargs, out)
        rows, num_dims = _own(x), x.dim() if isinstance(x, Tensor) else 0
        if rows is None:
            return None
        if type(dim) is int and num_dims and rows.axis == 0:  # the usual case
            return rows if dim % num_dims else None
        return _kept(rows, _axes(dim, num_dims), goes=out.dim() < num_dims)

    return rule


def flip(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    return _kept(_own(_first(args, kwargs)), _axes(_sizes(args, kwargs, "dims"), out.dim()), goes=False)


def set_source(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """``x.set_(y)`` makes ``x`` another name of ``y``."""
    return _own(_get(args, kwargs, 1, "source"))


def cosine(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """Compares two tensors along an axis."""
    pair = [x for x in (_first(args, kwargs), _get(args, kwargs, 1, "x2")) if isinstance(x, Tensor)]
    num_dims = max(x.dim() for x in pair)
    dim = _get(args, kwargs, 2, "dim", default=1)
    return _kept(_aligned(pair, num_dims), _axes(dim, num_dims), goes=True)


def layer_norm(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    rows, num_normalized = _own(_first(args, kwargs)), len(_get(args, kwargs, 1, "normalized_shape"))
    return None if rows is None or rows.axis >= out.dim() - num_normalized else rows


def pad(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    rows = _own(_first(args, kwargs))
    return rows if rows is not None and rows.axis < out.dim() - len(_get(args, kwargs, 1, "pad")) // 2 else None


def embedding_bag(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """Of ``(n, length)`` ids and the table; a flat list of ids has bags instead of rows."""
    x = _first(args, kwargs)
    return batch(2)(args, kwargs, out) if x.dim() == 2 and not x.is_floating_point() else None


def windows(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """``x.unfold(dim, size, step)``."""
    x = _first(args, kwargs)
    return _kept(_own(x), _axes(_get(args, kwargs, 1, "dimension"), x.dim()), goes=False)


def product(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """Matrix product: rows along the last axis of ``x`` and the last but one of ``y`` are summed, others stay."""
    x, y = _first(args, kwargs), _get(args, kwargs, 1, "other", "mat2", "vec")
    x_rows, y_rows = _own(x), _own(y)
    if x_rows is not None and x_rows.axis == x.dim() - 1:
        return None
    if y_rows is None and x.dim() == out.dim():  # the usual case
        return x_rows
    if y_rows is not None and y_rows.axis == max(y.dim() - 2, 0):
        return None
    # a vector is a matrix of one row in front, of one column behind; the result lacks that axis
    num_dims = max(x.dim(), y.dim(), 2)
    found = [] if x_rows is None else [x_rows.at(x_rows.axis + num_dims - x.dim())]
    if y_rows is not None:
        axis = y_rows.axis + num_dims - y.dim()
        found.append(y_rows.at(axis - 1 if x.dim() == 1 and axis == num_dims - 1 else axis))
    return _one_of(found)


def add_product(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    factors = (_get(args, kwargs, 1, "mat1", "batch1", "mat"), _get(args, kwargs, 2, "mat2", "batch2", "vec"))
    rows, added = product(factors, {}, out), _on_last_axes([_first(args, kwargs)], out.dim())
    return rows if rows is None else _one_of([rows, *added])


def einsum(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """Rows where one letter stands for them in the result and in all operands that have rows."""
    if not isinstance(args[0], str):
        return None
    operands = list(tensors(args[1:]))
    inputs, arrow, result = args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or not result or "." in inputs or len(terms) != len(operands):
        return None
    found: list[Rows] = []
    for term, x in zip(terms, operands, strict=True):
        if (rows := _own(x)) is not None:
            letter = term[rows.axis]
            if term.count(letter) > 1 or letter not in result:
                return None
            found.append(rows.at(result.index(letter)))
    return _one_of(found)


def reshape(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """Row-major order stays: rows are kept, split into equal pieces (a fold), or joined again."""
    x = _first(args, kwargs)
    rows = _own(x)
    if rows is None or not x.dim() or not out.dim():
        return None
    old, axis = x.shape[rows.axis], 0
    if rows.axis:  # behind as many entries as before; of several such axes all but the last have the size 1
        before = math.prod(x.shape[: rows.axis])
        places = [a for a in range(out.dim()) if math.prod(out.shape[:a]) == before]
        if not places:
            return None
        likely = [[a for a in places if out.shape[a] == size] for size in (old // rows.fold, old)]
        axis = max(likely[0] or likely[1] or places)
    new = out.shape[axis]
    if old == new:
        return rows if axis == rows.axis else rows.at(axis)
    if old and new % old == 0:
        return rows.folded(rows.fold * (new // old)).at(axis)
    if new and old % new == 0 and rows.fold % (old // new) == 0:
        return rows.folded(rows.fold // (old // new)).at(axis)
    return None


def flatten(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """As `reshape`, but told which axes are joined: (T, 1, D) to (T, D) is not what it looks like with one row."""
    x = _first(args, kwargs)
    rows = _own(x)
    if rows is not None and rows.axis:
        start = _get(args, kwargs, 1, "start_dim", default=0) % x.dim()
        end = _get(args, kwargs, 2, "end_dim", default=-1) % x.dim()
        if start < rows.axis <= end and math.prod(x.shape[start : rows.axis]) != 1:
            return None
    return reshape(args, kwargs, out)


def unsqueeze(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    rows, dim = _own(_first(args, kwargs)), _get(args, kwargs, 1, "dim") % out.dim()
    return None if rows is None else rows.at(rows.axis + (dim <= rows.axis))


def squeeze(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x = _first(args, kwargs)
    dim = _get(args, kwargs, 1, "dim")
    dims = range(x.dim()) if dim is None else _axes(dim, x.dim()) or []
    return _kept(_own(x), [d for d in dims if x.shape[d] == 1], goes=True) if x.dim() else None


def expand(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    return _aligned([_first(args, kwargs)], out.dim())


def repeat(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x = _first(args, kwargs)
    rows = _own(x)
    if rows is None:
        return None
    times = _sizes(args, kwargs, "repeats" if "repeats" in kwargs else "dims")
    axis = rows.axis + out.dim() - x.dim()
    place = axis - (out.dim() - len(times))  # `tile` may be given fewer numbers than there are axes
    return rows.at(axis) if place < 0 or times[place] == 1 else None


def repeat_interleave(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x, times = _first(args, kwargs), _get(args, kwargs, 1, "repeats")
    dim = _get(args, kwargs, 2, "dim", default=0 if x.dim() == 1 else None)
    rows = _own(x)
    if rows is None or dim is None:
        return None
    if dim % x.dim() != rows.axis:
        return rows
    return rows.folded(rows.fold * times) if isinstance(times, int) else None


def transpose(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    rows, num_dims = _own(_first(args, kwargs)), max(out.dim(), 1)
    a, b = _get(args, kwargs, 1, "dim0", "axis0") % num_dims, _get(args, kwargs, 2, "dim1", "axis1") % num_dims
    return None if rows is None else rows.at({a: b, b: a}.get(rows.axis, rows.axis))


def transpose_last(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    return transpose((_first(args, kwargs), -2, -1), {}, out)


def reversed_axes(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """``x.t()``, ``x.T``."""
    rows = _own(_first(args, kwargs))
    return None if rows is None else rows.at(out.dim() - 1 - rows.axis)


def move_axes(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    rows = _own(_first(args, kwargs))
    source = _axes(_get(args, kwargs, 1, "source"), out.dim())
    target = _axes(_get(args, kwargs, 2, "destination"), out.dim())
    if rows is None or source is None or target is None:
        return None
    moved = dict(zip(target, source, strict=True))
    others = iter(axis for axis in range(out.dim()) if axis not in source)
    return rows.at([moved[a] if a in moved else next(others) for a in range(out.dim())].index(rows.axis))


def permute(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    rows, order = _own(_first(args, kwargs)), _axes(_sizes(args, kwargs, "dims"), out.dim())
    return None if rows is None or order is None else rows.at(order.index(rows.axis))


def narrow(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x = _first(args, kwargs)
    rows = _own(x)
    if rows is None or _get(args, kwargs, 1, "dim") % x.dim() != rows.axis:
        return rows
    start = int(_get(args, kwargs, 2, "start"))
    return rows.picked(slice(start, start + int(_get(args, kwargs, 3, "length"))))


def index_select(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x, dim, index = (_get(args, kwargs, i, name) for i, name in enumerate(("input", "dim", "index")))
    rows, dim = _own(x), dim % max(x.dim(), 1)
    if rows is None:  # from a table without rows of its own, what is picked by ids belongs to the ids' rows
        found = _own(index)
        return None if found is None else found.at(dim)
    return rows.picked(index) if rows.axis == dim else rows


def embedding(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    """``F.embedding(ids, table)`` and ``torch.embedding(table, ids)``."""
    first, second = _first(args, kwargs), _get(args, kwargs, 1, "weight", "indices")
    return _own(second if first.is_floating_point() else first)


def getitem(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    x, index = args
    rows = _own(x)
    if type(index) is tuple and index and _is_all(index[0]) and all([type(part) in _BASIC for part in index]):
        if rows is None or not rows.axis:  # the usual case
            return rows
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(_axes_used(part) for part in parts)
    ellipsis = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[ellipsis : ellipsis + 1] = [slice(None)] * (x.dim() - used)
    lists = [i for i, part in enumerate(parts) if isinstance(part, (Tensor, list))]
    if lists and lists != list(range(lists[0], lists[-1] + 1)):
        return None  # index tensors apart from each other move their axis to the front
    list_dims = max([_axes_made(parts[i]) for i in lists], default=0)
    places: list[tuple[int, Any]] = []  # for each axis of x, the axis of the result and what is picked along it
    num_dims = 0
    for i, part in enumerate(parts):
        if type(part) not in _BASIC and i not in lists:
            return None
        place = num_dims - list_dims if i in lists[1:] else num_dims
        places += [(place, part)] * _axes_used(part)
        if i not in lists[1:]:
            num_dims += list_dims if i in lists else type(part) is not int
    axis, part = (0, None) if rows is None else places[rows.axis]
    # rows picked by ids, from a table without rows of its own, belong to the ids' rows
    others = [p for p in parts if isinstance(p, Tensor) and p is not part and not _is_mask(p)]
    before = sum(type(p) is not int for p in parts[: lists[0]]) if lists else 0
    found = [by.at(by.axis + before) for by in _on_last_axes(others, list_dims)]
    if rows is None:
        return _one_of(found)
    if isinstance(part, slice):
        is_whole = _is_all(part) or part.indices(x.shape[rows.axis]) == (0, x.shape[rows.axis], 1)
        picked = rows if is_whole else rows.picked(part)
    else:
        picked = rows.picked(part) if _is_one_list(part) and list_dims == 1 else None
    return None if picked is None else _one_of([picked.at(axis), *found])


_BASIC = frozenset({slice, int, type(None)})


def _is_all(part: Any) -> bool:
    return type(part) is slice and part.start is None and part.stop is None and part.step is None


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype.itemsize == 1


def _axes_used(part: Any) -> int:
    """How many axes of a tensor a part of its index is about."""
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if _is_mask(part) else 1


def _axes_made(part: Tensor | list[Any]) -> int:
    """How many axes of the result stand for an index of rows or flags."""
    return part.dim() if isinstance(part, Tensor) and not _is_mask(part) else 1


def _is_one_list(part: Any) -> bool:
    """Whether it picks along one axis, a row for each entry."""
    if isinstance(part, Tensor):
        return part.dim() == 1
    return isinstance(part, list) and not any(isinstance(entry, (list, tuple, Tensor)) for entry in part)


def join(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    parts = tensors([_get(args, kwargs, 0, "tensors")])
    return _kept(_agreed(parts), _axes(_get(args, kwargs, 1, "dim", "axis", default=0), out.dim()), goes=False)


def stack(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    rows, dim = _agreed(tensors([_get(args, kwargs, 0, "tensors")])), _get(args, kwargs, 1, "dim", default=0)
    return None if rows is None else rows.at(rows.axis + (dim % out.dim() <= rows.axis))


def join_columns(args: Args, kwargs: Kwargs, out: Tensor) -> Rows | None:
    rows = _agreed(tensors([_get(args, kwargs, 0, "tensors")]))
    return _kept(rows, [1], goes=False) if out.dim() > 1 else None


# -- functions of several results ----------------------------------------------------------------------------------


def split(name: str, args: Args, kwargs: Kwargs, outputs: Sequence[Tensor]) -> list[Rows | None]:
    x = _first(args, kwargs)
    dim = _get(args, kwargs, 1 if name == "unbind" else 2, "dim", "axis", default=0) % max(x.dim(), 1)
    rows = _own(x)
    if rows is None or rows.axis != dim or name == "unbind":
        return [_kept(rows, [dim], goes=name == "unbind")] * len(outputs)
    ends = list(itertools.accumulate((piece.shape[dim] for piece in outputs), initial=0))
    return [rows.picked(slice(a, b)) for a, b in itertools.pairwise(ends)]


def recurrent(name: str, args: Args, kwargs: Kwargs, outputs: Sequence[Tensor]) -> list[Rows | None]:
    """``torch.lstm`` and its kin, as `torch.nn` calls them: each sample is a sequence; states have them on axis 1."""
    own = _own(args[0])
    is_packed = isinstance(args[3], (list, tuple))  # a packed call has the sizes of its steps in front of the states
    given = [args[2] if is_packed else args[1]]
    states = [rows for x in tensors(given) if (rows := _own(x)) is not None]
    if is_packed:
        rows = None if own is None else own.sequences
    else:
        axis = 0 if args[8] else 1
        rows = own if own is not None and own.axis == axis and args[0].dim() == 3 else None
        own = rows
    if rows is None or _one_of([rows.at(1), *states]) is None:
        return [None] * len(outputs)
    return [own, *[rows.at(1)] * (len(outputs) - 1)]


def packed(name: str, args: Args, kwargs: Kwargs, outputs: Sequence[Tensor]) -> list[Rows | None]:
    """What `torch.nn.utils.rnn.pack_padded_sequence` calls with ``(input, lengths, batch_first)``, longest first."""
    rows = _own(args[0])
    return [rows.steps(outputs[1]) if rows is not None and rows.axis == (0 if args[2] else 1) else None, None]


def padded(name: str, args: Args, kwargs: Kwargs, outputs: Sequence[Tensor]) -> list[Rows | None]:
    """What `torch.nn.utils.rnn.pad_packed_sequence` calls with ``(data, batch_sizes, batch_first, ...)``."""
    rows = _own(args[0])
    sequences = None if rows is None else rows.sequences
    return [None, None] if sequences is None else [sequences.at(0 if args[2] else 1), sequences]
